"""Two runs whose work is divided otherwise: what their parts add up to is compared, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradtrace_analyzer.diff.divided.division import Division
from gradtrace_analyzer.diff.divided.part_sums import PartSumComparison, PartSums
from gradtrace_analyzer.numerics.tolerance import Rule
from support.synthetic_runs.differences import Row, Rows, views

RULE = Rule(2.0**-24, "float32", 10, 2)
WHOLE, PARTS = Division(1, 1, 12, 30, 1), Division(2, 1, 12, 30, 2)
SKETCH = [3.0, 4.0, 0.0, 0.0]


def summary(prefix: str, norm: float, numel: int = 8, **more: Any) -> Row:
    values = {
        "numel": numel,
        "norm": norm,
        "abs_max": norm,
        "sum": norm / 2,
        "nan_count": 0,
        "inf_count": 0,
    }
    return {f"{prefix}{name}": value for name, value in {**values, **more}.items()}


def named(
    norm: float, fingerprint: int, sketch: list[float] | None = None, dtype: str = "float32"
) -> Row:
    return summary("", norm, sketch=sketch or SKETCH, fingerprint=fingerprint, dtype=dtype)


class Side:
    """One step of a side with so many parts; each value is what the parts make together, or each has of it."""

    def __init__(self, parts: int, **times: float) -> None:
        self.parts, self._times = parts, times
        self.rows: dict[str, list[Row]] = {}

    def times(self, name: str) -> float:
        return self._times.get(name, 1.0)

    def add(self, table: str, **row: Any) -> None:
        self.rows.setdefault(table, []).append(row)

    def step(self, step: int = 0) -> Side:
        """Parameters, a call, a Node, the loss, and what the optimizer saw and left."""
        for part in range(self.parts):
            at = {"rank": part, "step": step, "root": 0}
            share = self.parts**0.5  # norms add up by their squares
            numel = 8 // self.parts
            for fqn in ("m.weight", "m.bias"):
                shape = [4, 4] if fqn == "m.weight" else [4]
                key = {**at, "parameter_fqn": fqn, "kind": "parameter", "shape": shape}
                self.add("parameters", **key, point="before", **named(5.0, 1))
            call = {**at, "module_fqn": "m", "phase": "forward", "call_index": 0}
            sides = summary("input_", 2.0 / share, numel)
            sides |= summary(
                "output_",
                3.0 * self.times("output") / share,
                numel,
                sum=1.5 * self.times("output") / self.parts,
            )
            sides["input_sum"] = 1.0 / self.parts
            self.add("module_calls", **call, **sides)
            loss = {"rank": part, "step": step, "backward_index": 0, "kind": "backward"}
            self.add("backward_passes", **loss, loss=2.0 * self.times("loss"))
            node = {
                **call,
                "node_name": "MmBackward0",
                "occurrence": 0,
                "outcome": "ok",
                "backward_index": 0,
            }
            del node["phase"]
            # A mean over a part's rows: each row's gradient is as many times larger as there are parts.
            scale = self.times("gradient") * self.parts
            gradients: Row = {}
            for prefix, norm in (("grad_output_", 4.0), ("grad_input_", 6.0)):
                own = norm * scale * (self.times("node") if prefix == "grad_input_" else 1.0)
                gradients |= summary(prefix, own / share, numel, sum=own / 2 / self.parts)
            self.add("node_events", **node, **gradients)
            arriving = {
                "rank": part,
                "step": step,
                "root": 0,
                "node_name": "AccumulateGrad",
                "backward_index": 0,
            }
            self.add("node_events", **arriving, parameter_fqn="m.weight", module_fqn="m")
            for fqn in ("m.weight", "m.bias"):
                key = {**at, "parameter_fqn": fqn}
                times = self.times(f"final {fqn}")
                seen = named(5.0 * times, int(times * 100), [x * times for x in SKETCH])
                self.add(
                    "gradients",
                    **key,
                    point="final",
                    backward_index=0,
                    shape=[4, 4] if fqn == "m.weight" else [4],
                    **seen,
                )
                shape = [4, 4] if fqn == "m.weight" else [4]
                moved = [3.0, 4.0, 0.5 * self.times(f"update {fqn}"), 0.0]
                after = named(5.0, int(100 * self.times(f"update {fqn}")), moved)
                self.add("parameters", **key, point="after", kind="parameter", shape=shape, **after)
        return self


def compared(
    a: Rows, b: Rows, *steps: int, parts: tuple[Division, Division] = (WHOLE, PARTS)
) -> PartSums:
    return PartSumComparison(views(a, b), parts, RULE).compared(steps or (0,))


GOOD = Side(1).step().rows


def places(found: PartSums) -> list[tuple[str, Any]]:
    return [
        (d.link, d.key.get("parameter_fqn") or d.key.get("module_fqn")) for d in found.differences
    ]


def test_parts_that_add_up_to_the_whole_agree() -> None:
    found = compared(GOOD, Side(2).step().rows)
    assert (found.step, found.differences, found.factor) == (None, (), 1.0)
    assert found.largest < 1e-6
    assert found.compared == {
        "module outputs": 1,
        "losses": 1,
        "gradients at Nodes": 1,
        "final gradients": 2,
        "parameters": 2,
    }


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("output", ("forward", "m")),
        ("loss", ("loss", None)),
        ("node", ("backward", "m")),
        ("final m.weight", ("clip", "m.weight")),
        ("update m.weight", ("optimizer", "m.weight")),
    ],
)
def test_sum_that_is_another_is_a_difference_of_its_link(
    fault: str, place: tuple[str, Any]
) -> None:
    found = compared(GOOD, Side(2, **{fault: 1.3}).step().rows)
    assert found.step == 0 and places(found)[0] == place
    d = found.differences[0]
    assert d.exceeds and d.rank == 0
    if d.link == "loss":
        assert d.values == {"loss": (2.0, pytest.approx(2.6))}
    elif d.link in ("clip", "optimizer"):
        assert d.writes is not None and d.writes.shown_by == "sums"


def test_microbatches_add_up_as_ranks_do() -> None:
    parts = Side(2).step().rows
    of_one: dict[str, list[Row]] = {}
    for table, own in parts.items():
        if table in ("parameters", "gradients"):  # one rank has them once
            of_one[table] = [row for row in own if row["rank"] == 0]
        else:
            of_one[table] = [row | {"rank": 0, "microbatch": row["rank"]} for row in own]
    assert compared(GOOD, of_one, parts=(WHOLE, Division(1, 2, 12, 30, 2))).step is None


def test_loss_and_gradients_may_be_divided_by_the_number_of_parts() -> None:
    found = compared(GOOD, Side(2, loss=0.5, gradient=0.5).step().rows)
    assert (found.step, found.factor) == (None, 0.5)
    assert "Loss and gradients inside a step are 0.5 times the baseline's." in found.words()
    loss_alone = compared(GOOD, Side(2, loss=0.5).step().rows)
    assert places(loss_alone)[0] == ("backward", "m")


def test_steps_are_compared_until_one_differs() -> None:
    good = Side(1)
    bad = Side(2)
    for step in range(4):
        good.step(step)
        bad._times = {"output": 1.3} if step == 2 else {}
        bad.step(step)
    found = compared(good.rows, bad.rows, 0, 1, 2, 3)
    assert found.step == 2 and found.compared["losses"] == 3
    assert compared(good.rows, bad.rows, 0, 1).step is None


def test_calls_come_in_the_order_of_the_first_rank_and_what_is_left_of_a_step_last() -> None:
    bad = Side(2, **{"node": 1.3, "final m.weight": 1.5, "final m.bias": 1.5}).step().rows
    found = compared(GOOD, bad)
    links = [d.link for d in found.differences]
    assert links == ["backward", "clip", "clip"]
    first, weight, bias = found.differences
    # The weight's gradient arrives at its Node; where the bias' does was not recorded.
    assert first.order < weight.order < 100 < bias.order


def test_drift_of_the_parameters_widens_what_is_allowed() -> None:
    def with_drift(side: Side, error: float) -> Rows:
        rows = side.step().rows
        for row in rows["parameters"]:
            if row["parameter_fqn"] == "m.weight":
                row["sketch"] = [3.0, 4.0 + 5 * error, *row["sketch"][2:]]
                row["fingerprint"] += 1000 * (error > 0)
        return rows

    allowed = RULE.forward() + 4 * ((1 + 1e-2) ** RULE.layers - 1)
    # A norm and a sum are worth less than a sketch: from three tolerances on.
    for times, is_found in ((2.9, False), (3.1, True)):
        bad = with_drift(Side(2, output=1 / (1 - times * allowed)), 1e-2)
        found = [d for d in compared(GOOD, bad).differences if d.link == "forward"]
        assert bool(found) == is_found


def test_gradient_of_a_flat_parameter_is_held_against_what_arrives_at_nodes() -> None:
    def spoilt(name: str, norm: float) -> PartSums:
        rows = Side(2).step().rows
        good = Side(1).step().rows
        for side, times in ((good, 1.0), (rows, 1.1)):
            for row in side["gradients"]:
                if row["parameter_fqn"] == name:
                    row |= named(norm, int(100 * times), [norm * times, 0.0, 0.0, 0.0])
        return compared(good, rows)

    # Nodes receive 4: of a bias with 1e-8 of it nothing but rounding is left.
    assert spoilt("m.bias", 1e-8).step is None
    assert places(spoilt("m.bias", 1.0)) == [("clip", "m.bias")]
    assert places(spoilt("m.weight", 1e-8)) == [("clip", "m.weight")]


def test_what_was_compared_is_said_in_words() -> None:
    found = PartSums((WHOLE, PARTS), None, (), {"losses": 1200, "parameters": 0}, 2e-7, 1.0)
    assert found.words() == (
        "The work is divided otherwise: 1 rank with 1 backward pass a step in the baseline, 2 ranks with 1 backward "
        "pass a step in the candidate. Sums over ranks and microbatches were compared: 1,200 losses; the largest "
        "relative error is 2.0e-07."
    )
    apart = replace(found, step=3)
    assert "; in the steps before, the largest relative error is 2.0e-07." in apart.words()
    assert "largest" not in replace(apart, largest=0.0).words()

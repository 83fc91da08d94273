"""Rows in, tolerances out: what each pair is allowed, and whether it is beyond that, or so far that a verdict rests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.numerics.tolerance import LowerBound, Rule
from support.synthetic_runs.differences import Row, Rows, paired, run_of, sides

UNIT = 2.0**-24
# One layer with a weight of ten by ten, and outputs of a hundred numbers: sums of ten terms.
RULE = Rule(UNIT, "float32", 10, 1)
Pairs = list[tuple[str, Row, Row]]


def weight(error: float = 0.0, name: str = "m.weight", **more: Any) -> tuple[str, Row, Row]:
    shape = more.pop("shape", [10, 10])
    a, b = sides(error, **more)
    key = {"root": 0, "parameter_fqn": name, "point": "before", "kind": "parameter", "shape": shape}
    return "parameters", key | a, key | b


def call(error: float, name: str = "m", **more: Any) -> tuple[str, Row, Row]:
    a, b = sides(error, "output_", **more)
    came, _ = sides(0.0, "input_")
    key = {"root": 0, "module_fqn": name, "phase": "forward", "call_index": 0, **came}
    return "module_calls", key | a, key | b


def node(
    error: float, index: int = 0, name: str = "m", came: float = 0.0, **more: Any
) -> tuple[str, Row, Row]:
    arrived = {k: more.pop(k) for k in ("came_norm",) if k in more}
    first = sides(came, "grad_output_", lanes=4, norm=arrived.get("came_norm", 1.0))
    left = sides(error, "grad_input_", lanes=4, **more)
    key = {
        "root": 0,
        "module_fqn": name,
        "call_index": 0,
        "backward_index": 0,
        "event_index": index,
    }
    key |= {"node_name": "MmBackward0", "occurrence": 0}
    return "node_events", key | first[0] | left[0], key | first[1] | left[1]


def gradient(error: float, name: str = "m.weight", **more: Any) -> tuple[str, Row, Row]:
    a, b = sides(error, **more)
    key = {"root": 0, "parameter_fqn": name, "point": "local", "backward_index": 0}
    return "gradients", key | a, key | b


def loss(before: float, after: float, index: int = 0) -> tuple[str, Row, Row]:
    key = {"backward_index": index, "kind": "backward"}
    return "backward_passes", key | {"loss": before}, key | {"loss": after}


def rows(pairs: Sequence[tuple[str, Row, Row]]) -> tuple[Rows, Rows]:
    """Both runs, in the order of the pairs."""
    made: tuple[dict[str, list[Row]], dict[str, list[Row]]] = ({}, {})
    for place, (table, *both) in enumerate(pairs):
        for side, row in zip(made, both, strict=True):
            side.setdefault(table, []).append({"record_index": place, **row})
    return made


class Judged:
    """The pairs after the judgement, and what it says of itself."""

    def __init__(self, *pairs: tuple[str, Row, Row], runs: Any = None, **options: Any) -> None:
        self.connection: duckdb.DuckDBPyConnection = paired(*rows([weight(), *pairs]))
        both = runs or {"baseline": run_of(), "candidate": run_of()}
        self.judgement = Judgement(self.connection, both, **options)
        self.judgement.write()

    def of(
        self, table: str, columns: str = "writes_tolerance, beyond, exceeds"
    ) -> list[tuple[Any, ...]]:
        """These columns of the rows that differ, in program order."""
        query = f"SELECT {columns} FROM differing_{table} ORDER BY place"
        return self.connection.execute(query).fetchall()

    def tolerance(self, table: str) -> float:
        [(found, *_)] = self.of(table)
        return float(found)


def test_rule_follows_from_the_weights_and_the_dtype_of_what_differs() -> None:
    assert Judged(call(1e-3)).judgement.rule == RULE
    coarse = Judged(call(1e-3, dtype="bfloat16")).judgement.rule
    assert (coarse.unit, coarse.arithmetic) == (2.0**-8, "bfloat16")
    other = weight(name="n.weight", shape=[4, 30], numel=120)
    wider = Judged(other, call(1e-3)).judgement.rule
    assert (wider.layers, wider.summands) == (2, 30)
    longer = Judged(call(1e-3, numel=2000)).judgement.rule
    assert longer.summands == 200  # a gradient is summed over the batch


def test_output_is_allowed_what_the_rule_gives_and_a_verdict_needs_half_as_much_again() -> None:
    """Of 16 lanes: with them an estimate has a standard error of 0.18."""
    times = {0.99: (False, False), 1.01: (True, False), 1.49: (True, False), 1.51: (True, True)}
    judged = Judged(*(call(t * RULE.forward(), f"m{n}") for n, t in enumerate(times)))
    allowed = pytest.approx(RULE.forward())
    assert judged.of("module_calls") == [(allowed, *found) for found in times.values()]


def test_verdict_rests_on_four_lanes_from_four_tolerances_on() -> None:
    judged = Judged(*(node(t * RULE.backward(), n) for n, t in enumerate((3.9, 4.1))))
    allowed = pytest.approx(RULE.backward())
    assert judged.of("node_events") == [(allowed, True, False), (allowed, True, True)]


def test_all_tolerances_are_multiplied_by_a_scale() -> None:
    pairs = [call(1e-3), node(1e-3, 1)]
    plain, wide = Judged(*pairs), Judged(*pairs, scale=100.0)
    for table in ("module_calls", "node_events"):
        assert wide.tolerance(table) == pytest.approx(100 * plain.tolerance(table))


def test_coarser_arithmetic_counts_from_where_it_is_used_on() -> None:
    """Each row is held against the coarsest dtype so far: an output in float32 was no worse in front of bfloat16."""
    judged = Judged(call(1e-3, "a"), call(1e-3, "b", dtype="bfloat16"), call(1e-3, "c"))
    coarse = Rule(2.0**-8, "", 10, 1).forward()
    assert [row[0] for row in judged.of("module_calls")] == [
        pytest.approx(RULE.forward()),
        pytest.approx(coarse),
        pytest.approx(coarse),
    ]


def test_module_is_held_against_the_dtype_in_which_its_nodes_compute() -> None:
    inside = node(1e-3, dtype="bfloat16")
    assert Judged(call(1e-3), inside).tolerance("module_calls") == pytest.approx(
        Rule(2.0**-8, "", 10, 1).forward()
    )


def test_value_that_is_not_finite_on_one_side_is_beyond_any_tolerance() -> None:
    table, a, b = call(0.0)
    judged = Judged((table, a, b | {"output_nan_count": 1, "output_fingerprint": 9}))
    assert judged.of(table)[0][1:] == (True, True)


def test_row_of_one_side_alone_counts_as_it_is() -> None:
    connection = paired(rows([weight()])[0], rows([weight(), call(0.0)])[1])
    judgement = Judgement(connection, {"baseline": run_of(), "candidate": run_of()})
    judgement.write()
    found = connection.execute("SELECT beyond, exceeds FROM differing_module_calls").fetchall()
    assert found == [(True, True)]


def test_forward_is_allowed_four_times_what_the_drift_of_the_weights_does() -> None:
    drift = 1e-2
    pairs = [weight(drift, "n.weight"), call(1e-3)]
    two_layers = Rule(UNIT, "", 10, 2)
    expected = two_layers.forward() + 4 * ((1 + drift) ** 2 - 1)
    assert Judged(*pairs).tolerance("module_calls") == pytest.approx(expected)


def test_drift_of_a_module_is_that_of_its_parameters_together_without_buffers() -> None:
    """A small bias that is all noise hardly widens the tolerance, and what a buffer holds is no drift."""
    own = [weight(1e-3, "n.weight"), weight(0.5, "n.bias", norm=1e-3, shape=[10])]
    table, *rows_of = weight(0.5, "n.mean")
    statistics = [row | {"kind": "buffer"} for row in rows_of]
    drift = ((1e-3**2 + 0.5e-3**2) / (1 + 1e-3**2)) ** 0.5
    expected = Rule(UNIT, "", 10, 2).forward() + 4 * ((1 + drift) ** 2 - 1)
    found = Judged(*own, (table, statistics[0], statistics[1]), call(1e-3))
    assert found.tolerance("module_calls") == pytest.approx(expected)


def test_drift_of_a_module_is_of_all_its_parameters_the_equal_ones_too() -> None:
    """A bias that is half off, beside a weight a thousand times as long that is equal, is a drift of 0.0005."""
    bias = weight(0.5, "n.bias", norm=1e-3, shape=[10])
    pairs = [weight(0.0, "n.weight"), bias, call(1e-3)]
    drift = 0.5e-3 / (1 + 1e-3**2) ** 0.5
    expected = Rule(UNIT, "", 10, 2).forward() + 4 * ((1 + drift) ** 2 - 1)
    assert Judged(*pairs).tolerance("module_calls") == pytest.approx(expected)


def test_gradient_is_allowed_the_noise_that_the_forward_shows() -> None:
    """Eight times the median of it and what a layer adds, if that is less than four times the drift that it shows."""
    seen = 1e-3
    judged = Judged(weight(1e-9, "m.b", norm=10.0), call(seen), node(1e-2))
    assert judged.tolerance("node_events") == pytest.approx(
        min(RULE.backward() + 4 * seen, RULE.layer() + 8 * seen)
    )
    # Where nothing drifted the forward's noise is no reason for more than the rule.
    assert Judged(call(seen), node(1e-2)).tolerance("node_events") == pytest.approx(RULE.backward())


def test_gradient_that_is_what_is_left_of_a_cancellation_is_held_against_what_it_was_summed_from() -> (
    None
):
    judged = Judged(node(1e-2, came_norm=4.0, came=1e-2), gradient(0.5, norm=1e-6))
    # A thousandth of the step's largest gradient is the floor.
    share = 1e-6 / (1e-3 * 4.0)
    assert judged.tolerance("gradients") == pytest.approx(RULE.backward() / share, rel=1e-6)
    large = Judged(node(1e-2, came_norm=4.0, came=1e-2), gradient(0.5))
    assert large.tolerance("gradients") == pytest.approx(RULE.backward())


def test_gradient_of_a_flat_parameter_is_held_against_what_arrived_at_its_module() -> None:
    flat = weight(name="m.bias", shape=[10])
    pairs = [flat, node(1e-2, came_norm=4.0, came=1e-2), gradient(0.5, "m.bias", norm=0.1)]
    assert Judged(*pairs).tolerance("gradients") == pytest.approx(RULE.backward() / (0.1 / 4.0))
    elsewhere = node(1e-2, name="n", came_norm=4.0, came=1e-2)
    assert Judged(flat, elsewhere, pairs[2]).tolerance("gradients") == pytest.approx(
        RULE.backward()
    )


def test_node_that_lengthens_what_it_hands_on_is_told_by_that() -> None:
    """Its direction is within what rounding does: a third of that may show in a length, of numbers that are many."""
    within, beyond = 1 + 0.9 * RULE.norm(), 1 + 1.1 * RULE.norm()
    nodes = [node(0.0, 0, times=within), node(0.0, 1, times=beyond)]
    nodes += [node(0.0, 2, times=beyond, numel=63), node(0.0, 3, times=beyond, numel=64)]
    untold = (None, False, pytest.approx(RULE.backward()))
    told = ("length", True, pytest.approx(RULE.norm()))
    found = Judged(*nodes).of("node_events", "shown_by, exceeds, writes_tolerance")
    assert found == [untold, told, untold, told]


def test_loss_is_allowed_what_an_output_is() -> None:
    after = [1 + 0.9 * RULE.forward(), 1 + 1.1 * RULE.forward(), float("nan")]
    judged = Judged(*(loss(1.0, value, n) for n, value in enumerate(after)))
    assert judged.of("backward_passes", "beyond, exceeds") == [
        (False, False),
        (True, True),
        (True, True),
    ]


def test_loss_that_one_side_did_not_record_counts() -> None:
    table, a, b = loss(1.0, 2.0)
    assert Judged((table, a, b | {"loss": None})).of(table, "exceeds") == [(True,)]


@pytest.mark.parametrize(
    ("options", "switches", "arithmetic"),
    [
        ({}, (None, None), "float32"),
        ({"precision": "tf32"}, (None, None), "products in tf32"),
        ({}, ("high", None), "products in tf32"),
        ({}, ("medium", "high"), "products in bf16"),
        (
            {},
            ("high", "high"),
            "float32",
        ),  # on a CPU the switch has no effect: it must tell the sides apart
        ({"precision": "fp8"}, ("high", None), "products in fp8"),
    ],
)
def test_products_in_fewer_bits_are_taken_from_the_switches_or_as_they_are_given(
    options: dict[str, str], switches: tuple[str | None, str | None], arithmetic: str
) -> None:
    runs = {
        side: run_of(environment={"float32_matmul_precision": switch})
        for side, switch in zip(("baseline", "candidate"), switches, strict=True)
    }
    assert Judged(call(1e-3), runs=runs, **options).judgement.rule.arithmetic == arithmetic


def test_switch_counts_on_a_device_whatever_the_other_side_has() -> None:
    facts: dict[str, Any] = {
        "environment": {"float32_matmul_precision": "high"},
        "device": "cuda:0",
    }
    runs = {side: run_of(**facts) for side in ("baseline", "candidate")}
    judged = Judged(call(1e-3), runs=runs)
    assert judged.judgement.rule.arithmetic == "products in tf32"
    assert judged.tolerance("module_calls") == pytest.approx(Rule(2.0**-11, "", 10, 1).forward())


def test_precision_that_is_finer_than_the_dtypes_changes_nothing() -> None:
    judged = Judged(call(1e-3, dtype="bfloat16"), precision="tf32")
    assert judged.judgement.rule.arithmetic == "bfloat16"


def test_least_is_by_the_finest_dtype_of_any_output_and_says_whether_optimizers_are_plain() -> None:
    judged = Judged(call(1e-3), call(0.0, "n", dtype="bfloat16"))
    assert judged.judgement.lower_bound() == LowerBound(1.0, 10, 1, UNIT, False)
    group = {"optimizer_index": 0, "group_index": 0, "optimizer_class": "SGD"}
    plain = Judged(call(1e-3), ("optimizer_groups", group, group), scale=2.0)
    assert plain.judgement.lower_bound() == LowerBound(2.0, 10, 1, UNIT, True)

"""What a step is given, and what the optimizer makes of it: rows in, tolerances out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.diff.tolerances.updates import is_plain
from gradtrace_analyzer.numerics.model import MODEL
from support.synthetic_runs.differences import Row, Rows, paired, run_of, sides, views

ROUNDED = 8 * 2.0**-24
Pair = tuple[str, Row, Row]


def parameter(point: str, error: float, *, step: int = 0, at: float = 0.0, **more: Any) -> Pair:
    """A parameter of norm 1 that has moved by `at` since the first; the candidate's is so much short of it."""
    kind, shape = more.pop("kind", "parameter"), more.pop("shape", [10, 10])
    a, b = sides(error, **more)
    key = {
        "root": 0,
        "parameter_fqn": "m.w",
        "point": point,
        "kind": kind,
        "shape": shape,
        "step": step,
    }
    for row, lane in ((a, at), (b, at - error)):
        row["sketch"] = [1.0, 0.0, lane, *row["sketch"][3:]]
    # What left one step is what the next began with, where both are as far apart.
    a["fingerprint"] = 1 + int(1000 * at)
    b["fingerprint"] = a["fingerprint"] + int(1e9 * error)
    return "parameters", key | a, key | b


def final(error: float, step: int = 0) -> Pair:
    a, b = sides(error)
    key = {"root": 0, "parameter_fqn": "m.w", "point": "final", "backward_index": 0, "step": step}
    return "gradients", key | a, key | b


def optimizer(name: str) -> Pair:
    row = {"optimizer_index": 0, "group_index": 0, "optimizer_class": name}
    return "optimizer_groups", row, row


def judged(
    pairs: Sequence[Pair], table: str, where: str, *, scale: float = 1.0, **options: Any
) -> list[tuple[Any, ...]]:
    made: tuple[dict[str, list[Row]], dict[str, list[Row]]] = ({}, {})
    for place, (name, *both) in enumerate(pairs):
        for side, row in zip(made, both, strict=True):
            side.setdefault(name, []).append({"record_index": place, **row})
    connection = paired(*made)
    runs = {"baseline": run_of(), "candidate": run_of()}
    Judgement(connection, runs, scale=scale, **options).write()
    return connection.execute(
        f"SELECT writes_tolerance, beyond, exceeds FROM differing_{table} WHERE {where} ORDER BY step"
    ).fetchall()


UPDATE = 0.25


def after(
    error: float, *gradients: Pair, name: str = "SGD", before: float = 0.0, **more: Any
) -> tuple[Any, ...]:
    """The judgement of a parameter after a step that moved it by `UPDATE`."""
    scale = more.pop("scale", 1.0)
    pairs = [
        optimizer(name),
        parameter("before", before, **more),
        *gradients,
        parameter("after", error, at=UPDATE, **more),
    ]
    [found] = judged(pairs, "parameters", "key_point = 'after'", scale=scale)
    return found


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("SGD", MODEL.updated + MODEL.passed_on * 1e-3),
        ("AdamW", MODEL.updated + 6 * (MODEL.turned * 1e-3) ** 0.5),
    ],
)
@pytest.mark.parametrize(("times", "beyond"), [(0.99, False), (1.01, True)])
def test_update_may_differ_by_what_the_error_of_its_gradient_explains(
    name: str, share: float, times: float, beyond: bool
) -> None:
    allowed = ROUNDED + UPDATE * share
    found = after(times * allowed, final(1e-3), name=name)
    assert found == (pytest.approx(allowed), beyond, beyond)


def test_update_from_an_equal_gradient_may_differ_by_a_thousandth() -> None:
    assert after(1e-3)[0] == pytest.approx(ROUNDED + UPDATE * MODEL.updated)


def test_what_differed_before_the_step_is_no_part_of_what_is_new() -> None:
    allowed = ROUNDED + UPDATE * MODEL.updated
    assert after(0.01 + 0.9 * allowed, before=0.01)[1] is False
    assert after(0.01 + 1.1 * allowed, before=0.01)[1] is True


def test_flat_parameter_of_an_adaptive_optimizer_is_not_judged() -> None:
    """Its gradient may be all rounding, and each step is as large whatever the gradient is."""
    assert after(0.5, final(1e-3), name="Adam", shape=[10])[:2] == (
        pytest.approx(ROUNDED + UPDATE * MODEL.unjudged),
        False,
    )
    assert after(0.5, final(1e-3), name="SGD", shape=[10])[1] is True
    assert after(0.5, name="Adam", shape=[10])[1] is True  # its gradient is equal


def test_tolerance_of_an_update_is_scaled() -> None:
    assert after(1e-3, scale=3.0)[0] == pytest.approx(3 * (ROUNDED + UPDATE * MODEL.updated))


def test_adaptive_optimizer_remembers_the_errors_of_gradients_before() -> None:
    pairs = [
        optimizer("Adam"),
        parameter("before", 0.0),
        final(1e-2),
        parameter("after", 0.0, at=UPDATE),
        parameter("before", 0.0, step=1, at=UPDATE),
        final(1e-4, step=1),
        parameter("after", 0.1, step=1, at=2 * UPDATE),
    ]
    [found] = judged(pairs, "parameters", "key_point = 'after'")
    assert found[0] == pytest.approx(
        ROUNDED + UPDATE * (MODEL.updated + 6 * (MODEL.turned * 1e-2) ** 0.5)
    )


def given(error: float, a: str = "float32", b: str = "float32") -> Pair:
    first, second = sides(error)
    key = {"root": 0, "call_index": 0, "name": "x"}
    return "inputs", key | first | {"dtype": a}, key | second | {"dtype": b}


@pytest.mark.parametrize(
    ("row", "tolerance", "beyond"),
    [
        (given(1e-9), 0.0, True),  # it was not computed: any difference counts
        (given(2.0**-8, b="bfloat16"), 1.01 * 2.0**-8, False),  # rounded once
        (given(1.1 * 2.0**-8, b="bfloat16"), 1.01 * 2.0**-8, True),
    ],
)
def test_input_may_differ_by_one_rounding_to_another_dtype(
    row: Pair, tolerance: float, beyond: bool
) -> None:
    assert judged([row], "inputs", "true") == [(pytest.approx(tolerance), beyond, beyond)]


def handed_on(before: float, kept: float | None, **more: Any) -> list[Pair]:
    """A parameter that the first step left `kept` apart, and that the second begins with `before` apart."""
    alone = more.pop("alone", False)
    last = [] if kept is None else [parameter("after", kept, **more)]
    first = [] if alone else [parameter("before", 0.0, **more), *last]
    return [*first, parameter("before", before, step=1, **more)]


BEFORE = "key_point = 'before' AND step = 1"


@pytest.mark.parametrize(
    ("rows", "beyond"),
    [
        (handed_on(0.1, 0.1), False),  # it is judged where the optimizer left it
        (handed_on(0.2, 0.1), True),  # something changed it in between
        (handed_on(0.1, None), True),  # nobody knows what was left
    ],
)
def test_parameter_before_a_step_counts_where_it_changed_since_the_step_before(
    rows: list[Pair], beyond: bool
) -> None:
    [(_, *found)] = judged(rows, "parameters", BEFORE)
    assert found == [beyond, beyond]


def test_parameter_before_a_step_that_is_compared_alone_counts_as_it_is() -> None:
    [(_, beyond, _)] = judged(handed_on(0.1, 0.1), "parameters", BEFORE, is_step_alone=True)
    assert beyond


def test_buffer_that_the_forward_changes_is_held_against_a_wider_tolerance() -> None:
    """64 times what an output is allowed: a statistic averages what may cancel. What it counts is exact."""
    rows = handed_on(1e-5, None, kind="buffer")
    [(tolerance, beyond, _)] = judged(rows, "parameters", BEFORE)
    assert not beyond and 1e-5 < tolerance < 1e-4
    assert judged(handed_on(1e-3, None, kind="buffer"), "parameters", BEFORE)[0][1]
    counted = handed_on(1e-5, None, kind="buffer", dtype="int64")
    assert judged(counted, "parameters", BEFORE)[0][:2] == (0.0, True)
    [(first, beyond, _)] = judged([parameter("before", 1e-5, kind="buffer")], "parameters", "true")
    assert (first, beyond) == (0.0, True)  # nothing came before the first step


def test_statistic_may_differ_as_the_parameters_that_drifted_do() -> None:
    table, a, b = parameter("before", 1e-2, step=1)
    other = {"parameter_fqn": "m.v"}
    rows = [*handed_on(1e-3, None, kind="buffer"), (table, a | other, b | other)]
    where = f"{BEFORE} AND key_parameter_fqn = 'm.w'"
    assert not judged(rows, "parameters", where)[0][1]
    assert judged(rows, "parameters", where, without=["drifted_statistics"])[0][1]


@pytest.mark.parametrize(
    ("names", "plain"),
    [(("SGD", "ASGD"), True), (("SGD", "Adam"), False), ((), False)],
)
def test_optimizers_are_plain_where_all_pass_a_gradient_on_in_proportion(
    names: tuple[str, ...], plain: bool
) -> None:
    groups: Rows = {"optimizer_groups": [optimizer(name)[1] for name in names]}
    assert is_plain(views(groups)) is plain


def test_parameter_that_is_not_finite_after_the_optimizer_on_one_side_is_beyond_any_tolerance() -> (
    None
):
    table, a, b = parameter("after", 0.0, at=UPDATE)
    spoilt = (table, a, b | {"nan_count": 1, "fingerprint": 9})
    pairs = [optimizer("SGD"), parameter("before", 0.0), spoilt]
    [(_, *found)] = judged(pairs, "parameters", "key_point = 'after'")
    assert found == [True, True]

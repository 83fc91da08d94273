"""What may exceed, of arrays: held against the least that a rule allows, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.pairing.lower_bound import RolePairs, Upstream, beyond_lower_bound
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.numerics.arrays import Side, numbers_of
from gradtrace_analyzer.numerics.tolerance import LowerBound, Rule
from gradtrace_schemas import TABLES
from support.synthetic_runs.builder import add_part
from support.synthetic_runs.differences import Row, Rows, paired, run_of, sides

LEAST = LowerBound(1.0, 10, 1, 2.0**-24, True)
RULE = Rule(2.0**-24, "", 10, 1)
Pair = tuple[Row, Row]


def read(folder: Path, table: str, rows: Sequence[Row]) -> pa.Table:
    texts = [f.name for f in TABLES[table].arrow_schema if pa.types.is_string(f.type)]
    return pq.ParquetFile(add_part(folder, table, rows), read_dictionary=texts).read()


def beyond(
    folder: Path,
    table: str,
    pairs: Sequence[Pair],
    *,
    known: Upstream | None = None,
    moved: frozenset[int] = frozenset(),
    lower_bound: LowerBound = LEAST,
) -> list[bool]:
    """Which of these pairs may exceed; all of them differ."""
    [of_table] = [t for t in LINK_TABLES if t.table == table]
    a, b = (read(folder / name, table, [p[n] for p in pairs]) for n, name in enumerate("ab"))
    steps = numbers_of(a, "step")
    starts = np.flatnonzero(np.r_[True, steps[1:] != steps[:-1]])
    judged = []
    for _, prefix in of_table.sides:
        both = [Side(rows, prefix) for rows in (a, b)]
        apart = both[0].fingerprint != both[1].fingerprint
        lanes = [np.array(side.rows.column(f"{prefix}sketch").to_pylist()) for side in both]
        error = np.linalg.norm(lanes[0] - lanes[1], axis=1) / np.maximum(both[0].norm, both[1].norm)
        judged.append(RolePairs(both, apart, error))
    found = beyond_lower_bound(
        of_table, (a, b), judged, starts, lower_bound, moved, known or Upstream()
    )
    return [bool(is_beyond) for is_beyond in found]


def pair(key: Row, *columns: Pair) -> Pair:
    a, b = dict(key), dict(key)
    for own in columns:
        a |= own[0]
        b |= own[1]
    return a, b


def call(error: float, dtype: str = "float32") -> Pair:
    key = {"root": 0, "module_fqn": "m", "phase": "forward", "call_index": 0}
    return pair(key, sides(0.0, "input_"), sides(error, "output_", dtype=dtype))


def test_output_is_held_against_one_and_a_half_times_the_rule_of_its_dtype(tmp_path: Path) -> None:
    errors = [1.49 * RULE.forward(), 1.51 * RULE.forward()]
    assert beyond(tmp_path / "all", "module_calls", [call(e) for e in errors]) == [False, True]
    mixed = [call(errors[1]), call(errors[1], "bfloat16")]
    assert beyond(tmp_path / "mixed", "module_calls", mixed) == [True, False]
    nothing = beyond(tmp_path / "none", "module_calls", [call(1e-12)], lower_bound=LowerBound())
    assert nothing == [True]  # measured noise may be none


def given(error: float, b: str = "float32") -> Pair:
    first, second = sides(error)
    return pair({"root": 0, "name": "x", "call_index": 0}, (first, second | {"dtype": b}))


def test_input_may_only_have_been_rounded_once(tmp_path: Path) -> None:
    pairs = [given(1e-9), given(2.0**-8, "bfloat16"), given(1.1 * 2.0**-8, "bfloat16")]
    assert beyond(tmp_path, "inputs", pairs) == [True, False, True]


def node(
    error: float, step: int = 0, *, came: float = 1.0, times: float = 1.0, **more: Any
) -> Pair:
    key = {"step": step, "root": 0, "module_fqn": "m", "node_name": "A", "event_index": 0, **more}
    arrived = sides(1e-9, "grad_output_", norm=came, lanes=4)
    return pair(key, arrived, sides(error, "grad_input_", times=times, lanes=4))


def test_node_is_held_against_four_times_what_one_layer_adds(tmp_path: Path) -> None:
    pairs = [node(3.9 * RULE.layer()), node(4.1 * RULE.layer())]
    assert beyond(tmp_path, "node_events", pairs) == [False, True]


def test_node_that_lengthens_what_it_hands_on_may_exceed(tmp_path: Path) -> None:
    pairs = [node(0.0, times=1 + share * RULE.norm()) for share in (0.9, 1.1)]
    assert beyond(tmp_path, "node_events", pairs) == [False, True]


def test_gradient_far_below_what_arrives_in_its_step_is_held_against_a_part_of_that(
    tmp_path: Path,
) -> None:
    """A thousandth of the largest: in step 0 that is four times this one's norm, in step 1 less than it."""
    known = Upstream()
    beyond(
        tmp_path / "nodes",
        "node_events",
        [node(1e-9, came=4000.0), node(1e-9, 1, came=1.0)],
        known=known,
    )
    assert known.arriving == {0: 4000.0, 1: 1.0}
    key = {"root": 0, "parameter_fqn": "w", "point": "local", "backward_index": 0}
    error = 2 * 1.5 * RULE.layer()
    pairs = [pair({**key, "step": step}, sides(error)) for step in (0, 1)]
    assert beyond(tmp_path / "gradients", "gradients", pairs, known=known) == [False, True]


def parameter(
    point: str, error: float, *, step: int = 0, at: float = 0.0, kind: str = "parameter"
) -> Pair:
    """A parameter that has moved by `at`; the candidate's is so much short of it."""
    key = {"step": step, "root": 0, "parameter_fqn": "w", "point": point, "kind": kind}
    a, b = sides(error)
    for row, lane in ((a, at), (b, at - error)):
        row["sketch"] = [1.0, 0.0, lane, *row["sketch"][3:]]
    return pair(key, (a, b))


@pytest.mark.parametrize(("times", "may_exceed"), [(0.99, False), (1.01, True)])
def test_update_is_held_against_what_the_error_of_its_gradient_explains(
    times: float, may_exceed: bool, tmp_path: Path
) -> None:
    known = Upstream()
    final = {"root": 0, "parameter_fqn": "w", "point": "final", "backward_index": 0}
    beyond(tmp_path / "gradients", "gradients", [pair(final, sides(1e-3))], known=known)
    allowed = 8 * 2.0**-24 + 0.25 * (1e-3 + 4 * 1e-3)
    before, error = 1e-2, 1e-2 + times * allowed
    pairs = [parameter("before", before), parameter("after", error, at=0.25)]
    assert beyond(tmp_path / "parameters", "parameters", pairs, known=known) == [False, may_exceed]


def test_parameter_before_a_step_may_exceed_where_it_moved_since_the_step_before(
    tmp_path: Path,
) -> None:
    pairs = [parameter(point, 1e-9, step=step) for step in (3, 4) for point in ("before", "after")]
    found = beyond(tmp_path, "parameters", pairs, moved=frozenset([4]))
    assert found == [False, False, True, False]


def test_statistic_that_is_far_off_may_exceed_unless_the_optimizers_row_is_judged(
    tmp_path: Path,
) -> None:
    """Only what has no row after the step: 64 times what an output is allowed."""
    far = 65 * RULE.forward()
    assert beyond(tmp_path / "far", "parameters", [parameter("before", far, kind="buffer")]) == [
        True
    ]
    near = [parameter("before", 0.9 * far, kind="buffer")]
    assert beyond(tmp_path / "near", "parameters", near) == [False]
    trained = [parameter("before", far), parameter("after", far)]
    assert beyond(tmp_path / "trained", "parameters", trained) == [False, False]


def judged_and_proposed(
    folder: Path, table: str, pairs: Sequence[Pair], drift: float = 0.0
) -> tuple[list[bool], list[bool]]:
    """(which rows exceed when they are judged, which the sieve proposes), of one step."""
    weight = {"root": 0, "parameter_fqn": "m.weight", "point": "before", "shape": [10, 10]}
    weight |= {"kind": "parameter", "record_index": 0}
    weights = [weight | side for side in sides(drift)]
    numbered = [pair({"record_index": n + 1}, p) for n, p in enumerate(pairs)]
    rows: list[Rows] = [
        {"parameters": [weights[n]], table: [p[n] for p in numbered]} for n in (0, 1)
    ]
    connection = paired(*rows)
    judgement = Judgement(connection, {side: run_of() for side in ("baseline", "candidate")})
    least = replace(judgement.lower_bound(), unit=2.0**-24)
    judgement.write()
    found = connection.execute(f"SELECT place, exceeds FROM differing_{table}").fetchall()
    exceeds = {int(place) - 1: is_beyond for place, is_beyond in found}
    proposed = beyond(folder, table, pairs, lower_bound=least)
    return [exceeds.get(n, False) for n in range(len(pairs))], proposed


DTYPES = ("float32", "float16", "bfloat16")


def drawn(
    seed: int, make: Callable[[float, float, str, int], Pair], dtypes: Sequence[str]
) -> list[Pair]:
    """Pairs with errors and lengths from far below to far above what any rule gives."""
    draw = np.random.default_rng(seed)
    return [
        make(
            10 ** draw.uniform(-8, 0),
            1 + draw.choice([0.0, 1.0]) * 10 ** draw.uniform(-8, -1),
            str(draw.choice(dtypes)),
            int(draw.choice([10, 100])),
        )
        for _ in range(60)
    ]


def any_call(error: float, times: float, dtype: str, numel: int) -> Pair:
    key = {"root": 0, "module_fqn": "m", "phase": "forward", "call_index": 0}
    came = sides(0.0, "input_")
    return pair(key, came, sides(error, "output_", times=times, dtype=dtype, numel=numel))


def any_node(error: float, times: float, dtype: str, numel: int) -> Pair:
    key = {"root": 0, "module_fqn": "m", "node_name": "A", "event_index": 0, "call_index": 0}
    came = sides(1e-9, "grad_output_", lanes=4, dtype=dtype)
    left = sides(error, "grad_input_", times=times, lanes=4, dtype=dtype, numel=numel)
    return pair(key, came, left)


def any_input(error: float, _: float, dtype: str, numel: int) -> Pair:
    first, second = sides(error, numel=numel)
    return pair({"root": 0, "name": "x", "call_index": 0}, (first, second | {"dtype": dtype}))


MAKES: dict[str, Callable[[float, float, str, int], Pair]] = {
    "module_calls": any_call, "node_events": any_node, "inputs": any_input,
}  # fmt: skip


@pytest.mark.parametrize("table", MAKES)
@pytest.mark.parametrize("drift", [0.0, 1e-4])
def test_whatever_exceeds_was_proposed(table: str, drift: float, tmp_path: Path) -> None:
    for seed, dtypes in enumerate((DTYPES, DTYPES[:1], DTYPES[2:])):
        pairs = drawn(seed, MAKES[table], dtypes)
        exceeds, proposed = judged_and_proposed(tmp_path / str(seed), table, pairs, drift)
        assert any(exceeds) and (table == "inputs" or not all(exceeds))
        missed = [
            n
            for n, (is_beyond, may) in enumerate(zip(exceeds, proposed, strict=True))
            if is_beyond > may
        ]
        assert missed == []


@pytest.mark.parametrize("table", ["module_calls", "inputs"])
def test_where_nothing_is_allowed_beyond_the_rule_no_other_is_proposed(
    table: str, tmp_path: Path
) -> None:
    """One arithmetic, equal parameters: the bound is the tolerance, for directions and for lengths."""
    dtypes = DTYPES if table == "inputs" else DTYPES[:1]
    for seed in range(3):
        pairs = drawn(seed, MAKES[table], dtypes)
        exceeds, proposed = judged_and_proposed(tmp_path / str(seed), table, pairs)
        assert exceeds == proposed

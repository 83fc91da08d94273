"""Parts are read side by side: which steps pair by place, what is counted of them, and what is left to pairing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.diff.pairing.rows_of_part import RowsOfPart
from gradtrace_analyzer.diff.pairing.sieve import sieved
from gradtrace_analyzer.diff.pairing.tally import SieveResult
from gradtrace_analyzer.numerics.tolerance import LowerBound
from support.synthetic_runs.builder import add_part, summary_columns
from support.synthetic_runs.differences import Row

ALL_STEPS = frozenset(range(9))


def call(step: int, value: float, name: str = "m", **more: Any) -> Row:
    key = {"step": step, "root": 0, "module_fqn": name, "phase": "forward", "call_index": 0}
    sides = summary_columns([1.0, 2.0], "input_") | summary_columns([value, 1.0], "output_")
    return {**key, **sides, **more}


def sift(
    folder: Path,
    baseline: Sequence[Sequence[Row]],
    candidate: Sequence[Sequence[Row]],
    *,
    steps: frozenset[int] = ALL_STEPS,
    table: str = "module_calls",
    lower_bound: LowerBound | None = None,
) -> SieveResult:
    """What is found in these parts of one rank's table."""
    paths = tuple(
        [RowsOfPart(str(add_part(folder / side, table, rows))) for rows in parts]
        for side, parts in (("a", baseline), ("b", candidate))
    )
    parts: Mapping[str, Any] = {table: paths}
    return sieved(3, parts, steps, lower_bound or LowerBound(1.0))


def counted(found: SieveResult) -> dict[int, tuple[int, bool]]:
    """By step, how many rows differ and whether any may exceed."""
    [tally] = found.tallies
    assert (tally.rank, tally.table, tally.point, tally.is_judged) == (
        3,
        "module_calls",
        None,
        False,
    )
    numbers = zip(tally.steps.tolist(), tally.rows.tolist(), tally.exceeds.tolist(), strict=True)
    return {step: (rows, exceeds) for step, rows, exceeds in numbers}


def test_rows_that_differ_are_counted_by_step(tmp_path: Path) -> None:
    rows = [call(step, 4.0, name) for step in (0, 1, 2) for name in "ab"]
    others = [
        row | summary_columns([5.0, 1.0], "output_") if row["step"] == 1 else row for row in rows
    ]
    others[5] = call(2, 4.0 * (1 + 2.0**-23), "b")
    found = sift(tmp_path, [rows], [others])
    assert counted(found) == {1: (2, True), 2: (1, True)} and not found.unpaired
    assert found.tallies[0].places.tolist() == ["a", None]  # of the first step that differs
    errors = found.tallies[0].errors.tolist()
    assert errors == [pytest.approx(1 / 26**0.5), pytest.approx(4 * 2.0**-23 / 17**0.5, rel=1e-6)]
    wide = sift(tmp_path / "wide", [rows], [others], lower_bound=LowerBound(1e18))
    assert counted(wide) == {1: (2, False), 2: (1, False)}


def test_steps_are_paired_however_they_are_divided_into_parts(tmp_path: Path) -> None:
    """A step may end in one part and go on in the next."""
    rows = [call(step, 4.0, name) for step in (0, 1, 2) for name in "abc"]
    others = [*rows[:8], call(2, 9.0, "c")]
    found = sift(tmp_path, [rows[:2], rows[2:5], rows[5:]], [others[:4], others[4:]])
    assert counted(found) == {2: (1, True)} and not found.unpaired


def test_step_in_which_rows_do_not_pair_by_place_is_left_to_pairing(tmp_path: Path) -> None:
    rows = [call(step, 4.0, name) for step in (0, 1, 2, 3, 4) for name in "ab"]
    others = list(rows)
    others[2:4] = reversed(others[2:4])  # another order in step 1
    del others[4]  # one row less in step 2
    others[-1] = call(4, 4.0, "b", output_numel=7, output_fingerprint=None, output_norm=None)
    del others[5:7]  # none at all in step 3
    found = sift(tmp_path, [rows], [others])
    assert found.unpaired == {1, 2, 3, 4}
    assert not any(len(tally.steps) for tally in found.tallies)


def test_step_that_one_side_alone_has_at_the_end_is_left_to_pairing(tmp_path: Path) -> None:
    rows = [call(step, 4.0) for step in (0, 1, 2)]
    assert sift(tmp_path, [rows], [rows[:1]]).unpaired == {1, 2}
    assert sift(tmp_path / "none", [rows], []).unpaired == {0, 1, 2}


def test_only_the_steps_that_are_asked_for_are_looked_at(tmp_path: Path) -> None:
    rows = [call(step, 4.0) for step in (0, 1, 2)]
    others = [call(step, 5.0) for step in (0, 1)]
    found = sift(tmp_path, [rows], [others], steps=frozenset([1]))
    assert counted(found) == {1: (1, True)} and not found.unpaired


def test_step_that_does_not_pair_in_one_table_is_counted_in_none(tmp_path: Path) -> None:
    names = {"root": 0, "point": "local", "backward_index": 0}
    gradients = [
        {**names, "step": s, "parameter_fqn": "w", **summary_columns([s + 1.0])} for s in (0, 1)
    ]
    others = [{**row, **summary_columns([9.0])} for row in gradients]
    calls = [call(0, 4.0), call(1, 4.0)]
    paths: dict[str, Any] = {
        table: tuple(
            [RowsOfPart(str(add_part(tmp_path / side, table, rows)))]
            for side, rows in zip("ab", both, strict=True)
        )
        for table, both in (("gradients", (gradients, others)), ("module_calls", (calls, calls[:1])))
    }  # fmt: skip
    found = sieved(0, paths, ALL_STEPS, LowerBound(1.0))
    assert found.unpaired == {1}
    [tally] = found.tallies
    assert (tally.point, tally.steps.tolist()) == ("local", [0])


def test_value_that_is_not_finite_on_one_side_exceeds_and_has_no_error(tmp_path: Path) -> None:
    rows = [call(step, 4.0) for step in (0, 1)]
    others = [call(0, float("nan")), call(1, 4.0)]
    [tally] = sift(tmp_path, [rows], [others], lower_bound=LowerBound(1e9)).tallies
    assert tally.nonfinite.tolist() == tally.exceeds.tolist() == [True]
    assert tally.errors.tolist() != tally.errors.tolist() and tally.unmeasured.tolist() == [1]


def test_points_of_a_table_are_counted_apart(tmp_path: Path) -> None:
    def gradients(value: float) -> list[Row]:
        return [
            {"root": 0, "parameter_fqn": "w", "backward_index": 0, "point": p, **summary_columns([v])}
            for p, v in (("local", value), ("final", value), ("reduced", 1.0))
        ]  # fmt: skip

    found = sift(tmp_path, [gradients(2.0)], [gradients(3.0)], table="gradients")
    assert [t.point for t in found.tallies] == ["final", "local"]


def test_actions_of_other_kinds_or_under_way_are_left_out(tmp_path: Path) -> None:
    def action(kind: str, value: float, end_ns: int | None = 1) -> Row:
        place = {"stage_index": 0, "kind": kind, "occurrence": 0, "end_ns": end_ns}
        return {**place, **summary_columns([value], "sent_")}

    a = [action("forward", 1.0), action("wait", 1.0), action("backward_full", 1.0, None)]
    b = [action("forward", 1.0), action("wait", 2.0), action("backward_full", 2.0, None)]
    found = sift(tmp_path, [a], [b], table="stage_events")
    assert found.tallies == [] and not found.unpaired


def test_steps_of_a_part_are_numbered_and_left_out_as_it_is_read(tmp_path: Path) -> None:
    """The candidate is two attempts: the second counted from 0 and took over with step 2."""

    def part(side: str, *norms: float) -> str:
        rows = [call(step, norm) for step, norm in enumerate(norms)]
        return str(add_part(tmp_path / side, "module_calls", rows))

    sides = [
        [RowsOfPart(part("a", 4.0, 4.0, 4.0, 4.0))],
        [
            RowsOfPart(part("b", 4.0, 4.0, 9.0), end=2),
            RowsOfPart(part("b", 4.0, 5.0), step_shift=2),
        ],
    ]
    parts: Mapping[str, Any] = {"module_calls": tuple(sides)}
    found = sieved(3, parts, frozenset(range(4)), LowerBound(1.0))
    assert not found.unpaired and set(counted(found)) == {3}

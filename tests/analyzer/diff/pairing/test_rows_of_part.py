from __future__ import annotations

from gradtrace_analyzer.diff.pairing.rows_of_part import RowsOfPart


def test_part_is_opened_for_steps_that_it_holds_and_that_are_read() -> None:
    part = RowsOfPart("part", step_shift=10, end=13)
    assert [step for step in range(20) if part.may_hold(0, 5, step)] == [10, 11, 12]
    assert [step for step in range(20) if RowsOfPart("part").may_hold(2, 3, step)] == [2, 3]

"""Attempts of one run, built row by row: what is read of each, and how their numbers go on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradtrace_analyzer.diff.scope.cover import torn_ends
from gradtrace_analyzer.reports.info import attempt_sentence
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import journal_rows, row_counts
from gradtrace_analyzer.sql.history import continued_steps, open_history
from gradtrace_analyzer.sql.inventory import inventory
from gradtrace_analyzer.sql.views import CLOCK_COLUMNS, connect, connect_pair
from gradtrace_schemas import ALL_TABLES
from support.synthetic_runs.builder import build_run, facts_of, summary_columns
from support.synthetic_runs.journals import write_journal

MS = 10**6


def steps_of(values: Sequence[float], first: int = 0) -> dict[str, list[dict[str, Any]]]:
    """A rank's steps, each of which begins with a parameter of that value and leaves the next one's."""
    parameters = [
        {"step": first + n, "root": 0, "parameter_fqn": "w", "point": point, "kind": "parameter",
         **summary_columns([value + ahead])}
        for n, value in enumerate(values)
        for point, ahead in (("before", 0), ("after", 1))
    ]  # fmt: skip
    times = [
        {"step": first + n, "start_ns": n * MS, "end_ns": n * MS + 1} for n in range(len(values))
    ]
    groups = [{"name": "0", "role": "dp", "ranks": "[0]", "root": 0, "module_fqn": ""}]
    return {"steps": times, "parameters": parameters, "groups": groups}


def attempts(path: Path, *of_each: dict[str, list[dict[str, Any]]], **facts: Any) -> Path:
    for number, rows in enumerate(of_each):
        later = {
            name: facts_of(0, 1)[name] + number * 1000 * MS
            for name in ("wall_start_ns", "wall_end_ns", "monotonic_start_ns")
        }
        build_run(path, rows, attempt=number, rank_facts={**later, **facts})
    return path


def rows(run: Run, query: str, *, as_recorded: bool = False) -> list[tuple[Any, ...]]:
    with contextlib.closing(connect([run], as_recorded=as_recorded)) as connection:
        return connection.execute(query).fetchall()


def test_attempt_takes_over_with_its_first_step(tmp_path: Path) -> None:
    run = open_history(attempts(tmp_path / "a", steps_of([0, 1, 2, 3]), steps_of([2, 3, 4], 2)))
    assert rows(run, "SELECT attempt, step FROM steps ORDER BY step") == [
        (0, 0), (0, 1), (1, 2), (1, 3), (1, 4),
    ]  # fmt: skip
    assert [(s.joined_by, s.read, s.repeated, s.gap) for s in run.stories] == [
        (None, (0, 1), None, None),
        ("job", (2, 4), (2, 3), None),
    ]
    assert run.first_of_attempts == {2: 1}
    with contextlib.closing(connect([run])) as connection:
        assert row_counts(connection, run).of("steps") == 5
        assert row_counts(connection, run).of("parameters") == 10
    one = open_history(run.path, 0)
    assert not one.history and rows(one, "SELECT count(*) FROM steps") == [(4,)]


def test_attempt_that_counts_anew_is_numbered_on_from_the_step_that_its_parameters_are_of(
    tmp_path: Path,
) -> None:
    run = open_history(attempts(tmp_path / "a", steps_of([0, 1, 2, 3]), steps_of([2, 7, 8])))
    assert [of.run.step_shift for of in run.stretches] == [0, 2]
    assert rows(run, "SELECT step FROM steps ORDER BY 1") == [(n,) for n in range(5)]
    # What the last step left is as good: the job died before it began the next.
    run = open_history(attempts(tmp_path / "b", steps_of([0, 1]), steps_of([2])))
    assert rows(run, "SELECT step FROM steps ORDER BY 1") == [(0,), (1,), (2,)]


def test_third_attempt_goes_back_behind_the_second(tmp_path: Path) -> None:
    path = attempts(
        tmp_path / "a", steps_of([0, 1, 2, 3]), steps_of([3, 4], 3), steps_of([2, 3, 4, 5], 2)
    )
    run = open_history(path)
    assert rows(run, "SELECT attempt, step FROM steps ORDER BY step") == [
        (0, 0), (0, 1), (2, 2), (2, 3), (2, 4), (2, 5),
    ]  # fmt: skip
    assert [s.read for s in run.stories] == [(0, 1), None, (2, 5)]


def test_what_begins_anew_is_read_alone_and_steps_that_nobody_did_are_named(tmp_path: Path) -> None:
    anew = open_history(attempts(tmp_path / "a", steps_of([0, 1, 2]), steps_of([0, 1])))
    assert not anew.history and anew.attempt == 1
    assert [s.read for s in anew.stories] == [None, (0, 1)]
    gap = open_history(attempts(tmp_path / "b", steps_of([0, 1]), steps_of([9], 6)))
    assert gap.stories[1].gap == (2, 5) and len(gap.history) == 2
    # Of several that could be it, none is taken: nothing was learnt in step 1.
    unmoved = open_history(attempts(tmp_path / "c", steps_of([0, 1, 1, 2]), steps_of([1, 2])))
    assert not unmoved.history and "several steps (1 and 2)" in str(unmoved.stories[1].why_not)


def test_numbers_that_go_on_do_not_hide_that_the_parameters_are_others(tmp_path: Path) -> None:
    whole = open_history(attempts(tmp_path / "a", steps_of([0, 1]), steps_of([2, 3], 2)))
    again = open_history(attempts(tmp_path / "b", steps_of([0, 1, 2]), steps_of([2, 3], 2)))
    lost = open_history(attempts(tmp_path / "c", steps_of([0, 1]), steps_of([0, 1], 2)))
    unknown = open_history(attempts(tmp_path / "d", steps_of([0, 1]), steps_of([2, 3], 4)))
    assert [run.stories[1].same_parameters for run in (whole, again, lost, unknown)] == [
        True, True, False, None,
    ]  # fmt: skip
    assert whole.as_joined == "attempt 0, attempt 1 from step 2 on"
    told = "it begins with other parameters than those that were there before"
    assert lost.as_joined == f"attempt 0, attempt 1 from step 2 on ({told})"
    assert f"; {told}; " in attempt_sentence(lost.stories[1])
    assert told not in attempt_sentence(whole.stories[1])


def test_numbers_and_clocks_go_on_where_a_rank_is_read_as_one(tmp_path: Path) -> None:
    run = open_history(attempts(tmp_path / "a", steps_of([0, 1, 2]), steps_of([1, 2], 1)))
    starts = rows(run, "SELECT start_ns FROM steps ORDER BY step")
    assert starts == [(0,), (1000 * MS,), (1001 * MS,)]
    order = "SELECT step FROM steps ORDER BY record_index"
    assert rows(run, order) == [(0,), (1,), (2,)]
    assert rows(run, "SELECT count(*) FROM groups") == [(1,)]
    assert rows(run, "SELECT monotonic_start_ns FROM ranks") == [(5_000_000_000,)]
    # To a person every attempt's rows are told as they lie on disk.
    as_recorded = rows(run, "SELECT start_ns FROM steps ORDER BY step", as_recorded=True)
    assert as_recorded == [(0,), (0,), (MS,)]
    assert rows(run, "SELECT attempt FROM ranks ORDER BY 1", as_recorded=True) == [(0,), (1,)]


def test_every_time_is_a_moment_or_a_stretch() -> None:
    """Who adds a time to a table says here which it is."""
    stretches = {"forward_ns", "backward_ns", "optimizer_ns", "recorder_ns", "device_ns"}
    anchors = {"wall_start_ns", "wall_end_ns", "monotonic_start_ns"}
    times = {c.name for table in ALL_TABLES for c in table.columns if c.name.endswith("_ns")}
    assert times == stretches | anchors | set(CLOCK_COLUMNS)


def test_rows_that_only_a_journal_holds_are_read_up_to_where_the_next_took_over(
    tmp_path: Path,
) -> None:
    path = build_run(tmp_path / "a", unclosed=(0,))
    write_journal(path, [("steps", {"step": n}) for n in range(4)])
    build_run(path, steps_of([2, 3], 2), attempt=1)
    run = open_history(path)
    assert rows(run, "SELECT attempt, step FROM steps ORDER BY step") == [
        (0, 0), (0, 1), (1, 2), (1, 3),
    ]  # fmt: skip
    assert journal_rows(run, "steps") == 2
    assert run.incomplete_ranks == () and run.torn_ranks == frozenset()


def test_step_in_which_an_attempt_stopped_and_that_is_read_is_torn(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", steps_of([0, 1]), unclosed=(0,))
    build_run(path, steps_of([2], 2), attempt=1)
    assert open_history(path).torn_ranks == frozenset({0})


def test_shifted_run_has_the_same_rows_under_other_numbers(tmp_path: Path) -> None:
    run = open_history(attempts(tmp_path / "a", steps_of([0, 1, 2]), steps_of([1, 2], 1)))
    moved = run.shifted(10)
    assert rows(moved, "SELECT attempt, step FROM steps ORDER BY step") == [
        (0, 10), (1, 11), (1, 12),
    ]  # fmt: skip
    assert moved.first_of_attempts == {11: 1}
    assert continued_steps([moved], open_history(run.path, 1)) == {11}


def test_what_attempts_were_made_with_is_all_told(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", steps_of([0, 1, 2]), rank_facts={"versions": {"torch": "2.6"}})
    build_run(path, steps_of([2], 2), attempt=1, rank_facts={"versions": {"torch": "2.13"}})
    held = inventory(open_history(path))
    assert held.versions == {"torch": ("2.13", "2.6")} and held.step_count == 3
    assert open_history(path).as_joined == "attempt 0, attempt 1 from step 2 on"


def test_diff_knows_each_step_that_may_be_unfinished(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", steps_of([0, 1]), unclosed=(0,))
    build_run(path, steps_of([2, 3], 2), attempt=1, unclosed=(0,))
    cut = build_run(tmp_path / "b", steps_of([0, 1, 2]), unclosed=(0,))
    build_run(cut, steps_of([1, 2], 1), attempt=1)
    runs = [open_history(path), open_history(cut)]
    with contextlib.closing(connect_pair(*runs)) as connection:
        assert torn_ends(connection, "baseline", runs[0]) == {0: (1, 3)}
        assert torn_ends(connection, "candidate", runs[1]) == {}

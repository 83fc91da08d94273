"""Opening a run: what is there, what is missing, and that nothing missing stops it."""

import contextlib
import gzip
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gradtrace_analyzer.errors import NewerSchema, NoSuchAttempt, NotARun
from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect
from gradtrace_schemas import layout
from gradtrace_schemas.journal import (
    RECORD_BYTES,
)
from gradtrace_schemas.journal_reader import (
    text_of,
)
from support.synthetic_runs.builder import add_part, build_run, part_rows
from support.synthetic_runs.journals import write_journal


def steps_in_parts(run: Run) -> list[int]:
    return [
        step
        for parts in run.parts["steps"].values()
        for part in parts
        for step in pa.parquet.read_table(part.path, partitioning=None)["step"].to_pylist()
    ]


def test_whole_run_is_opened_without_a_notice(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{"rank": r} for r in range(3)]}, world_size=3)
    run = open_run(path)
    assert (run.name, run.attempt, run.attempts, run.world_size) == ("a", 0, (0,), 3)
    assert list(run.ranks) == [0, 1, 2]
    assert all(info.is_complete and info.host == "host0" for info in run.ranks.values())
    assert {rank: len(parts) for rank, parts in run.parts["steps"].items()} == {0: 1, 1: 1, 2: 1}
    assert run.notices == ()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.write_text("x"), "is a file"),
        (lambda p: p.mkdir(), "is empty"),
        (lambda p: (p / "src").mkdir(parents=True), "is no run"),
    ],
)
def test_what_is_no_run_is_refused_by_name(tmp_path: Path, make: object, says: str) -> None:
    path = tmp_path / "thing"
    make(path)  # type: ignore[operator]
    with pytest.raises(NotARun, match=says) as caught:
        open_run(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_part_cut_in_half_is_named_and_the_rest_answered(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{"rank": 0}, {"rank": 1}]}, world_size=2)
    cut = add_part(path, "steps", [{"step": 1}], rank=1)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    run = open_run(path)
    assert [part.number for part in run.parts["steps"][1]] == [0]
    assert len(run.notices) == 1
    assert "steps/rank=00001/part-0-1.parquet is cut off" in run.notices[0]
    assert "rank 1" in run.notices[0]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 40, b"PAR1\xff\xff\xff\0PAR1"])
def test_part_that_no_reader_would_open_is_left_out(tmp_path: Path, content: bytes) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]})
    layout.part_file(path, "steps", 0, 0, 1).write_bytes(content)
    run = open_run(path)
    assert [part.number for part in run.parts["steps"][0]] == [0]
    assert "part-0-1.parquet" in run.notices[0]


def test_part_still_being_written_is_not_there_yet(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]})
    (path / "steps" / "rank=00000" / "part-0-1.writing").write_bytes(b"PAR1")
    run = open_run(path)
    assert run.notices == ()
    assert len(run.parts["steps"][0]) == 1


def test_missing_ranks_are_named_as_a_span(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]}, world_size=8, absent=(4, 5, 6, 7))
    run = open_run(path)
    assert run.missing_ranks == (4, 5, 6, 7)
    assert run.notices == (f"{path} lacks ranks 4-7 of 8",)


def test_ranks_left_out_by_choice_are_explained(tmp_path: Path) -> None:
    facts = {"settings": {"ranks": ["0-1"]}}
    path = build_run(tmp_path / "a", world_size=4, absent=(2, 3), rank_facts=facts)
    assert "GRADTRACE_RANKS was 0-1" in open_run(path).notices[0]


def test_rank_that_did_not_close_its_recording_is_named(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]}, world_size=3, unclosed=(1,))
    run = open_run(path)
    assert run.incomplete_ranks == (1,)
    assert len(run.notices) == 1 and "rank 1 did not close" in run.notices[0]


def test_rank_whose_json_is_cut_off_is_incomplete_and_its_parts_are_kept(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]})
    layout.rank_file(path, 0, 0).write_text('{"rank": 0, "comp')
    run = open_run(path)
    assert run.incomplete_ranks == (0,)
    assert len(run.parts["steps"][0]) == 1


def test_newest_attempt_is_read_and_older_ones_are_named(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{"step": 7}]})
    build_run(path, {"steps": [{"step": 9}]}, attempt=1)
    run = open_run(path)
    assert (run.attempt, run.attempts) == (1, (0, 1))
    assert steps_in_parts(run) == [9]
    assert "attempt 1 is read, not 0" in run.notices[0]
    assert steps_in_parts(open_run(path, attempt=0)) == [7]


def test_attempt_that_recorded_nothing_gives_way_to_the_one_before(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]})
    layout.attempt_file(path, 1).write_text("{}")
    run = open_run(path)
    assert run.attempt == 0
    assert "not 1, which recorded nothing" in run.notices[0]


def test_attempt_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]})
    with pytest.raises(NoSuchAttempt, match="no attempt 5; it has 0"):
        open_run(path, attempt=5)


def test_run_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]})
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "schema_version": 99}))
    with pytest.raises(NewerSchema, match="schema 99"):
        open_run(path)


def test_journal_left_behind_is_read_after_what_was_drained(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{"step": 0}, {"step": 1}]}, unclosed=(0,))
    rows = [("steps", {"step": n, "start_ns": 10 * n, "skipped": None}) for n in range(4)]
    write_journal(path, rows, drained=2)
    run = open_run(path)
    left = run.leftovers["steps"][0]
    assert left["step"].to_pylist() == [2, 3]
    assert left["start_ns"].to_pylist() == [20, 30]
    assert left["skipped"].to_pylist() == [None, None]
    assert "2 rows were read from journals" in run.notices[0]


def test_row_in_a_part_and_in_the_journal_appears_once(tmp_path: Path) -> None:
    """Killed after the part was renamed, before the journal said so: records 1 to 3 lie in both."""
    path = build_run(tmp_path / "a", unclosed=(0,))
    rows: list[tuple[str, dict[str, Any]]]
    rows = [("steps", {"step": 0}), ("inputs", {"name": "x"}), ("steps", {"step": 1})]
    write_journal(path, [*rows, ("steps", {"step": 2}), ("inputs", {"name": "y"})], drained=0)
    add_part(path, "steps", [{"step": 0}, {"step": 1}], last_record=3)
    run = open_run(path)
    assert steps_in_parts(run) == [0, 1]
    assert run.leftovers["steps"][0]["step"].to_pylist() == [2]
    # The part of `inputs` was not written yet, so both of its records are only in the journal.
    assert run.leftovers["inputs"][0]["name"].to_pylist() == ["x", "y"]


def test_mark_of_another_attempt_hides_no_journal_row(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a")
    add_part(path, "steps", [{"step": 50}], attempt=0, last_record=1000)
    build_run(path, attempt=1, unclosed=(0,))
    write_journal(path, [("steps", {"step": 3})], attempt=1)
    assert open_run(path).leftovers["steps"][0]["step"].to_pylist() == [3]


def test_rank_known_by_its_journal_alone_is_there_and_says_what_it_was_running(
    tmp_path: Path,
) -> None:
    path = build_run(tmp_path / "a", world_size=2, absent=(1,))
    entry = {"node_name": "MulBackward0", "module_fqn": "blocks.0", "step": 5}
    write_journal(path, [("steps", {"step": 4})], rank=1, running=[entry])
    run = open_run(path)
    assert run.missing_ranks == ()
    assert run.incomplete_ranks == (1,)
    assert run.ranks[1].facts["pid"] == 4242
    journal = run.journals[1]
    thread = journal.running[0]
    assert thread["depth"] == 1
    assert text_of(journal.strings, thread["entries"][0]["node_name"]) == "MulBackward0"


def test_half_written_record_is_left_out_and_counted(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", unclosed=(0,))
    journal = write_journal(path, [("steps", {"step": n}) for n in range(3)], half_records=2)
    data = bytearray(journal.read_bytes())
    second = len(data) - 3 * RECORD_BYTES
    data[second : second + 8] = bytes(8)  # its number is written last
    journal.write_bytes(data)
    run = open_run(path)
    assert run.leftovers["steps"][0]["step"].to_pylist() == [0, 2]
    assert any("1 journal records were only half written" in notice for notice in run.notices)


@pytest.mark.parametrize("content", [b"", b"short", b"X" * 10_000])
def test_unreadable_journal_is_named_and_the_rest_answered(tmp_path: Path, content: bytes) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]}, unclosed=(0,))
    journal = layout.journal_file(path, 0, 0)
    journal.parent.mkdir()
    journal.write_bytes(content)
    run = open_run(path)
    assert len(run.parts["steps"][0]) == 1
    assert any("journal of rank 0 cannot be read" in notice for notice in run.notices)


def test_ten_thousand_parts_open_in_about_a_second(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", world_size=100)
    one = add_part(path, "steps", part_rows("steps", [{}])).read_bytes()
    for rank in range(100):
        layout.table_folder(path, "steps", rank).mkdir(exist_ok=True)
        for number in range(100):
            layout.part_file(path, "steps", rank, 0, number).write_bytes(one)
    started = time.perf_counter()
    run = open_run(path)
    took = time.perf_counter() - started
    assert sum(map(len, run.parts["steps"].values())) == 10_000
    assert took < 5  # about 0.3 s; the margin is for a busy machine


def test_a_run_of_the_first_schema_is_read_with_nulls_for_what_came_later() -> None:
    """Recorded by the version that wrote schema 1: two steps of a linear layer."""
    run = open_run(Path(__file__).resolve().parents[2] / "data" / "schema-1")
    assert run.schema_version == 1 and run.notices == ()
    with contextlib.closing(connect([run])) as connection:
        found = connection.execute(
            "SELECT step, backward_count, digest_gradients IS NULL, digest_buckets FROM steps ORDER BY step"
        ).fetchall()
        assert found == [(0, 1, False, None), (1, 1, False, None)]
        passes = connection.execute("SELECT kind, ddp_sync FROM backward_passes").fetchall()
        assert passes == [("backward", None)] * 2


def test_a_run_of_the_second_schema_is_read_with_nulls_for_what_came_later() -> None:
    """Recorded by the version that wrote schema 2: two steps of a linear layer."""
    run = open_run(Path(__file__).resolve().parents[2] / "data" / "schema-2")
    assert run.schema_version == 2 and run.notices == () and run.flight_steps is None
    with contextlib.closing(connect([run])) as connection:
        nodes = connection.execute(
            "SELECT DISTINCT replay_equal, replay_error, outcome FROM node_events"
        ).fetchall()
        assert nodes == [(None, None, "ok")]
        ranks = connection.execute("SELECT replay_skipped, overwritten FROM ranks").fetchall()
        assert ranks == [(None, None)]


def test_a_run_of_the_third_schema_is_read_without_rows_of_stages() -> None:
    """Recorded by the version that wrote schema 3: two steps of a linear layer."""
    run = open_run(Path(__file__).resolve().parents[2] / "data" / "schema-3")
    assert run.schema_version == 3 and run.notices == ()
    with contextlib.closing(connect([run])) as connection:
        assert connection.execute("SELECT occurrence, error FROM stage_events").fetchall() == []
        nodes = connection.execute("SELECT DISTINCT stage_index, phase FROM node_events").fetchall()
        assert nodes == [(None, "backward")]


def test_a_run_of_the_fourth_schema_is_read_without_a_commit() -> None:
    """Recorded by the version that wrote schema 4: two steps of a linear layer, each in two actions of stage 0."""
    run = open_run(Path(__file__).resolve().parents[2] / "data" / "schema-4")
    assert run.schema_version == 4 and run.notices == ()
    with contextlib.closing(connect([run])) as connection:
        assert connection.execute("SELECT git_commit FROM ranks").fetchall() == [(None,)]
        actions = "SELECT step, stage_index, kind FROM stage_events ORDER BY step, kind"
        assert connection.execute(actions).fetchall() == [
            (step, 0, kind) for step in (0, 1) for kind in ("backward_full", "forward")
        ]


def test_a_run_of_the_fifth_schema_is_read_without_times_on_the_device_of_nodes() -> None:
    """Recorded by the version that wrote schema 5: two steps of a linear layer, each in two actions of stage 0."""
    run = open_run(Path(__file__).resolve().parents[2] / "data" / "schema-5")
    assert run.schema_version == 5 and run.notices == ()
    with contextlib.closing(connect([run])) as connection:
        nodes = "SELECT count(*), count(device_ns), count(DISTINCT node_name) FROM node_events"
        assert connection.execute(nodes).fetchall() == [(12, 0, 5)]
        assert connection.execute("SELECT device_ns FROM buckets").fetchall() == []


def test_a_run_of_the_sixth_schema_is_read_without_what_ended_its_steps() -> None:
    """Recorded by the version that wrote schema 6: two steps of a linear layer, each in two actions of stage 0."""
    run = open_run(Path(__file__).resolve().parents[2] / "data" / "schema-6")
    assert run.schema_version == 6 and run.notices == ()
    with contextlib.closing(connect([run])) as connection:
        steps = "SELECT step, skipped, ended_by, framework, framework_step FROM steps ORDER BY step"
        assert connection.execute(steps).fetchall() == [
            (step, False, None, None, None) for step in (0, 1)
        ]
        groups = "SELECT DISTINCT optimizer_class, wrapper_class FROM optimizer_groups"
        assert connection.execute(groups).fetchall() == [("SGD", None)]
        ranks = "SELECT step_rule, first_step_from FROM ranks"
        assert connection.execute(ranks).fetchall() == [(None, None)]


def test_a_run_that_lost_its_json_is_read_by_the_schema_of_its_parts(tmp_path: Path) -> None:
    kept = Path(__file__).resolve().parents[2] / "data" / "schema-6"
    shutil.copytree(kept, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    shutil.rmtree(tmp_path / "run" / "attempts")
    run = open_run(tmp_path / "run")
    assert run.schema_version == 6
    with contextlib.closing(connect([run])) as connection:
        assert connection.execute("SELECT DISTINCT ended_by FROM steps").fetchall() == [(None,)]


def test_journal_of_format_2_is_read_with_null_where_columns_are_newer(tmp_path: Path) -> None:
    """Written by the recorder of schema 2: a pass that failed, and a Node that was running."""
    packed = Path(__file__).resolve().parents[2] / "data" / "journal-2.gz"
    path = layout.journal_file(tmp_path, 0, 0)
    path.parent.mkdir()
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    [rank] = endings(open_run(tmp_path)).ranks
    assert rank.last_failure is not None and rank.last_failure.row["exception_text"] == "no luck"
    assert rank.last_failure.row["grad_outputs"] is None is rank.last_failure.row["call_step"]
    assert rank.state == "silent" and rank.place is not None  # it says of no process that it lives
    assert (rank.place.node_name, rank.place.module_fqn) == ("ReluBackward0", "act")

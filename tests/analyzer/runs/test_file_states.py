"""A run's files and folders in every state: each command answers, or says in one sentence why it cannot."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.errors import Unreadable
from gradtrace_analyzer.runs.facts import understood
from gradtrace_analyzer.runs.files import JsonFiles, names_in, opened, parsed
from gradtrace_analyzer.runs.opening import open_run
from support.environment.small_disk import small_disk
from support.stress import file_states
from support.stress.file_states import asked, complaint, restricted
from support.synthetic_runs.builder import build_run

TESTS = Path(__file__).resolve().parents[2]


def in_words(*command: object) -> str:
    """The one sentence of a command that cannot tell."""
    code, out, err = asked([str(word) for word in command])
    assert code == 2 and complaint(code, out, err) is None, err
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("analyzer: "), err
    return lines[0].removeprefix("analyzer: ")


def prefix() -> list[str]:
    """Rights count for what begins with it."""
    try:
        return restricted()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_every_command_answers_or_says_why_not_in_every_state(tmp_path: Path) -> None:
    states = 3 * 22
    done = subprocess.run(
        [*prefix(), sys.executable, file_states.__file__, "200", "24", str(states)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=270,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert "each ended with an answer or a sentence" in done.stdout


@pytest.mark.parametrize("where", ["steps", "steps/rank=00000", "ranks", "ranks/rank=00000-0.json"])
def test_what_may_not_be_read_is_named_with_what_would_help(tmp_path: Path, where: str) -> None:
    run = build_run(tmp_path / "a", {"steps": [{}]})
    place = run / where
    place.chmod(0)
    try:
        done = subprocess.run(
            [*prefix(), sys.executable, "-m", "gradtrace_analyzer", "diff", str(run), str(run)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        place.chmod(0o755)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"analyzer: {place} cannot be read: Permission denied; its owner can let you read it "
        "(chmod -R u+rX,g+rX)\n"
    )


def test_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    run = build_run(tmp_path / "a", {"steps": [{}]})
    [part] = run.glob("steps/*/*.parquet")
    part.unlink()
    os.mkfifo(part)
    assert "it is a pipe or a device where a file should be" in open_run(run).notices[0]
    (run / "run.json").unlink(missing_ok=True)
    os.mkfifo(run / "run.json")
    assert "run.json cannot be read: it is a pipe or a device" in in_words("info", run)
    with pytest.raises(OSError, match="it is a folder where a file should be"):
        opened(run)


def test_file_or_link_in_a_folders_place_is_no_table_that_was_not_recorded(tmp_path: Path) -> None:
    run = build_run(tmp_path / "a", {"steps": [{}]})
    (run / "gradients").write_text("")
    assert f"{run / 'gradients'} cannot be read: Not a directory; put the folder" in in_words(
        "check", run
    )
    (run / "gradients").unlink()
    (run / "gradients").symlink_to("/nowhere")
    assert "it is a link to nothing; put back what it leads to" in in_words("check", run)
    with pytest.raises(Unreadable):
        names_in(run / "gradients")
    assert names_in(run / "none") == []


def test_huge_files_are_not_read_to_their_end(tmp_path: Path) -> None:
    run = build_run(tmp_path / "a", {"steps": [{}]})
    [said] = run.glob("ranks/*.json")
    os.truncate(said, file_states.HUGE)
    journal = run / "journals" / "rank=00001-0.journal"
    journal.parent.mkdir(exist_ok=True)
    journal.write_bytes(b"GRADTRCE")
    os.truncate(journal, file_states.HUGE)
    notices = open_run(run).notices
    assert any("is no whole JSON object; what it said is missing" in notice for notice in notices)
    assert any("the journal of rank 1 cannot be read" in notice for notice in notices)


def test_json_of_other_types_is_left_out_and_named(tmp_path: Path) -> None:
    said = {
        "world_size": "two",
        "settings": [],
        "host": "h",
        "problems": ["x"],
        "own": {},
        "pid": True,
    }
    found, odd = understood(said)
    assert odd == ["world_size", "settings", "pid"]
    assert found == {"host": "h", "problems": ["x"], "own": {}}
    assert understood({"dropped": {"full": 3}, "dropped_steps": {"full": [1, None]}})[1] == []
    assert parsed(b"[" * 100_000) is None
    run = build_run(tmp_path / "a", {"steps": [{}]})
    (run / "run.json").write_text('{"world_size": 1000000000000}')
    read = JsonFiles(run, understood)
    assert read(run / "run.json") == {} and read(run / "none.json") == {}
    assert read.notices == [f"{run}: run.json says of world_size what it cannot be; left out"]


def test_part_of_another_table_is_named(tmp_path: Path) -> None:
    run = build_run(tmp_path / "a", {"steps": [{}], "gradients": [{}]})
    [steps], [gradients] = run.glob("steps/*/*.parquet"), run.glob("gradients/*/*.parquet")
    gradients.write_bytes(steps.read_bytes())
    assert "the parts of gradients hold something else than its rows" in in_words("check", run)


def test_full_disk_is_a_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    run = file_states.DATA / "schema-5"
    with small_disk(tmp_path / "disk", "48k") as disk:
        (disk / "filler").write_bytes(b"x" * 48 * 1024)
        for option in ("--duckdb", "--csv", "--parquet", "--perfetto"):
            said = in_words("export", option, disk / "out", run)
            assert "out" in said and "cannot be" in said
            assert [path.name for path in disk.rglob("*") if path.is_file()] == ["filler"], option
            for path in disk.glob("out"):
                path.rmdir()


def test_output_that_may_not_be_written_is_a_sentence(tmp_path: Path) -> None:
    run = build_run(tmp_path / "a", {"steps": [{}]})
    (tmp_path / "file").write_text("")
    for option in ("--duckdb", "--csv", "--parquet", "--perfetto"):
        assert "cannot be" in in_words("export", option, tmp_path / "file" / "out", run)
    assert "there is no folder" in in_words(
        "sql", "SELECT 1", run, "-o", tmp_path / "none" / "a.csv"
    )


def test_every_command_that_reads_runs_is_asked(tmp_path: Path) -> None:
    with click.Context(analyzer) as context:
        known = set(analyzer.list_commands(context))
    states = file_states.States(tmp_path, random.Random(0))
    asked_about = {command for command, *_ in states.commands(tmp_path / "run")}
    assert known - asked_about <= {
        "laws",
        "doctor",
    }  # reads no run; records for a second before it reads one

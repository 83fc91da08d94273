"""`analyzer repair`: journals into parts, whatever interrupts it; a living rank is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.runs.repair import CannotRepair, Repaired, repairs
from gradtrace_analyzer.sql.views import connect
from gradtrace_schemas import ALL_TABLES
from gradtrace_schemas.processes import machine_token, start_of
from support.environment.small_disk import small_disk
from support.synthetic_runs.journals import write_journal

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("backward_passes", {"step": 0, "kind": "backward", "node_count": 1, "unattributed_count": 0}),
    ("node_events", {"step": 0, "node_name": "MmBackward0", "outcome": "ok"}),
    ("gradients", {"step": 0, "parameter_fqn": "head.weight", "point": "local"}),
    ("steps", {"step": 0, "start_ns": 5, "end_ns": 9}),
    ("node_events", {"step": 1, "node_name": "AddBackward0", "outcome": "ok"}),
]
RUNNING = {"node_name": "ReluBackward0", "module_fqn": "act", "step": 1, "start_ns": 7}


def killed(run: Path, **more: Any) -> Path:
    dead = {"pid": os.getpid(), "process_start": 1, "machine": machine_token()}
    write_journal(run, ROWS, running=[RUNNING], **{**dead, **more})
    return run


def all_rows(run: Path) -> dict[str, list[Any]]:
    """Every row but for the digests of steps, which a journal does not hold."""
    with connect([open_run(run)]) as connection:
        return {
            t.name: connection.execute(
                f"SELECT {', '.join(chr(34) + c.name + chr(34) for c in t.columns if 'digest' not in c.name)} "
                f"FROM {t.name} ORDER BY rank, record_index"
            ).fetchall()
            for t in ALL_TABLES
            if t.journalled
        }


def test_rows_are_the_same_and_what_the_rank_did_is_kept(tmp_path: Path) -> None:
    run = killed(tmp_path / "run")
    before, told = all_rows(run), endings(open_run(run)).ranks[0]
    [done] = list(repairs(run))
    assert isinstance(done, Repaired) and sum(done.rows.values()) == len(ROWS)
    assert all_rows(run) == before and not list((run / "journals").iterdir())
    [kept] = endings(open_run(run)).ranks
    assert kept.state == told.state == "died"
    assert kept.place == told.place and kept.place is not None
    assert (kept.place.node_name, kept.place.module_fqn) == ("ReluBackward0", "act")
    assert list(repairs(run)) == []


def test_living_rank_is_left_alone(tmp_path: Path) -> None:
    run = killed(tmp_path / "run", process_start=start_of(os.getpid()))
    [said] = list(repairs(run, force=True))
    assert isinstance(said, CannotRepair) and "is still running" in str(said)
    assert len(list((run / "journals").iterdir())) == 1 and not (run / "steps").exists()


def test_rank_of_another_machine_is_repaired_only_by_force(tmp_path: Path) -> None:
    run = killed(tmp_path / "run", machine=1)
    [said] = list(repairs(run))
    assert isinstance(said, CannotRepair) and "--force" in str(said)
    assert [type(one) for one in repairs(run, force=True)] == [Repaired]


INTERRUPTED = """
import os, shutil, sys
from pathlib import Path
from gradtrace_analyzer.runs.repair import repairs
valid, folder = Path(sys.argv[1]), Path(sys.argv[2])
at = 0
while True:
    run = folder / str(at)
    shutil.copytree(valid, run)
    child = os.fork()
    if child == 0:
        events = 0
        def die(event, arguments):
            global events
            if event in ("open", "os.rename", "os.remove", "os.mkdir"):
                events += 1
                if events > at:
                    os._exit(9)
        sys.addaudithook(die)
        list(repairs(run))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
    at += 1
print(at)
"""


def test_repair_that_dies_at_any_moment_loses_nothing_and_can_be_run_again(tmp_path: Path) -> None:
    run = killed(tmp_path / "run")
    whole = all_rows(run)
    (tmp_path / "cut").mkdir()
    command = [sys.executable, "-c", INTERRUPTED, str(run), str(tmp_path / "cut")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15  # every file that it opens, renames or removes
    for cut in (tmp_path / "cut").iterdir():
        assert all_rows(cut) == whole, cut
        assert [one for one in repairs(cut) if isinstance(one, CannotRepair)] == []
        assert all_rows(cut) == whole and not list((cut / "journals").iterdir()), cut


def test_disk_without_room_keeps_the_journal(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "200k") as place:
        shutil.copytree(killed(tmp_path / "run"), place / "run")
        whole = all_rows(place / "run")
        free = os.statvfs(place)
        (place / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
        [said] = list(repairs(place / "run"))
        assert isinstance(said, CannotRepair) and "its journal stays as it is" in str(said)
        assert all_rows(place / "run") == whole
        (place / "filler").unlink()
        assert [type(one) for one in repairs(place / "run")] == [Repaired]
        assert all_rows(place / "run") == whole

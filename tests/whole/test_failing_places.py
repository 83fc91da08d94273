"""A disk that fills up, a directory that vanishes, a file system that stalls: the job goes on, the answer says it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.inventory import inventory
from gradtrace_analyzer.sql.views import connect
from gradtrace_schemas import ALL_TABLES
from support.environment.small_disk import small_disk

JOB = """
import os, shutil, sys, time, torch
from pathlib import Path
from gradtrace_recorder.journal.writer import JournalWriter
JournalWriter.__init__.__kwdefaults__.update(half_records=int(sys.argv[2]), strings_bytes=1 << 16)
torch.set_num_threads(1)
torch.manual_seed(0)
run, what = Path(os.environ["GRADTRACE_DIR"]), sys.argv[1]
net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(150):
    optimizer.zero_grad()
    net(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    time.sleep(0.004)
    if step == 1 and what == "stall":
        (run / "gradients" / "rank=00000").mkdir(parents=True)
        os.mkfifo(run / "gradients" / "rank=00000" / "part-0-0.writing")  # nobody reads: opening it blocks
    if step == 75 and what == "vanish":
        run.rename(str(run) + ".gone")
        shutil.rmtree(str(run) + ".gone")
print(sum(p.sum().item() for p in net.parameters()))
print(time.time(), flush=True)
"""


def run_job(
    directory: Path | None, what: str, half_records: int = 256, **settings: str
) -> tuple[str, str, float]:
    """(the job's result, what it said on stderr, how long it took from its last line to its end)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    place = {
        "GRADTRACE_DIR": "" if directory is None else str(directory),
        "OMP_NUM_THREADS": "1",
    } | {"GRADTRACE_QUIET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, what, str(half_records)],
        env=environment | place | settings,
        capture_output=True,
        text=True,
        timeout=100,
    )
    ended = time.time()
    assert done.returncode == 0, done.stderr
    result, last = done.stdout.splitlines()
    return result, done.stderr, ended - float(last)


@pytest.fixture(scope="module")
def result() -> str:
    """What the job prints unrecorded."""
    return run_job(None, "nothing")[0]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Rows by table where nothing goes wrong."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run_job(directory, "nothing", half_records=16_384)
    return rows_by_table(directory)


def rows_by_table(directory: Path) -> dict[str, int]:
    with connect([open_run(directory)]) as connection:
        counted: dict[str, Any] = {
            t.name: connection.execute(f"SELECT count(*) FROM {t.name}").fetchall()[0][0]
            for t in ALL_TABLES
            if t.journalled
        }
    return {name: count for name, count in counted.items() if count}


def test_disk_that_fills_up_costs_rows_that_are_counted(
    tmp_path: Path, result: str, counts: dict[str, int]
) -> None:
    with small_disk(tmp_path / "small", "900k") as place:
        got, said, after = run_job(place / "run", "nothing")
        assert got == result and after < 3
        assert said.count("\n") == 1 and "the journal keeps what it has room for" in said
        [ending] = endings(open_run(place / "run")).ranks
        present = rows_by_table(place / "run")
    assert ending.state == "ended"
    dropped = {name: count for name, (count, *_) in ending.dropped.items()}
    assert sum(dropped.values()) > 0
    assert {n: present.get(n, 0) + dropped.get(n, 0) for n in counts} == counts
    # Rows were dropped from some step on, to the end.
    first = {name: first for name, (_, first, _) in ending.dropped.items() if first is not None}
    assert all(0 < step < 149 for step in first.values()) and first
    assert {last for name, (_, _, last) in ending.dropped.items()} == {149}


def test_file_system_that_stalls_delays_the_end_by_two_seconds_and_costs_nothing(
    tmp_path: Path, result: str
) -> None:
    got, said, after = run_job(tmp_path / "run", "stall")
    assert got == result and said == "" and after < 3.5
    run = open_run(tmp_path / "run")
    [ending] = endings(run).ranks
    assert ending.state == "ended"
    with connect([run]) as connection:
        union = " UNION ALL ".join(
            f"SELECT record_index FROM {t.name}" for t in ALL_TABLES if t.journalled
        )
        numbers = sorted(n for (n,) in connection.execute(union).fetchall())
    assert numbers == list(range(1, 513)) == list(range(1, len(numbers) + 1))  # two halves
    assert sum(count for count, *_ in ending.dropped.values()) > 1000


def test_directory_that_vanishes_is_one_line_and_in_the_answer(tmp_path: Path, result: str) -> None:
    got, said, after = run_job(tmp_path / "run", "vanish")
    assert got == result and after < 3
    assert said.count("\n") == 1 and "was removed while it was recorded into" in said
    run = open_run(tmp_path / "run")
    held = inventory(run)
    assert [said.removeprefix("gradtrace: ").rstrip()] == [
        p.removeprefix("rank 0: ") for p in held.problems
    ]
    assert held.dropped["removed with the directory"] > 1000
    [facts] = [json.loads(p.read_text()) for p in (tmp_path / "run" / "ranks").iterdir()]
    assert facts["complete"] and rows_by_table(tmp_path / "run")["steps"] > 60


def test_steps_that_a_flight_has_let_go_of_are_not_lost_with_the_directory(
    tmp_path: Path, result: str
) -> None:
    got, said, _ = run_job(tmp_path / "run", "vanish", half_records=4096, GRADTRACE_MODE="flight")
    assert got == result and "what lay there is lost (0 rows)" in said
    assert inventory(open_run(tmp_path / "run")).dropped.get("removed with the directory", 0) == 0

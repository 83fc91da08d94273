"""Kills jobs at random moments and checks that nothing they recorded is lost, torn or invented.

A job of the same seed that ended by itself is the reference: row n of a killed one is row n of it, but for times. So a
lost row, one that is there twice, and a torn one that is shown are each seen. After `repair` its tables have not
changed, but for the digests of steps, which are the reference's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb

from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.runs.repair import Repaired, repairs
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect, connect_pair
from gradtrace_schemas import ALL_TABLES
from gradtrace_schemas.nodes import NODE_EVENTS
from gradtrace_schemas.table import Table

NURSERY = Path(__file__).resolve().parents[1] / "jobs" / "nursery.py"
MODELS = ("lists", "gpt", "cnn", "rnn", "ddp")
WAYS: tuple[signal.Signals | None, ...] = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, None,
)  # fmt: skip
REFERENCE_STEPS = 100  # a killed job, which rests between steps, does not get so far
LONGEST = 0.6
_TABLES = tuple(table for table in ALL_TABLES if table.journalled)


class Killer:
    """Starts jobs in a nursery and kills them. `folder` holds their runs, each removed when it was found right."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.records = self.dropping = 0
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
        self._nursery = subprocess.Popen(
            [sys.executable, str(NURSERY)],
            env=environment | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._references: dict[str, Path] = {}

    def __enter__(self) -> Killer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.close()
        self._nursery.wait(30)
        self._nursery.stdout.close()

    def kill_one(self, number: int, models: tuple[str, ...] = MODELS) -> str:
        """Start a job, kill it at a random moment, check what is left. In words, what was done."""
        model, way = models[number % len(models)], WAYS[number % len(WAYS)]
        after = self.draw.uniform(0, LONGEST)
        reference = self._reference(model)
        directory = self.folder / f"{number}-{model}"
        pids = self._ask(
            directory=str(directory),
            model=model,
            steps=0,
            exit_after=after if way is None else None,
        )
        if way is not None:
            time.sleep(after)
            os.kill(self.draw.choice(pids), way)
            if len(pids) > 1:
                time.sleep(self.draw.uniform(0, 0.05))
                for pid in pids:  # as torch's launcher does it
                    os.kill(pid, signal.SIGTERM)
        statuses = self._ask(reap=pids)
        expected = {7} if way is None else {-way, -signal.SIGTERM, 1}
        assert set(statuses) <= expected, statuses
        self._check(directory, None if model == "ddp" else reference)
        shutil.rmtree(directory)
        return f"{model} by {'os._exit' if way is None else way.name} after {after:.3f} s"

    def _check(self, directory: Path, reference: Path | None) -> None:
        run = open_run(directory)
        assert not run.damaged, run.damaged
        assert all(contents.torn_count <= 1 for contents in run.journals.values())
        with connect([run]) as connection:
            for rank in run.ranks:
                numbers = _numbers(connection, rank)
                assert numbers == list(range(1, len(numbers) + 1)), f"rank {rank}: {_odd(numbers)}"
                self.records += len(numbers)
            [(bad,)] = connection.execute(
                "SELECT count(*) FROM node_events WHERE node_name IS NULL OR end_ns < start_ns OR start_ns < 0"
            ).fetchall()
            assert not bad, f"{bad} Nodes without a name or with torn times"
        before = endings(run)
        if any(ending.dropped for ending in before.ranks):
            self.dropping += (
                1  # the drain did not keep up: what is left is not row for row the reference's
            )
            reference = None
        if reference is not None:
            assert [ending.state for ending in before.ranks] == ["died"], before.ranks
            assert before.ranks[0].place is not None
            _same_rows(run, open_run(reference), with_digests=False)
        kept = {name: _rows(run, name) for name in ("node_events", "buckets", "gradients")}
        done = list(repairs(directory))
        assert all(isinstance(one, Repaired) for one in done), done
        repaired = open_run(directory)
        assert not repaired.journals
        assert {name: _rows(repaired, name) for name in kept} == kept
        assert [e.place for e in endings(repaired).ranks] == [e.place for e in before.ranks]
        if reference is not None:
            _same_rows(repaired, open_run(reference), with_digests=True)

    def _reference(self, model: str) -> Path:
        if model not in self._references:
            directory = self.folder / f"reference-{model}"
            pids = self._ask(
                directory=str(directory),
                model=model,
                steps=REFERENCE_STEPS if model != "ddp" else 4,
                exit_after=None,
            )
            assert self._ask(reap=pids) == [0] * len(pids)
            [ended, *_] = endings(open_run(directory)).ranks
            assert ended.state == "ended" and not ended.dropped, ended
            self._references[model] = directory
        return self._references[model]

    def _ask(self, **order: Any) -> list[int]:
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps(order) + "\n")
        self._nursery.stdin.flush()
        answer: list[int] = json.loads(self._nursery.stdout.readline())
        return answer


def _numbers(connection: duckdb.DuckDBPyConnection, rank: int) -> list[int]:
    union = " UNION ALL ".join(
        f"SELECT record_index FROM {t.name} WHERE rank = {rank}" for t in _TABLES
    )
    return sorted(number for (number,) in connection.execute(union).fetchall())


def _odd(numbers: list[int]) -> str:
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
    twice = sorted({n for n in numbers if numbers.count(n) > 1}) if len(numbers) < 50_000 else []
    return f"records {missing[:5]} are missing, {twice[:5]} are there twice"


def _rows(run: Run, table: str) -> list[Any]:
    with connect([run]) as connection:
        query = f"SELECT * EXCLUDE (run) FROM {table} ORDER BY rank, record_index"
        return [repr(row) for row in connection.execute(query).fetchall()]


_IDENTITY = "step, microbatch, backward_index, event_index, node_name, root, module_fqn, call_index, parameter_fqn"


def _same_rows(killed: Run, reference: Run, *, with_digests: bool) -> None:
    """Every row of the killed run is one of the reference, of the same number, but for its times."""
    with connect_pair(reference, killed) as connection:
        [(unknown,)] = connection.execute(
            f"SELECT count(*) FROM (SELECT {_IDENTITY} FROM candidate.node_events WHERE outcome = 'running' "
            f"EXCEPT ALL SELECT {_IDENTITY} FROM baseline.node_events)"
        ).fetchall()
        assert not unknown, "a Node that was running never ran in a job that ended well"
        for table in _TABLES:
            columns = ", ".join(f'"{name}"' for name in _compared(table, with_digests=with_digests))
            # Of a Node that was running its identity alone is known.
            ended = "WHERE outcome <> 'running'" if table is NODE_EVENTS else ""
            [(strange,)] = connection.execute(
                f"SELECT count(*) FROM (SELECT {columns} FROM candidate.{table.name} {ended} "
                f"EXCEPT ALL SELECT {columns} FROM baseline.{table.name})"
            ).fetchall()
            assert not strange, (
                f"{strange} rows of {table.name} are not as in a job that ended well"
            )


def _compared(table: Table, *, with_digests: bool) -> list[str]:
    return [
        column.name
        for column in table.columns
        if not column.name.endswith("_ns")
        and column.name != "thread"
        and (with_digests or not column.name.startswith("digest_"))
    ]


def main() -> None:
    """So many kills, with a line for each that was not survived by its records."""
    import tempfile

    count, seed = int(sys.argv[1]), int(sys.argv[2])
    failed, began = 0, time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="kills-") as folder,
        Killer(Path(folder), seed) as killer,
    ):
        for number in range(count):
            try:
                killer.kill_one(number)
            except AssertionError as error:
                failed += 1
                print(f"kill {number}: {error}", flush=True)
        print(
            f"{count} kills with seed {seed}, {failed} with something wrong; {killer.records:,} records, "
            f"{killer.dropping} that dropped rows, "
            f"{time.monotonic() - began:.0f} s"
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""The rows of a data-parallel job of which only the times matter: who launches which bucket when.

A step takes 100 ms. Its backward pass begins at 20 ms, a bucket is launched every 10 ms after, 1 ms after its first
gradient, and a reduction is done 2 ms after its last launch, on all ranks at once. `late` delays a rank from one bucket
of a pass on: bucket -1 is the begin of the pass. Rank r began recording r x 7 ms after the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from gradtrace_analyzer.cli import analyzer
from gradtrace_schemas import layout
from support.synthetic_runs.builder import build_run

MS = 1_000_000
PARAMETERS = (
    ("head.weight", "head.bias"),
    ("body.1.fc.weight", "body.1.fc.bias"),
    ("body.0.fc.weight", "body.0.fc.bias"),
)
Late = Callable[[int, int, int], float]
Rows = dict[str, list[dict[str, Any]]]


def never(rank: int, step: int, bucket: int) -> float:
    """Nobody is late."""
    return 0


@dataclass(frozen=True)
class TimedJob:
    """`late(rank, step, bucket)` is in milliseconds, `leaves` too: how long after the end a rank notices it.

    `hosts` names each rank's host, and `ahead` what a host's clock is ahead, in milliseconds.
    """

    rank_count: int = 2
    step_count: int = 4
    late: Late = never
    leaves: Late = never
    hosts: Sequence[str] = ()
    ahead: Mapping[str, float] | None = None
    group: str = "0"
    buckets: Sequence[Sequence[str]] = PARAMETERS

    def rows(self) -> Rows:
        """The rows of all ranks, by table."""
        made: Rows = {"buckets": [], "backward_passes": [], "steps": [], "groups": []}
        everyone = json.dumps(list(range(self.rank_count)))
        for rank in range(self.rank_count):
            made["groups"].append(
                {"rank": rank, "name": self.group, "ranks": everyone, "role": "dp", "root": 0}
                | {"module_fqn": ""}
            )
        for step in range(self.step_count):
            self._step(step, made)
        return made

    def _step(self, step: int, made: Rows) -> None:
        begin = 1000 + 100 * step + 20
        launched = []
        for rank in range(self.rank_count):
            behind = self.late(rank, step, -1)
            of_rank = []
            for bucket in range(len(self.buckets)):
                behind += self.late(rank, step, bucket)
                of_rank.append(begin + 10 * (bucket + 1) + behind)
            launched.append(of_rank)
        done, free = [], 0.0
        for bucket in range(len(self.buckets)):
            free = max(free, *(of_rank[bucket] for of_rank in launched)) + 2
            done.append(free)
        for rank in range(self.rank_count):
            entered = begin + self.late(rank, step, -1)
            made["backward_passes"].append(
                {"rank": rank, "step": step, "backward_index": 0, "kind": "backward"}
                | {"start_ns": self.own(rank, entered), "end_ns": self.own(rank, done[-1])}
            )
            made["steps"].append(
                {"rank": rank, "step": step, "start_ns": self.own(rank, begin - 20)}
                | {"end_ns": self.own(rank, begin + 80), "forward_ns": 15 * MS}
                | {"backward_ns": 50 * MS, "optimizer_ns": 5 * MS, "recorder_ns": MS}
            )
            for bucket, fqns in enumerate(self.buckets):
                launch = launched[rank][bucket]
                left = done[bucket] + self.leaves(rank, step, bucket)
                made["buckets"].append(
                    {"rank": rank, "step": step, "backward_index": 0, "bucket_index": bucket}
                    | {"is_last": bucket == len(self.buckets) - 1, "group": self.group}
                    | {"parameter_fqns": list(fqns), "size_bytes": 4000 * (bucket + 1)}
                    | {"ready_ns": self.own(rank, launch - 1), "root": 0, "module_fqn": ""}
                    | {"launched_ns": self.own(rank, launch), "done_ns": self.own(rank, left)}
                    | {"kind": "all_reduce", "layout_index": 0}
                    | {"collective_seq": 5 + len(self.buckets) * step + bucket}
                )

    def own(self, rank: int, at_ms: float) -> int:
        """A moment on the clock of a rank's recording."""
        return round((at_ms - 7 * rank) * MS)

    def write(
        self, path: Path, rows: Rows | None = None, absent: Collection[int] = (), **facts: Any
    ) -> Path:
        """A run of these rows, each rank with its host and when its recording began on that host's clock."""
        made = self.rows() if rows is None else rows
        build_run(path, made, world_size=self.rank_count, absent=absent, rank_facts=facts)
        for rank in range(self.rank_count):
            host = self.hosts[rank] if self.hosts else "host0"
            file = layout.rank_file(path, rank, 0)
            if not file.exists():
                continue
            ahead = (self.ahead or {}).get(host, 0)
            known = json.loads(file.read_text())
            began = {"monotonic_start_ns": round((7 * rank + ahead) * MS), "host": host}
            file.write_text(json.dumps({**known, **began, **facts}))
        return path


def timing(*arguments: object, exit_code: int = 0) -> Result:
    """What `analyzer timing` says."""
    result = CliRunner().invoke(analyzer, ["timing", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result


def bucket_json(path: Path, *options: object) -> dict[str, Any]:
    """The answer about buckets, as a program reads it."""
    answer = json.loads(timing(path, "--buckets", "--format", "json", *options).stdout)["buckets"]
    assert isinstance(answer, dict)
    return answer

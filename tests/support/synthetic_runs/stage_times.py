"""A run of a pipeline from numbers: what each action takes, who is late, how long a transfer takes; without torch.

Every stage is on a rank of its own, the clock of rank r begins 7 ms after that of rank r - 1. All forwards come first,
then each microbatch's input half and weight half; the first stage runs whole backwards, as torch's schedules do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.synthetic_runs.bucket_times import MS, Rows, TimedJob

USUAL = {"forward": 2.0, "backward_full": 6.0, "backward_input": 3.0, "backward_weight": 3.0}
Took = Callable[[int, int, str, int], float]


def usual(stage: int, step: int, kind: str, microbatch: int) -> float:
    """What an action takes in milliseconds when nothing is slow."""
    return USUAL[kind]


@dataclass(frozen=True)
class StagedJob:
    """`took(stage, step, kind, microbatch)` and `transfer(from, to, step)` are in milliseconds.

    `hosts` and `ahead` as in `TimedJob`; `replicas` pipelines have a rank for each stage, those of a stage adjacent.
    """

    stages: int = 4
    steps: int = 6
    microbatches: int = 4
    took: Took = usual
    transfer: Callable[[int, int, int], float] = lambda *_: 0.1
    hosts: tuple[str, ...] = ()
    ahead: Mapping[str, float] = field(default_factory=dict)
    replicas: int = 1
    is_split: bool = True
    first_step: int = 0

    @property
    def clock(self) -> TimedJob:
        """The job's clocks and how its run is written."""
        return TimedJob(rank_count=self.stages * self.replicas, hosts=self.hosts, ahead=self.ahead)

    def rows(self) -> Rows:
        """The rows of all ranks, by table."""
        made: Rows = {name: [] for name in ("stage_events", "node_events", "module_calls", "steps")}
        begin = 1000.0
        for step in range(self.first_step, self.first_step + self.steps):
            ends = [self._step(step, begin, replica, made) for replica in range(self.replicas)]
            begin = max(ends) + 5
        return made

    def write(self, path: Path, rows: Rows | None = None, **facts: Any) -> Path:
        """A run of these rows."""
        return self.clock.write(path, self.rows() if rows is None else rows, **facts)

    def _step(self, step: int, begin: float, replica: int, made: Rows) -> float:
        free = [begin] * self.stages
        made_at: dict[tuple[bool, int, int], float] = {}
        for microbatch in range(self.microbatches):
            for stage in range(self.stages):
                self._action(step, replica, stage, "forward", microbatch, free, made_at, made)
        for microbatch in range(self.microbatches):
            for stage in reversed(range(self.stages)):
                kinds = (
                    ("backward_input", "backward_weight")
                    if stage and self.is_split
                    else ("backward_full",)
                )
                for kind in kinds:
                    self._action(step, replica, stage, kind, microbatch, free, made_at, made)
        for stage in range(self.stages):
            rank = stage * self.replicas + replica
            made["steps"].append(
                {"rank": rank, "step": step, "start_ns": self.clock.own(rank, begin)}
                | {"end_ns": self.clock.own(rank, free[stage] + 1), "forward_ns": 10 * MS}
                | {"backward_ns": 20 * MS, "optimizer_ns": MS, "recorder_ns": 0}
            )
        return max(free)

    def _action(
        self,
        step: int,
        replica: int,
        stage: int,
        kind: str,
        microbatch: int,
        free: list[float],
        made_at: dict[tuple[bool, int, int], float],
        made: Rows,
    ) -> None:
        rank = stage * self.replicas + replica
        forward = kind == "forward"
        other = stage - 1 if forward else stage + 1
        about = {"rank": rank, "step": step, "microbatch": microbatch, "stage_index": stage}
        if kind != "backward_weight" and 0 <= other < self.stages:
            sent = made_at[forward, other, microbatch]
            # One after the other: a link carries one microbatch at a time.
            before = made_at.get((forward, other, -1 - stage), sent)
            came = max(sent, before) + self.transfer(other, stage, step)
            made_at[forward, other, -1 - stage] = came
            done = max(free[stage], came)
            what = "receive_activations" if forward else "receive_gradients"
            self._event(made, {**about, "kind": what}, free[stage], done)
            free[stage] = done
        took = self.took(stage, step, kind, microbatch)
        start = free[stage]
        free[stage] = start + took
        if kind != "backward_weight":
            made_at[forward, stage, microbatch] = free[stage]
        self._event(made, {**about, "kind": kind}, start, free[stage])
        inside = {"start_ns": self.clock.own(rank, start + took * 0.02)}
        inside |= {"end_ns": self.clock.own(rank, start + took * 0.98), "root": 0, "call_index": 0}
        call = {k: about[k] for k in ("rank", "step", "microbatch")}
        if forward:
            whole = {"start_ns": self.clock.own(rank, start + took * 0.01)}
            whole |= {"end_ns": self.clock.own(rank, start + took * 0.99)}
            outer = {**call, **inside, **whole, "module_fqn": "", "module_class": "Sequential"}
            inner = {**call, **inside, "module_fqn": "mlp", "module_class": "Mlp"}
            made["module_calls"] += [
                {**inner, "depth": 1, "phase": "forward"},
                {**outer, "depth": 0, "phase": "forward"},
            ]
            return
        phase = {"backward_input": "input", "backward_weight": "weight"}.get(kind, "backward")
        made["node_events"].append(
            {**about, **inside, "backward_index": microbatch, "event_index": len(made["node_events"])}
            | {"node_name": "AddmmBackward0", "module_fqn": "mlp", "phase": phase, "outcome": "ok"}
            | {"occurrence": 0}
        )  # fmt: skip

    def _event(self, made: Rows, about: dict[str, Any], start: float, end: float) -> None:
        own = self.clock.own
        times = {"start_ns": own(about["rank"], start), "end_ns": own(about["rank"], end)}
        made["stage_events"].append({**about, **times, "occurrence": 0})

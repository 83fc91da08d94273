"""The rows of a small data-parallel job as the recorder would write them, for tests to break in one place.

Three parameters in two buckets, trained by plain SGD: what each rank holds follows from what its reductions give.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from click.testing import CliRunner

from gradtrace_analyzer.check.check import opened_evidence
from gradtrace_analyzer.check.law import Findings, Law
from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.runs.opening import open_run
from support.synthetic_runs.builder import build_run, summary_columns

Array = npt.NDArray[Any]
Reduce = Callable[[int, list[Array]], Sequence[Array]]
Rows = dict[str, list[dict[str, Any]]]

SIZES = {"body.weight": 40, "head.weight": 24, "head.bias": 6}
BUCKETS = (("head.weight", "head.bias"), ("body.weight",))


def mean(step: int, buckets: list[Array]) -> list[Array]:
    """What DDP does."""
    reduced = (np.sum(buckets, axis=0) / len(buckets)).astype(buckets[0].dtype)
    return [reduced] * len(buckets)


@dataclass
class Job:
    """`reduce` gives each rank's bucket after the reduction, from a step and the ranks' buckets."""

    rank_count: int = 2
    step_count: int = 3
    reduce: Reduce = mean
    hook_name: str | None = None
    dtype: str = "float32"
    seed: int = 0
    rows: Rows = field(default_factory=dict)
    _records: dict[int, int] = field(default_factory=dict)

    def made(self) -> Rows:
        """The rows of all ranks, by table."""
        held = [
            {name: self._random(1, n, size) for n, (name, size) in enumerate(SIZES.items())}
            for _ in range(self.rank_count)
        ]
        for rank in range(self.rank_count):
            ranks = json.dumps(list(range(self.rank_count)))
            self._add(
                "groups", rank, name="0", ranks=ranks, role="dp", root=0, module_fqn="",
                backend="gloo", hook_name=self.hook_name,
            )  # fmt: skip
        for step in range(self.step_count):
            self._step(step, held)
        return self.rows

    def _random(self, *key: int) -> Array:
        return np.random.default_rng((self.seed, *key)).standard_normal(key[-1]).astype(self.dtype)

    def _add(self, table: str, rank: int, **row: Any) -> None:
        self._records[rank] = self._records.get(rank, 0) + 1
        self.rows.setdefault(table, []).append(
            {"rank": rank, "record_index": self._records[rank], **row}
        )

    def _step(self, step: int, held: list[dict[str, Array]]) -> None:
        local = [
            {n: self._random(2, step, rank, i, size) for i, (n, size) in enumerate(SIZES.items())}
            for rank in range(self.rank_count)
        ]
        came_out: list[dict[str, Array]] = [{} for _ in local]
        buckets = []
        for names in BUCKETS:
            before = [np.concatenate([own[name] for name in names]) for own in local]
            after = self.reduce(step, before)
            buckets.append((names, before, after))
            edges = np.cumsum([SIZES[name] for name in names])[:-1]
            for rank, whole in enumerate(after):
                came_out[rank].update(zip(names, np.split(whole, edges), strict=True))
        for rank in range(self.rank_count):
            self._forward(rank, step, held[rank])
            self._backward(rank, step, local[rank])
            for index, (names, before, after) in enumerate(buckets):
                self._bucket(rank, step, index, names, before[rank], after[rank])
            for name, reduced in came_out[rank].items():
                self._gradient(rank, step, "reduced", name, reduced)
            for name, reduced in came_out[rank].items():
                self._gradient(rank, step, "final", name, reduced)
                held[rank][name] = (held[rank][name] - 0.1 * reduced).astype(self.dtype)
            self._parameters(rank, step, "after", held[rank])
            self._add("optimizer_groups", rank, step=step, optimizer_index=0, group_index=0)
            self._add("steps", rank, step=step, backward_count=1, skipped=False)

    def _parameters(self, rank: int, step: int, point: str, held: dict[str, Array]) -> None:
        for name, values in held.items():
            self._add(
                "parameters", rank, step=step, root=0, parameter_fqn=name, point=point,
                kind="parameter", requires_grad=True, **summary_columns(values),
            )  # fmt: skip

    def _forward(self, rank: int, step: int, held: dict[str, Array]) -> None:
        self._parameters(rank, step, "before", held)
        data = self._random(3, step, rank, 16)
        self._add(
            "inputs", rank, step=step, root=0, call_index=0, name="x", **summary_columns(data)
        )
        for fqn in ("body", "head", ""):
            self._add(
                "module_calls", rank, step=step, root=0, module_fqn=fqn, phase="forward",
                call_index=0, **summary_columns(data, "input_"), **summary_columns(data, "output_"),
            )  # fmt: skip

    def _backward(self, rank: int, step: int, local: dict[str, Array]) -> None:
        for index, name in enumerate(reversed(local)):
            values = local[name]
            self._gradient(rank, step, "local", name, values)
            self._add(
                "node_events", rank, step=step, backward_index=0, event_index=index, root=0,
                module_fqn=name.rpartition(".")[0], node_name="AddmmBackward0",
                **summary_columns(values, "grad_output_", 4), **summary_columns(values, "grad_input_", 4),
            )  # fmt: skip
        self._add(
            "backward_passes", rank, step=step, backward_index=0, kind="backward", loss=1.0,
            ddp_sync="sync",
        )  # fmt: skip

    def _gradient(self, rank: int, step: int, point: str, name: str, values: Array) -> None:
        self._add(
            "gradients", rank, step=step, backward_index=0, root=0, parameter_fqn=name,
            point=point, **summary_columns(values),
        )  # fmt: skip

    def _bucket(
        self, rank: int, step: int, index: int, names: tuple[str, ...], before: Array, after: Array
    ) -> None:
        self._add(
            "buckets", rank, step=step, backward_index=0, bucket_index=index, root=0, module_fqn="",
            hook_name=self.hook_name, group="0", parameter_fqns=list(names), kind="all_reduce",
            divisor=self.rank_count if self.hook_name is None else None,
            collective_seq=1 + step * len(BUCKETS) + index, numel=before.size, dtype=self.dtype,
            launched_ns=0, done_ns=1, **summary_columns(before, "before_"),
            **summary_columns(after, "after_"),
        )  # fmt: skip


def matching(rows: Rows, table: str, **where: Any) -> list[dict[str, Any]]:
    """The rows of a table that hold these values."""
    return [r for r in rows.get(table, ()) if all(r.get(k) == v for k, v in where.items())]


def edit(rows: Rows, table: str, where: dict[str, Any], **changes: Any) -> None:
    """Change the rows of a table that hold these values; there must be some."""
    found = matching(rows, table, **where)
    assert found, (table, where)
    for row in found:
        row.update(changes)


def remove(rows: Rows, table: str, **where: Any) -> None:
    """Take away the rows of a table that hold these values."""
    gone = [id(row) for row in matching(rows, table, **where)]
    assert gone, (table, where)
    rows[table] = [row for row in rows[table] if id(row) not in gone]


def checked(
    folder: Path, rows: Rows, *options: str, rank_count: int = 2, **build: Any
) -> dict[str, Any]:
    """What `analyzer check --format json` answers of these rows, with its exit code as `exit_code`."""
    path = build_run(folder / "run", rows, world_size=rank_count, **build)
    result = CliRunner().invoke(analyzer, ["check", str(path), "--format", "json", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    answer: dict[str, Any] = json.loads(result.stdout)
    return {**answer, "exit_code": result.exit_code}


def findings(
    folder: Path,
    law: Law,
    rows: Rows,
    *,
    rank_count: int = 2,
    compressing: Sequence[str] = (),
    **build: Any,
) -> Findings:
    """What one law finds in these rows, no other law asked."""
    run = open_run(build_run(folder / "run", rows, world_size=rank_count, **build))
    with opened_evidence(run, compressing) as evidence:
        return law(evidence)


def laws(answer: dict[str, Any]) -> list[str]:
    """The laws that are broken, in the order of the answer."""
    return [v["law"] for v in answer["violations"]]


def violation(answer: dict[str, Any], law: str) -> dict[str, Any]:
    """The only violation of a law."""
    [found] = [v for v in answer["violations"] if v["law"] == law]
    held: dict[str, Any] = found
    return held

"""What each rank did when, as slices on tracks, all ranks on one clock.

A rank has a track each for its steps, the calls of modules, its backward passes, the Nodes of every thread, each
bucket and each pipeline stage. A flow joins a bucket's reduction on all its ranks, and what a stage sent with what
its neighbour made of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from gradtrace_analyzer.exports.protobuf import Detail
from gradtrace_analyzer.timing.clocks import HostClock
from gradtrace_analyzer.timing.reductions import paired_reductions
from gradtrace_analyzer.timing.slices import Steps


@dataclass(frozen=True)
class Track:
    """A row of the picture. Where it is a thread's, `thread` is its number in this rank, from 1."""

    rank: int
    name: str
    place: int
    thread: int | None = None


@dataclass(frozen=True)
class Slice:
    """Something that took a while. `end_ns` is None where it was never seen to end."""

    start_ns: int
    end_ns: int | None
    name: str
    category: str
    details: Mapping[str, Detail] = field(default_factory=dict)
    flows: tuple[int, ...] = ()
    ending_flows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """`zeros` are when each rank's recording began, on the clock of all; `by_wall` are ranks that only their wall
    clock places there."""

    connection: duckdb.DuckDBPyConnection
    steps: Steps
    zeros: Mapping[int, int]
    by_wall: tuple[int, ...]
    clocks: tuple[HostClock, ...]

    def process_name(self, rank: int) -> str:
        """How a rank's process is called on the time line: `rank 3 on host0`."""
        rows = self.connection.execute("SELECT host FROM ranks WHERE rank = ?", [rank]).fetchall()
        host = rows[0][0] if rows else None
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def tracks(self, rank: int) -> Iterator[tuple[Track, Iterator[Slice]]]:
        """The tracks of a rank, each with its slices in the order of their starts, the longest of equal ones first."""
        yield Track(rank, "steps", 0), self._plain(rank, *_STEPS)
        yield Track(rank, "forward: modules", 1, 1), self._plain(rank, *_MODULES)
        yield Track(rank, "backward passes", 2), self._plain(rank, *_PASSES)
        threads = self._numbers(rank, "node_events", "thread")
        for number, thread in enumerate(threads, 2):
            name = "backward: Nodes" if len(threads) == 1 else f"backward: Nodes {number - 1}"
            yield (
                Track(rank, name, number + 1, number),
                self._plain(
                    rank, "node_events", "t.node_name", _OF_A_NODE, "node", f"t.thread = {thread}"
                ),
            )
        place = 100
        for bucket in self._numbers(rank, "buckets", "bucket_index"):
            yield Track(rank, f"bucket {bucket}", place), self._buckets(rank, bucket)
            place += 1
        for stage in self._numbers(rank, "stage_events", "stage_index"):
            for is_wait, name in ((False, f"stage {stage}"), (True, f"stage {stage} waits")):
                yield Track(rank, name, place), self._stages(rank, stage, is_wait)
                place += 1

    def _numbers(self, rank: int, table: str, column: str) -> list[int]:
        rows = self.connection.execute(
            f"SELECT DISTINCT {column} FROM {table} WHERE rank = {rank} AND {column} IS NOT NULL "
            f"AND {self.steps.condition()} ORDER BY 1"
        ).fetchall()
        return [number for (number,) in rows]

    def _rows(
        self, rank: int, table: str, columns: str, condition: str, start: str = "start_ns",
        end: str = "end_ns",
    ) -> Iterator[tuple[int, int | None, tuple[Any, ...]]]:  # fmt: skip
        cursor = self.connection.cursor()
        zero = self.zeros[rank]
        cursor.execute(
            f"SELECT t.{start}, t.{end}, {columns} FROM {table} t WHERE t.rank = {rank} "
            f"AND {self.steps.condition('t.step')} AND ({condition}) AND t.{start} IS NOT NULL "
            f"ORDER BY t.{start}, t.{end} DESC, t.record_index DESC"
        )
        while rows := cursor.fetchmany(10_000):
            for begun, ended, *rest in rows:
                yield begun + zero, None if ended is None else ended + zero, tuple(rest)

    def _plain(
        self,
        rank: int,
        table: str,
        name: str,
        others: Sequence[str],
        category: str,
        condition: str = "true",
    ) -> Iterator[Slice]:
        columns = ", ".join([name, *(f"t.{other}" for other in others)])
        for start, end, (text, *values) in self._rows(rank, table, columns, condition):
            yield Slice(start, end, text or category, category, _details(others, values))

    def _buckets(self, rank: int, bucket: int) -> Iterator[Slice]:
        columns = "t.record_index, t.kind, t.step, t.size_bytes, t.ready_ns, len(t.parameter_fqns), t.module_fqn"
        pairs = dict(
            self.connection.execute(
                "SELECT record_index, pair FROM paired WHERE rank = ? AND rank_count > 1", [rank]
            ).fetchall()
        )
        names = ("step", "size_bytes", "filling_ns", "parameters", "module_fqn")
        for start, end, row in self._rows(
            rank, "buckets", columns, f"t.bucket_index = {bucket}", "launched_ns", "done_ns"
        ):
            record, kind, step, size, ready, parameters, module = row
            filling = None if ready is None else start - self.zeros[rank] - ready
            details = _details(names, (step, size, filling, parameters, module))
            flows = (_flow("bucket", pairs[record]),) if record in pairs else ()
            yield Slice(start, end, kind or "reduction", "bucket", details, flows)

    def _stages(self, rank: int, stage: int, is_wait: bool) -> Iterator[Slice]:
        waits = "t.kind LIKE 'receive%' OR t.kind LIKE 'send%'"
        condition = f"t.stage_index = {stage} AND " + (
            f"({waits})" if is_wait else f"NOT ({waits})"
        )
        for start, end, (kind, step, microbatch) in self._rows(
            rank, "stage_events", "t.kind, t.step, t.microbatch", condition
        ):
            details = {"step": step, "microbatch": microbatch}
            sent, received = _stage_flows(kind, stage, step, microbatch)
            yield Slice(start, end, f"{kind} {microbatch}", "stage", details, sent, received)


# (table, what a slice is called, what else is said of it, category, which rows)
_STEPS = ("steps", "'step ' || t.step", ("skipped", "recorder_ns"), "step")
_MODULES = (
    "module_calls",
    "coalesce(nullif(t.module_fqn, ''), t.module_class)",
    ("step", "microbatch", "phase", "call_index", "module_class", "output_norm"),
    "module",
)
_PASSES = ("backward_passes", "t.kind", ("step", "microbatch", "backward_index", "loss"), "pass")
_OF_A_NODE = (
    "step",
    "microbatch",
    "event_index",
    "module_fqn",
    "parameter_fqn",
    "grad_output_norm",
    "grad_input_norm",
    "outcome",
)


def timeline(connection: duckdb.DuckDBPyConnection, steps: Steps) -> Timeline:
    """That of some steps of a run, from the connection of that run alone."""
    paired = paired_reductions(connection, steps)
    began = connection.execute(
        "SELECT r.rank, c.host, c.began_ns, r.wall_start_ns FROM ranks r JOIN clocks c USING (rank) "
        "WHERE r.wall_start_ns IS NOT NULL ORDER BY r.rank"
    ).fetchall()
    if not began:
        return Timeline(connection, steps, {}, (), paired.clocks)
    _, first_host, first_began, first_wall = began[0]
    offsets = {
        clock.host: clock.offset_ns for clock in paired.clocks if clock.reference == first_host
    }
    zeros, by_wall = {}, []
    for rank, host, at, wall in began:
        if host == first_host or host in offsets:
            zeros[rank] = at - offsets.get(host, 0)
        else:
            zeros[rank] = first_began + wall - first_wall
            by_wall.append(rank)
    earliest = min(zeros.values())
    zeros = {rank: at - earliest for rank, at in zeros.items()}
    return Timeline(connection, steps, zeros, tuple(by_wall), paired.clocks)


def _stage_flows(
    kind: str, stage: int, step: int, microbatch: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(flows that begin, flows that end) in an action: to the next stage forward, to the one before it backward."""
    if kind == "forward":
        arriving = (_flow("forward", step, microbatch, stage),) if stage else ()
        return (_flow("forward", step, microbatch, stage + 1),), arriving
    if kind in ("backward_full", "backward_input"):
        leaving = (_flow("backward", step, microbatch, stage - 1),) if stage else ()
        return leaving, (_flow("backward", step, microbatch, stage),)
    return (), ()


def _flow(*key: str | int) -> int:
    """A number of 64 bits that is the same for the same key in every process, and for no other that matters."""
    text = json.dumps(key).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1


def _details(names: Sequence[str], values: Sequence[Any]) -> dict[str, Detail]:
    pairs = zip(names, values, strict=True)
    return {name: value for name, value in pairs if value is not None}

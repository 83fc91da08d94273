"""Builds runs as large as real ones, vectorised, to measure the analyzer on: no row passes through Python.

Every rank makes the same Nodes in the same order; what they carry is random but is the same in two runs of one
seed, unless a change is asked for. Digests are those that the recorder would write. A second run of the same sizes
shares the parts in which it is equal, as links to the same files.
"""

from __future__ import annotations

import itertools
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gradtrace_schemas import SCHEMA_VERSION, TABLES, layout
from gradtrace_schemas.batches import arrow_table, write_part
from gradtrace_schemas.digests import DIGESTED_TABLES, Digests
from gradtrace_schemas.journal import (
    NULL_BOOL,
    NULL_FLOAT_BITS,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
    SUMMARY,
    record_dtype,
)
from gradtrace_schemas.summary import STATE_FULL
from support.synthetic_runs.builder import facts_of, write_json

Change = Literal["nothing", "one event", "noise", "bug"]
Records = npt.NDArray[Any]

_KINDS_OF_NODES = ("AddmmBackward0", "MulBackward0", "GeluBackward0", "ViewBackward0", "TBackward0")
_RECORDS_A_STEP = 10_000_000


@dataclass(frozen=True)
class Sizes:
    """How much there is of everything. `modules` are called once a step and hold one parameter each."""

    ranks: int = 64
    steps: int = 200
    nodes: int = 1500
    modules: int = 60
    parts: int = 1

    @property
    def node_rows(self) -> int:
        """Rows of `node_events`."""
        return self.ranks * self.steps * self.nodes


def build_large(
    path: Path, sizes: Sizes, change: Change = "nothing", *, like: Path | None = None
) -> Path:
    """A run of these sizes, or `path` as it is where it was built before.

    `like` is a run of the same sizes without a change. `one event` differs in one Node of the last rank, half
    way through the steps; `noise`, with another thread count, in the last bits of everything from the first step
    on; `bug` by a hundredth
    in one Node of half the steps, and all after it.
    """
    if (path / "built").exists():
        return path
    started = {"world_size": sizes.ranks, "schema_version": SCHEMA_VERSION, "token": "0"}
    for file in (path / layout.RUN_FILE, layout.attempt_file(path, 0)):
        write_json(file, started)
    jobs = []
    for rank in range(sizes.ranks):
        is_same = change == "nothing" or (change == "one event" and rank != sizes.ranks - 1)
        if like is not None and is_same:
            _link_rank(like, path, rank)
        else:
            jobs.append(rank)
    if len(jobs) * sizes.steps <= 500:  # sooner done than other processes are started
        for rank in jobs:
            _build_rank(path, sizes, change, rank)
    else:
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            told = [pool.submit(_build_rank, path, sizes, change, rank) for rank in jobs]
            for one in told:
                one.result()
    (path / "built").touch()
    return path


def _link_rank(like: Path, path: Path, rank: int) -> None:
    for part in like.glob(f"*/{layout.rank_name(rank)}/*.parquet"):
        target = path / part.relative_to(like)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(part, target)
    (path / layout.RANKS).mkdir(parents=True, exist_ok=True)
    os.link(layout.rank_file(like, rank, 0), layout.rank_file(path, rank, 0))


def _build_rank(path: Path, sizes: Sizes, change: Change, rank: int) -> None:
    recorded: dict[str, int] = {}
    digests = Digests()
    for number, steps in enumerate(np.array_split(np.arange(sizes.steps), sizes.parts)):
        records, strings = _records(sizes, steps.astype(np.int64), change, rank)
        absent = {name: np.zeros(0, record_dtype(TABLES[name])) for name in DIGESTED_TABLES}
        digests.take({**absent, **records}, strings)
        for name, rows in records.items():
            table = TABLES[name]
            recorded[name] = recorded.get(name, 0) + len(rows)
            made = arrow_table(table, rows, strings, 0)
            part = layout.part_file(path, name, rank, 0, number)
            write_part(part, table, made, int(rows["record_number"].max()))
    facts = {
        **facts_of(rank, sizes.ranks),
        "local_rank": rank % 8,
        "host": f"host{rank // 8}",
        "environment": {"num_threads": 2 if change == "noise" else 1},
        "complete": True,
        "last_step": sizes.steps - 1,
        "recorded": recorded,
    }
    write_json(layout.rank_file(path, rank, 0), facts)


def _records(
    sizes: Sizes, steps: npt.NDArray[np.int64], change: Change, rank: int
) -> tuple[dict[str, Records], list[str]]:
    """The journal's records of a rank's steps, by table, and the strings that they name by number."""
    strings: list[str] = []

    def text(value: str) -> int:
        if value not in strings:
            strings.append(value)
        return strings.index(value)

    modules = [text(f"blocks.{n // 5}.part{n % 5}") for n in range(sizes.modules)]
    parameters = [text(f"blocks.{n // 5}.part{n % 5}.weight") for n in range(sizes.modules)]
    dtype = text("float32")
    shifts = _Shifts(sizes, steps, change, rank, dtype)
    counts = {
        "parameters": 2 * sizes.modules,
        "inputs": 1,
        "module_calls": sizes.modules,
        "backward_passes": 1,
        "node_events": sizes.nodes,
        "gradients": 2 * sizes.modules,
        "buckets": 1,
        "optimizer_groups": 1,
        "steps": 1,
    }
    made: dict[str, Records] = {}
    first = 1
    for name, each in counts.items():
        rows = _nulls(record_dtype(TABLES[name]), each * len(steps))
        place = np.tile(np.arange(each), len(steps))
        rows["step"] = np.repeat(steps, each)
        rows["microbatch"] = 0
        rows["record_number"] = rows["step"].astype(np.int64) * _RECORDS_A_STEP + first + place
        began = rows["step"].astype(np.int64) * 50_000_000 + place * 10_000
        for column, late in (("start_ns", 0), ("end_ns", 5_000 + place % 13)):
            if column in (rows.dtype.names or ()):
                rows[column] = began + late
        first += each
        for role, field in enumerate(n for n in rows.dtype.names or () if n.endswith("summary")):
            rows[field] = shifts.summaries(name, role, each)
        made[name] = rows

    halves = np.tile(np.repeat([0, 1], sizes.modules), len(steps))
    for name, points in (("parameters", ("before", "after")), ("gradients", ("local", "final"))):
        rows = made[name]
        rows["root"] = 0
        rows["parameter_fqn"] = np.tile(parameters, 2 * len(steps))
        rows["point"] = np.array([text(point) for point in points])[halves]
    made["parameters"]["kind"] = text("parameter")
    made["parameters"]["requires_grad"] = 1
    made["gradients"]["backward_index"] = 0
    calls = made["module_calls"]
    calls["root"], calls["call_index"], calls["depth"] = 0, 0, 1
    calls["module_fqn"] = np.tile(modules, len(steps))
    calls["phase"], calls["module_class"] = text("forward"), text("Linear")
    made["inputs"]["root"], made["inputs"]["call_index"] = 0, 0
    made["inputs"]["name"] = text("x")
    passes = made["backward_passes"]
    passes["backward_index"], passes["kind"], passes["unattributed_count"] = 0, text("backward"), 0
    passes["root_node_name"], passes["loss"] = text("MeanBackward0"), 2.5
    passes["node_count"] = sizes.nodes
    nodes = made["node_events"]
    place = np.tile(np.arange(sizes.nodes), len(steps))
    inside = place % sizes.modules
    nodes["backward_index"], nodes["event_index"] = 0, place
    nodes["autograd_seq"] = sizes.nodes - place
    nodes["node_name"] = np.array([text(name) for name in _KINDS_OF_NODES])[place % 5]
    nodes["root"], nodes["call_index"] = 0, 0
    nodes["module_fqn"] = np.array(modules)[inside]
    nodes["occurrence"] = place // (5 * sizes.modules)
    nodes["phase"], nodes["thread"] = text("backward"), 140_000_000
    nodes["grad_output_count"], nodes["grad_input_count"] = 1, 1
    nodes["outcome"] = text("ok")
    buckets = made["buckets"]
    buckets["backward_index"], buckets["bucket_index"], buckets["is_last"] = 0, 0, 1
    buckets["group"] = text("default")
    buckets["parameter_fqns"] = text(json.dumps([strings[n] for n in parameters]))
    buckets["size_bytes"], buckets["launched_ns"] = 4_000_000, buckets["step"] * 50_000_000
    buckets["root"], buckets["module_fqn"] = 0, text("")
    buckets["kind"], buckets["layout_index"] = text("all_reduce"), 0
    groups = made["optimizer_groups"]
    groups["optimizer_index"], groups["group_index"], groups["learning_rate"] = 0, 0, 1e-3
    groups["optimizer_class"], groups["hyperparameters"] = text("AdamW"), text('{"eps": 1e-08}')
    groups["parameter_fqns"] = text(json.dumps([strings[n] for n in parameters]))
    ends = made["steps"]
    for column, time in (("forward_ns", 9e6), ("backward_ns", 2e7), ("optimizer_ns", 1e6)):
        ends[column] = int(time)
    ends["end_ns"] = ends["start_ns"] + 40_000_000
    ends["skipped"], ends["backward_count"], ends["abandoned_forwards"] = 0, 1, 0
    ends["rng_fingerprint"], ends["recorder_ns"] = 77 + steps, 90_000
    return made, strings


class _Shifts:
    """The summaries of a rank's rows: random, and moved where the run is to differ."""

    def __init__(
        self, sizes: Sizes, steps: npt.NDArray[np.int64], change: Change, rank: int, dtype: int
    ) -> None:
        self._sizes, self._steps, self._change, self._rank = sizes, steps, change, rank
        self._dtype = dtype

    def summaries(self, table: str, role: int, each: int) -> Records:
        """Those of all rows of a table in one of its summaries, `each` of a step."""
        if table == "parameters":
            return self._parameters(each // 2)
        count = each * len(self._steps)
        random = np.random.default_rng([self._rank, role, int(self._steps[0]) + 1, *table.encode()])
        made = np.zeros(count, SUMMARY)
        made["numel"], made["dtype"], made["state"] = 4096, self._dtype, STATE_FULL
        made["fingerprint"] = random.integers(-(2**63), 2**63 - 1, count)
        # Little of it is random, so that a row takes about 30 bytes.
        sizes = 1 + np.tile(np.arange(each) % 97, len(self._steps)) / 97
        made["norm"] = sizes * (4 + random.random(count, np.float32))
        made["abs_max"], made["sum"] = sizes, sizes / 8
        made["sketch"] = (sizes * 1.0)[:, None] * np.where(np.arange(16) % 3 == 0, -1.0, 1.0)
        where = self._apart(table, role, each)
        made["fingerprint"][where] += 1
        by = 1e-2 if self._change in ("bug", "one event") else 1e-7
        made["sketch"][where] *= np.float32(1 + by)
        return made

    def _parameters(self, each: int) -> Records:
        """Before each step what the step before left."""
        left = [self._left(int(step), each) for step in (self._steps[0] - 1, *self._steps)]
        return np.concatenate([half for pair in itertools.pairwise(left) for half in pair])

    def _left(self, step: int, each: int) -> Records:
        own = _Shifts(self._sizes, np.array([step]), self._change, self._rank, self._dtype)
        return own.summaries("parameters after", 0, each)

    def _apart(self, table: str, role: int, each: int) -> npt.NDArray[np.bool_]:
        step = np.repeat(self._steps, each)
        place = np.tile(np.arange(each), len(self._steps))
        half = self._sizes.steps // 2
        if self._change == "noise":
            # Everything but what the first step is given.
            return np.asarray((step >= 0) & (table != "inputs"))
        last = self._rank == self._sizes.ranks - 1
        here = (step == half) & (table == "node_events") & (place == each // 3) & (role == 1) & last
        if self._change == "bug":
            after = (step > half) & (table != "inputs")
            return np.asarray(here | after)
        return np.asarray(here & (self._change == "one event"))


def _nulls(dtype: np.dtype[Any], count: int) -> Records:
    """Records whose fields all say that they do not apply."""
    rows = np.zeros(count, dtype)
    for name in dtype.names or ():
        kind = dtype[name]
        if kind == np.dtype("<f8"):
            rows[name].view(np.int64)[:] = NULL_FLOAT_BITS
        elif kind == np.dtype("<u4"):
            rows[name] = NULL_STRING
        elif kind == np.dtype("<i4"):
            rows[name] = NULL_INT32
        elif kind == np.dtype("<i8"):
            rows[name] = NULL_INT64
        elif kind == np.dtype("u1"):
            rows[name] = NULL_BOOL
        elif kind.names == ("ndim", "sizes"):
            rows[name]["ndim"], rows[name]["sizes"][:, 0] = 1, 4096
    return rows

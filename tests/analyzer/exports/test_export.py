"""`analyzer export`: what other programs read is what was recorded."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from gradtrace_analyzer.cli import analyzer
from gradtrace_schemas import ALL_TABLES
from support.environment.small_disk import small_disk
from support.synthetic_runs.bucket_times import TimedJob
from support.synthetic_runs.builder import build_run


def export(*arguments: object) -> str:
    result = CliRunner().invoke(analyzer, ["export", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stderr


def test_database_holds_every_table_without_our_help(tmp_path: Path) -> None:
    runs = [TimedJob().write(tmp_path / name) for name in ("a", "b")]
    export(*runs, "--duckdb", tmp_path / "out.duckdb")
    with duckdb.connect(str(tmp_path / "out.duckdb"), read_only=True) as connection:
        names = {
            name
            for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()
        }
        assert names == {table.name for table in ALL_TABLES}
        rows = connection.execute(
            "SELECT run, count(*) FROM buckets GROUP BY run ORDER BY run"
        ).fetchall()
        assert rows == [("a", 24), ("b", 24)]
        [(said,)] = connection.execute(
            "SELECT comment FROM duckdb_columns() WHERE table_name = 'buckets' AND column_name = 'numel'"
        ).fetchall()
        assert said == "Elements of the flat buffer."
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "out.duckdb"}


@pytest.mark.parametrize("kind", ["duckdb", "csv", "parquet"])
def test_full_disk_is_told_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    run = build_run(tmp_path / "a", {"steps": [{"step": n, "end_ns": n**4} for n in range(30_000)]})
    with small_disk(tmp_path / "small", "40k") as place:
        said = CliRunner().invoke(analyzer, ["export", str(run), f"--{kind}", str(place / "out")])
        assert said.exit_code == 2
        assert said.stderr.splitlines()[-1].endswith("cannot be written: No space left on device")
        assert [path for path in place.rglob("*") if path.is_file()] == []


def test_tables_as_files_are_those_that_have_rows(tmp_path: Path) -> None:
    run = TimedJob().write(tmp_path / "a")
    export(run, "--csv", tmp_path / "csv", "--parquet", tmp_path / "parquet")
    expected = {"backward_passes", "buckets", "groups", "ranks", "steps"}
    for kind in ("csv", "parquet"):
        assert {path.stem for path in (tmp_path / kind).iterdir()} == expected
        with duckdb.connect() as connection:
            [(rows,)] = connection.execute(
                f"SELECT count(*) FROM '{tmp_path / kind / f'steps.{kind}'}'"
            ).fetchall()
        assert rows == 8
    again = CliRunner().invoke(analyzer, ["export", str(run), "--csv", str(tmp_path / "csv")])
    assert again.exit_code == 2 and "is there already" in again.stderr


@dataclass
class Begun:
    """A slice of the trace, read back."""

    name: str
    start_ns: int
    end_ns: int | None = None
    flows: tuple[int, ...] = ()
    ending: tuple[int, ...] = ()


@dataclass
class Trace:
    """What Perfetto would show: process names, and by (process, track) the slices."""

    processes: dict[int, str] = field(default_factory=dict)
    slices: dict[tuple[str, str], list[Begun]] = field(default_factory=dict)


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message, by the format's own rules."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
        elif kind == 1:
            yield key >> 3, struct.unpack_from("<Q", data, at)[0]
            at += 8
        else:
            assert kind == 2, kind
            size = varint()
            assert at + size <= len(data)
            yield key >> 3, data[at : at + size]
            at += size


def read_trace(data: bytes) -> Trace:
    """As the format's documentation has it: packets in order, names by number, ends that close the last begun."""
    trace = Trace()
    names: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    pids: dict[int, str] = {}
    stacks: dict[int, list[Begun]] = {}
    last: dict[int, int] = {}
    for number, packet in fields(data):
        assert number == 1
        found: dict[int, Any] = dict(fields(packet))
        assert found[10] == 1
        if 12 in found:
            for kind, entry in fields(found[12]):
                said = dict(fields(entry))
                names.setdefault(said[1], said[2].decode())
                assert kind in (1, 2, 3)
        if 60 in found:
            about = dict(fields(found[60]))
            if 3 in about:
                process = dict(fields(about[3]))
                trace.processes[about[1]] = pids[process[1]] = process[6].decode()
            elif 4 in about:
                thread = dict(fields(about[4]))
                tracks[about[1]] = (pids[thread[1]], thread[5].decode())
            else:
                tracks[about[1]] = (trace.processes[about[5]], about[2].decode())
        if 11 in found:
            event: dict[int, Any] = dict(fields(found[11]))
            track, at = event[11], found[8]
            assert at >= last.get(track, 0), "time goes back on a track"
            last[track] = at
            if event[9] == 1:
                flows = tuple(v for k, v in fields(found[11]) if k == 47)
                ending = tuple(v for k, v in fields(found[11]) if k == 48)
                begun = Begun(names[event[10]], at, None, flows, ending)
                trace.slices.setdefault(tracks[track], []).append(begun)
                stacks.setdefault(track, []).append(begun)
            else:
                stacks[track].pop().end_ns = at
    return trace


def test_trace_shows_ranks_on_one_clock_and_joins_their_buckets(tmp_path: Path) -> None:
    job = TimedJob(hosts=("host0", "host1"), ahead={"host1": 5_000_000.0})
    told = export(job.write(tmp_path / "a"), "--perfetto", tmp_path / "out.pftrace.gz")
    assert told.endswith(f"slices written to {tmp_path / 'out.pftrace.gz'}\n")
    trace = read_trace(gzip.decompress((tmp_path / "out.pftrace.gz").read_bytes()))
    assert sorted(trace.processes.values()) == ["rank 0 on host0", "rank 1 on host1"]
    a, b = (trace.slices[name, "bucket 1"] for name in sorted(trace.processes.values()))
    assert len(a) == len(b) == 4
    for one, other in zip(a, b, strict=True):
        # The clocks of the hosts are 5,000 s apart; the reductions, which all leave together, lay them over.
        assert abs(one.start_ns - other.start_ns) < 1_000_000
        assert one.flows == other.flows and len(one.flows) == 1
    assert len({one.flows for one in a}) == 4
    steps = trace.slices["rank 0 on host0", "steps"]
    assert [one.name for one in steps] == [f"step {n}" for n in range(4)]
    assert all(one.end_ns is not None and one.end_ns > one.start_ns for one in steps)


def test_trace_of_a_pipeline_joins_stages_and_nests_what_lies_inside(tmp_path: Path) -> None:
    def action(rank: int, kind: str, start: int) -> dict[str, Any]:
        return {"rank": rank, "stage_index": rank, "kind": kind, "occurrence": 0,
                "start_ns": start, "end_ns": start + 10}  # fmt: skip

    def call(fqn: str, start: int, end: int) -> dict[str, Any]:
        return {"module_fqn": fqn, "phase": "forward", "start_ns": start, "end_ns": end}

    node = {"node_name": "MmBackward0", "thread": 77, "start_ns": 50, "end_ns": None}
    run = build_run(
        tmp_path / "a",
        {
            "stage_events": [
                action(0, "forward", 10), action(1, "receive_activations", 20), action(1, "forward", 30),
                action(1, "backward_full", 50), action(0, "backward_full", 70),
            ],
            "module_calls": [call("", 10, 20), call("block", 10, 20), call("block.inner", 12, 18)],
            "node_events": [{**node, "outcome": "running"}],
        },
        world_size=2,
    )  # fmt: skip
    export(run, "--perfetto", tmp_path / "out.pftrace")
    trace = read_trace((tmp_path / "out.pftrace").read_bytes())
    of_first, of_second = (trace.slices[f"rank {n} on host0", f"stage {n}"] for n in (0, 1))
    (forward, backward), (later, earlier) = of_first, of_second
    assert forward.flows == later.ending and earlier.flows == backward.ending
    assert not forward.ending and not backward.flows
    assert len(trace.slices["rank 1 on host0", "stage 1 waits"]) == 1
    calls = trace.slices["rank 0 on host0", "forward: modules"]
    assert [(one.start_ns, one.end_ns) for one in calls] == [(10, 20), (10, 20), (12, 18)]
    [running] = trace.slices["rank 0 on host0", "backward: Nodes"]
    assert running.end_ns is None


def test_trace_of_some_steps_holds_these(tmp_path: Path) -> None:
    run = TimedJob().write(tmp_path / "a")
    export(run, "--perfetto", tmp_path / "out", "--step", "1:3")
    trace = read_trace((tmp_path / "out").read_bytes())
    names = {
        one.name for (_, track), found in trace.slices.items() if track == "steps" for one in found
    }
    assert names == {"step 1", "step 2"}


@pytest.mark.parametrize("value", [0, 127, 128, 2**63, 2**64 - 1, -1])
def test_number_is_read_back_as_it_was_written(value: int) -> None:
    from gradtrace_analyzer.exports.protobuf import varint

    [(number, found)] = fields(varint(1 << 3) + varint(value))
    assert (number, found) == (1, value % 2**64)

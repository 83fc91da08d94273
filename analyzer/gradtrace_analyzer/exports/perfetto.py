"""A run's time line as a trace that Perfetto opens: ranks are processes, with their threads, stages and buckets.

The native format, not Chrome's JSON: nanoseconds stay whole, tracks need no thread, and it is a fifth of the size.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradtrace_analyzer.exports.protobuf import TraceWriter
from gradtrace_analyzer.exports.timeline import Slice, Timeline, Track
from gradtrace_analyzer.exports.whole import whole_file
from gradtrace_analyzer.progress import progress

_TRACKS_A_RANK = 1 << 20


def write_trace(path: Path, found: Timeline) -> int:
    """Write the trace, compressed where the name ends in `.gz`, and say how many slices it has."""
    with whole_file(path) as temporary:
        opened = gzip.open if path.suffix == ".gz" else open
        count = 0
        with opened(temporary, "wb") as out:
            for packet, is_slice in _packets(found):
                out.write(packet)
                count += is_slice
        return count


def _packets(found: Timeline) -> Iterator[tuple[bytes, bool]]:
    writer = TraceWriter()
    yield writer.start(), False
    with progress("writing ranks", len(found.zeros)) as count:
        for rank in sorted(found.zeros):
            base = (rank + 1) * _TRACKS_A_RANK
            pid = rank + 1  # 0 is the idle task of a machine
            yield writer.process(base, pid, found.process_name(rank)), False
            for number, (track, slices) in enumerate(found.tracks(rank), 1):
                uuid = base + number
                described = False
                for packet, is_slice in _on_track(writer, uuid, slices):
                    if not described:
                        yield _descriptor(writer, track, uuid, base, pid), False
                        described = True
                    yield packet, is_slice
            count(1)


def _descriptor(writer: TraceWriter, track: Track, uuid: int, base: int, pid: int) -> bytes:
    if track.thread is not None:
        # Numbers of threads are unique in the trace, as those of a machine are.
        return writer.thread(uuid, pid, pid * 1000 + track.thread, track.name)
    return writer.track(uuid, base, track.name, track.place)


def _on_track(
    writer: TraceWriter, track: int, slices: Iterable[Slice]
) -> Iterator[tuple[bytes, bool]]:
    """Begins and ends in the order of time. One that outlasts what it lies in (two that overlap) ends with it."""
    ends: list[int] = []
    for one in slices:
        while ends and ends[-1] <= one.start_ns:
            yield writer.end(track, ends.pop()), False
        yield (
            writer.begin(
                track,
                one.start_ns,
                one.name,
                one.category,
                flows=one.flows,
                ending_flows=one.ending_flows,
                details=one.details,
            ),
            True,
        )
        if one.end_ns is not None:
            ends.append(min(one.end_ns, ends[-1]) if ends else one.end_ns)
    while ends:
        yield writer.end(track, ends.pop()), False

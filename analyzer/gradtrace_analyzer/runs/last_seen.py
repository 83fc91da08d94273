"""What a rank that did not close its recording was doing when it was last seen: from its journal.

A repaired rank has no journal any more; what its journal told is kept in the rank's json in the form that
`as_object` gives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from gradtrace_analyzer.runs.run import Run
from gradtrace_schemas.journal import (
    AFTER_BACKWARD,
    AFTER_MODULE,
    AFTER_OPTIMIZER,
    IN_BACKWARD,
    IN_MODULE,
    IN_OPTIMIZER,
    NULL_INT32,
    NULL_INT64,
    THREAD_DEPTH,
)
from gradtrace_schemas.journal_reader import (
    Contents,
    text_of,
)
from gradtrace_schemas.nodes import NODE_EVENTS
from gradtrace_schemas.processes import Life, life_of

Doing = Literal[
    "node", "module", "backward", "optimizer", "after_module", "after_backward", "after_optimizer"
]
_DOING: dict[int, Doing] = {
    IN_MODULE: "module",
    IN_BACKWARD: "backward",
    IN_OPTIMIZER: "optimizer",
    AFTER_MODULE: "after_module",
    AFTER_BACKWARD: "after_backward",
    AFTER_OPTIMIZER: "after_optimizer",
}
_INSIDE: tuple[Doing, ...] = ("node", "backward", "module", "optimizer")

# A rank on another machine says once a second that it lives; clocks of hosts differ by less than this.
_SILENT_NS = 15 * 10**9


@dataclass(frozen=True)
class RankPlace:
    """Where a thread is since `since_ns` of the recording's clock.

    `node`: in that Node. `module`: in that module's forward. `backward`: in a backward pass, in no Node.
    `optimizer`: in an optimizer's step. `after_...`: outside all of these, and which it left last. `module_inside`
    is the module whose forward a Node runs again.
    """

    thread: int
    doing: Doing
    since_ns: int
    step: int | None = None
    microbatch: int | None = None
    backward_index: int | None = None
    root: int | None = None
    module_fqn: str | None = None
    call_index: int | None = None
    node_name: str | None = None
    parameter_fqn: str | None = None
    event_index: int | None = None
    autograd_seq: int | None = None
    phase: str | None = None
    optimizer: str | None = None
    module_inside: str | None = None


@dataclass(frozen=True)
class LastSeen:
    """A rank that did not close its recording.

    `places` are those of its threads. `moved_ns` is when it last did anything that was recorded, on the recording's
    clock. `heartbeat_ns` is wall time, 0 where there was none; so is `closed_ns`, when the rank ended by itself though
    its journal could not be written out.
    """

    pid: int
    process_start: int
    machine: int
    wall_start_ns: int
    monotonic_start_ns: int
    heartbeat_ns: int
    moved_ns: int
    places: tuple[RankPlace, ...]
    dropped: Mapping[str, tuple[int, int, int]]
    closed_ns: int = 0
    is_repaired: bool = False

    @property
    def place(self) -> RankPlace | None:
        """The place that matters most: in a Node, else inside anything, else the latest."""
        for doing in _INSIDE:
            inside = [place for place in self.places if place.doing == doing]
            if inside:
                return max(inside, key=lambda place: place.since_ns)
        return max(self.places, key=lambda place: place.since_ns, default=None)

    @property
    def last_unix_ns(self) -> int:
        """Its last sign of life: its heartbeat or its last row, whichever is later; nanoseconds since 1970."""
        return max(self.heartbeat_ns, self.wall_start_ns + self.moved_ns)

    @property
    def life(self) -> Life | Literal["silent"]:
        """`alive` or `dead`; of a process elsewhere, by its heartbeat, `alive` or `silent`."""
        if self.is_repaired:
            return "dead"
        told = life_of(self.pid, self.process_start, self.machine)
        if told != "elsewhere":
            return told
        return "alive" if abs(time.time_ns() - self.last_unix_ns) < _SILENT_NS else "silent"

    def idle_ns(self, since_ns: int) -> int:
        """For how long by now, if it lives, nothing has happened since that moment of its clock."""
        if life_of(self.pid, self.process_start, self.machine) != "elsewhere":
            return max(0, time.monotonic_ns() - self.monotonic_start_ns - since_ns)
        return max(0, time.time_ns() - self.wall_start_ns - since_ns)

    def shifted(self, count: int) -> LastSeen:
        """The same with steps numbered so much higher."""
        places = (
            place if place.step is None else replace(place, step=place.step + count)
            for place in self.places
        )
        dropped = {
            table: (rows, first + count, last + count) if last >= 0 else (rows, first, last)
            for table, (rows, first, last) in self.dropped.items()
        }
        return replace(self, places=tuple(places), dropped=dropped)

    def as_object(self) -> dict[str, Any]:
        """All fields, to be kept under `left_behind` in the rank's json once the journal is gone: see `of_object`."""
        return asdict(self)


def last_seen(run: Run, rank: int) -> LastSeen | None:
    """What a rank that did not close its recording left: a journal, or what is kept of one that was repaired."""
    journal = run.journals.get(rank)
    if journal is not None:
        found: LastSeen | None = of_journal(journal)
    else:
        found = of_object(run.ranks[rank].facts.get("left_behind"))
    return found if found is None or not run.step_shift else found.shifted(run.step_shift)


def of_journal(contents: Contents) -> LastSeen:
    """Where a rank was and what it dropped, by its journal: from the threads' open Nodes, and where each moved last."""
    header = contents.header
    places = tuple(_places(contents))
    ends = contents.of(NODE_EVENTS)["end_ns"]
    moved = max([0, *(place.since_ns for place in places), *(ends.tolist() if len(ends) else [])])
    return LastSeen(
        **{name: header[name] for name in ("pid", "process_start", "machine", "closed_ns")},
        **{name: header[name] for name in ("wall_start_ns", "monotonic_start_ns", "heartbeat_ns")},
        moved_ns=moved,
        places=places,
        dropped=contents.dropped,
    )


def of_object(kept: object) -> LastSeen | None:
    """The `LastSeen` of what `as_object` gave, `is_repaired`; None where it is something else, or lacks a field."""
    if not isinstance(kept, dict):
        return None
    known = {field.name for field in fields(RankPlace)}
    try:
        places = tuple(
            RankPlace(**{name: value for name, value in place.items() if name in known})
            for place in kept["places"]
        )
        mine = {field.name: kept[field.name] for field in fields(LastSeen) if field.name in kept}
        return LastSeen(**{**mine, "places": places, "is_repaired": True})
    except (KeyError, TypeError, AttributeError):
        return None


def _places(contents: Contents) -> list[RankPlace]:
    found = []
    for slot, thread in enumerate(contents.running):
        number, depth = int(thread["thread"]), min(int(thread["depth"]), THREAD_DEPTH)
        outside = contents.places[slot] if slot < len(contents.places) else None
        moved = 0 if outside is None or not outside["kind"] else int(outside["moved_ns"])
        if depth > 0:
            entry = thread["entries"][depth - 1]
            inside = None
            if moved > int(entry["start_ns"]) and outside["kind"] == IN_MODULE:  # type: ignore[index]
                inside = text_of(contents.strings, int(outside["name"]))  # type: ignore[index]
            found.append(_node(contents, number, entry, inside))
        elif outside is not None and int(outside["kind"]) in _DOING:
            found.append(_outside(contents, number, outside))
    return found


def _node(contents: Contents, thread: int, entry: Any, inside: str | None) -> RankPlace:
    def text(name: str) -> str | None:
        return text_of(contents.strings, int(entry[name]))

    sequence = int(entry["autograd_seq"])
    return RankPlace(
        thread=thread,
        doing="node",
        since_ns=int(entry["start_ns"]),
        **_numbers(entry, "step", "microbatch", "backward_index"),
        **_numbers(entry, "root", "call_index", "event_index"),
        node_name=text("node_name"),
        module_fqn=text("module_fqn"),
        parameter_fqn=text("parameter_fqn"),
        phase=text("phase"),
        autograd_seq=None if sequence == NULL_INT64 else sequence,
        module_inside=inside,
    )


def _outside(contents: Contents, thread: int, place: Any) -> RankPlace:
    doing = _DOING[int(place["kind"])]
    name = text_of(contents.strings, int(place["name"]))
    is_optimizer = doing in ("optimizer", "after_optimizer")
    return RankPlace(
        thread=thread,
        doing=doing,
        since_ns=int(place["moved_ns"]),
        **_numbers(place, "step", "microbatch", "backward_index"),
        **_numbers(place, "root", "call_index"),
        module_fqn=None if is_optimizer else name,
        optimizer=name if is_optimizer else None,
    )


def _numbers(record: Any, *names: str) -> dict[str, Any]:
    return {n: None if int(record[n]) == NULL_INT32 else int(record[n]) for n in names}

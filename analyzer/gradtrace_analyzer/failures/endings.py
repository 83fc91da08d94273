"""How each rank of a run ended, or where it is: `analyzer failures`.

What a rank did is read from what it recorded; whether its process lives from the process itself, on the machine
where it runs, else from its heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gradtrace_analyzer.failures.failed_passes import FailedPass, failed_passes
from gradtrace_analyzer.failures.under_way import StageAction, under_way
from gradtrace_analyzer.failures.waiting import Wait, waits
from gradtrace_analyzer.runs.last_seen import LastSeen, RankPlace, last_seen
from gradtrace_analyzer.runs.run import RankInfo, Run
from gradtrace_analyzer.sql.views import connect

State = Literal[
    "ended",
    "raised",
    "died",
    "silent",
    "stuck",
    "waits",
    "running",
    "unknown",
    "missing",
    "not_asked",
]
EndingsVerdict = Literal["well", "found", "unknown"]

# What is something to look at, and what leaves the question open.
_FOUND: tuple[State, ...] = ("raised", "died", "silent", "stuck", "waits")
_OPEN: tuple[State, ...] = ("running", "unknown", "missing")

STUCK_SECONDS = 30.0


@dataclass(frozen=True)
class Ending:
    """One rank: how it ended or where it is.

    `raised`: an exception left a backward pass, or ended the job's process. `silent`: on another machine, without a
    sign of life. `stuck` and `waits`: it lives, and nothing has happened for long; `waits` where that is in a
    reduction for ranks that have not come. `not_asked`: GRADTRACE_RANKS left it out. `last_failure` is the last of
    `failure_count` exceptions that left backward passes; `went_on` says that it ran backward passes after that.
    `uncaught` is the (type, text) of the exception with which its process ended. Of a rank that closed its recording,
    `place` is the forward or optimizer's step that never returned, if one did not. `idle_ns` is for how long nothing
    has happened, of a rank that lives. `stage` is the action or wait of a pipeline stage that was under way, or that an
    exception left last.
    """

    rank: int
    state: State
    facts: Mapping[str, Any]
    seen: LastSeen | None = None
    place: RankPlace | None = None
    idle_ns: int | None = None
    wait: Wait | None = None
    stage: StageAction | None = None
    last_failure: FailedPass | None = None
    failure_count: int = 0
    went_on: bool = False
    uncaught: tuple[str, str] | None = None
    dropped: Mapping[str, tuple[int, int | None, int | None]] = field(default_factory=dict)

    @property
    def for_ranks(self) -> tuple[int, ...]:
        """The ranks that it waits for, or waited for last: in a reduction, or to receive what a stage sends."""
        if self.wait is not None:
            return self.wait.for_ranks
        return self.stage.for_ranks if self.stage is not None and self.stage.is_receive else ()


@dataclass(frozen=True)
class Endings:
    """How all ranks of an attempt ended, or where they are; by rank, those that recorded nothing among them.

    `before` are those attempts, the oldest first, that it continues.
    """

    run: Run
    ranks: tuple[Ending, ...]
    before: tuple[Endings, ...] = ()

    @property
    def verdict(self) -> EndingsVerdict:
        """Whether all ranks ended by themselves, something was found, or it cannot be told yet."""
        states = {ending.state for ending in self.ranks}
        if states & set(_FOUND) or any(ending.place for ending in self.of("ended")):
            return "found"
        if any(earlier.verdict == "found" for earlier in self.before):
            return "found"
        return "unknown" if not states or states & set(_OPEN) else "well"

    def of(self, *states: State) -> tuple[Ending, ...]:
        """The endings in any of these states, by rank."""
        return tuple(ending for ending in self.ranks if ending.state in states)


def endings(run: Run, stuck_seconds: float = STUCK_SECONDS) -> Endings:
    """How each rank of the run ended, or where it is; one that lives is stuck after `stuck_seconds` without an event.

    Of ranks on this machine their processes are asked. Of a history it is the newest attempt that is told of, and those
    that it continues.
    """
    if run.history:
        *before, newest = (endings(of.run, stuck_seconds) for of in run.history)
        return replace(newest, before=tuple(before))
    with connect([run]) as connection:
        reductions = waits(run, connection)
        stages = under_way(connection)
        raised: dict[int, list[FailedPass]] = {}
        for failed in failed_passes(connection):
            raised.setdefault(failed.rank, []).append(failed)
        last_passes = dict(
            connection.execute(
                "SELECT rank, max(record_index) FROM backward_passes WHERE error IS NULL GROUP BY 1"
            ).fetchall()
        )
    found = []
    for rank, info in run.ranks.items():
        failures = raised.get(rank, [])
        last = failures[-1] if failures else None
        went_on = last is not None and last_passes.get(rank, 0) > last.row["record_index"]
        found.append(
            _ending(
                run, info, reductions.get(rank), stages.get(rank), last, len(failures), went_on, stuck_seconds
            )
        )  # fmt: skip
    found += [
        Ending(rank, "missing" if _is_asked(run, rank) else "not_asked", {})
        for rank in run.missing_ranks
    ]
    return Endings(run, tuple(sorted(found, key=lambda ending: ending.rank)))


def _ending(
    run: Run,
    info: RankInfo,
    wait: Wait | None,
    stage: StageAction | None,
    last: FailedPass | None,
    count: int,
    went_on: bool,
    stuck_seconds: float,
) -> Ending:
    rank = info.rank
    seen = last_seen(run, rank)
    place: RankPlace | None = None
    idle = None
    if info.is_complete or (seen is not None and seen.closed_ns):
        error, place = uncaught(info.facts), left_in(info.facts)
        state: State = "raised" if last is not None or error else "ended"
    elif seen is None:
        state, error = "unknown", None
    else:
        error, place, life = None, seen.place, seen.life
        state = "died" if life == "dead" else "silent" if life == "silent" else "running"
        if life == "alive":
            idle = seen.idle_ns(seen.moved_ns)
            if idle >= stuck_seconds * 1e9:
                receives = stage is not None and stage.error is None and stage.is_receive
                state = "waits" if receives or _was_waiting(wait, place, None) else "stuck"
    return Ending(
        rank=rank,
        state=state,
        facts=info.facts,
        seen=seen,
        place=place,
        idle_ns=idle,
        wait=wait if _was_waiting(wait, place, None if went_on else last) else None,
        stage=None if stage is not None and stage.error is not None and state == "ended" else stage,
        last_failure=last,
        failure_count=count,
        went_on=went_on,
        uncaught=error,
        dropped=_dropped(info.facts, seen),
    )


def _was_waiting(wait: Wait | None, place: RankPlace | None, last: FailedPass | None) -> bool:
    """Whether the rank had run all Nodes there were, and stood in the engine, until its end or an exception there."""
    if wait is None:
        return False
    if place is not None and place.doing == "backward":
        return (place.step, place.backward_index) == (wait.step, wait.backward_index)
    return last is not None and (last.step, last.backward_index) == (
        wait.step,
        wait.backward_index,
    )


def _is_asked(run: Run, rank: int) -> bool:
    """Whether GRADTRACE_RANKS asked for a rank, as those that recorded say in their settings; none for all."""
    parts = [
        str(part)
        for info in run.ranks.values()
        for part in (info.facts.get("settings") or {}).get("ranks") or ()
    ]
    return not parts or any(_holds(part, rank) for part in parts)


def _holds(part: str, rank: int) -> bool:
    """Of a span, `0-3`, or a slice with a stride or without an end, `0::2`."""
    if ":" in part:
        start, stop, stride = part.split(":")
        is_inside = rank >= int(start) and (not stop or rank < int(stop))
        return is_inside and (rank - int(start)) % int(stride) == 0
    first, _, last = part.partition("-")
    return int(first) <= rank <= int(last or first)


def uncaught(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """(type, text) of the exception that ended a rank which closed its recording, from the rank's json."""
    kept = facts.get("uncaught")
    if isinstance(kept, list) and len(kept) == 2:
        return str(kept[0]), str(kept[1])
    return None


def left_in(facts: Mapping[str, Any]) -> RankPlace | None:
    """The forward or optimizer's step that such a rank never left, from its json."""
    kept = facts.get("left_in")
    if not isinstance(kept, dict):
        return None
    name, step = kept.get("name"), kept.get("step")
    if kept.get("doing") == "optimizer":
        return RankPlace(0, "optimizer", 0, step, optimizer=name)
    return RankPlace(0, "module", 0, step, module_fqn=name)


def _dropped(
    facts: Mapping[str, Any], seen: LastSeen | None
) -> dict[str, tuple[int, int | None, int | None]]:
    """By table: how many rows had no room in the journal, and the first and last step of those (None: of no step)."""
    if seen is not None and seen.dropped:
        return {name: (drop[0], *_steps(drop[1:])) for name, drop in seen.dropped.items()}
    counts, steps = facts.get("dropped"), facts.get("dropped_steps")
    if not isinstance(counts, dict):
        return {}
    steps = steps if isinstance(steps, dict) else {}
    return {
        name: (count, *_steps(steps.get(name) or (None, None)))
        for name, count in counts.items()
        if isinstance(count, int) and count
    }


def _steps(given: Any) -> tuple[int | None, int | None]:
    first, last = given
    return (None, None) if first is None or first < 0 else (int(first), int(last))

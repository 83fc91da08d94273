"""Rows of `stage_events`, and those of them that are waits for what a stage receives or sends.

Source: torch/distributed/pipelining/{stage,schedules}.py (2.13). Called on the job's threads.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.state.actions import FORWARD, Action
from gradtrace_schemas.journal import NULL_INT64

OPERATIONS = {
    "get_fwd_recv_ops": "receive_activations",
    "get_bwd_recv_ops": "receive_gradients",
    "get_fwd_send_ops": "send_activations",
    "get_bwd_send_ops": "send_gradients",
}
# (kind, stage_index, microbatch) of an action, or of what is waited for.
Place = tuple[str, int | None, int]
# Start and end of what is over, and the place in the journal where its row is held.
Over = tuple[int, int, int | None]
Ended = Callable[[Recording, Any, BaseException | None], None]


class StageRows:
    """Writes rows of `stage_events`, and counts those of one place within a step."""

    def __init__(self) -> None:
        self._counts: collections.Counter[Place] = collections.Counter()
        self._counted_step = -1

    def write(
        self,
        recording: Recording,
        place: Place,
        over: Over,
        error: BaseException | None = None,
        received: Any = None,
        sent: Any = None,
        device_ns: int = NULL_INT64,
    ) -> None:
        """The row of what is over."""
        step = recording.timeline.step
        if self._counted_step != step:
            self._counted_step = step
            self._counts.clear()
        occurrence = self._counts[place]
        self._counts[place] += 1
        kind, stage_index, microbatch = place
        start, end, held = over
        text = None if error is None else f"{type(error).__name__}: {str(error)[:400]}"
        recording.rows.stage_event(
            held, step, microbatch, stage_index=stage_index, kind=kind, occurrence=occurrence, start_ns=start,
            end_ns=end, error=text, received=received, sent=sent, device_ns=device_ns,
        )  # fmt: skip


class StageWaits:
    """What is sent off, and waited for.

    A wait for what an action receives comes before the step may be known: its row is written when the action begins.
    """

    def __init__(self, rows: StageRows) -> None:
        self._rows = rows
        self._operations: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Any, list[Place]] = weakref.WeakKeyDictionary()
        self._received: dict[Place, list[Over]] = {}

    def prepared(self, name: str, arguments: dict[str, Any]) -> Ended:
        """A stage makes the operations of a microbatch: `name` is one of OPERATIONS."""
        owner, microbatch = list(arguments.values())[:2]
        place = (OPERATIONS[name], owner.stage_index, microbatch)

        def made(_: Recording, operations: Any, error: BaseException | None) -> None:
            for operation in operations or ():
                self._operations[operation] = place

        return made

    def sent_off(self, operations: Any) -> Ended:
        """A schedule hands operations to the backend, which gives works to wait for."""

        def given(_: Recording, result: Any, error: BaseException | None) -> None:
            works = result or ()
            places = [self._operations.pop(operation, None) for operation in operations]
            if len(works) != len(places):
                # One for all of them, which the backend coalesced.
                places = [place for place in places if place is not None]
                for work in works:
                    self._works[work] = list(filter(None, places))
                return
            for work, place in zip(works, places, strict=True):
                if place is not None:
                    self._works[work] = [place]

        return given

    def wait(self, recording: Recording, works: Any) -> Ended | None:
        """A schedule waits for works; None where they are of no stage."""
        places = [place for work in works for place in self._works.pop(work, ())]
        if not places:
            return None
        start = recording.timeline.now()
        held = [_hold(recording, place, start) for place in places]

        def waited(live: Recording, _: Any, error: BaseException | None) -> None:
            end = live.timeline.now()
            for place, kept in zip(places, held, strict=True):
                self._waited(live, place, (start, end, kept), error)

        return waited

    def _waited(
        self, recording: Recording, place: Place, over: Over, error: BaseException | None
    ) -> None:
        start, end, held = over
        if error is None and place[0].startswith("receive"):
            # Kept as over until its action begins, which tells the step for certain.
            recording.rows.release(held)
            kept = _hold(recording, place, start, end)
            self._received.setdefault(place, []).append((start, end, kept))
        elif is_recorded(recording):
            self._rows.write(recording, place, over, error)
        else:
            recording.rows.release(held)

    def write_received(self, recording: Recording, action: Action) -> None:
        """An action begins: the rows of what it has waited for."""
        if action.stage_index is None or action.kind is None:
            return
        kind = "receive_activations" if action.kind == FORWARD else "receive_gradients"
        place = (kind, action.stage_index, action.microbatch)
        for over in self._received.pop(place, ()):
            if is_recorded(recording):
                self._rows.write(recording, place, over)
            else:
                recording.rows.release(over[-1])

    def forget(self, recording: Recording) -> None:
        """No row comes of what was waited for."""
        for waits in self._received.values():
            for *_, held in waits:
                recording.rows.release(held)
        self._received.clear()


def is_recorded(recording: Recording) -> bool:
    """Whether this step's stages have rows."""
    return recording.timeline.is_recorded and recording.settings.records("params")


def _hold(recording: Recording, place: Place, start: int, end: int | None = None) -> int | None:
    """Keep the row of a wait in case the rank is killed; None where the step to come has none."""
    step = recording.timeline.coming_step
    if step is None or not recording.settings.records("params"):
        return None
    kind, stage_index, microbatch = place
    return recording.rows.hold_stage_event(
        step, microbatch, stage_index=stage_index, kind=kind, start_ns=start, end_ns=end
    )

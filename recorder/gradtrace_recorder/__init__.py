"""Records the backward passes of a PyTorch job. Importing this loads neither torch nor pyarrow.

Usually nothing of this is called: GRADTRACE_DIR switches the recorder on in an unmodified job. A job may call
these to start it by hand, or to tell it what it cannot see. Those that tell it something do nothing while nothing is
armed.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradtrace_recorder.bootstrap import current_session, start_session, stop_session

if TYPE_CHECKING:
    import os
    from pathlib import Path
    from types import TracebackType

    import torch

    from gradtrace_recorder.recording.recording import Recording
    from gradtrace_recorder.session.tripwire import Tripwire
    from gradtrace_recorder.state.actions import OwnAction

__version__ = "0.1.0"
__all__ = ["build_native", "microbatch", "note", "pause", "stage", "start", "step", "stop"]


class Started:
    """What `start` gives. Used as a context manager it stops the recording at the block's end, if that goes on then."""

    def __init__(self, tripwire: Tripwire) -> None:
        self._tripwire = tripwire

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop_session(only=self._tripwire, raised=error)


def start(directory: str | os.PathLike[str], **settings: str | bool | int) -> Started:
    """Record into `directory` from the next event on, until `stop` or the end of the block: `with start("runs/a"):`.
    An exception that leaves the block is kept as what ended the job.

    Settings are named like the variables, in lower case and without GRADTRACE_: `detail="params"`. No variable and no
    settings file is read. A relative `directory` begins in the one in which the process was started.
    Raises SettingsError (a ValueError) for one that cannot be read, RuntimeError where recording is on already.
    """
    from gradtrace_recorder.settings.variables import settings_of

    return Started(start_session(settings_of(directory, **settings)))


def stop() -> None:
    """End the recording: everything is on disk when it returns, and no hook, patch or thread is left.

    But for what a DDP reducer was given, which it does not give back: see `relays.py`.
    """
    stop_session()


def build_native(*, again: bool = False) -> Path:
    """Build the native observer for the torch of this Python, once and for all jobs that use both. Where it lies.

    Raises NotBuilt (a RuntimeError) where that cannot be; jobs are recorded by the Python observer then.
    """
    from gradtrace_recorder.observers.native.build import build_native

    return build_native(again=again)


def step(number: int) -> None:
    """From here on it is this step, until the next call. The rule that counts optimizer steps is off then.

    Raises TypeError or ValueError for what is no number of a step, whether anything is recorded or not.
    """
    number = _number(number, "step", 2**63)
    recording = _recording()
    if recording is not None:
        recording.timeline.set_step(number)


def microbatch(index: int) -> None:
    """From here to the step's end it is this microbatch, until the next call.

    Raises TypeError or ValueError for what is no number of one, whether anything is recorded or not.
    """
    index = _number(index, "microbatch")
    recording = _recording()
    if recording is not None:
        recording.timeline.set_microbatch(index)


def note(name: str, tensor: torch.Tensor) -> None:
    """Record a tensor that is no argument of the root module, such as labels, in `inputs` under this name."""
    recording = _recording()
    if recording is not None and recording.timeline.is_recorded:
        recording.rows.input(
            None, recording.noted(name), name, tensor, recording.summariser.of(tensor)
        )


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Record nothing inside the block."""
    recording = _recording()
    if recording is None:
        yield
        return
    before, recording.timeline.paused = recording.timeline.paused, True
    try:
        yield
    finally:
        recording.timeline.paused = before


@contextlib.contextmanager
def stage(index: int, microbatch: int, kind: str) -> Iterator[OwnAction]:
    """The block is an action of a stage of the job's own pipeline, and its rows are of that microbatch.

    `kind` is `forward`, `backward_full`, `backward_input` or `backward_weight`. What the block is given has `received`
    and `sent`, for the tensors that come from a neighbouring stage and go to one: they are summarised. Stages that
    torch's own schedules run are seen without it. Raises TypeError or ValueError for what is no stage, microbatch or
    kind, whether anything is recorded or not.
    """
    from gradtrace_recorder.state.actions import KINDS, OwnAction

    if kind not in KINDS:
        raise ValueError(f"an action of a stage is one of {', '.join(KINDS)}, not {kind!r}")
    index, microbatch = _number(index, "stage"), _number(microbatch, "microbatch")
    session = current_session()
    if session is None:
        yield OwnAction()
        return
    with session.pipeline.stage(index, microbatch, kind) as action:
        yield action


def _number(value: int, what: str, end: int = 2**31) -> int:
    """The number as records can hold it: one that they cannot would end the recording at the next record."""
    number = operator.index(value)
    if not -end <= number < end:
        raise ValueError(f"{number} is too large for the number of a {what}")
    return number


def _recording() -> Recording | None:
    session = current_session()
    return session.gate.enter() if session is not None else None

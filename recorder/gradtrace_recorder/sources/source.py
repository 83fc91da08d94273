"""What a source is to the session, and the one way in which sources hear of each other's events.

A source sees one kind of event in torch. Of what concerns others (a root is called, a pass begins) it tells the
session's list, which tells them all; no source knows another, which a contract holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.recording.recording import Gate, Recording
from gradtrace_recorder.state.passes import Pass
from gradtrace_recorder.torch_internals.dynamo import never_compiled


class Source:
    """One kind of event. What is not overridden does nothing. All of it is called on the job's threads.

    Hooks that a source gives to torch are guarded by itself; what the session's list tells is guarded there.
    """

    # Whether it is told of others' events even when it has failed.
    hears_when_closed = False

    def __init__(self, gate: Gate, guard: Guard) -> None:
        self._gate = gate
        self.guard = guard

    def attach(self) -> None:
        """See events from now on."""

    def detach(self) -> None:
        """See no more, and leave nothing behind. Called once more than needed where the guard is closed already."""
        self.guard.is_open = False

    def recording_ends(self, recording: Recording) -> None:
        """Write the rows of what is open."""

    def root_called(self, recording: Recording, root: nn.Module) -> None:
        """A root that has parameters is called in grad mode, outside backward; its step has begun."""

    def wrapper_called(self, recording: Recording, wrapper: nn.Module) -> None:
        """A module that wraps another is called in grad mode, in a step that is recorded."""

    def pass_begins(self, recording: Recording, begun: Pass) -> None:
        """The engine is about to be called; nothing is hooked yet."""

    def pass_ends(self, recording: Recording, ended: Pass, *, failed: bool) -> None:
        """It has returned or raised, and no hook of ours is on its Nodes; the pass's own row is not written yet."""


class Sources:
    """The sources of a session, in the order in which they are told."""

    def __init__(self) -> None:
        self._all: tuple[Source, ...] = ()

    def hold(self, *sources: Source) -> None:
        """These are all."""
        self._all = sources

    def __iter__(self) -> Iterator[Source]:
        return iter(self._all)

    def recording_ends(self, recording: Recording) -> None:
        """The recording ends."""
        self._tell(lambda source: source.recording_ends(recording))

    def root_called(self, recording: Recording, root: nn.Module) -> None:
        """A root is called in grad mode, outside backward."""
        self._tell(lambda source: source.root_called(recording, root))

    def wrapper_called(self, recording: Recording, wrapper: nn.Module) -> None:
        """A module that wraps another is called in grad mode."""
        self._tell(lambda source: source.wrapper_called(recording, wrapper))

    def pass_begins(self, recording: Recording, begun: Pass) -> None:
        """The engine is about to be called."""
        self._tell(lambda source: source.pass_begins(recording, begun))

    def pass_ends(self, recording: Recording, ended: Pass, *, failed: bool) -> None:
        """The engine has returned or raised."""
        self._tell(lambda source: source.pass_ends(recording, ended, failed=failed))

    def _tell(self, tell: Callable[[Source], None]) -> None:
        """A failure ends the recording of the source that was told, not of the one whose event it is."""
        for source in self._all:
            if source.guard.is_open or source.hears_when_closed:
                try:
                    tell(source)
                except Exception as error:
                    source.guard.failed(error)


never_compiled(Source, Sources)

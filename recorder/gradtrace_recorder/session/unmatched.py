"""What of the settings chose nothing: globs, told with near names when the first recorded step is over; steps, told
at the recording's end."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator, Sequence

from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.settings.readers import matches
from gradtrace_recorder.settings.spelling import near

_MOST_NEAR = 3


class Globs:
    """The globs of a recording, until they were held against what there is."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._modules = recording.settings.modules
        self._replay = recording.settings.replay

    def look(self) -> None:
        """A step is over: tell what matched nothing. Called on the job's thread, with the step's number still there."""
        recording = self._recording
        if not (self._modules or self._replay) or not recording.timeline.is_recorded:
            return
        try:
            for sentence in self._unmatched(recording.timeline.step):
                recording.problems.add(sentence)
        except Exception as error:
            self._modules, self._replay = (), None
            recording.problems.add(f"globs could not be looked at: {type(error).__name__}: {error}")

    def _unmatched(self, step: int) -> Iterator[str]:
        modules, self._modules = self._modules, ()
        fqns = self._recording.names.fqns()
        for glob in modules:
            if not any(matches((glob,), fqn) for fqn in fqns):
                yield _sentence("GRADTRACE_MODULES", glob, step, fqns, "module")
        replay = self._replay
        if replay is not None and step in replay.steps:
            self._replay = None
            # Of what a step leaves, names of Nodes are the only texts that may match; classes of modules are none.
            texts = set(self._recording.journal.texts) - self._recording.names.class_names()
            for glob in (*replay.globs, *replay.python_globs):
                if not any(matches((glob,), fqn) for fqn in fqns) and not any(
                    fnmatch.fnmatchcase(text, glob) for text in texts
                ):
                    nodes = {text for text in texts if "Backward" in text}
                    yield _sentence("GRADTRACE_REPLAY", glob, step, fqns | nodes, "module or Node")


def _sentence(label: str, glob: str, step: int, names: Collection[str], what: str) -> str:
    said = f"{label}: {glob!r} matches no {what} that this rank has in step {step}"
    found = _near(glob, names)
    return f"{said}; there are {', '.join(found)}" if found else said


def _near(glob: str, names: Collection[str]) -> Sequence[str]:
    """Names like the glob, with `*` for the numbers of layers; else the shortest ones."""
    shown = sorted({_of_any_layer(name) for name in names if name})
    short = sorted(shown, key=lambda name: (name.count("."), name))
    return near(glob, shown, _MOST_NEAR) or short[:_MOST_NEAR]


def _of_any_layer(name: str) -> str:
    """`blocks.*.attn` of `blocks.3.attn`; `3.0` as it is: `*.*` would name nothing."""
    starred = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
    return starred if starred.strip("*.") else name


class Steps:
    """The steps of a recording, held against those that GRADTRACE_STEPS chooses."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._first: int | None = None
        self._is_any_chosen = False

    def step_ended(self) -> None:
        """A step is over. Called on the job's thread, with the step's number still there."""
        step = self._recording.timeline.step
        if self._first is None:
            self._first = step
        self._is_any_chosen = self._is_any_chosen or step in self._recording.settings.steps

    def look(self) -> None:
        """The recording ends: tell where none of its steps was chosen."""
        if self._first is None or self._is_any_chosen:
            return
        last = self._recording.timeline.step
        there = f"step {last} alone" if last == self._first else f"steps {self._first} to {last}"
        chosen = self._recording.settings.steps.as_text()
        self._recording.problems.add(
            f"GRADTRACE_STEPS: {chosen!r} has no step of this job, which made {there}; nothing was recorded of them"
        )

"""Every GRADTRACE_* variable: its name, its default, how it is read.

Standard library only: this is imported at the end of `import torch`, before anything is recorded.
"""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "GRADTRACE_"

DETAILS = ("steps", "params", "modules", "nodes")
SUMMARIES = ("off", "norms", "full")
DEVICE_TIMES = ("off", "stages", "nodes")
MODES = ("whole", "flight")
OBSERVERS = ("auto", "native", "python")
_BY_REQUEST = "python:"


class SettingsError(ValueError):
    """A variable that cannot be read; the text says which, what about it, and what would help."""


@dataclass(frozen=True)
class Steps:
    """Which steps are recorded: the union of Python slices over non-negative numbers; empty: all."""

    slices: tuple[slice, ...] = ()

    def __contains__(self, step: int) -> bool:
        if not self.slices:
            return True
        return any(
            step >= s.start and (s.stop is None or step < s.stop) and (step - s.start) % s.step == 0
            for s in self.slices
        )


@dataclass(frozen=True)
class Replay:
    """Which Nodes are run a second time: globs on their name, or on the module's FQN or one around it.

    `python_globs` choose Functions that the job or an extension defines too: they may have side effects.
    """

    text: str
    globs: tuple[str, ...]
    python_globs: tuple[str, ...]
    steps: Steps

    def chooses(self, fqn: str | None, node_name: str) -> bool:
        """Whether a Node of that module and name is asked for."""
        return _matches(self.globs + self.python_globs, fqn, node_name)

    def chooses_by_request(self, fqn: str | None, node_name: str) -> bool:
        """Whether it is asked for even if it is a Function of the job's."""
        return _matches(self.python_globs, fqn, node_name)


@dataclass(frozen=True)
class Settings:
    """What to record and where. `detail` and `summary` as in the reference page."""

    directory: str
    detail: str = "nodes"
    summary: str = "full"
    device_times: str = "stages"
    steps: Steps = field(default_factory=Steps)
    ranks: tuple[range, ...] = ()
    modules: tuple[str, ...] = ()
    strict: bool = False
    step_offset: int = 0
    replay: Replay | None = None
    mode: str = "whole"
    flight_steps: int = 8
    observer: str = "auto"

    def records(self, detail: str) -> bool:
        """Whether tables of that detail are recorded."""
        return DETAILS.index(self.detail) >= DETAILS.index(detail)

    @functools.cached_property
    def records_modules(self) -> bool:
        """Whether calls of modules leave rows."""
        return self.records("modules")

    @functools.cached_property
    def records_state(self) -> bool:
        """Whether parameters and gradients leave rows: they hold nothing but summaries."""
        return self.records("params") and self.summary != "off"

    @property
    def is_flight(self) -> bool:
        """Whether only the last steps are kept."""
        return self.mode == "flight"

    def wants_rank(self, rank: int) -> bool:
        """Whether that rank is recorded."""
        return not self.ranks or any(rank in chosen for chosen in self.ranks)

    def wants_module(self, fqn: str) -> bool:
        """Whether a module's calls and Nodes are recorded: itself or one around it matches a glob."""
        if not self.modules:
            return True
        return _matches(self.modules, fqn)

    def as_json(self) -> dict[str, object]:
        """The settings as they were given, for the rank's json."""
        return {
            "detail": self.detail,
            "summary": self.summary,
            "device_times": self.device_times,
            "steps": [
                f"{s.start}:{'' if s.stop is None else s.stop}:{s.step}" for s in self.steps.slices
            ],
            "ranks": [f"{r.start}-{r.stop - 1}" for r in self.ranks],
            "modules": list(self.modules),
            "step_offset": self.step_offset,
            **({"replay": self.replay.text} if self.replay is not None else {}),
            **({"mode": self.mode, "flight_steps": self.flight_steps} if self.is_flight else {}),
        }


def settings_from(environment: Mapping[str, str] = os.environ) -> Settings | None:
    """The settings that the variables ask for, None where GRADTRACE_DIR is unset or empty.

    Raises SettingsError for the first value that cannot be read.
    """
    directory = environment.get(PREFIX + "DIR", "")
    if not directory:
        return None
    given = {
        name.lower(): environment[PREFIX + name]
        for name in (
            "DETAIL",
            "SUMMARY",
            "DEVICE_TIMES",
            "STEPS",
            "RANKS",
            "MODULES",
            "STRICT",
            "STEP_OFFSET",
            "REPLAY",
            "MODE",
            "FLIGHT_STEPS",
            "OBSERVER",
        )
        if environment.get(PREFIX + name, "") != ""
    }
    return settings_of(directory, **given)


def settings_of(directory: str, **given: str | bool | int) -> Settings:
    """Settings from texts as the variables hold them, named in lower case without their prefix.

    Raises SettingsError; TypeError for a name that there is not.
    """
    texts = {name: str(value) for name, value in given.items()}
    readers: dict[str, Callable[[str], Any]] = {
        "detail": lambda text: _one_of("DETAIL", text, DETAILS),
        "summary": lambda text: _one_of("SUMMARY", text, SUMMARIES),
        "device_times": lambda text: _one_of("DEVICE_TIMES", text, DEVICE_TIMES),
        "steps": _steps,
        "ranks": _ranks,
        "modules": lambda text: tuple(part.strip() for part in text.split(",") if part.strip()),
        "strict": lambda text: (
            _one_of("STRICT", text, ("0", "1", "False", "True")) in ("1", "True")
        ),
        "step_offset": lambda text: _whole("STEP_OFFSET", text, text),
        "replay": _replay,
        "mode": lambda text: _one_of("MODE", text, MODES),
        "flight_steps": _flight_steps,
        "observer": lambda text: _one_of("OBSERVER", text, OBSERVERS),
    }
    unknown = sorted(set(texts) - set(readers))
    if unknown:
        raise TypeError(f"there is no setting {unknown[0]!r}; there are {', '.join(readers)}")
    settings = Settings(directory, **{name: readers[name](text) for name, text in texts.items()})
    if settings.replay is not None and not settings.records("nodes"):
        raise SettingsError(
            f"{PREFIX}REPLAY is {settings.replay.text!r}, and {PREFIX}DETAIL is {settings.detail!r}; "
            "Nodes are run again where they are recorded: with nodes"
        )
    return settings


def _matches(globs: tuple[str, ...], fqn: str | None, node_name: str | None = None) -> bool:
    """Whether a glob matches the module, one around it, or the Node's name."""
    parts = [] if fqn is None else fqn.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    if node_name is not None:
        names.append(node_name)
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)


def _one_of(name: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise SettingsError(f"{PREFIX}{name} is {text!r}; it can be {', '.join(allowed)}")
    return text


def _whole(name: str, text: str, whole_text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise SettingsError(
            f"{PREFIX}{name} is {whole_text!r}, of which {text!r} is no whole number from 0"
        )
    return value


def _flight_steps(text: str) -> int:
    steps = _whole("FLIGHT_STEPS", text, text)
    if steps == 0:
        raise SettingsError(
            f"{PREFIX}FLIGHT_STEPS is {text!r}; a recording of no step holds nothing"
        )
    return steps


def _replay(text: str) -> Replay:
    """`blocks.*.attn,python:MyFunctionBackward@0:10`: globs, then steps."""
    chosen, at, steps = text.partition("@")
    globs = [part.strip() for part in chosen.split(",") if part.strip()]
    plain = tuple(glob for glob in globs if not glob.startswith(_BY_REQUEST))
    own = tuple(g.removeprefix(_BY_REQUEST) for g in globs if g.startswith(_BY_REQUEST))
    if not globs or "" in own:
        raise SettingsError(
            f"{PREFIX}REPLAY is {text!r}, which names no Node; write *@0:2, blocks.*.attn or python:MyFunctionBackward"
        )
    if at and not steps.strip():
        raise SettingsError(
            f"{PREFIX}REPLAY is {text!r}, which names no step behind the @; write *@0:2"
        )
    return Replay(text, plain, own, _steps(steps, "REPLAY") if at else Steps())


def _steps(text: str, name: str = "STEPS") -> Steps:
    slices = []
    for part in text.split(","):
        pieces = part.strip().split(":")
        if len(pieces) == 1:
            first = _whole(name, pieces[0].strip(), text)
            slices.append(slice(first, first + 1, 1))
            continue
        if len(pieces) > 3:
            raise SettingsError(
                f"{PREFIX}{name} is {text!r}, of which {part!r} is no slice; write 0:10,100:110,::50"
            )
        start, stop, stride = [*pieces, ""][:3]
        step = _whole(name, stride.strip() or "1", text)
        if step == 0:
            raise SettingsError(f"{PREFIX}{name} is {text!r}, of which {part!r} has a stride of 0")
        slices.append(
            slice(
                _whole(name, start.strip() or "0", text),
                _whole(name, stop.strip(), text) if stop.strip() else None,
                step,
            )
        )
    return Steps(tuple(slices))


def _ranks(text: str) -> tuple[range, ...]:
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = _whole("RANKS", first, text)
        high = _whole("RANKS", last, text) if dash else low
        if high < low:
            raise SettingsError(f"{PREFIX}RANKS is {text!r}, of which {part!r} runs backwards")
        ranges.append(range(low, high + 1))
    return tuple(ranges)

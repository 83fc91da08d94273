"""Every GRADTRACE_* variable, declared once in VARIABLES: what it is called, how it is read, what it means.

The same table is read at the start of a job and made into the reference page of the settings (`scripts/reference`).
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


def _matches(globs: tuple[str, ...], fqn: str | None, node_name: str | None = None) -> bool:
    """Whether a glob matches the module, one around it, or the Node's name."""
    parts = [] if fqn is None else fqn.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    if node_name is not None:
        names.append(node_name)
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)


def _text(name: str, text: str) -> str:
    return text


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    """A reader that takes these texts alone."""

    def read(name: str, text: str) -> str:
        if text not in allowed:
            raise SettingsError(f"{PREFIX}{name} is {text!r}; it can be {', '.join(allowed)}")
        return text

    return read


def _flag(name: str, text: str) -> bool:
    """`1` or `0`, and what Python makes of `start(strict=True)`."""
    return _one_of("0", "1", "False", "True")(name, text) in ("1", "True")


def _globs(name: str, text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _whole_number(name: str, text: str) -> int:
    return _whole(name, text, text)


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


def _count_of_steps(name: str, text: str) -> int:
    steps = _whole(name, text, text)
    if steps == 0:
        raise SettingsError(f"{PREFIX}{name} is {text!r}; a recording of no step holds nothing")
    return steps


def _replay(name: str, text: str) -> Replay:
    """`blocks.*.attn,python:MyFunctionBackward@0:10`: globs, then steps."""
    chosen, at, steps = text.partition("@")
    globs = [part.strip() for part in chosen.split(",") if part.strip()]
    plain = tuple(glob for glob in globs if not glob.startswith(_BY_REQUEST))
    own = tuple(g.removeprefix(_BY_REQUEST) for g in globs if g.startswith(_BY_REQUEST))
    if not globs or "" in own:
        raise SettingsError(
            f"{PREFIX}{name} is {text!r}, which names no Node; write *@0:2, blocks.*.attn or python:MyFunctionBackward"
        )
    if at and not steps.strip():
        raise SettingsError(
            f"{PREFIX}{name} is {text!r}, which names no step behind the @; write *@0:2"
        )
    return Replay(text, plain, own, _steps(name, steps) if at else Steps())


def _steps(name: str, text: str) -> Steps:
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


def _ranks(name: str, text: str) -> tuple[range, ...]:
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = _whole(name, first, text)
        high = _whole(name, last, text) if dash else low
        if high < low:
            raise SettingsError(f"{PREFIX}{name} is {text!r}, of which {part!r} runs backwards")
        ranges.append(range(low, high + 1))
    return tuple(ranges)


@dataclass(frozen=True)
class Variable:
    """One variable, without its prefix. `read` makes its value of its name and text, or raises SettingsError.

    `default` is the text that an unset one stands for; where no text says it, `unset` says it in words. A variable
    with `is_setting` is a field of `Settings` of its own name in lower case, and may be given to `start`; the others
    are read where they are needed.
    """

    name: str
    read: Callable[[str, str], Any]
    meaning: str
    example: str
    default: str = ""
    unset: str = ""
    is_setting: bool = True

    @property
    def variable(self) -> str:
        """The name as the environment has it."""
        return PREFIX + self.name

    @property
    def setting(self) -> str:
        """The name as `Settings` and `start` have it."""
        return self.name.lower()


DIRECTORY = Variable(
    "DIR", _text, "The run's directory, the same for all ranks. It switches recording on.",
    example="runs/a", unset="off", is_setting=False,
)  # fmt: skip
NATIVE_CACHE = Variable(
    "NATIVE_CACHE", _text,
    "The folder in which the native observer is built and found: the same for the build and for the jobs.",
    example="/var/cache/gradtrace", unset="the user's cache", is_setting=False,
)  # fmt: skip

# In the order in which they are read: of several that cannot be, the first is told.
VARIABLES = (
    DIRECTORY,
    Variable(
        "DETAIL", _one_of(*DETAILS),
        "`steps`, `params`, `modules` or `nodes`: each adds finer tables to the one before.",
        example="params", default="nodes",
    ),
    Variable(
        "SUMMARY", _one_of("off", "norms", "full"),
        "What is kept of a tensor: `off` (names and times alone), `norms`, `full` (adds fingerprint and sketch).",
        example="norms", default="full",
    ),
    Variable(
        "DEVICE_TIMES", _one_of("off", "stages", "nodes"),
        "Times on a CUDA device, in the columns `device_ns`: `off`, `stages` (backward passes, stages, buckets), "
        "`nodes` (each Node too).",
        example="off", default="stages",
    ),
    Variable(
        "STEPS", _steps,
        "Which steps are recorded: numbers and Python slices, comma-separated. A number is one step.",
        example="0:10,100:110,::50", unset="all",
    ),
    Variable(
        "RANKS", _ranks, "Which ranks are recorded: numbers and spans with a dash, comma-separated.",
        example="0,8-15", unset="all",
    ),
    Variable(
        "MODULES", _globs,
        "Which modules' calls and Nodes are recorded: globs on the FQN, comma-separated. What lies inside a module "
        "that matches is recorded too.",
        example="blocks.*.attn,head", unset="all",
    ),
    Variable(
        "STRICT", _flag, "`1`: failures of the recorder itself raise in the job (for its own tests).",
        example="1", default="0",
    ),
    Variable(
        "STEP_OFFSET", _whole_number, "The number of the first step, for a job that was resumed.",
        example="5000", default="0",
    ),
    Variable(
        "REPLAY", _replay,
        "Nodes to run a second time: globs on the Node's name or its module, then steps behind an `@`. `python:` "
        "before a glob lets it choose Functions of the job's own.",
        example="blocks.*.attn,python:My*@0:3", unset="none",
    ),
    Variable(
        "MODE", _one_of("whole", "flight"),
        "`whole` writes every step; `flight` keeps the last steps, and writes them when something happens.",
        example="flight", default="whole",
    ),
    Variable(
        "FLIGHT_STEPS", _count_of_steps, "How many steps flight mode keeps.", example="32", default="8",
    ),
    Variable(
        "OBSERVER", _one_of("auto", "native", "python"),
        "Who watches the Nodes: `auto` is the native observer where it is built, else the Python one; `native` is the "
        "same, with a line on stderr where it is not used; `python`.",
        example="python", default="auto",
    ),
    NATIVE_CACHE,
)  # fmt: skip
_SETTINGS = {variable.setting: variable for variable in VARIABLES if variable.is_setting}


def settings_from(environment: Mapping[str, str] = os.environ) -> Settings | None:
    """The settings that the variables ask for, None where GRADTRACE_DIR is unset or empty.

    Raises SettingsError for the first value that cannot be read.
    """
    directory = environment.get(DIRECTORY.variable, "")
    if not directory:
        return None
    given = {
        name: environment[variable.variable]
        for name, variable in _SETTINGS.items()
        if environment.get(variable.variable, "") != ""
    }
    return settings_of(directory, **given)


def settings_of(directory: str, **given: str | bool | int) -> Settings:
    """Settings from texts as the variables hold them, named in lower case without their prefix.

    Raises SettingsError; TypeError for a name that there is not.
    """
    unknown = sorted(set(given) - set(_SETTINGS))
    if unknown:
        raise TypeError(f"there is no setting {unknown[0]!r}; there are {', '.join(_SETTINGS)}")
    values = {name: _SETTINGS[name].read(name.upper(), str(value)) for name, value in given.items()}
    settings = Settings(directory, **values)
    if settings.replay is not None and not settings.records("nodes"):
        raise SettingsError(
            f"{PREFIX}REPLAY is {settings.replay.text!r}, and {PREFIX}DETAIL is {settings.detail!r}; "
            "Nodes are run again where they are recorded: with nodes"
        )
    return settings

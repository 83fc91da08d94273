"""Every GRADTRACE_* variable, declared once in VARIABLES: what it is called, how it is read, what it means.

The same table is read at the start of a job, from the environment and from a settings file, and made into the reference
page of the settings (`scripts/reference`).
Standard library only: this is imported at the end of `import torch`, before anything is recorded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradtrace_recorder.settings.chosen_numbers import Numbers
from gradtrace_recorder.settings.directories import absolute
from gradtrace_recorder.settings.readers import (
    Replay,
    SettingsError,
    any_text,
    count_of_steps,
    flag,
    globs,
    matches,
    numbers,
    one_of,
    replay,
    whole_number,
)
from gradtrace_recorder.settings.spelling import meant

__all__ = ["VARIABLES", "Settings", "SettingsError", "Variable", "settings_from", "settings_of"]

PREFIX = "GRADTRACE_"

DETAILS = ("steps", "params", "modules", "nodes")


@dataclass(frozen=True)
class Settings:
    """What to record and where, by an absolute path. `detail` and `summary` as in the reference page.

    `remarks` are what was given and is not used, each in a sentence.
    """

    directory: str
    detail: str = "nodes"
    summary: str = "full"
    device_times: str = "stages"
    steps: Numbers = field(default_factory=Numbers)
    ranks: Numbers = field(default_factory=Numbers)
    modules: tuple[str, ...] = ()
    strict: bool = False
    step_offset: int = 0
    replay: Replay | None = None
    mode: str = "whole"
    flight_steps: int = 8
    observer: str = "auto"
    quiet: bool = False
    remarks: tuple[str, ...] = ()

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
        return rank in self.ranks

    def wants_module(self, fqn: str) -> bool:
        """Whether a module's calls and Nodes are recorded: itself or one around it matches a glob."""
        if not self.modules:
            return True
        return matches(self.modules, fqn)

    def as_json(self) -> dict[str, object]:
        """The settings as they were given, for the rank's json."""
        return {
            "detail": self.detail,
            "summary": self.summary,
            "device_times": self.device_times,
            "steps": self.steps.as_slices(),
            "ranks": self.ranks.as_spans(),
            "modules": list(self.modules),
            "step_offset": self.step_offset,
            **({"replay": self.replay.text} if self.replay is not None else {}),
            **({"mode": self.mode, "flight_steps": self.flight_steps} if self.is_flight else {}),
        }


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
    "DIR", any_text,
    "The run's directory, the same for all ranks. It switches recording on. A relative path begins in the directory "
    "in which the process was started, `~` is the user's home.",
    example="runs/a", unset="off", is_setting=False,
)  # fmt: skip
CONFIG = Variable(
    "CONFIG", any_text,
    "A settings file in TOML: these names in lower case and without `GRADTRACE_`. Variables win over it. Its `dir` "
    "switches recording on too.",
    example="gradtrace.toml", unset="none", is_setting=False,
)  # fmt: skip
NATIVE_CACHE = Variable(
    "NATIVE_CACHE", any_text,
    "The folder in which the native observer is built and found: the same for the build and for the jobs.",
    example="/var/cache/gradtrace", unset="the user's cache", is_setting=False,
)  # fmt: skip

# In the order in which they are read: of several that cannot be, the first is told.
VARIABLES = (
    DIRECTORY,
    CONFIG,
    Variable(
        "DETAIL", one_of(*DETAILS),
        "`steps`, `params`, `modules` or `nodes`: each adds finer tables to the one before.",
        example="params", default="nodes",
    ),
    Variable(
        "SUMMARY", one_of("off", "norms", "full"),
        "What is kept of a tensor: `off` (names and times alone), `norms`, `full` (adds fingerprint and sketch).",
        example="norms", default="full",
    ),
    Variable(
        "DEVICE_TIMES", one_of("off", "stages", "nodes"),
        "Times on a CUDA device, in the columns `device_ns`: `off`, `stages` (backward passes, stages, buckets), "
        "`nodes` (each Node too).",
        example="off", default="stages",
    ),
    Variable(
        "STEPS", numbers,
        "Which steps are recorded: numbers, spans with a dash (`8-15`) and Python slices (`0:10`, without 10), "
        "comma-separated.",
        example="0:10,100-109,::50", unset="all",
    ),
    Variable(
        "RANKS", numbers, "Which ranks are recorded: written as steps are.",
        example="0,8-15", unset="all",
    ),
    Variable(
        "MODULES", globs,
        "Which modules' calls and Nodes are recorded: globs on the FQN, comma-separated. What lies inside a module "
        "that matches is recorded too.",
        example="blocks.*.attn,head", unset="all",
    ),
    Variable(
        "STRICT", flag, "`1`: failures of the recorder itself raise in the job (for its own tests).",
        example="1", default="0",
    ),
    Variable(
        "STEP_OFFSET", whole_number, "The number of the first step, for a job that was resumed.",
        example="5000", default="0",
    ),
    Variable(
        "REPLAY", replay,
        "Nodes to run a second time: globs on the Node's name or its module, then steps behind an `@`. `python:` "
        "before a glob lets it choose Functions of the job's own.",
        example="blocks.*.attn,python:My*@0:3", unset="none",
    ),
    Variable(
        "MODE", one_of("whole", "flight"),
        "`whole` writes every step; `flight` keeps the last steps, and writes them when something happens.",
        example="flight", default="whole",
    ),
    Variable(
        "FLIGHT_STEPS", count_of_steps, "How many steps flight mode keeps.", example="32", default="8",
    ),
    Variable(
        "OBSERVER", one_of("auto", "native", "python"),
        "Who watches the Nodes: `auto` is the native observer where it is built, else the Python one; `native` is the "
        "same, with a line on stderr where it is not used; `python`.",
        example="python", default="auto",
    ),
    Variable(
        "QUIET", flag,
        "`1`: no line on stderr that says where recording goes. What is wrong is told even so.",
        example="1", default="0",
    ),
    NATIVE_CACHE,
)  # fmt: skip
_SETTINGS = {variable.setting: variable for variable in VARIABLES if variable.is_setting}


def settings_from(environment: Mapping[str, str] = os.environ) -> Settings | None:
    """The settings that the variables ask for, and the file that GRADTRACE_CONFIG names.

    None where neither names a directory. Raises SettingsError for the first value that cannot be read.
    """
    directory, config = (environment.get(v.variable, "") for v in (DIRECTORY, CONFIG))
    if not directory and not config:
        return None
    given: dict[str, tuple[str, str]] = {}
    base = None
    remarks: tuple[str, ...] = unknown_variables(environment)
    label = DIRECTORY.variable
    if config:
        from gradtrace_recorder.settings.file import read_settings_file

        file = read_settings_file(
            CONFIG.variable, absolute(CONFIG.variable, config), ("dir", *_SETTINGS)
        )
        given, remarks = dict(file.values), (*remarks, *file.remarks)
        in_file = given.pop("dir", None)
        if not directory and in_file is not None:
            label, directory = in_file
            base = os.path.dirname(file.path)
    if not directory and label == DIRECTORY.variable:
        if (
            config and file.remarks
        ):  # `dir` may be what was meant: as DIR, or in a table that is not looked at
            raise SettingsError("; ".join(file.remarks))
        return None  # the file leaves it to GRADTRACE_DIR
    for name, variable in _SETTINGS.items():
        if text := environment.get(variable.variable, ""):
            given[name] = (variable.variable, text)
    return _settings(absolute(label, directory, base), given, remarks)


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence on each variable of the environment that looks like one of ours and is none."""
    known = [variable.name for variable in VARIABLES]
    return tuple(
        f"{name} is no variable of gradtrace's, and not used; {meant(bare, known, PREFIX)}"
        for name, text in sorted(environment.items())
        if (bare := _without_prefix(name)) is not None
        and name.removeprefix(PREFIX) not in known
        and text
    )


def _without_prefix(name: str) -> str | None:
    """What follows the prefix, however that is written; None where it does not look like one of ours."""
    start = PREFIX.rstrip("_")
    return name[len(start) :].lstrip("_") if name.upper().startswith(start) else None


def settings_of(directory: str | os.PathLike[str], **given: str | bool | int) -> Settings:
    """Settings from texts as the variables hold them, named in lower case without their prefix.

    Raises SettingsError; TypeError for a name that there is not.
    """
    unknown = sorted(set(given) - set(_SETTINGS))
    if unknown:
        raise TypeError(f"there is no setting {unknown[0]!r}; {meant(unknown[0], [*_SETTINGS])}")
    texts = {name: (PREFIX + name.upper(), str(value)) for name, value in given.items()}
    return _settings(absolute("the directory", os.fspath(directory)), texts, ())


def _settings(
    directory: str, given: Mapping[str, tuple[str, str]], remarks: tuple[str, ...]
) -> Settings:
    """Settings from what each is called where it was given, and its text there."""
    values = {
        name: variable.read(*given[name]) for name, variable in _SETTINGS.items() if name in given
    }
    settings = Settings(directory, **values, remarks=remarks)
    if settings.replay is not None and not settings.records("nodes"):
        raise SettingsError(
            f"{given['replay'][0]} is {settings.replay.text!r}, and {given['detail'][0]} is {settings.detail!r}; "
            "Nodes are run again where they are recorded: with nodes"
        )
    return settings

"""What a recording says of itself when it begins: one line, where it goes and what it is expected to cost; and what of
the settings has no effect.

The first of the ranks that are recorded says it, once. GRADTRACE_QUIET=1 turns the line off.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradtrace_recorder.guard import say
from gradtrace_recorder.observers.native.choice import why_python
from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.session.unmatched import Globs, Steps
from gradtrace_recorder.settings.variables import Settings


@dataclass(frozen=True)
class Cost:
    """How many times as long a step takes: of a small GPT (d=256), and with tiny tensors."""

    usual: float
    tiny: str


# Measured on one CPU core: docs/internals/performance.md, "A step" and "Beside others, in one run". With norms tiny
# tensors were not measured, and lie between the two others.
COSTS = {
    ("native", "off"): Cost(1.006, "1.4"),
    ("native", "norms"): Cost(1.042, "1.4 to 2.4"),
    ("native", "full"): Cost(1.077, "2.4"),
    ("python", "off"): Cost(1.033, "2.1"),
    ("python", "norms"): Cost(1.216, "2.1 to 8.1"),
    ("python", "full"): Cost(1.569, "8.1"),
}


def tell_beginning(
    recording: Recording, run: Path, attempt: int, rank: int, world_size: int
) -> None:
    """Say the line, and what was given in vain: variables now, globs at the first step's end, steps
    at the recording's."""
    settings = recording.settings
    if not speaks(settings, rank, world_size):
        return
    if not settings.quiet:
        say(greeting(settings, run, attempt, is_native=recording.native is not None))
    for remark in settings.remarks:
        recording.problems.add(remark)
    if settings.modules or settings.replay is not None:
        recording.timeline.at_end.append(Globs(recording).look)
    if settings.steps.slices:
        steps = Steps(recording)
        recording.timeline.at_end.append(steps.step_ended)
        recording.timeline.at_finish.append(steps.look)


def speaks(settings: Settings, rank: int, world_size: int) -> bool:
    """Whether this rank is the one that tells what is the same on all: the first that is recorded."""
    return rank == next((r for r in range(world_size) if settings.wants_rank(r)), rank)


def greeting(settings: Settings, run: Path, attempt: int, *, is_native: bool) -> str:
    """The line. `run` is absolute."""
    said = [f"detail {settings.detail}", f"summary {settings.summary}"]
    if settings.is_flight:
        said.append(f"the last {settings.flight_steps} steps")
    if settings.records("nodes"):
        said.append(_observer(settings, is_native))
    return (
        f"recording into {run}, attempt {attempt}: {', '.join(said)}; {_cost(settings, is_native)}"
    )


def _observer(settings: Settings, is_native: bool) -> str:
    if is_native:
        return "native observer"
    if settings.observer == "python":
        return "Python observer, as asked"
    reason = why_python(settings)
    return f"Python observer ({reason})" if reason else "Python observer"


def _cost(settings: Settings, is_native: bool) -> str:
    cost = COSTS["native" if is_native else "python", settings.summary]
    is_less = not settings.records("nodes") or settings.steps.slices or settings.modules
    said = (
        f"a step is expected to take {'at most' if is_less else 'about'} {cost.usual:.3g} times as long, "
        f"{cost.tiny} times where tensors are tiny (measured on a CPU)"
    )
    is_slow_by_chance = (
        settings.records("nodes")
        and not is_native
        and settings.observer != "python"
        and why_python(settings) is None
    )
    if is_slow_by_chance:
        native = COSTS["native", settings.summary]
        said += f"; {native.usual:.3g} with the native observer, python -m gradtrace_recorder build"
    return said

"""The step counter of the framework around the job: found without touching the job, read once a step.

Only where a framework's module has been imported is it looked for: among the frames that lead to a step's first
forward, in functions of the framework that are over with that forward or soon after. No frame of the job's own loop is
asked for its variables: before Python 3.13 they would be kept alive with it. What is found is held weakly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gradtrace_recorder.state.naming import Names
from gradtrace_recorder.state.timeline import Timeline

# How often it is looked for, and how many frames are passed on the way.
_MOST_LOOKS, _MOST_FRAMES = 64, 80


@dataclass(frozen=True)
class _Framework:
    """Where a framework's counter is: `holder` of one of `functions` is an instance of `class_name` of `modules`.

    `before_first` is what it stands at while its first step runs; `counts` says whether one step is one count.
    """

    name: str
    modules: tuple[str, ...]
    class_name: str
    functions: tuple[str, ...]
    holder: str
    read: Callable[[Any], int]
    before_first: int = 0
    counts: Callable[[Any], bool] = lambda owner: True


def _lightning_counts(trainer: Any) -> bool:
    """`Trainer.global_step` counts the steps of all optimizers, which may be one step of ours, or several."""
    return len(trainer.optimizers) <= 1


# Sources: transformers/trainer.py, `compute_loss`, and `TrainerState` (5.0); lightning/pytorch/trainer/call.py,
# `_call_strategy_hook` (2.6); torchtitan/train.py, `train` adds one before `train_step`;
# deepspeed/runtime/engine.py, `_take_model_step` adds one after the step (0.18).
_FRAMEWORKS = (
    _Framework(
        "transformers",
        ("transformers.trainer",),
        "Trainer",
        ("compute_loss", "training_step"),
        "self",
        lambda trainer: trainer.state.global_step,
    ),
    _Framework(
        "lightning",
        ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
        "Trainer",
        ("_call_strategy_hook",),
        "trainer",
        lambda trainer: trainer.global_step,
        counts=_lightning_counts,
    ),
    _Framework(
        "torchtitan",
        ("torchtitan.train", "torchtitan.trainer"),
        "Trainer",
        ("forward_backward_step", "train_step"),
        "self",
        lambda trainer: trainer.step,
        before_first=1,
    ),
)
_DEEPSPEED = _Framework(
    "deepspeed",
    ("deepspeed.runtime.engine",),
    "DeepSpeedEngine",
    (),
    "",
    lambda engine: engine.global_steps,
)
_MODULES = tuple(name for framework in (*_FRAMEWORKS, _DEEPSPEED) for name in framework.modules)


class Counter:
    """The counter that was found, if one was. Called on the job's threads, at a step's beginning."""

    def __init__(self, timeline: Timeline, names: Names) -> None:
        self._timeline, self._names = timeline, names
        self._owner: Callable[[], Any] | None = None
        self._of: _Framework | None = None
        self._last: int | None = None
        self._looks = 0

    def begins(self) -> None:
        """A step begins: note the counter, and in the first step where the job resumes."""
        timeline = self._timeline
        step = self._read()
        if step is None or self._of is None:
            return
        if timeline.is_first:
            self._first(step)
        timeline.totals.framework = self._of.name
        timeline.totals.framework_step = step

    def read_early(self) -> None:
        """Something is called before the first step begins: an evaluation, which is of the step to come."""
        step = self._read()
        if step is not None:
            self._first(step)
        self._last = None

    def _first(self, step: int) -> None:
        owner = self._owner() if self._owner is not None else None
        if self._of is not None and owner is not None and self._of.counts(owner):
            self._timeline.begin_at(max(0, step - self._of.before_first))

    def _read(self) -> int | None:
        step = self._value()
        # A counter that stands still may be that of a trainer which is done, while another trains.
        if step is None or step == self._last:
            self._look()
            step = self._value()
        self._last = step
        return step

    def _value(self) -> int | None:
        owner = self._owner() if self._owner is not None else None
        if owner is None or self._of is None:
            return None
        try:
            return int(self._of.read(owner))
        except Exception:  # the framework's own, of a version that we do not know
            return None

    def _look(self) -> None:
        if self._looks >= _MOST_LOOKS or not any(name in sys.modules for name in _MODULES):
            return
        wanted = {
            name: (framework, classes)
            for framework in _FRAMEWORKS
            if (classes := _classes(framework))
            for name in framework.functions
        }
        engines = _classes(_DEEPSPEED)
        if not wanted and not engines:
            return
        self._looks += 1
        found = _among_frames(wanted, sys._getframe(1)) if wanted else None
        if found is None and engines:
            for _, root in self._names.roots():
                if isinstance(root, engines):
                    found = (_DEEPSPEED, root)
        if found is not None:
            self._of, owner = found
            self._owner = weakref.ref(owner)


def _classes(framework: _Framework) -> tuple[type, ...]:
    """The framework's class, where it has been imported."""
    found = (
        getattr(sys.modules.get(module), framework.class_name, None) for module in framework.modules
    )
    return tuple(one for one in found if isinstance(one, type))


def _among_frames(
    wanted: dict[str, tuple[_Framework, tuple[type, ...]]], frame: FrameType | None
) -> tuple[_Framework, Any] | None:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name in wanted:
            framework, classes = wanted[code.co_name]
            if code.co_argcount and code.co_varnames[0] == framework.holder:
                owner = frame.f_locals.get(framework.holder)
                if isinstance(owner, classes):
                    return framework, owner
        frame = frame.f_back
    return None

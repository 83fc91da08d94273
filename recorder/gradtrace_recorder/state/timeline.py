"""Where in the run we are: step, microbatch, backward pass; and what the current step has taken.

The rule, unless `gradtrace_recorder.step` says which step it is: a step begins at the first grad-mode call of a root
that has parameters, or top-level engine call, after a step's end; it ends when an optimizer step returns, skipped or
not. Several optimizer steps without forward or backward between them are one; inside backward they end with it.
As long as no torch optimizer has been seen, it ends where parameters have changed between passes (`updates.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gradtrace_recorder.settings.chosen_numbers import Numbers
from gradtrace_recorder.state.attribution import RootCall


class StepTotals:
    """What one step has taken so far; times in nanoseconds."""

    def __init__(self) -> None:
        self.start_ns = -1
        self.end_ns = 0
        self.forward_ns = 0
        self.backward_ns = 0
        self.optimizer_ns = 0
        self.recorder_ns = 0
        self.skipped: bool | None = None
        self.ended_by: str | None = None
        self.framework: str | None = None
        self.framework_step: int | None = None
        self.backward_count = 0
        self.engine_calls = 0
        self.root_calls: list[RootCall] = []
        self.rng_fingerprint: int | None = None


class Timeline:
    """The recording's counters. `at_begin` and `at_end` are called when a step begins and is over, `at_finish` when
    the recording ends. `at_complete` is called whenever all that a step needs has happened: it is over with the next
    activity, and until then another optimizer may step."""

    def __init__(self, steps: Numbers, first_step: int, zero_ns: int) -> None:
        self.step = first_step
        self.microbatch = 0
        self.totals = StepTotals()
        self.paused = False
        self.at_begin: list[Callable[[], None]] = []
        self.at_complete: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.at_finish: list[Callable[[], None]] = []
        self._steps = steps
        self._is_every_step = not steps.slices
        self.zero_ns = zero_ns
        self.passes = 0  # top-level calls into the engine that have returned, over all steps
        self.optimizer_seen = False
        self.first_step_from = "offset" if first_step else "0"
        self._ended_by_parameters = False
        self._any_begun = False
        self._ended = False
        self._end_after_backward = False
        self._given = False
        self._microbatch_given = False
        self._begun = False
        self._lock = threading.RLock()

    def now(self) -> int:
        """Nanoseconds since the recording began."""
        return time.monotonic_ns() - self.zero_ns

    @property
    def is_recorded(self) -> bool:
        """Whether this step's events are asked for."""
        return not self.paused and (self._is_every_step or self.step in self._steps)

    @property
    def is_begun(self) -> bool:
        """Whether anything that counts has happened in this step."""
        return self._begun and not self._ended

    @property
    def has_begun(self) -> bool:
        """Whether what happens now belongs to a step: one that has begun, and may have ended since."""
        return self._begun

    @property
    def is_first(self) -> bool:
        """Whether no step has begun yet."""
        return not self._any_begun

    @property
    def rule(self) -> str | None:
        """What ends the steps: `job`, `optimizers`, `parameters`; None while nothing has."""
        if self._given:
            return "job"
        if self.optimizer_seen:
            return "optimizers"
        return "parameters" if self._ended_by_parameters else None

    @property
    def is_by_parameters(self) -> bool:
        """Whether changed parameters end a step: neither the job nor a torch optimizer does."""
        return not (self.optimizer_seen or self._given)

    def activity(self) -> None:
        """A grad-mode root call or a top-level engine call: begins the next step after an end."""
        if self._ended and not self._given:
            self._advance(self.step + 1)
        if not self._begun:
            self._begun = True
            self._ended = False
            self.totals.start_ns = self.now()
            for call in self.at_begin:
                call()
            self._any_begun = True

    @property
    def coming_step(self) -> int | None:
        """The step that an activity would be of, if it began now; None where that is not asked for."""
        step = self.step + 1 if self._ended and not self._given else self.step
        return step if not self.paused and step in self._steps else None

    def backward_done(self) -> None:
        """A top-level accumulating backward pass has returned."""
        self.totals.backward_count += 1
        if not self._microbatch_given:
            self.microbatch += 1
        if self._end_after_backward:
            self._end_after_backward = False
            self._complete("optimizer")

    def weight_half_done(self) -> None:
        """A weight half has accumulated gradients, without a backward pass that does: it counts as one."""
        self.totals.backward_count += 1

    def optimizer_stepped(self, *, inside_backward: bool = False, by_scaler: bool = False) -> None:
        """An optimizer step, or GradScaler's, has returned; `by_scaler`: it left the optimizer out."""
        self.totals.end_ns = self.now()
        if inside_backward:
            self._end_after_backward = True
        elif self._begun:
            # One of several optimizers that a scaler leaves out ends no step that another one ends.
            self._complete((self.totals.ended_by or "scaler") if by_scaler else "optimizer")

    def parameters_changed(self) -> None:
        """Between the last pass and now they did: where nothing else ends steps, this one is over."""
        if self._begun and not self._ended and self.is_by_parameters:
            self.totals.end_ns = self.now()
            self._ended_by_parameters = True
            self._complete("parameters")

    def begin_at(self, step: int) -> None:
        """A framework resumes a job: its first step has this number, unless one was given or it has begun."""
        if self.is_first and not self._given and self.first_step_from != "offset":
            self.step = step
            self.first_step_from = "framework" if step else "0"

    def set_step(self, step: int) -> None:
        """The job says which step begins; the rule is off from now on."""
        self._given = True
        if step != self.step:
            if self._begun:
                self.totals.ended_by = "job"
            self._advance(step)

    def set_microbatch(self, microbatch: int) -> None:
        """The job says which microbatch this is, until the step's end."""
        self._microbatch_given = True
        self.microbatch = microbatch

    def enter_microbatch(self, microbatch: int) -> tuple[int, int, bool]:
        """An action of a pipeline stage begins: it is this microbatch until `leave_microbatch` gets what is given."""
        before = (self.step, self.microbatch, self._microbatch_given)
        self.set_microbatch(microbatch)
        return before

    def leave_microbatch(self, before: tuple[int, int, bool]) -> None:
        """The action is over."""
        step, microbatch, given = before
        if step == self.step:
            self.microbatch, self._microbatch_given = microbatch, given

    @property
    def microbatch_given(self) -> bool:
        """Whether the job, or its schedule, said which microbatch this is."""
        return self._microbatch_given

    def finish(self) -> None:
        """The recording ends: the current step is over, as far as it got."""
        if self._begun:
            self._end()
        for call in self.at_finish:
            call()

    def _complete(self, ended_by: str) -> None:
        self._ended = True
        self.totals.ended_by = ended_by
        for call in self.at_complete:
            call()

    def _advance(self, step: int) -> None:
        with self._lock:
            self._end()
            self.step = step
            self.microbatch = 0
            self._microbatch_given = False
            self.totals = StepTotals()
            self._ended = self._begun = False

    def _end(self) -> None:
        if self._begun:
            if not self.totals.end_ns:
                self.totals.end_ns = self.now()
            for call in self.at_end:
                call()

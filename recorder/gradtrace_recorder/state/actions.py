"""The action of a pipeline stage that a thread is in: what the rows made meanwhile take from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradtrace_schemas.journal import NULL_INT64

if TYPE_CHECKING:
    from gradtrace_recorder.summaries.device.times import Moment
    from gradtrace_recorder.summaries.values import Packed

FORWARD, FULL, INPUT, WEIGHT = KINDS = (
    "forward",
    "backward_full",
    "backward_input",
    "backward_weight",
)
_PHASES = {INPUT: "input", WEIGHT: "weight"}


class Action:
    """An action that has begun and is not over. `kind` is None where no row comes of it: a loss is computed."""

    __slots__ = (
        "before", "device_began", "device_ns", "follows_half", "has_run", "held", "kind", "microbatch", "own_half",
        "phase", "received", "sent", "stage_index", "start_ns",
    )  # fmt: skip

    def __init__(self, stage_index: int | None, microbatch: int, kind: str | None) -> None:
        self.stage_index = stage_index
        self.microbatch = microbatch
        self.start_ns = 0
        self.device_began: Moment | None = None
        self.device_ns = NULL_INT64
        self.received: Packed | None = None
        self.sent: Packed | None = None
        self.has_run = False  # a backward function of torch, inside it
        self.follows_half = False  # torch's weight half: it begins where its input half has ended
        self.own_half = False  # the job brings its own weight half (`dw_builder`)
        self.held: int | None = None  # where its row is kept until it is over
        self.before: tuple[int, int, bool] | None = None
        self.phase: str | None = None
        self.kind: str | None = None
        self.become(kind)

    def become(self, kind: str | None) -> None:
        """It is of this kind."""
        self.kind = kind
        self.phase = _PHASES.get(kind) if kind is not None else None


class OwnAction:
    """What `gradtrace_recorder.stage` gives to its block: there the job says what its action received and sent."""

    def __init__(
        self,
        summarised: Callable[[Any], Packed | None] | None = None,
        action: Action | None = None,
    ) -> None:
        self._summarised = summarised
        self._action = action

    def received(self, *tensors: Any) -> None:
        """The activations or gradients that came from the neighbouring stage. Tensors, or lists of them."""
        if self._summarised is not None and self._action is not None:
            self._action.received = self._summarised(tensors)

    def sent(self, *tensors: Any) -> None:
        """Those that go to the neighbouring stage."""
        if self._summarised is not None and self._action is not None:
            self._action.sent = self._summarised(tensors)


class Actions(threading.local):
    """A thread's actions, outermost first."""

    def __init__(self) -> None:
        self.open: list[Action] = []

    @property
    def current(self) -> Action | None:
        """The innermost, None outside any."""
        return self.open[-1] if self.open else None


class HalfDone:
    """Which Nodes ran in an input half of this step: a weight half goes no further than to the first of them.

    Numbers only, no Nodes. Holds while all Nodes were made on one thread, whose numbers are unique.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._step = -1

    def numbers(self, step: int) -> set[int]:
        """Autograd's numbers of those Nodes, to be read and added to."""
        if step != self._step:
            self._step, self._numbers = step, set()
        return self._numbers

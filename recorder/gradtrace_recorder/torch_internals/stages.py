"""Which functions of torch's pipelines are seen: the actions of a stage, what they send, and what is waited for.

Nothing here imports `torch.distributed.pipelining`: in a job that does not use it nothing is done.
Standard library and torch only: an armed process loads this before its first event.
Source: torch/distributed/pipelining/{stage,schedules,_backward}.py (2.13).
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch

from gradtrace_recorder.torch_internals.call_sites import passed_over
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.imports import AfterImport
from gradtrace_recorder.torch_internals.seen import SeenFunctions
from gradtrace_recorder.torch_internals.standing import TOLD

_PACKAGE = "torch.distributed.pipelining"
WAIT = "_wait_batch_p2p"
_METHODS = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_send_ops",
)
_is_compiling = torch.compiler.is_compiling


class Observer(Protocol):
    """Who watches the stages while a job is recorded. Its methods never raise unless in strict mode."""

    def begins(self, name: str, arguments: dict[str, Any]) -> Any:
        """A seen function is called. What is given, unless None, is handed to `ends`."""

    def ends(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """It has returned, or raised."""


class Stages:
    """The seen functions of the process, and who watches them."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self._wake: Callable[[], object] | None = None
        self._seen = SeenFunctions()
        # It is imported last, behind what it uses.
        self._import = AfterImport(f"{_PACKAGE}.schedules", self._see)

    def attach(self, wake: Callable[[], object] | None = None) -> None:
        """See the functions as soon as there are any. `wake` is called at the first call that nobody watches."""
        self._wake = wake or self._wake
        if not self._seen.any:
            self._import.arm()

    def detach(self) -> None:
        """See no more, and leave everything as it was."""
        self.observer = self._wake = None
        self._import.disarm()
        self._seen.let_go()

    def _see(self) -> None:
        def part(name: str) -> Any:
            return sys.modules.get(f"{_PACKAGE}.{name}")

        schedules, base = part("schedules"), getattr(part("stage"), "_PipelineStageBase", None)
        owners = [(part("_backward"), name) for name in ("stage_backward", "stage_backward_input")]
        owners += [(part("_backward"), "stage_backward_weight")]
        owners += [(base, name) for name in _METHODS]
        owners += [(schedules, "_batch_p2p"), (schedules, WAIT)]
        owners += [(getattr(schedules, "_PipelineSchedule", None), "_maybe_compute_loss")]
        for owner, name in owners:
            function = getattr(owner, name, None)
            # Older ones lack some.
            if isinstance(function, types.FunctionType) and not function.__code__.co_freevars:
                self._seen.see(function, self._around)

    def _around(self, original: Any) -> Callable[..., Any]:
        name, signature = original.__name__, inspect.signature(original)

        def around(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling():
                return original(*args, **kwargs)
            if self.observer is None and self._wake is not None:
                self._wake()
            observer = self.observer
            if observer is None:
                return original(*args, **kwargs)
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return original(*args, **kwargs)  # which says so
            opened = None
            try:
                opened = observer.begins(name, arguments)
            except RecursionError:
                TOLD.short += 1
            del arguments
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if opened is not None:
                    observer.ends(opened, None, error)
                raise
            if opened is not None:
                observer.ends(opened, result, None)
            return result

        def one_by_one(*args: Any, **kwargs: Any) -> Any:
            # It waits for one after the other: so each has its own time.
            if len(args) == 1 and not kwargs and isinstance(args[0], list) and len(args[0]) > 1:
                for work in args[0]:
                    around([work])
                return None
            return around(*args, **kwargs)

        passed_over(around), passed_over(one_by_one)
        never_compiled(around, one_by_one, calls_the_job=True)
        return one_by_one if name == WAIT else around


STAGES = Stages()

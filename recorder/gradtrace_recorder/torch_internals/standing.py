"""What stands in torch from its import on, and never changes again: our hooks, and who is told by them.

Dynamo guards what it compiles on torch's tables of global hooks, down to each function in them. Were ours exchanged for
others when recording begins, a job that forbids to compile again would raise. So these few functions stay for good, and
tell whoever is to be told at the moment: the tripwire at first, then the session's sources, then nobody. Each is the
gate for frames, too: where Python has none left for us the job goes on, and the event is counted as lost.

Standard library and torch only: an armed process loads this before its first event.
Source: torch/_dynamo/variables/nn_module.py, `UnspecializedNNModuleVariable.call_function`; torch/autograd/graph.py,
`_engine_run_backward` (2.13).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from gradtrace_recorder.torch_internals.call_sites import called_from, passed_over
from gradtrace_recorder.torch_internals.dynamo import may_not_compile_again, never_compiled
from gradtrace_recorder.torch_internals.imports import AfterImport
from gradtrace_recorder.torch_internals.privates import found
from gradtrace_recorder.torch_internals.seen import SeenFunctions

_is_compiling = torch.compiler.is_compiling
_tracing_state = found("torch._C._get_tracing_state", lambda: None)
_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MODULE = "torch.nn.modules.module"
_OPTIMIZER = "torch.optim.optimizer"


class Begun(Protocol):
    """A pass that is watched: told of its end."""

    def returned(self) -> None:
        """The engine has returned."""

    def raised(self, error: BaseException, outputs: Any) -> BaseException | None:
        """The engine has raised. Gives what the job is to see instead, None for the same."""


def _nobody(*_: Any) -> Any:
    return None


class Told:
    """Who is told. `short` counts the events that were lost because Python had no frames left for us."""

    __slots__ = (
        "module_called", "module_left", "modules_resumed", "optimizer_stepped", "optimizer_steps", "pass_begins",
        "short",
    )  # fmt: skip

    def __init__(self) -> None:
        self.short = 0
        self.forget()

    def forget(self) -> None:
        """Nobody is told."""
        self.module_called: Callable[[Any, Any], None] = _nobody
        self.module_left: Callable[[Any, Any, Any, Any], None] = _nobody
        self.modules_resumed: Callable[[], None] = _nobody
        self.optimizer_steps: Callable[[Any, Any, Any], Any] = _nobody
        self.optimizer_stepped: Callable[[Any, Any, Any], None] = _nobody
        self.pass_begins: Callable[[Any, Any], Begun | None] = _nobody


TOLD = Told()


class _Thread(threading.local):
    skipped = 0  # calls of modules, one inside the other, whose beginning nobody was told


_LOCAL = _Thread()


# Where frames have run out not even a function in C can be called: what follows `except RecursionError` calls nothing.


def module_called(module: Any, args: Any) -> None:
    """Global forward pre-hook."""
    try:
        if _is_compiling():
            return
        if TOLD.short and _LOCAL.skipped:
            _LOCAL.skipped += 1
            TOLD.short += 1
            return
        if not _tracing_state():
            TOLD.module_called(module, args)
    except RecursionError:
        _LOCAL.skipped += 1
        TOLD.short += 1


def module_left(module: Any, args: Any, kwargs: Any, output: Any = ...) -> None:
    """Global forward hook. Of a call that raised torch (2.13, `_call_impl`) tells no kwargs, though they were asked
    for: `output` is not given then."""
    try:
        if _is_compiling():
            return
    except RecursionError:
        pass
    if TOLD.short and _LOCAL.skipped:
        _LOCAL.skipped -= 1
        try:
            if not _LOCAL.skipped:
                TOLD.modules_resumed()
        except RecursionError:
            pass
        return
    try:
        if not _tracing_state():
            TOLD.module_left(module, args, kwargs, output)
    except RecursionError:
        TOLD.short += 1


def no_module_runs() -> None:
    """Whatever calls of modules the calling thread was in, they are over."""
    _LOCAL.skipped = 0


def optimizer_steps(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Global optimizer pre-hook: it may give other arguments."""
    try:
        return None if _is_compiling() else TOLD.optimizer_steps(optimizer, args, kwargs)
    except RecursionError:
        TOLD.short += 1
        return None


def optimizer_stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Global optimizer post-hook."""
    try:
        if not _is_compiling():
            TOLD.optimizer_stepped(optimizer, args, kwargs)
    except RecursionError:
        TOLD.short += 1


@passed_over
def _engine_called(run: Any, *args: Any, **kwargs: Any) -> Any:
    """A call into the autograd engine, however it is made."""
    begun = None
    try:
        if not (_is_compiling() or _tracing_state()):
            begun = TOLD.pass_begins(args, kwargs)
    except RecursionError:
        TOLD.short += 1
    if begun is None:
        return run(*args, **kwargs)
    try:
        result = run(*args, **kwargs)
    except BaseException as error:
        failure = begun.raised(error, args[0] if args else ())
        if failure is None:
            raise
    else:
        begun.returned()
        return result
    raise failure


def job_has_any_global_hook() -> bool:
    """What torch asks in order to warn of global hooks on a compiled module: ours end at once there.

    Source: torch/_dynamo/eval_frame.py, `OptimizedModule.__call__` (2.13).
    """
    return bool(
        torch_modules._global_backward_pre_hooks
        or torch_modules._global_backward_hooks
        or any(h is not module_called for h in torch_modules._global_forward_pre_hooks.values())
        or any(h is not module_left for h in torch_modules._global_forward_hooks.values())
    )


class Standing:
    """Puts all this in its place, and takes it away."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._seen = SeenFunctions()
        self._engine: Any = None
        self._asks: Any = None
        self._compiler = AfterImport("torch._dynamo.convert_frame", self._see_what_is_traced)

    def attach(self) -> bool:
        """Put it in place. False where the hooks are left out: functions were compiled without them, and the job
        forbids to compile them again."""
        has_hooks = bool(self._handles) or not may_not_compile_again()
        if has_hooks and not self._handles:
            self._register()
            self._asks = getattr(torch_modules, "_has_any_global_hook", None)
            if self._asks is not None:  # torch 2.6 never warns
                torch_modules._has_any_global_hook = job_has_any_global_hook
            self._compiler.arm()
        if self._engine is None:
            self._stand_before_the_engine()
        return has_hooks

    def detach(self) -> None:
        """Take it away; but where the job forbids to compile again, hooks stay that tell nobody."""
        TOLD.forget()
        self._compiler.disarm()
        if self._engine is not None:
            Variable._execution_engine, self._engine = self._engine, None
        self._seen.let_go()
        if self._handles and not may_not_compile_again():
            for handle in self._handles:
                handle.remove()
                # Torch (2.13) forgets this one, and would go on to say that there are global hooks.
                found(f"{_MODULE}._global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
            self._handles = []
            if self._asks is not None:
                torch_modules._has_any_global_hook = self._asks

    def _register(self) -> None:
        """Those hooks that this torch has: without one, its source is closed (see `privates`)."""
        both: dict[str, Any] = {"with_kwargs": True, "always_call": True}
        wanted: list[tuple[str, Any, dict[str, Any]]] = [
            (f"{_MODULE}.register_module_forward_pre_hook", module_called, {}),
            (f"{_MODULE}.register_module_forward_hook", module_left, both),
            (f"{_OPTIMIZER}.register_optimizer_step_pre_hook", optimizer_steps, {}),
            (f"{_OPTIMIZER}.register_optimizer_step_post_hook", optimizer_stepped, {}),
        ]
        for name, hook, how in wanted:
            register = found(name, None)
            try:
                if register is not None:
                    self._handles.append(register(hook, **how))
            except (
                Exception
            ):  # torch's own lacks a table, which closes the source, and may have kept the hook
                kept = found(f"{_MODULE}._global_forward_hooks", {})
                for key in [key for key, one in kept.items() if one is hook]:
                    del kept[key]

    def _see_what_is_traced(self) -> None:
        """Of a module without hooks `torch.export` traces `forward` alone, and can do no more: so where ours are the
        only ones, too.

        Source: torch/_dynamo/convert_frame.py, `get_traced_fn` (2.13; older ones have none).
        """
        traced: Any = getattr(sys.modules["torch._dynamo.convert_frame"], "get_traced_fn", None)
        if not self._handles or traced is None or traced.__code__.co_freevars:
            return

        def around(original: Any) -> Any:
            def get_traced_fn(called: Any) -> Any:
                is_bare = (
                    isinstance(called, torch.nn.Module)
                    and type(called).__call__ is torch.nn.Module.__call__
                    and type(called).forward is not torch.nn.Module.forward
                    and not any(getattr(called, name) for name in _TABLES)
                    and not job_has_any_global_hook()
                )
                return original(called.forward if is_bare else called)

            return get_traced_fn

        self._seen.see(traced, around)

    def _stand_before_the_engine(self) -> None:
        """Everything of torch's goes through one function, the rest finds an engine of ours."""
        through: Any = found("torch.autograd.graph._engine_run_backward", None)
        code = getattr(through, "__code__", None)
        if code is not None and not code.co_freevars:
            self._seen.see(through, lambda original: functools.partial(_engine_called, original))
        self._engine = Variable._execution_engine

        class SeenEngine(type(self._engine)):  # type: ignore[misc]
            """The engine: who asks for `run_backward` past torch's own function is given ours."""

            def _run_backward(self) -> Any:
                run, caller = super().run_backward, sys._getframe(1)
                if caller.f_code is code:
                    return run
                return functools.partial(
                    _engine_called, functools.partial(called_from(caller), run)
                )

            run_backward = property(_run_backward)

        never_compiled(SeenEngine)
        Variable._execution_engine = SeenEngine()


STANDING = Standing()


def has_room(frames: int) -> bool:
    """Whether Python has so many frames left for the calling thread. A few microseconds for a hundred."""
    try:
        return _deeper(frames)
    except RecursionError:
        return False


def _deeper(frames: int) -> bool:
    return frames == 0 or _deeper(frames - 1)


never_compiled(
    module_called, module_left, optimizer_steps, optimizer_stepped, has_room, _deeper, no_module_runs
)  # fmt: skip
never_compiled(Told, _nobody)
never_compiled(_engine_called, calls_the_job=True)

"""What stands between a DDP reducer and its communication hook: a relay, one for each reducer.

A reducer takes one hook and never gives it back. So a job's hook is registered inside a relay, which calls it
and nothing else while nobody records. Where the job has none, a recorder gives the reducer a free relay, which
reduces as the reducer itself does, bit for bit; a hook that the job registers later moves into it, and the reducer
stays free in the job's eyes. What a reducer was given stays with it when recording ends.

Standard library and torch only: an armed process loads this before its first event.
Source of how the reducer reduces without a hook: torch/csrc/distributed/c10d/reducer.cpp (2.13),
`mark_variable_ready_dense`, `run_comm_hook`; of the built-in hooks:
torch/csrc/distributed/c10d/default_comm_hooks.cpp.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradtrace_recorder.torch_internals.call_sites import passed_over

_TORCHS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."


class Observer(Protocol):
    """Who watches buckets while a job is recorded. Its methods never raise unless in strict mode."""

    def launched(self, relay: Relay, bucket: Any) -> Any:
        """A bucket's hook is about to run, on a thread of autograd. What is given is handed to `reducing`."""

    def reducing(self, opened: Any, future: Any) -> None:
        """The hook has returned its future."""

    def done(self, opened: Any) -> None:
        """The reduction is done. On a thread of the process group."""


class Relay:
    """The hook of one reducer: the job's own inside it, or none."""

    def __init__(self, relays: Relays, reducer: Any, ddp: Any) -> None:
        self.hook: Callable[..., Any] | None = None
        self.hook_name: str | None = None
        self.state: Any = None
        self.divisor: int | None = None
        self.failure: BaseException | None = None
        self.join_work: Any = None
        self._relays = relays
        self._reducer = weakref.ref(reducer)
        self._ddp: Callable[[], Any] = weakref.ref(ddp) if ddp is not None else lambda: None

    @property
    def ddp(self) -> Any:
        """The DDP module, None once it is gone or where a reducer is used without one."""
        return self._ddp()

    @property
    def is_free(self) -> bool:
        """Whether the job has registered nothing here."""
        return self.hook is None

    def take_in(self, state: Any, hook: Callable[..., Any], name: str) -> None:
        """The job's hook moves in."""
        self.state, self.hook, self.hook_name = state, hook, name

    @passed_over
    def __call__(self, state: Any, bucket: Any) -> Any:
        """Reduce a bucket; called by the reducer on an autograd thread, or by `join` on the job's."""
        observer = self._relays.observer
        opened = observer.launched(self, bucket) if observer is not None else None
        if self.hook is not None:
            future = self.hook(self.state, bucket)
        else:
            future = self._reduced(bucket, opened)
        if observer is not None and opened is not None:
            observer.reducing(opened, future)
        return future

    def _reduced(self, bucket: Any, opened: Any) -> Any:
        """As the reducer does it without a hook."""
        self.divisor = divisor = self._live_count()
        bucket.buffer().mul_(1.0 / divisor)
        return self._summed(bucket).then(functools.partial(self._first, opened))

    def _summed(self, bucket: Any) -> Any:
        reducer = self._reducer()
        assert reducer is not None  # it is calling us
        return reducer._run_allreduce_hook(bucket)

    def _first(self, opened: Any, future: Any) -> Any:
        try:
            value = future.value()[0]
        except Exception as error:
            self.failure = (
                error  # as the reducer would have raised it; `then` gives it another text
            )
            raise
        observer = self._relays.observer
        if observer is not None and opened is not None:
            observer.done(opened)
        return value

    def _live_count(self) -> int:
        """What the reducer divides by: the group's size, or under `join(divide_by_initial_world_size=False)`
        how many ranks still have inputs."""
        ddp = self.ddp
        if ddp is None:
            return dist.get_world_size()
        if (
            self.join_work is not None
            and ddp._join_config.enable
            and not ddp._divide_by_initial_world_size
        ):
            self.join_work.wait()
            return int(self.join_work.get_future().value()[0].item())  # `result()` would warn
        return int(ddp.process_group.size())

    def all_reduced(self, state: Any, bucket: Any) -> Any:
        """The built-in hook ALLREDUCE: it divides, then sums."""
        bucket.buffer().div_(self._group_size())
        return self._summed(bucket).then(functools.partial(self._first, None))

    def half_compressed(self, state: Any, bucket: Any) -> Any:
        """The built-in hook FP16_COMPRESS."""
        buffer = bucket.buffer()
        compressed = buffer.to(torch.float16).div_(self._group_size())
        group: Any = self.ddp.process_group if self.ddp is not None else dist.group.WORLD

        def decompressed(future: Any) -> Any:
            return buffer.copy_(self._first(None, future))

        return group.allreduce([compressed]).get_future().then(decompressed)

    def _group_size(self) -> int:
        return int(self.ddp.process_group.size()) if self.ddp is not None else dist.get_world_size()


class Relays:
    """All relays of the process, and the functions of torch that are wrapped to place them."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.ddps: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of: weakref.WeakKeyDictionary[Any, Relay] = weakref.WeakKeyDictionary()
        self._patches: list[tuple[Any, str, Any, Any]] = []
        self._is_attached = False

    def attach(self) -> None:
        """Wrap what registers hooks, so that each finds its relay. Calling it again does nothing."""
        self._is_attached = True
        if self._patches or not dist.is_available():
            return
        from torch.nn.parallel import DistributedDataParallel as Ddp

        self._patch(dist, "_register_comm_hook", self._register)
        self._patch(dist, "_register_builtin_comm_hook", self._register_builtin)
        self._patch(Ddp, "_ddp_init_helper", self._ddp_made)
        with contextlib.suppress(ImportError):
            from torch.distributed.algorithms.join import Join

            self._patch(Join, "notify_join_context", self._joining, static=True)

    def detach(self) -> None:
        """Observe no more, and unwrap; while a free relay lives, its reducer still needs what is wrapped."""
        self.observer = None
        self._is_attached = False
        self._unwrap_if_unneeded()

    def of(self, reducer: Any) -> Relay | None:
        """The relay of a reducer."""
        return self._of.get(reducer)

    def give(self, ddp: Any) -> Relay:
        """A free relay for a DDP module that has no hook."""
        relay = self._placed(ddp.reducer, ddp)
        weakref.finalize(ddp.reducer, self._unwrap_if_unneeded).atexit = False
        return relay

    def own_failure(self, error: BaseException) -> BaseException | None:
        """What the reducer would have raised where `error` is its wording of a failure in a callback of ours."""
        for relay in self._of.values():
            failure, relay.failure = relay.failure, None
            if failure is not None and str(failure).splitlines()[:1] and str(failure) in str(error):
                return failure.with_traceback(None)
        return None

    def _placed(self, reducer: Any, ddp: Any) -> Relay:
        relay = Relay(self, reducer, ddp)
        self._original("_register_comm_hook")(reducer, None, relay)
        self._of[reducer] = relay
        return relay

    def _register(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 3 or kwargs:
            return original(*args, **kwargs)
        reducer, state, comm_hook = args
        relay = self._of.get(reducer)
        if relay is None:
            if not self._is_attached:
                return original(reducer, state, comm_hook)
            relay = self._placed(reducer, self._ddp_of(reducer))
        elif not relay.is_free:
            return original(reducer, state, comm_hook)  # which refuses a second one
        relay.take_in(state, comm_hook, hook_name(comm_hook))
        return None

    def _register_builtin(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return original(*args, **kwargs)
        reducer, comm_hook_type = args
        relay = self._of.get(reducer)
        kinds = torch._C._distributed_c10d.BuiltinCommHookType
        if (
            relay is None
            and self._is_attached
            and comm_hook_type in (kinds.ALLREDUCE, kinds.FP16_COMPRESS)
        ):
            relay = self._placed(reducer, self._ddp_of(reducer))
        if relay is None or not relay.is_free:
            return original(reducer, comm_hook_type)
        emulated = relay.all_reduced if comm_hook_type == kinds.ALLREDUCE else relay.half_compressed
        relay.take_in(None, emulated, str(comm_hook_type))
        return None

    def _ddp_made(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(ddp, *args, **kwargs)
        self.ddps.add(ddp)
        return result

    def _joining(self, original: Any, joinable: Any) -> Any:
        work = original(joinable)
        reducer = getattr(joinable, "reducer", None)
        relay = self._of.get(reducer) if work is not None and reducer is not None else None
        if relay is not None:
            relay.join_work = work
        return work

    def _ddp_of(self, reducer: Any) -> Any:
        # While a DDP module is made its hook may be registered before we are told of the module.
        return next((d for d in self.ddps if getattr(d, "reducer", None) is reducer), None)

    def _patch(self, owner: Any, name: str, wrapper: Any, *, static: bool = False) -> None:
        original = vars(owner).get(name)
        if original is None:
            return  # of another torch: `privates` closes the source that needs it
        called = original.__func__ if static else original

        @functools.wraps(called)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(called, *args, **kwargs)

        placed = staticmethod(wrapped) if static else wrapped
        setattr(owner, name, placed)
        self._patches.append((owner, name, original, placed))

    def _original(self, name: str) -> Any:
        for _, patched, original, _ in self._patches:
            if patched == name:
                return original
        return getattr(dist, name)

    def _unwrap_if_unneeded(self) -> None:
        if self._is_attached or any(relay.is_free for relay in self._of.values()):
            return
        for owner, name, original, placed in self._patches:
            if owner.__dict__.get(name) is placed:
                setattr(owner, name, original)
        self._patches = []


def hook_name(hook: Any) -> str:
    """Module and qualified name of a hook; torch's own without their packages."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{module}.{name}".removeprefix(_TORCHS_HOOKS)


RELAYS = Relays()

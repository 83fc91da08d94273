"""Tries of what `privates` lists: each does with tiny tensors what the recorder does, and raises where that differs.

Those that do not say that they are whole go past `torch.autograd.backward` and modules, whose hooks a job may see.
Tensors are given a dtype and a device: a job may have set others for all.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

_LEAF_NUMBER = 2**64 - 1
_PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def _leaf() -> torch.Tensor:
    return torch.ones(2, **_PLAIN, requires_grad=True)


def _engine_class() -> Any:
    """Torch's own, whoever stands in its place."""
    return type(torch.autograd.Variable._execution_engine).__mro__[-2]


def _run(root: torch.Tensor) -> None:
    _engine_class()().run_backward((root,), (torch.ones_like(root),), True, False, (), True, True)


def engine() -> None:
    """A subclass of its class takes its place."""

    class Seen(_engine_class()):  # type: ignore[misc]
        pass

    assert callable(Seen().run_backward), "no run_backward"
    assert callable(Seen().queue_callback), "no queue_callback"


def engine_arguments() -> None:
    """`run_backward`'s arguments, by place and by name."""
    of, leaf = _engine_class()(), _leaf()
    root = (leaf * leaf).sum()
    one = torch.ones((), **_PLAIN)
    [given] = of.run_backward((root,), (one,), True, True, (leaf,), True, False)
    assert given.grad_fn is not None and leaf.grad is None, (
        "create_graph, inputs or accumulate_grad by place"
    )
    of.run_backward(
        tensors=(root,), grad_tensors=(one,), keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0, 2.0], "what is accumulated"


def engine_is_called() -> None:
    """Whole: `backward` and `grad` enter the engine that stands there."""
    variable = torch.autograd.Variable
    original = variable._execution_engine
    seen: list[Any] = []

    class Seen(type(original)):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((args, kwargs))
            return super().run_backward(*args, **kwargs)

    variable._execution_engine = Seen()
    try:
        leaf = _leaf()
        (leaf * 2).sum().backward()
        torch.autograd.grad((leaf * 2).sum(), leaf)
    finally:
        variable._execution_engine = original
    assert len(seen) == 2, f"{len(seen)} of 2 calls seen"
    kinds = [args[6] if len(args) > 6 else kwargs.get("accumulate_grad") for args, kwargs in seen]
    assert kinds == [True, False], f"accumulate_grad {kinds}"


def sequence_numbers() -> None:
    """The number that the next Node gets."""
    leaf, number = _leaf(), torch._C._autograd._get_sequence_nr()
    made: Any = (leaf * 2).grad_fn
    assert made._sequence_nr() == number, f"a Node of number {made._sequence_nr()}, not {number}"
    assert torch._C._autograd._get_sequence_nr() == number + 1, "it does not count Nodes"


def node_numbers() -> None:
    """Later Nodes have larger numbers."""
    first = _leaf() * 2
    second: Any = (first * 2).grad_fn
    before: Any = first.grad_fn
    assert before._sequence_nr() < second._sequence_nr(), "a later Node has no larger number"


def graph() -> None:
    """From a Node to its parameters."""
    leaf = _leaf()
    node: Any = (leaf * 2).grad_fn
    assert node.name().rpartition("::")[2] == "MulBackward0", f"name {node.name()!r}"
    accumulates: Any = node.next_functions[0][0]
    assert accumulates._sequence_nr() == _LEAF_NUMBER, "an AccumulateGrad has another number"
    assert accumulates.variable is leaf, "an AccumulateGrad has no variable"


def node_hooks() -> None:
    """What hooks of a Node see, and when."""
    leaf, seen = _leaf(), list[Any]()
    result = leaf * 2
    node: Any = result.grad_fn
    before = node.register_prehook(lambda came: seen.append(("before", came[0].tolist())))
    after = node.register_hook(lambda went, came: seen.append((went[0].tolist(), came[0].tolist())))
    _run(result)
    before.remove()
    after.remove()
    _run(result)
    assert seen == [("before", [1.0, 1.0]), ([2.0, 2.0], [1.0, 1.0])], f"seen {seen}"


def metadata() -> None:
    """A Node keeps what is put there."""
    node: Any = (_leaf() * 2).grad_fn
    node.metadata["gradtrace"] = 1
    assert node.metadata["gradtrace"] == 1, "it keeps nothing"


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def functions() -> None:
    """A Node of a Function's, told from others."""
    from torch.autograd.function import BackwardCFunction

    own: Any = _Own.apply(_leaf())  # type: ignore[no-untyped-call]
    others = _leaf() * 2
    assert isinstance(own.grad_fn, BackwardCFunction), "a Function's Node is none"
    assert not isinstance(others.grad_fn, BackwardCFunction), "every Node is one"


def graph_task() -> None:
    """-1 outside any pass, a number inside."""
    task, seen = torch._C._current_graph_task_id, list[int]()
    result: Any = _leaf() * 2
    result.grad_fn.register_prehook(lambda _: seen.append(task()))
    outside = task()
    _run(result)
    assert outside == -1 and len(seen) == 1 and seen[0] >= 0, f"{outside} outside, {seen} inside"


def leaf_tables() -> None:
    """Hooks on a parameter run in the order of a table that can be changed, and taken away."""
    leaf: Any = _leaf()
    seen: list[str] = []
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append("job"))
    ours = leaf.register_post_accumulate_grad_hook(lambda _: seen.append("ours"))
    table = leaf._post_accumulate_grad_hooks
    for key in [key for key in table if key != ours.id]:
        table[key] = table.pop(key)
    _run(leaf * 2)
    assert seen == ["ours", "job"], f"in the order {seen}"
    table.clear()
    leaf._post_accumulate_grad_hooks = None
    _run(leaf * 2)
    assert len(seen) == 2 and leaf.grad.tolist() == [4.0, 4.0], "a table that was taken away"


def module_hook_arguments() -> None:
    """How hooks of all modules are registered."""
    register = torch.nn.modules.module.register_module_forward_hook
    names = inspect.signature(register).parameters
    assert {"with_kwargs", "always_call"} <= set(names), f"it takes {list(names)}"


def module_calls() -> None:
    """The frame in which a module's hooks and forward are called."""
    assert torch.nn.Module._call_impl.__code__.co_name == "_call_impl", "another function"


def module_tables() -> None:
    """Where a module keeps what is its own."""
    module: Any = torch.nn.Module()
    for name in ("_parameters", "_buffers", "_modules", "_forward_hooks"):
        assert isinstance(module.__dict__.get(name), dict), f"no {name}"


def module_hooks() -> None:
    """Whole: what hooks of all modules see, also of a call that raises, from inside `_call_impl`."""
    of, seen = torch.nn.modules.module, list[Any]()

    class Raises(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError

    def before(module: Any, args: Any) -> None:
        caller: Any = sys._getframe(1)
        while caller is not None and caller.f_code.co_name != "_call_impl":
            caller = caller.f_back
        seen.append(("before", len(args), caller is not None))

    def after(module: Any, args: Any, *rest: Any) -> None:
        seen.append(("after", len(args), rest[0] if len(rest) == 2 else None))

    handles = [
        of.register_module_forward_pre_hook(before),
        of.register_module_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    try:
        torch.nn.Identity()(_leaf())
        try:
            Raises()(_leaf())
        except KeyError:
            seen.append("raised")
    finally:
        for handle in handles:
            handle.remove()
            of._global_forward_hooks_with_kwargs.pop(handle.id, None)
    want = [("before", 1, True), ("after", 1, {})]
    assert seen[:2] == want, f"of a call that returned: {seen[:2]}"
    assert [one[0] for one in seen[2:]] == ["before", "after", "r"], (
        f"of one that raised: {seen[2:]}"
    )


def optimizer_hooks() -> None:
    """Whole: what hooks of all optimizers see, from inside the wrapper of their step."""
    from torch.optim import optimizer as of

    seen = list[Any]()

    def stands_in_wrapper() -> bool:
        caller: Any = sys._getframe(2)
        return caller.f_code.co_name == "wrapper" and caller.f_globals is vars(of)

    handles = [
        of.register_optimizer_step_pre_hook(lambda *_: seen.append(stands_in_wrapper())),
        of.register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    leaf = _leaf()
    leaf.grad = torch.ones(2, **_PLAIN)
    try:
        torch.optim.SGD([leaf], lr=1.0).step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [True, "after"] and leaf.tolist() == [0.0, 0.0], f"seen {seen}"


def tracing() -> None:
    """Nothing is traced on a thread that traces nothing."""
    assert torch._C._get_tracing_state() is None, "a state where nothing is traced"


def modes() -> None:
    """How many modes are on, and inside a block that turns them off."""
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    count = torch._C._len_torch_dispatch_stack
    numbers = [count()]
    with Counts():  # type: ignore[no-untyped-call]
        numbers.append(count())
        with _disable_current_modes():
            numbers.append(count())
        numbers.append(count())
    assert numbers == [0, 1, 0, 1], f"counted {numbers}"
    assert torch._C._len_torch_function_stack() == 0, "a function mode where there is none"


class _Asks(torch.Tensor):
    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def torch_function() -> None:
    """A subclass is not asked inside the block."""
    tensor = _leaf().detach().as_subclass(_Asks)
    before = _Asks.asked
    with torch._C.DisableTorchFunction():
        tensor.sum()
    assert _Asks.asked == before, "a subclass is asked"


def functorch() -> None:
    """A plain tensor is in no wrapper."""
    assert not torch._C._functorch.is_functorch_wrapped_tensor(_leaf()), "every tensor is"


def profiler() -> None:
    """Off here, and its switch can be turned."""
    on = torch._C._autograd._profiler_enabled()
    assert isinstance(on, bool), f"it is {on!r}"
    torch._C._autograd._enable_record_function(False)
    torch._C._autograd._enable_record_function(True)


def norms() -> None:
    """The same norms."""
    found = torch._foreach_norm([torch.full((4,), 2.0, **_PLAIN)])
    assert [float(norm) for norm in found] == [4.0], "other norms"


def tensor_version() -> None:
    """It rises when the tensor is changed in place."""
    tensor = torch.ones(2, **_PLAIN)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1, "a change in place does not raise it"


def replay() -> None:
    """A Node can be called once more."""
    result = _leaf() * 2
    node: Any = result.grad_fn
    with torch.no_grad():
        given = node(torch.ones(2, **_PLAIN))
    first = given[0] if isinstance(given, tuple) else given
    assert first.tolist() == [2.0, 2.0], "it gives something else"


def saved_tensors() -> None:
    """What a Node saved, without the check of its version."""
    node: Any = (_leaf() * _leaf()).grad_fn
    assert node._raw_saved_self.data.tolist() == [1.0, 1.0], "something else"


def never_compiled() -> None:
    """A function is marked."""
    frames: Any = torch._C._dynamo.eval_frame

    def marked() -> None:
        pass

    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    else:
        frames.skip_code(marked.__code__)

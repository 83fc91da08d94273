"""What the recorder leans on that torch promises nobody: one table of names, and whether they still are what they were.

A name that is gone closes the source that needs it, and nothing else; code asks for such names with `found`. What a
name does is tried where torch's version is none that was tested: cheaply when a recording begins, wholly by
`python -m gradtrace_recorder self-test`, which `analyzer doctor` calls.
Standard library and torch only: an armed process loads this before its first event.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gradtrace_recorder.torch_internals import probes

# Releases that passed a row of `scripts/matrix` (2.13.0: the whole suite), the oldest first. Others of their minors
# count as tested too.
TESTED_TORCH = ("2.6.0", "2.9.1", "2.13.0", "2.14.1")

MODULES, BACKWARD, OPTIMIZER = "module source", "backward source", "optimizer source"
DDP, FSDP, PIPELINE = "DDP source", "FSDP source", "pipeline source"
SUMMARIES = "summaries"
_EVERYTHING = (MODULES, BACKWARD, OPTIMIZER, DDP, FSDP, PIPELINE)
_MOST_SECONDS = 10.0


@dataclass(frozen=True)
class Private:
    """One name, or one thing that is done with several.

    `sources` are those that record nothing without it; with none, what it is used for is done without. `probe`
    raises where it is not what it was; `is_whole` ones change what all threads share, and are for a process that trains
    nothing. Nothing is asked before `module` has been imported. `proved_on` are the releases on which it was found as
    it should be.
    """

    name: str
    used_for: str
    sources: tuple[str, ...] = ()
    probe: Callable[[], None] | None = None
    module: str | None = None
    is_whole: bool = False
    proved_on: tuple[str, ...] = TESTED_TORCH

    @property
    def is_path(self) -> bool:
        """Whether the name is one that can be looked up."""
        return self.name.startswith("torch.") and self.name.replace(".", "").isidentifier()


@dataclass(frozen=True)
class Finding:
    """What became of one name. `source` names what is not recorded without it, "" for none; `detail` says what is
    wrong, or why it was not asked; `proved_on` are the releases of torch on which it was found as it should be."""

    name: str
    used_for: str
    source: str
    ok: bool
    detail: str
    proved_on: tuple[str, ...] = TESTED_TORCH


def _pipelining(part: str) -> str:
    return f"torch.distributed.pipelining.{part}"


_FSDP = "torch.distributed.fsdp._fully_shard"
_SINCE_2_9 = TESTED_TORCH[1:]  # 2.6 has no such thing, and is done without

PRIVATES = (
    Private("torch.autograd.Variable._execution_engine", "seeing every backward pass", (BACKWARD,), probes.engine),
    Private("engine.run_backward(...)", "telling a pass's outputs and kind", (BACKWARD,), probes.engine_arguments),
    Private("torch.autograd.backward", "seeing how the engine is called", (BACKWARD,), probes.engine_is_called,
            is_whole=True),
    Private("torch._C._autograd._get_sequence_nr", "naming the module of a Node", (MODULES,), probes.sequence_numbers),
    Private("torch.autograd.graph._engine_run_backward", "seeing passes with no frame of ours below the job's"),
    Private("node._sequence_nr()", "the order of Nodes", (BACKWARD,), probes.node_numbers),
    Private("node.next_functions", "walking the graph to its parameters", (BACKWARD,), probes.graph),
    Private("node.register_prehook, node.register_hook", "seeing Nodes run", (BACKWARD,), probes.node_hooks),
    Private("node.metadata", "freeing long graphs in pieces", (), probes.metadata),
    Private("torch.autograd.function.BackwardCFunction", "knowing a Function of the job's", (BACKWARD,),
            probes.functions),
    Private("torch._C._current_graph_task_id", "knowing what runs inside a backward pass",
            (MODULES, BACKWARD, OPTIMIZER, DDP), probes.graph_task),
    Private("tensor._post_accumulate_grad_hooks", "local gradients, before any hook of the job's", (BACKWARD,),
            probes.leaf_tables),
    Private("torch.nn.modules.module.register_module_forward_pre_hook", "seeing modules called", (MODULES,)),
    Private("torch.nn.modules.module.register_module_forward_hook", "seeing modules return", (MODULES,),
            probes.module_hook_arguments),
    Private("torch.nn.modules.module._global_forward_hooks", "leaving no hook behind", (MODULES,)),
    Private("torch.nn.modules.module._global_forward_hooks_with_kwargs", "leaving no hook behind", (MODULES,)),
    Private("torch.nn.modules.module._has_any_global_hook", "keeping torch.compile from warning of our hooks",
            proved_on=_SINCE_2_9),
    Private("torch.nn.Module._call_impl", "knowing which calls of modules still run", (MODULES,), probes.module_calls),
    Private("module._parameters, module._forward_hooks", "naming modules and parameters", (MODULES,),
            probes.module_tables),
    Private("global hooks of modules", "what went into modules and came out", (MODULES,), probes.module_hooks,
            is_whole=True),
    Private("torch.optim.optimizer.register_optimizer_step_pre_hook", "seeing steps begin", (OPTIMIZER,)),
    Private("torch.optim.optimizer.register_optimizer_step_post_hook", "seeing steps end", (OPTIMIZER,)),
    Private("global hooks of optimizers", "what an optimizer saw and left", (OPTIMIZER,), probes.optimizer_hooks,
            is_whole=True),
    Private("torch.amp.GradScaler.step", "steps that a GradScaler skips"),
    Private("torch._C._get_tracing_state", "leaving alone what is traced", (), probes.tracing),
    Private("torch._C._len_torch_dispatch_stack", "staying out of the job's modes", (SUMMARIES,), probes.modes),
    Private("torch._C._len_torch_function_stack", "staying out of the job's modes", (SUMMARIES,)),
    Private("torch.utils._python_dispatch._disable_current_modes", "staying out of the job's modes", (SUMMARIES,)),
    Private("torch._C.DisableTorchFunction", "staying out of the job's tensor subclasses", _EVERYTHING,
            probes.torch_function),
    Private("torch._C._disabled_torch_dispatch_impl", "reading a loss"),
    Private("torch._C._functorch.is_functorch_wrapped_tensor", "leaving alone tensors under transforms",
            (SUMMARIES, BACKWARD), probes.functorch),
    Private("torch._C._functorch.is_legacy_batchedtensor", "leaving alone tensors under transforms", (SUMMARIES,)),
    Private("torch.nn.parameter.is_lazy", "leaving alone what has no memory yet", (SUMMARIES,)),
    Private("torch._C._autograd._profiler_enabled", "staying out of the job's profiles", (SUMMARIES,), probes.profiler),
    Private("torch._C._autograd._enable_record_function", "staying out of the job's profiles", (SUMMARIES,)),
    Private("torch.autograd.profiler._run_on_profiler_start", "ending our thread while a profiler begins"),
    Private("torch.autograd.profiler._run_on_profiler_stop", "ending our thread while a profiler begins"),
    Private("torch._foreach_norm", "norms of many tensors at once", (SUMMARIES,), probes.norms),
    Private("tensor._version", "knowing a gradient that is handed on", (SUMMARIES,), probes.tensor_version),
    Private("torch._C._current_autograd_node", "running Nodes again (GRADTRACE_REPLAY)", (), probes.replay),
    Private("node._raw_saved_self.data", "who changed a saved tensor", (), probes.saved_tensors),
    Private("torch._C._dynamo.eval_frame", "keeping torch.compile away from our hooks", (), probes.never_compiled),
    Private("torch.distributed._register_comm_hook", "placing a relay around a job's hook", (DDP,),
            module="torch.distributed.distributed_c10d"),
    Private("torch.distributed._register_builtin_comm_hook", "placing a relay around a job's hook", (DDP,),
            module="torch.distributed.distributed_c10d"),
    Private("torch.distributed.Reducer._run_allreduce_hook", "buckets of models without a hook",
            module="torch.distributed.distributed_c10d"),
    Private("torch.nn.parallel.DistributedDataParallel._ddp_init_helper", "meeting DDP modules", (DDP,),
            module="torch.distributed.distributed_c10d"),
    Private("torch.distributed.algorithms.join.Join.notify_join_context", "the divisor under join()", (DDP,),
            module="torch.distributed.distributed_c10d"),
    Private(f"{_FSDP}._fsdp_collectives.DefaultReduceScatter", "reductions of FSDP2",
            module=f"{_FSDP}._fsdp_collectives", proved_on=_SINCE_2_9),
    Private(f"{_FSDP}.FSDPModule.set_custom_reduce_scatter", "reductions of FSDP2",
            module=f"{_FSDP}._fsdp_collectives", proved_on=_SINCE_2_9),
    Private(_pipelining("stage._PipelineStageBase.forward_one_chunk"), "forwards of stages", (PIPELINE,),
            module=_pipelining("schedules")),
    Private(_pipelining("stage._PipelineStageBase.backward_one_chunk"), "backwards of stages", (PIPELINE,),
            module=_pipelining("schedules")),
    Private(_pipelining("_backward.stage_backward"), "backwards of stages", (PIPELINE,),
            module=_pipelining("schedules")),
)  # fmt: skip

# What is looked up in a module that the job may never import is asked for by the whole self-test alone.
_OWN_MODULES = {private.module for private in PRIVATES if private.module is not None}


def found(name: str, otherwise: Any) -> Any:
    """What torch has under this name of the table, and `otherwise` where it has nothing."""
    try:
        return _looked_up(name)
    except AttributeError:
        return otherwise


def self_test(*, whole: bool = True) -> list[Finding]:
    """What torch is asked of the table, in its order. Nothing of it is raised.

    All but the whole one may run where a job trains: on a thread of its own, which shares no modes, no numbers of Nodes
    and no switches with the job's, and it calls nothing that hooks of the job's see.
    """
    if whole:
        for name in sorted(_OWN_MODULES):
            _import(name)
    chosen = [private for private in PRIVATES if whole or not private.is_whole]
    findings: list[Finding] = []

    def ask() -> None:
        for private in chosen:
            findings.append(_finding(private))

    thread = threading.Thread(target=ask, name="gradtrace self-test", daemon=True)
    thread.start()
    thread.join(_MOST_SECONDS)
    for private in chosen[len(findings) :]:
        findings.append(_of(private, f"no answer within {_MOST_SECONDS:g} seconds"))
    return findings


def lookups() -> list[Finding]:
    """Whether what has a name is there: microseconds each, and nothing is called."""
    return [_finding(private, tries=False) for private in PRIVATES if private.is_path]


def is_tested(version: str) -> bool:
    """Whether the suite has passed on a release of that minor."""
    release = version.partition("+")[0]
    return all(part.isdigit() for part in release.split(".")) and _minor(release) in [
        _minor(tested) for tested in TESTED_TORCH
    ]


def is_newer(version: str) -> bool:
    """Whether it is of a later minor than all that were tested."""
    return _minor(version) > _minor(TESTED_TORCH[-1])


@dataclass(frozen=True)
class Verdict:
    """What is not recorded in this process: `closed` are sources, and "summaries"; `problems` say why, one line each.
    `note` says that torch is newer than what was tested, "" where it is not."""

    closed: frozenset[str]
    problems: tuple[str, ...]
    note: str


def verdict_at_start(gradtrace: str) -> Verdict:
    """What a recording that begins is to leave out. `gradtrace` is our version."""
    version = str(torch.__version__)
    findings = lookups() if is_tested(version) else self_test(whole=False)
    failed = [finding for finding in findings if not finding.ok]
    closed = {source for finding in failed for source in finding.source.split(", ") if source}
    problems = [
        f"torch {version} is not what {_what(source)} needs, and is recorded without: "
        f"{_listed(finding for finding in failed if source in finding.source.split(', '))}"
        for source in (*_EVERYTHING, SUMMARIES)
        if source in closed
    ]
    note = ""
    if is_newer(version):
        problems += [
            f"torch {version} lacks {f.name}: {f.used_for}" for f in failed if not f.source
        ]
        release = ".".join(gradtrace.split(".")[:2])
        passed = len(findings) - len(failed)
        note = (
            f"torch {version} is newer than what gradtrace {release} was tested with "
            f"({_dotted(TESTED_TORCH[-1])}); {passed} of {len(findings)} self-tests pass"
        )
    return Verdict(frozenset(closed), tuple(problems), note)


def is_first_rank() -> bool:
    """Whether this process is to say what all ranks would say."""
    return os.environ.get("RANK", "0") == "0"


def _finding(private: Private, *, tries: bool = True) -> Finding:
    if private.module is not None and private.module not in sys.modules:
        return Finding(
            private.name, private.used_for, ", ".join(private.sources), True, f"{private.module} is not imported",
            private.proved_on,
        )  # fmt: skip
    try:
        if private.is_path:
            _looked_up(private.name)
        if tries and private.probe is not None:
            private.probe()
    except AttributeError as error:
        return _of(private, "is not there" if _is_gone(private) else str(error))
    except Exception as error:
        return _of(private, f"{type(error).__name__}: {error}".removesuffix(": "))
    return _of(private, "")


def _of(private: Private, detail: str) -> Finding:
    sources = ", ".join(private.sources)
    return Finding(private.name, private.used_for, sources, not detail, detail, private.proved_on)


def _is_gone(private: Private) -> bool:
    if private.is_path:
        try:
            _looked_up(private.name)
        except AttributeError:
            return True
    return False


def _looked_up(name: str) -> Any:
    of: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        # A package knows a part of it as soon as that is imported, or has a function of the same name.
        of = (
            getattr(of, part) if hasattr(of, part) or path not in sys.modules else sys.modules[path]
        )
    return of


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception:
        return  # a torch without it, which the finding says


def _what(source: str) -> str:
    return "a summary" if source == SUMMARIES else f"the {source}"


def _listed(findings: Iterable[Finding]) -> str:
    return "; ".join(f"{f.name} ({f.used_for}): {f.detail}" for f in findings)


def _minor(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.partition("+")[0].split(".")[:2]:
        numbers.append(int("".join(c for c in part if c.isdigit()) or 0))
    return tuple(numbers)


def _dotted(version: str) -> str:
    return ".".join(map(str, _minor(version)))

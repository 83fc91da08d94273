"""What Python's own stack says of torch: calls of modules that still run, a step inside another, graphs of a compiler.

Functions of torch are told by their names, which no version promises. `dry_runs` asks the same of pipelines.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.optim import optimizer as torch_optimizer

from gradtrace_recorder.torch_internals.dynamo import never_compiled


def calls_run(count: int) -> bool:
    """Whether so many calls of modules are running on this thread. Of a call inside another it looks at a few frames.

    Source: torch/nn/modules/module.py, `_call_impl`, which calls global hooks (2.13).
    """
    # Python makes an object for each frame that is looked at: those of ours, down to the source, are passed over.
    frame: Any = sys._getframe(3)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            count -= 1
            if not count:
                return True
        frame = frame.f_back
    return False


def is_of_a_compiler(module: nn.Module) -> bool:
    """Whether the module that is just being called is a graph that torch.compile made, and its backend runs as a
    module (`aot_eager`, or one of the job's that returns the graph): a part of the compiled region, no module.

    Source: torch/_dynamo/output_graph.py, `compile_and_call_fx_graph`; torch/fx/graph_module.py (2.13).
    """
    if all(base.__name__ != "GraphModule" for base in type(module).__mro__):
        return False
    if "compile_subgraph_reason" in module.__dict__:
        return True
    frame: Any = sys._getframe(1)
    while frame is not None:
        of = frame.f_globals.get("__name__") or ""
        if not of.startswith(("torch.nn.modules.", "torch.fx.", __package__.partition(".")[0])):
            return bool(
                of.startswith(("torch._dynamo.backends.", "torch._functorch.", "torch._inductor."))
            )
        frame = frame.f_back
    return False


def is_inside_another_step() -> bool:
    """Whether the step that is just beginning is made by another optimizer's step, or by its closure.

    Source: torch/optim/optimizer.py, `Optimizer.profile_hook_step` (2.13): its wrapper calls the hooks.
    """
    frame: Any = sys._getframe(1)
    running = 0
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_globals is vars(torch_optimizer):
            running += 1
        frame = frame.f_back
    return running > 1


never_compiled(calls_run, is_inside_another_step, is_of_a_compiler)

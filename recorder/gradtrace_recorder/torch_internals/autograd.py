"""What autograd says of Nodes and passes: numbers of Nodes, the pass that a thread runs, what is running.

`sequence_nr` is the number of the calling thread's next Node; `graph_task` is -1 where the thread runs no Node of any
pass.
"""

from __future__ import annotations

from gradtrace_recorder.torch_internals.privates import found

sequence_nr = found("torch._C._autograd._get_sequence_nr", lambda: 0)
graph_task = found("torch._C._current_graph_task_id", lambda: -1)
current_node = found("torch._C._current_autograd_node", lambda: None)
# The class of Nodes of Functions that are defined in Python.
FUNCTION_NODE = found("torch.autograd.function.BackwardCFunction", ())


def inside_backward() -> bool:
    """Whether the calling thread is running a Node, or a hook of one, of some backward pass."""
    is_inside: bool = graph_task() != -1
    return is_inside

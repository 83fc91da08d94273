"""Lets a long graph that Python has looked at be freed in pieces.

Torch frees a graph in a loop, but a Node that Python has seen owns a Python object, and frees the Nodes that it
leads to from inside its own end (torch 2.13): so deep a recursion overflows the stack. So wherever such a chain gets
long, a Node is given a `_Successors` in its `metadata`: it holds the Nodes that it leads to as long as it lives
itself, hence no longer than the graph does, and lets go of them a moment after it has gone: from the top of the
stack, again piece by piece.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

from gradtrace_recorder.torch_internals.dynamo import never_compiled

# Nodes in a row that are freed by recursion: one took about 210 bytes of stack.
LONGEST = 1000

_KEY = "gradtrace_successors"
_waiting: list[tuple[Any, ...]] = []
_ending: list[None] = []  # one for each `_Successors` whose end is running


def release_in_pieces(nodes: Iterable[tuple[int, Any]]) -> None:
    """Cut every path through these Nodes into pieces that may be freed by recursion.

    They come with their sequence numbers, the youngest first: the order of the backward pass.
    """
    depths: dict[Any, int] = {}
    for _, node in nodes:
        depth = depths.pop(node, 0) + 1
        following = [after for after, _ in node.next_functions if after is not None]
        if depth == LONGEST:
            if _KEY not in node.metadata:
                node.metadata[_KEY] = _Successors(tuple(following))
            continue
        for after in following:
            if depths.get(after, 0) < depth:
                depths[after] = depth


def release_waiting(_: Any = None) -> int:
    """Let go of what waits. Returns 0, as Python wants it of a pending call."""
    if _ending and _waiting:
        _soon(_as_pending, None)  # called inside such an end, whose Node still leads there
        return 0
    while _waiting:
        try:
            _waiting.pop()
        except IndexError:  # another thread was faster
            break
    return 0


_as_pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(release_waiting)
_soon: Any = ctypes.pythonapi.Py_AddPendingCall
_soon.argtypes = (type(_as_pending), ctypes.c_void_p)
_hold: Any = ctypes.pythonapi.Py_IncRef
_hold.argtypes = (ctypes.py_object,)


class _Successors:
    """The Nodes that a Node leads to. Its end comes before the Node lets go of them."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[Any, ...]) -> None:
        self.nodes = nodes

    def __del__(
        self,
        finalizing: Any = sys.is_finalizing,
        hold: Any = _hold,
        ending: list[None] = _ending,
        waiting: list[tuple[Any, ...]] = _waiting,
        soon: Any = _soon,
        call: Any = _as_pending,
    ) -> None:
        # Defaults are there as long as the function is: a module's names may have gone when Python ends.
        if finalizing():
            hold(self.nodes)  # nobody will come for them, and the process ends
            return
        ending.append(None)
        waiting.append(self.nodes)
        # Python's main thread makes the call between two instructions. Where that takes long, or the queue is full, our
        # next hook lets go. It must not be made right here: after a call Python looks, after `del` it does not.
        soon(call, None)
        del ending[-1]


never_compiled(release_waiting, _Successors.__del__)

"""Which module made this Node? By the interval of autograd's sequence numbers that its call covers.

Autograd numbers Nodes per thread as forward creates them (`torch.autograd._get_sequence_nr`). The number is
read at the entry and exit of each module call: a Node belongs to the innermost call whose interval holds its
number. Kept as a list of boundaries: from this number on, Nodes belong to that call.

The number is per thread, and a Node does not show its thread to Python. So on threads other than the first that
ran a module, a call from outside any module tags the Nodes that lead to its outputs, as it ends.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from typing import Any

from gradtrace_schemas.journal import NULL_INT32, NULL_STRING

_get_ident = threading.get_ident

# In `node.metadata` of a Node made on another thread than the first: whose recording this is, and the call.
_TAG = "gradtrace_call"


class RootCall:
    """One call of a root module; `used` once a backward pass ran through its graph."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = False


class Frame:
    """One call of a module, as far as its Nodes need to know it. `outer` is the call around it."""

    __slots__ = (
        "call_index", "fqn", "fqn_number", "microbatch", "outer", "phase", "root", "root_call", "step", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        root: int,
        fqn: str,
        fqn_number: int,
        call_index: int,
        root_call: RootCall | None,
        wanted: bool,
        step: int = NULL_INT32,
        microbatch: int = NULL_INT32,
        phase: int = NULL_STRING,
        outer: Frame | None = None,
    ) -> None:
        self.root = root
        self.fqn = fqn
        self.fqn_number = fqn_number
        self.call_index = call_index
        self.root_call = root_call
        self.wanted = wanted
        self.step = step
        self.microbatch = microbatch
        self.phase = phase
        self.outer = outer


# Stands for the call of Nodes of which it is not known who made them.
_UNKNOWN = Frame(-1, "", -1, -1, None, True)

# Boundaries kept: the graphs of the last steps. Far more than a step has calls, and bounded.
_MOST_BOUNDARIES = 400_000
# Nodes that one call on another thread tags at most: Python's view of a longer chain must not be freed in one go.
_MOST_TAGGED = 8000


class _Thread:
    __slots__ = ("all_tagged", "first_known", "frames", "numbers")

    def __init__(self, first_known: int) -> None:
        self.numbers: list[int] = []
        self.frames: list[Frame | None] = []
        self.first_known = first_known
        self.all_tagged = True

    def frame_at(self, number: int) -> Frame | None:
        return self.frames[bisect.bisect_right(self.numbers, number) - 1]


class _Running:
    """A Node that a thread is running, and that may make others; `is_marked` once there is a boundary for it."""

    __slots__ = ("began", "frame", "is_marked")

    def __init__(self, began: int, frame: Frame) -> None:
        self.began = began
        self.frame = frame
        self.is_marked = False


class Attribution:
    """The boundaries of every thread that ran modules."""

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}
        self._first: int | None = None
        self._running: dict[int, list[_Running]] = {}
        self._mine = object()  # what other recordings left on a Node is not ours

    def mark(self, number: int, frame: Frame | None) -> None:
        """From this sequence number on, Nodes made on the calling thread belong to `frame`.

        None is code outside any module: it belongs to the Node that the thread is running, if any.
        """
        ident = _get_ident()
        if self._running:
            running = self.mark_running()
            if frame is None and running is not None:
                frame = running.frame
        thread = self._threads.get(ident)
        if (
            thread is not None
            and thread.numbers[-1] < number
            and len(thread.numbers) < _MOST_BOUNDARIES
        ):
            thread.frames.append(frame)  # as `_mark` does
            thread.numbers.append(number)
        else:
            self._mark(ident, number, frame)

    def lost(self, number: int) -> None:
        """The calls that the calling thread was in have ended unseen: who made the Nodes since its last boundary
        cannot be told, and from this number on they belong to no module."""
        thread = self._threads.get(threading.get_ident())
        if thread is not None:
            thread.frames[-1] = _UNKNOWN
        self.mark(number, None)

    def node_begins(self, number: int, frame: Frame) -> None:
        """The calling thread runs a Node of that call, which may make others: they belong to the call too."""
        self._running.setdefault(threading.get_ident(), []).append(_Running(number, frame))

    def node_ends(self, number: int) -> int | None:
        """The Node that the calling thread began last has run. The number at which it began, if it made others."""
        ident = threading.get_ident()
        ended = self.node_failed(ident)
        if ended is None or not (ended.is_marked or number > ended.began):
            return None
        outer = self.mark_running()
        if not ended.is_marked:
            self._mark(ident, ended.began, ended.frame)
        self._mark(ident, number, outer.frame if outer is not None else None)
        return ended.began

    def node_failed(self, ident: int) -> _Running | None:
        """That thread will not come back to the Node that it began last."""
        stack = self._running.get(ident)
        if not stack:
            return None
        ended = stack.pop()
        if not stack:
            del self._running[ident]
        return ended

    def mark_running(self) -> _Running | None:
        """What the Nodes have made that the calling thread runs is known from now on. Gives the innermost."""
        ident = threading.get_ident()
        stack = self._running.get(ident)
        if not stack:
            return None
        for running in stack:
            if not running.is_marked:
                running.is_marked = True
                self._mark(ident, running.began, running.frame)
        return stack[-1]

    def owner(self, number: int, node: Any) -> tuple[Frame | None, bool]:
        """(the call that made the Node of that number, whether that is known).

        (None, True) is a Node made outside any module.
        """
        if len(self._threads) > 1:
            return self._owner_among_threads(number, node)
        thread = self._threads.get(threading.get_ident())
        if thread is None or number < thread.first_known:
            return None, False
        return _known(thread.frame_at(number))

    def boundaries(self) -> tuple[list[int], list[Frame | None], int, Frame]:
        """Of the calling thread, to be looked up in and not changed: from which number on Nodes belong to which call,
        the first number that is known of, and the call that stands for an unknown one."""
        thread = self._threads.get(threading.get_ident())
        if thread is None:
            return [], [], 0, _UNKNOWN
        return thread.numbers, thread.frames, thread.first_known, _UNKNOWN

    @property
    def is_of_one_thread(self) -> bool:
        """Whether one thread alone ran modules."""
        return len(self._threads) == 1

    @property
    def has_several_threads(self) -> bool:
        """Whether another thread than the calling one ran modules."""
        others = len(self._threads) - (threading.get_ident() in self._threads)
        return others > 0

    @property
    def must_tag(self) -> bool:
        """Whether the calling thread is another than the first that ran a module."""
        return threading.get_ident() != self._first

    def tag(self, outputs: Iterable[Any], first: int, last: int, arguments: Iterable[Any]) -> None:
        """A call from outside any module made Nodes number `first` to before `last` on the calling thread: those
        that lead to its outputs are tagged.

        The walk ends at the Nodes of its arguments, and at what was made before: another thread may have.
        """
        thread = self._threads.get(threading.get_ident())
        if thread is None:
            return
        seen = {tensor.grad_fn for tensor in arguments}
        waiting = [tensor.grad_fn for tensor in outputs]
        tagged = 0
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = type(node)._sequence_nr(node)
            if first <= number < last:
                if tagged == _MOST_TAGGED:
                    break
                tagged += 1
                node.metadata.setdefault(_TAG, (self._mine, thread.frame_at(number)))
                waiting += [following for following, _ in node.next_functions]
        if tagged < last - first:
            thread.all_tagged = False  # some lead to no output; if they live, they cannot be told

    def _owner_among_threads(self, number: int, node: Any) -> tuple[Frame | None, bool]:
        """The same where several threads ran modules: by the Node's tag, or where one thread alone can have made
        it. What another thread than the first made inside a module is tagged, if its outputs lead to it."""
        tag = node.metadata.get(_TAG)
        if tag is not None and tag[0] is self._mine:
            return _known(tag[1])
        ident = threading.get_ident()
        candidates: set[Frame | None] = set()
        try:
            for key, thread in list(self._threads.items()):
                own = key == ident
                if number < thread.first_known or not (own or number < thread.numbers[-1]):
                    continue
                frame = thread.frame_at(number)
                if own or key == self._first or frame is None or not thread.all_tagged:
                    candidates.add(frame)
        except IndexError:  # another thread is just dropping what it knew
            return None, False
        return _known(candidates.pop()) if len(candidates) == 1 else (None, False)

    def _mark(self, ident: int, number: int, frame: Frame | None) -> None:
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread(number)
            if self._first is None:
                self._first = ident
        numbers = thread.numbers
        if numbers and numbers[-1] == number:
            thread.frames[-1] = frame
            return
        if numbers and number < numbers[-1]:
            # Another thread with the identifier of one that ended.
            numbers.clear()
            thread.frames.clear()
            thread.first_known = number
            thread.all_tagged = True
        thread.frames.append(frame)  # before its number: other threads read meanwhile
        numbers.append(number)
        if len(numbers) > _MOST_BOUNDARIES:
            half = _MOST_BOUNDARIES // 2
            del numbers[:half], thread.frames[:half]
            thread.first_known = numbers[0]


def _known(frame: Frame | None) -> tuple[Frame | None, bool]:
    return (None, False) if frame is _UNKNOWN else (frame, True)

"""Which module made this Node? By the interval of autograd's sequence numbers that its call covers.

Autograd numbers Nodes per thread as forward creates them (`torch.autograd._get_sequence_nr`). The number is
read at the entry and exit of each module call: a Node belongs to the innermost call whose interval holds its
number. Kept as a list of boundaries: from this number on, Nodes belong to that call.
"""

from __future__ import annotations

import bisect
import threading


class RootCall:
    """One call of a root module; `used` once a backward pass ran through its graph."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = False


class Frame:
    """One call of a module, as far as its Nodes need to know it."""

    __slots__ = ("call_index", "fqn", "fqn_number", "root", "root_call", "wanted")

    def __init__(
        self,
        root: int,
        fqn: str,
        fqn_number: int,
        call_index: int,
        root_call: RootCall | None,
        wanted: bool,
    ) -> None:
        self.root = root
        self.fqn = fqn
        self.fqn_number = fqn_number
        self.call_index = call_index
        self.root_call = root_call
        self.wanted = wanted


# Boundaries kept: the graphs of the last steps. Far more than a step has calls, and bounded.
_MOST_BOUNDARIES = 400_000


class _Thread:
    __slots__ = ("first_known", "frames", "numbers")

    def __init__(self, first_known: int) -> None:
        self.numbers: list[int] = []
        self.frames: list[Frame | None] = []
        self.first_known = first_known


class Attribution:
    """The boundaries of every thread that ran modules."""

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}

    def mark(self, number: int, frame: Frame | None) -> None:
        """From this sequence number on, Nodes made on the calling thread belong to `frame`."""
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread(number)
        numbers = thread.numbers
        if numbers and numbers[-1] == number:
            thread.frames[-1] = frame
            return
        if numbers and number < numbers[-1]:
            # Another thread with the identifier of one that ended.
            numbers.clear()
            thread.frames.clear()
            thread.first_known = number
        numbers.append(number)
        thread.frames.append(frame)
        if len(numbers) > _MOST_BOUNDARIES:
            half = _MOST_BOUNDARIES // 2
            del numbers[:half], thread.frames[:half]
            thread.first_known = numbers[0]

    def owner(self, number: int) -> tuple[Frame | None, bool]:
        """(the call that made the Node of that number, whether that is known).

        For Nodes that the calling thread made. (None, True) is a Node made outside any module.
        """
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None or number < thread.first_known:
            return None, False
        if len(self._threads) > 1 and any(
            other.first_known <= number < other.numbers[-1]
            for key, other in self._threads.items()
            if key != ident
        ):
            return None, False  # made on this thread or on another: both have counted that far
        place = bisect.bisect_right(thread.numbers, number) - 1
        return thread.frames[place], True

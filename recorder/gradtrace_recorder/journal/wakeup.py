"""What wakes the drain thread: it can be set in any hook, whatever a signal handler of the job's does there."""

from __future__ import annotations

import queue


class Wakeup:
    """Stays set until it is cleared, as `threading.Event` does, which holds a lock in code of Python's meanwhile.

    A handler that raised there would leave that lock taken, and the next to set it would wait for ever. Here each step
    that must be whole is one call into C. (`queue.SimpleQueue.put` may be interrupted by another: it is reentrant.
    Source: docs.python.org, queue, SimpleQueue.)
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake who waits, or comes to. Called on any thread."""
        if self._asked.empty():
            self._asked.put(None)

    def wait(self, timeout: float) -> bool:
        """Whether it is set, or is within so many seconds. For one thread at a time."""
        try:
            self._asked.get(timeout=timeout)
        except queue.Empty:
            return False
        self.set()
        return True

    def clear(self) -> None:
        """What was set until now is done with. Called by who waits."""
        while not self._asked.empty():
            self._asked.get()

"""Kernels made ready outside the job's threads: importing Triton and compiling take seconds, a step does not.

Until a kernel is ready, and for good where it cannot be made, the job's thread takes torch's operations.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Iterable


class Readiness:
    """Prepares what is asked for, one after the other, on a thread that starts with the first."""

    def __init__(
        self,
        prepare: Callable[[Hashable], None],
        failed: Callable[[Exception], None],
        ready: Iterable[Hashable] = (),
    ) -> None:
        """`failed` is called once, with the first exception of `prepare`; nothing is prepared after it. `ready` is
        what needs no preparation."""
        self._prepare = prepare
        self._failed = failed
        self.ready: set[Hashable] = set(ready)
        self._asked: set[Hashable] = set()
        self._queue: queue.SimpleQueue[Hashable] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_over = False

    def is_ready(self, what: Hashable) -> bool:
        """Whether it can be used now. If not, it is prepared; nothing waits for that."""
        if what in self.ready:
            return True
        if what not in self._asked and not self.is_over:
            with self._lock:
                self._asked.add(what)
                self._queue.put(what)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="gradtrace-kernels", daemon=True
                    )
                    self._thread.start()
        return False

    def _run(self) -> None:
        while not self.is_over:
            what = self._queue.get()
            if what is _END:
                return
            try:
                self._prepare(what)
            except Exception as error:
                self.is_over = True
                self.ready.clear()
                self._failed(error)
                return
            self.ready.add(what)

    def give_up(self, error: Exception) -> None:
        """What was ready has failed in use."""
        if not self.is_over:
            self.is_over = True
            self.ready.clear()
            self._failed(error)

    def stop(self, timeout: float = 10.0) -> None:
        """Prepare nothing more, and wait for what is being prepared."""
        self.is_over = True
        self._queue.put(_END)
        if self._thread is not None:
            self._thread.join(timeout)


_END = object()

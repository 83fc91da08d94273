"""What a command is doing, on stderr, for whoever waits longer than a second.

On a terminal it is one line, which is written over and erased at the end. Elsewhere (a log, a pipe) it is a plain
line every half minute: enough to see that it lives, too little to fill a log.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

FIRST_AFTER_S = 1.0
PLAIN_EVERY_S = 30.0
_ERASE = "\r\x1b[K"


class _Line:
    """The one line of a process. Work that is nested tells the innermost."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._began = time.monotonic()
        self._work: list[tuple[str, int | None, list[int]]] = []
        self._is_shown = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._thread.start()

    def begin(self, what: str, total: int | None) -> Callable[[int], None]:
        done = [0]
        self._work.append((what, total, done))

        def count(more: int) -> None:
            done[0] += more

        return count

    def end(self) -> bool:
        """Whether nothing is left to be told of; then the line is erased."""
        self._work.pop()
        if self._work:
            return False
        self._ended.set()
        self._thread.join()
        return True

    def _tell(self) -> None:
        wait = FIRST_AFTER_S if self._is_terminal else PLAIN_EVERY_S
        while not self._ended.wait(wait):
            wait = 0.5 if self._is_terminal else PLAIN_EVERY_S
            self._write()
        if self._is_shown and self._is_terminal:
            self._put(_ERASE)

    def _write(self) -> None:
        work = self._work[-1:]
        if not work:
            return
        what, total, [done] = work[0]
        of = f" {done:,} of {total:,}" if total else ""
        text = f"analyzer: {what}{of}, {time.monotonic() - self._began:.0f} s"
        self._put(f"{_ERASE}{text}" if self._is_terminal else f"{text}\n")
        self._is_shown = True

    def _put(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # nobody reads it any more
            self._ended.set()


_line: _Line | None = None


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Tell what is done inside the `with`, once it takes long; call what it gives with how much more is done."""
    global _line
    if _line is None:
        _line = _Line(sys.stderr)
    line = _line
    try:
        yield line.begin(what, total)
    finally:
        if line.end():
            _line = None

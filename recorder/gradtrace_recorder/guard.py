"""The wall between our failures and the job."""

from __future__ import annotations

import signal
import sys
import traceback

# A job may interrupt us at our start, and go on; a start that it interrupts each time would be all that it does.
MOST_INTERRUPTS = 3


class Problems:
    """What went wrong inside the recorder: kept for the run, said once on stderr.

    In strict mode (GRADTRACE_STRICT=1, for our own tests) a failure raises instead.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Keep a problem and say it on stderr, unless the same was said before."""
        if text not in self.texts:
            self.texts.append(text)
            say(text)


class Guard:
    """One source's share of the wall: its first failure closes that source, and nothing else.

    Every callable that torch calls has the form

        if not guard.is_open: return
        try: ...
        except Exception as error: guard.failed(error)

    written out rather than wrapped, since a wrapper would be a call more for each Node. `Exception` and
    not `BaseException`: Ctrl-C and SystemExit are the job's.
    """

    def __init__(self, source: str, problems: Problems) -> None:
        self.source = source
        self.is_open = True
        self._problems = problems

    def failed(self, error: Exception) -> None:
        """Close the source because of our own error. Raises it again in strict mode, and where a signal
        handler of the job raised it: such an exception came through us by chance. Where Python has no frames left
        it is raised too, and nothing is closed: see `standing`, where one event is lost then."""
        if isinstance(error, RecursionError) or is_of_a_signal_handler(error):
            raise error
        self.is_open = False
        place = traceback.extract_tb(error.__traceback__)
        where = f" at {place[-1].filename.rsplit('/', 1)[-1]}:{place[-1].lineno}" if place else ""
        self._problems.add(
            f"the recorder's {self.source} failed and records no more on this rank: "
            f"{type(error).__name__}: {error}{where}"
        )
        if self._problems.strict:
            raise error


def is_of_a_signal_handler(error: BaseException) -> bool:
    """Whether a Python signal handler of the job raised this: a timeout, say, or a DataLoader's watcher."""
    handlers = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is not None and handler is not signal.default_int_handler:
            handlers.add(code)
    place = error.__traceback__
    while place is not None:
        if place.tb_frame.f_code in handlers:
            return True
        place = place.tb_next
    return False


def say(text: str) -> None:
    """One line on stderr. Never raises: a job's stderr may be closed."""
    try:
        sys.stderr.write(f"gradtrace: {text}\n")
        sys.stderr.flush()
    except Exception:
        pass

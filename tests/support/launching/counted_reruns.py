"""Jobs that are run again because torch, not what is tested, ended them: each is counted, told, and bounded.

A plugin of pytest: conftest.py registers one `Reruns` in each process. Under pytest-xdist the workers hand their counts
to the controller, which tells them at the end of the session and fails it where all of them together are too many.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

MOST = 2
_KEY = "gradtrace_reruns"
_STASHED = pytest.StashKey["Reruns"]()


class TooManyReruns(AssertionError):
    """More jobs had to be run again in one session than chance explains."""


class Reruns:
    """The jobs of this session that were run again: (reason, job) in the order in which it happened."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.counted: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def count(self, job: str, because: str) -> None:
        """Call it before `job` is run again. Raises TooManyReruns where that is once too often; any thread."""
        with self._lock:
            self.counted.append((because, job))
            if len(self.counted) > self.most:
                raise TooManyReruns(f"{self._too_many()}:\n" + "\n".join(self.told()))

    def told(self) -> list[str]:
        """A line for each reason: how many jobs, why, and which."""
        lines = []
        for because, times in Counter(reason for reason, _ in self.counted).items():
            jobs = ", ".join(job for reason, job in self.counted if reason == because)
            runs = "1 run of a job was" if times == 1 else f"{times} runs of jobs were"
            lines.append(f"{runs} not counted and made again because of {because!r}: {jobs}")
        return lines

    def _too_many(self) -> str:
        return f"{len(self.counted)} reruns in one session, of which {self.most} are borne"

    def pytest_configure(self, config: pytest.Config) -> None:
        """Be found by `reruns_of`."""
        config.stash[_STASHED] = self

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist is done; one that crashed handed nothing over."""
        self.counted += map(tuple, getattr(node, "workeroutput", {}).get(_KEY, []))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand over to the controller, or judge."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = self.counted
        elif len(self.counted) > self.most and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was run again, if anything was."""
        if self.counted:
            terminalreporter.section("jobs that were run again")
            for line in self.told():
                terminalreporter.line(line)
            if len(self.counted) > self.most:
                terminalreporter.line(f"{self._too_many()}: the session fails", red=True)


def reruns_of(config: pytest.Config) -> Reruns:
    """Where the tests of this process count what they run again."""
    return config.stash[_STASHED]

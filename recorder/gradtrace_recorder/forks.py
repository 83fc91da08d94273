"""What happens to recordings when their process forks.

A child records nothing. In the parent no thread of ours is there while the process forks, where the job has none
either: Python 3.12 and newer warn of a fork beside threads, and a job that warns of nothing bare would do so recorded.
Source: Modules/posixmodule.c, `warn_about_fork_with_threads` (3.12 to 3.14): it counts the threads of the operating
system, in the parent, between the two kinds of hooks that are registered here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Protocol

WARNS = sys.version_info >= (3, 12)

# jemalloc's own variable, as Arrow's copy of it is called: it has a thread that gives memory back.
# Source: cpp/src/arrow/memory_pool_jemalloc.cc, `je_arrow_malloc_conf` (Arrow 17 to 26).
_JEMALLOC, _WITHOUT_THREAD = "JE_ARROW_MALLOC_CONF", "background_thread:false"


class Forking(Protocol):
    """What wants to know of forks."""

    def before_fork(self) -> None:
        """The process is about to fork: end the threads that nobody but us has begun."""

    def after_fork(self) -> None:
        """The process has forked; this is the parent."""

    def forked(self) -> None:
        """This is the child."""


# What is registered for forks stays registered for good: so nothing that is told is, or it would outlive `stop`.
ARMED: weakref.WeakSet[Forking] = weakref.WeakSet()


def has_other_threads(ours: int) -> bool:
    """Whether the process has threads besides this one and `ours`; False where that cannot be known."""
    try:
        return len(os.listdir("/proc/self/task")) > 1 + ours
    except OSError:
        return False


def is_there(native_id: int) -> bool:
    """Whether a thread of this process is there still, by the operating system's number of it."""
    return os.path.exists(f"/proc/self/task/{native_id}")


@contextlib.contextmanager
def arrow_without_threads() -> Iterator[None]:
    """What loads Arrow inside the block loads it without a thread of its allocator's.

    Nothing is changed where the job has Arrow already, or has said how that allocator is to be, or nobody warns.
    """
    if not WARNS or "pyarrow" in sys.modules or _JEMALLOC in os.environ:
        yield
        return
    os.environ[_JEMALLOC] = _WITHOUT_THREAD
    try:
        yield
    finally:
        os.environ.pop(_JEMALLOC, None)


def _before() -> None:
    for one in list(ARMED):
        one.before_fork()


def _after() -> None:
    for one in list(ARMED):
        one.after_fork()


def _in_child() -> None:
    for one in list(ARMED):
        one.forked()


if WARNS:
    os.register_at_fork(before=_before, after_in_parent=_after)
os.register_at_fork(after_in_child=_in_child)

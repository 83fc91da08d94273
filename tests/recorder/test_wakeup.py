"""The drain thread is woken by hooks, in which a signal handler of the job's may raise at any moment."""

from __future__ import annotations

import dis
import functools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gradtrace_recorder.journal.wakeup import Wakeup
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_schemas.journal import KINDS, NULL_INT32, NULL_INT64, NULL_STRING


class Raised(Exception):
    """What a signal handler raises."""


def raise_at(place: int, act: Callable[[], object]) -> bool:
    """Raise at the place of that number, of those in an act, and in all that it calls, where Python looks for signals:
    behind a call, a function's first instruction and a jump backwards. Whether it has as many."""
    seen = 0
    last: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            if last.get(frame, "").startswith(
                ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
            ):
                seen += 1
                if seen > place:
                    sys.settrace(None)
                    raise Raised
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except Raised:
        return True
    finally:
        sys.settrace(before)
    return False


def ends(act: Callable[[], object]) -> bool:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def test_it_stays_set_until_it_is_cleared() -> None:
    wakeup = Wakeup()
    assert not wakeup.wait(0)
    wakeup.set()
    wakeup.set()
    assert wakeup.wait(0) and wakeup.wait(0)
    wakeup.clear()
    assert not wakeup.wait(0)


def test_who_waits_is_woken() -> None:
    wakeup = Wakeup()
    waiting = threading.Thread(target=lambda: found.append(wakeup.wait(60)))
    found: list[bool] = []
    waiting.start()
    time.sleep(0.05)
    wakeup.set()
    waiting.join(10)
    assert found == [True]


@pytest.mark.parametrize("name", ["set", "wait", "clear"])
def test_handler_that_raises_in_it_holds_nobody_up(name: str) -> None:
    place = 0
    while True:
        wakeup = Wakeup()
        act = functools.partial(getattr(wakeup, name), *([0] if name == "wait" else []))
        if not raise_at(place, act):
            break
        assert ends(wakeup.set) and wakeup.wait(0), place
        place += 1
    assert place > 0, "nothing was interrupted"


def test_handler_that_raises_while_a_half_fills_holds_no_other_thread_up(tmp_path: Path) -> None:
    """At whichever place of `append`: the next record, on any thread, finds no lock that is taken, and wakes the
    drain thread where the one that was to do so did not come to it."""
    about = {"rank": 0, "attempt": 0, "wall_start_ns": 0, "monotonic_start_ns": 0}
    # Those of a backward pass: step, microbatch, backward_index, then its fields.
    values = (0, 0, 0, NULL_INT32, 0, 0, 1.5, 7, 0, 5, 6, NULL_INT64, NULL_STRING, NULL_STRING)
    place, is_interrupted = 0, True
    while is_interrupted:
        journal = JournalWriter(tmp_path / str(place), half_records=1, strings_bytes=4096, **about)
        act = functools.partial(journal.append, KINDS["backward_passes"], *values)
        is_interrupted = raise_at(place, act)
        assert ends(act), place
        assert journal.half_is_full.wait(0), place
        journal.close(remove=True)
        place += 1
    assert place > 5, "nothing was interrupted"

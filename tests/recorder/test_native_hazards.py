"""What the C++ of the observer could do to a process, and does not: docs/internals/native.md, "Hazards".

Each is tried in a process of its own, which would die of it.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from support.environment.native_observer import CACHE

pytestmark = pytest.mark.usefixtures("native_library")


def run(script: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A job in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script],
        input=given,
        env={**os.environ, "GRADTRACE_DIR": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# The thread comes for the GIL while Python goes down: CPython ends it there, which C++ must survive.
_SUMMARISES = """
import threading, time, torch
from gradtrace_recorder.observers.native.build import library
summary, tensor, began = library().summary, torch.ones(1_000_000), threading.Event()
def work():
    while True:
        summary(tensor, True)  # so many elements that the GIL is let go of
        began.set()
threading.Thread(target=work, daemon=True).start()
began.wait()
"""
_ASKS_PYTHON = """
import threading, time, torch
from gradtrace_recorder.summaries.summariser import Summariser
from gradtrace_recorder.summaries.values import NOTHING
began = threading.Event()
def slow(self, gradient):
    began.set()
    for _ in range(300):
        time.sleep(0.01)
    return NOTHING
Summariser.of_gradient = slow
class Model(torch.nn.Module):
    def forward(self, x):
        return (x * 1j).abs().sum()
x = torch.ones(3, dtype=torch.complex64, requires_grad=True)
def work():
    Model()(x).backward()  # C++ reads no complex gradients
threading.Thread(target=work, daemon=True).start()
assert began.wait(30)
"""
_WAITS_FOR_THE_DRAIN = """
import threading
from gradtrace_recorder.observers.native.build import library
event, began = library().Journal().half_is_full, threading.Event()
def work():
    began.set()
    while True:
        event.wait(0.001)
threading.Thread(target=work, daemon=True).start()
began.wait()
"""


@pytest.mark.parametrize("script", [_SUMMARISES, _ASKS_PYTHON, _WAITS_FOR_THE_DRAIN])
def test_a_daemon_thread_that_comes_for_the_gil_at_the_end_takes_nothing_along(
    tmp_path: Path, script: str
) -> None:
    done = run(script, GRADTRACE_DIR=str(tmp_path / "run"), GRADTRACE_OBSERVER="native")
    assert (done.returncode, "terminate" in done.stderr, "FATAL" in done.stderr) == (
        0,
        False,
        False,
    ), done.stderr


# What the recorder itself would never say.
_WRONG = {
    "map too short": "core.open(mmap.mmap(-1, 4096), *PARTS)",
    "records behind the end": "core.open(MAP, RUNNING, HELD, LENGTH - 64, HALF)",
    "records before the beginning": "core.open(MAP, RUNNING, HELD, -4096, HALF)",
    "more records than there are bytes": "core.open(MAP, RUNNING, HELD, RECORDS, 1 << 62)",
    "no records": "core.open(MAP, RUNNING, HELD, RECORDS, 0)",
    "threads behind the end": "core.open(MAP, LENGTH - 8, HELD, RECORDS, HALF)",
    "held rows behind the end": "core.open(MAP, RUNNING, LENGTH, RECORDS, HALF)",
    "words that are not aligned": "core.open(MAP, RUNNING, HELD, RECORDS + 1, HALF)",
    "opened twice": "opened().open(MAP, *PARTS)",
    "too little memory after a fork": "opened().forget(mmap.mmap(-1, 4096))",
    "a kind that there is not": "opened().append(63, 0, 0, 0)",
    "a drop of a kind that there is not": "opened().drop(64, 0)",
    "a drop of a kind below all": "opened().drop(-1, 0)",
    "a place that there is not": "opened().release(64)",
    "settled where nothing is": "opened().settle(1 << 40, *GROUP)",
    "amended behind a record": "opened().amend(array('Q', [1]), array('q', [RECORD_BYTES - 8]), b'x')",
    "amended before a record": "opened().amend(array('Q', [1]), array('q', [-1]), b'x')",
    "amended with less data": "opened().amend(array('Q', [1, 2]), array('q', [8]), b'xx')",
    "written of Python's own accord": "setattr(opened(), 'written', -5)",
    "its lock taken by Python": "opened().__enter__()",
    "settings with a short record": "settings(records=(b'x' * 64,) * 3)",
    "settings with records of another table": "settings(records=(RECORD, RECORD, RECORD))",
    "a pass that is attached before it walked": "a_pass().attach([], [], 0, None, str, False, False)",
    "a pass that is put on before it walked": "a_pass().put_on({}, ())",
    "a leaf of a pass that walked none": "a_pass().leaf(0)",
    "a pass that walks twice": "p = a_pass(); p.walk([], id, id, None); p.walk([], id, id, None)",
}
_PREPARED = """
import mmap, sys, torch
from array import array
from gradtrace_recorder.observers.native.build import library
from gradtrace_recorder.observers.native.observer import _record
from gradtrace_schemas.journal import HEADER_BYTES, HELD_PLACES, KINDS, RECORD_BYTES, THREAD, THREAD_SLOTS
RUNNING = HEADER_BYTES
HELD = RUNNING + THREAD_SLOTS * THREAD.itemsize
RECORDS = -(-(HELD + HELD_PLACES * RECORD_BYTES) // 4096) * 4096
HALF = 8
LENGTH = RECORDS + 2 * HALF * RECORD_BYTES
PARTS = (RUNNING, HELD, RECORDS, HALF)
MAP = mmap.mmap(-1, LENGTH)
GROUP = (KINDS["groups"], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
RECORD = _record("node_events")
core = library().Journal()
def opened():
    core.open(MAP, *PARTS)
    core.settle(core.hold(*GROUP), *GROUP)
    return core
def settings(records=tuple(map(_record, ("node_events", "node_tensors", "gradients")))):
    no = lambda *_: None
    return library().Settings(opened(), 0, records, "full", (0,) * 6, no, (no, no))
def a_pass():
    return library().Pass(settings(), 0, 0, 0, 0, 0)
a_pass().walk([torch.ones(1, requires_grad=True) * 2], lambda tensor: tensor.grad_fn, lambda text: 1, None)
for line in sys.stdin.read().splitlines():
    core = library().Journal()
    try:
        exec(line)
    except (ValueError, TypeError, AttributeError, RuntimeError):
        print("refused:", line, flush=True)
    else:
        print("taken:", line, flush=True)
"""


def test_what_python_says_wrongly_is_refused_and_nothing_is_written_past_an_end() -> None:
    done = run(_PREPARED, given="\n".join(_WRONG.values()), GRADTRACE_NATIVE_CACHE=str(CACHE))
    taken = set(_WRONG.values()) - set(re.findall("refused: (.*)", done.stdout))
    assert (done.returncode, taken) == (0, set()), done.stderr


# A cycle through each of our types that may hold what is not ours: it goes when Python looks for cycles.
_CYCLES = """
import gc, weakref
exec(open(0).read())
class Holder:
    pass
def dies(make):
    holder = Holder()
    holder.own = make(holder)
    alive = weakref.ref(holder)
    del holder
    gc.collect()
    return alive() is None
def sightings(holder):
    own = library().Sightings(10, torch.Tensor, torch.nn.Parameter)
    own.see(1, "in", holder, (torch.ones(2),))
    return own
def journal(holder):
    own = library().Journal()
    own.open(mmap.mmap(-1, LENGTH), *PARTS)
    class Place(tuple):
        pass
    place = Place((1, 0, 0, 0, 0, 0, 0))
    place.holder = holder
    own.move(5, 7, place)
    return own
def settings_of(holder):
    own = library().Journal()
    own.open(mmap.mmap(-1, LENGTH), *PARTS)
    no = lambda *_: holder
    records = tuple(map(_record, ("node_events", "node_tensors", "gradients")))
    return library().Settings(own, 0, records, "full", (0,) * 6, no, (no, no))
print([dies(make) for make in (sightings, journal, settings_of)])
"""


def test_cycles_through_our_types_are_found_by_the_collector() -> None:
    prepared = _PREPARED.partition("for line in")[0]
    done = run(_CYCLES, given=prepared, GRADTRACE_NATIVE_CACHE=str(CACHE))
    assert done.stdout.strip() == "[True, True, True]", done.stderr


def test_a_recording_that_is_over_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    """Neither the C++ objects nor what they ask lives on: no cycle leads through them that nobody breaks."""
    from gradtrace_recorder import bootstrap
    from gradtrace_recorder.state.attribution import Attribution
    from support.recordings.in_process import recording

    alive: list[weakref.ref[object]] = []
    for number in range(3):
        with recording(tmp_path / f"run-{number}", observer="native"):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
            model(torch.ones(2, 4)).sum().backward()
            session = bootstrap.current_session()
            assert session is not None and session.gate.recording is not None
            alive.append(weakref.ref(session.gate.recording.attribution))
            alive.append(weakref.ref(session.gate.recording))
            del session, model
    gc.collect()
    # The last one may still be what the process would answer of.
    assert [one() for one in alive[:-2]] == [None] * 4
    assert sum(type(one) is Attribution for one in gc.get_objects()) <= 1

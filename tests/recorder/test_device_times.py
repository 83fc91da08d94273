"""Times on a device: of the span that was asked for, from a bounded pool, and none where none can be had."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from gradtrace_recorder.summaries.device.backends import BACKENDS
from gradtrace_recorder.summaries.device.devices import Devices
from gradtrace_recorder.summaries.device.times import DeviceTimes
from gradtrace_schemas.journal import NULL_INT64
from support.devices.host_device import HostBackend, HostEvent, HostStream


class OneStream:
    """One stream to record on."""

    def __init__(self) -> None:
        self.stream = HostStream()
        self.where: str | None = "host"
        self.made = 0
        self.may_read = True
        self.is_broken = False

    def place(self, of: object = None) -> str | None:
        return self.where

    def takes(self, place: object) -> bool:
        return self.where is not None

    def event(self, place: object) -> HostEvent:
        self.made += 1
        stream = self

        class Event(HostEvent):
            def query(self) -> bool:
                if stream.is_broken:
                    raise RuntimeError("an illegal memory access")
                return super().query()

        return Event(self.stream)

    def begin_reading(self, place: object) -> bool:
        return self.may_read


@pytest.fixture
def place() -> Iterator[OneStream]:
    made = OneStream()
    yield made
    made.stream.end()


def test_a_span_takes_the_time_of_what_lies_between(place: OneStream) -> None:
    times = DeviceTimes("stages", place)
    place.stream.give(lambda: time.sleep(0.05))
    outer = times.begin()
    place.stream.give(lambda: time.sleep(0.02))
    inner = times.end(times.begin())
    code = times.end(outer)
    assert code != inner and times.is_waiting(code)
    place.stream.wait()
    codes, found = times.read()
    took = dict(zip(codes.tolist(), found.tolist(), strict=True))
    assert 20_000_000 <= took[code] < 50_000_000 and took[inner] < 10_000_000
    assert not times.is_waiting(code)


def test_nothing_is_read_before_the_device_has_come_to_it(place: OneStream) -> None:
    times = DeviceTimes("stages", place)
    place.stream.hold()
    code = times.end(times.begin())
    assert times.read()[0].tolist() == [] and times.is_waiting(code)
    place.stream.release()
    place.stream.wait()
    assert times.read()[0].tolist() == [code]


def test_events_are_used_again_and_never_more_than_allowed(place: OneStream) -> None:
    times = DeviceTimes("stages", place, most=4)
    place.stream.hold()
    codes = [times.end(times.begin()) for _ in range(3)]
    assert codes[2] == NULL_INT64 and times.missed == {"no event was free": 1}
    place.stream.release()
    place.stream.wait()
    assert len(times.read()[0]) == 2
    for _ in range(20):
        assert times.end(times.begin()) != NULL_INT64
        place.stream.wait()
        times.read()
    assert place.made == 4


def test_who_reads_is_woken_before_events_run_out(place: OneStream) -> None:
    woken: list[int] = []
    times = DeviceTimes("stages", place, most=8, wake=lambda: woken.append(1))
    for _ in range(4):
        times.end(times.begin())
    assert len(woken) == 4
    place.stream.wait()
    assert len(times.read()[0]) == 4
    times.end(times.begin())
    assert len(woken) == 5


def test_an_end_that_cannot_be_recorded_gives_its_beginning_back(place: OneStream) -> None:
    times = DeviceTimes("stages", place, most=2)
    for _ in range(2):
        begun = times.begin()
        place.where = None
        assert times.end(begun) == NULL_INT64
        place.where = "host"
    times.forget(times.begin())
    assert times.end(times.begin()) != NULL_INT64


class OnTheSecond(torch.Tensor):
    """A tensor of the second of some devices."""

    device = torch.device("meta", 1)


class Apart(HostBackend):
    """Devices of which the calling thread's own is not in use; what was asked of which."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int | None]] = []

    def is_capturing(self, index: int | None) -> bool:
        self.asked.append(("is_capturing", index))
        return self.is_captured

    def current(self) -> int | None:
        return None

    def event(self, index: int) -> HostEvent:
        self.asked.append(("event", index))
        return super().event(index)

    def begin_reading(self, index: int) -> bool:
        self.asked.append(("begin_reading", index))
        return True


def test_a_span_is_of_the_device_of_its_tensor_and_no_other_device_is_touched() -> None:
    """A job may use one device and have another for its thread's own: an event there would make a context."""
    backend = Apart()
    BACKENDS["meta"] = backend
    try:
        times = DeviceTimes("stages", Devices(print, print))
        there = torch.ones(1, device="meta").as_subclass(OnTheSecond)
        assert times.begin() is None and times.begin(torch.ones(1)) is None and not backend.asked
        code = times.end(times.begin(there))
        backend.stream.wait()
        assert times.read()[0].tolist() == [code]
        assert {index for _, index in backend.asked} == {1}
        assert [what for what, _ in backend.asked if what != "is_capturing"] == [
            "event", "event", "begin_reading",
        ]  # fmt: skip
        begun = times.begin(there)
        backend.is_captured = True
        assert times.end(begun) == NULL_INT64
    finally:
        del BACKENDS["meta"]
        backend.stream.end()


def test_levels_say_what_is_timed(place: OneStream) -> None:
    of = {level: DeviceTimes(level, place) for level in ("off", "stages", "nodes")}
    timed = {level: (t.begin() is not None, t.begin_node() is not None) for level, t in of.items()}
    assert timed == {"off": (False, False), "stages": (True, False), "nodes": (True, True)}


def test_a_device_that_failed_is_asked_no_more(place: OneStream) -> None:
    times = DeviceTimes("stages", place)
    code = times.end(times.begin())
    place.is_broken = True
    assert times.read()[0].tolist() == [] and not times.is_waiting(code)
    assert times.missed == {"RuntimeError": 1} and times.begin() is None


def test_where_a_thread_of_ours_may_not_ask_there_are_no_times(place: OneStream) -> None:
    place.may_read = False
    times = DeviceTimes("stages", place)
    code = times.end(times.begin())
    assert times.read()[0].tolist() == [] and not times.is_waiting(code)
    assert times.begin() is None and sum(times.missed.values()) == 1

"""The ring of flight mode, in Python and in C++: what is kept, let go of, wanted, written again, dropped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradtrace_recorder.journal.ring import Ring
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.observers.native.build import library
from gradtrace_recorder.observers.native.choice import journal_of
from gradtrace_recorder.recording.native_library import Native
from gradtrace_schemas import TABLES
from gradtrace_schemas.journal import HEADER, KINDS, NULL_INT32, NULL_INT64, NULL_STRING
from gradtrace_schemas.journal_reader import read_journal

PLACES = 16


pytestmark = pytest.mark.usefixtures("native_library")


class Bench:
    """A ring, and what a recording does with it."""

    def __init__(self, path: Path, *, of_native: bool, places: int = PLACES) -> None:
        about = {"rank": 3, "attempt": 1, "wall_start_ns": 10, "monotonic_start_ns": 20}
        sizes = {"half_records": places // 2, "strings_bytes": 4096}
        kind = Native(library()) if of_native else None
        self.path = path
        self.journal: JournalWriter = journal_of(kind, path, **about, **sizes)
        self.ring: Ring = self.journal.keep_as_ring()
        self.step = 0

    def rows(self, count: int) -> None:
        string = self.journal.string
        for index in range(count):
            head = (self.step, 0, index, NULL_INT32, string("backward"), string("MmBackward0"))
            rest = (1.5, 7, 0, 5, 6, NULL_INT64, NULL_STRING, NULL_STRING)
            self.journal.append(KINDS["backward_passes"], *head, *rest)

    def lasting(self, number: int) -> None:
        texts = (self.journal.string(f"group {number}"), *[NULL_STRING] * 3)
        fields = (self.step, 0, NULL_INT32, *texts, NULL_INT32, *[NULL_STRING] * 3)
        self.journal.append_lasting(KINDS["groups"], *fields)

    def end_step(self, keep: int) -> None:
        self.ring.end_step(self.step)
        self.ring.keep(keep)
        self.step += 1

    def want(self) -> None:
        if self.ring.kept is not None:
            self.ring.want()

    def write(self, most: int) -> None:
        """What the drain thread does, of so many records at most."""
        last = min(self.ring.wanted, self.journal.drained + most)
        if last > self.journal.drained:
            self.journal.mark_drained(last)
            self.ring.wrote(last)

    def state(self) -> dict[str, Any]:
        journal, ring = self.journal, self.ring
        return {
            "written": journal.written, "drained": journal.drained, "recorded": journal.recorded,
            "dropped": dict(journal.dropped), "dropped_steps": journal.dropped_steps,
            "kept": ring.kept, "wanted": ring.wanted, "shortened": ring.shortened,
            "overwritten": dict(ring.overwritten),
        }  # fmt: skip

    def bytes(self) -> bytes:
        data = bytearray(self.path.read_bytes())
        header = np.frombuffer(data, HEADER, 1)
        assert header["magic"][0] == b"GRADTRCE"
        return bytes(data)

    def steps(self, table: str) -> list[int]:
        contents = read_journal(self.bytes())
        return [int(row["step"]) for row in contents.of(TABLES[table])]

    def close(self) -> None:
        self.journal.close(remove=True)


_ACTS = st.one_of(
    st.tuples(st.just("rows"), st.integers(1, 6)),
    st.tuples(st.just("lasting"), st.integers(0, 3)),
    st.tuples(st.just("end_step"), st.integers(1, 3)),
    st.tuples(st.just("end_step"), st.integers(1, 3)),
    st.tuples(st.just("want")),
    st.tuples(st.just("write"), st.integers(1, 20)),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(acts=st.lists(_ACTS, max_size=40))
def test_both_rings_keep_the_same_to_the_last_byte(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[Any, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("ring")
    both = [Bench(folder / str(kind), of_native=kind) for kind in (False, True)]
    try:
        for name, *arguments in acts:
            for bench in both:
                getattr(bench, name)(*arguments)
            assert both[0].state() == both[1].state()
        assert both[0].bytes() == both[1].bytes()
    finally:
        for bench in both:
            bench.close()


@pytest.mark.parametrize("of_native", [False, True], ids=["python", "native"])
class TestRing:
    """What both do."""

    def test_lasting_rows_outlive_their_step_and_are_there_once(
        self, tmp_path: Path, of_native: bool
    ) -> None:
        bench = Bench(tmp_path / "j", of_native=of_native)
        bench.lasting(0)
        for _ in range(9):
            bench.rows(3)
            bench.end_step(keep=2)
        assert bench.steps("backward_passes") == [7, 7, 7, 8, 8, 8]
        assert len(bench.steps("groups")) == 1 and bench.steps("groups")[0] in (7, 8)
        assert bench.ring.overwritten["backward_passes"] == 7 * 3 and not bench.journal.dropped
        bench.close()

    def test_more_lasting_rows_than_a_step_has_rows_are_all_kept(
        self, tmp_path: Path, of_native: bool
    ) -> None:
        bench = Bench(tmp_path / "j", of_native=of_native)
        for number in range(6):
            bench.lasting(number)
        for _ in range(9):
            bench.rows(2)
            bench.end_step(keep=3)
        contents = read_journal(bench.bytes())
        names = {contents.strings[int(row["name"])] for row in contents.of(TABLES["groups"])}
        assert names == {f"group {number}" for number in range(6)} and not bench.journal.dropped
        bench.close()

    def test_what_is_wanted_is_never_overwritten_and_what_comes_then_is_counted(
        self, tmp_path: Path, of_native: bool
    ) -> None:
        bench = Bench(tmp_path / "j", of_native=of_native)
        bench.rows(10)
        bench.end_step(keep=1)
        bench.want()
        bench.rows(10)
        assert bench.steps("backward_passes") == [0] * 10 + [1] * 6
        assert dict(bench.journal.dropped) == {"backward_passes": 4}
        bench.write(PLACES)
        assert (bench.ring.wanted, bench.ring.kept, bench.journal.drained) == (0, None, 10)
        bench.rows(1)
        assert bench.steps("backward_passes") == [1] * 7 and not bench.ring.overwritten
        bench.close()

    def test_threads_that_fill_the_ring_at_once_lose_whole_steps_and_nothing_else(
        self, tmp_path: Path, of_native: bool
    ) -> None:
        """Each finds it full now and then; one of them ends steps, and what is let go of and kept is all there was."""
        bench = Bench(tmp_path / "j", of_native=of_native, places=64)
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                bench.rows(1)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(300):
            with bench.journal.lock:
                bench.rows(3)
                bench.end_step(keep=4)
        ended.set()
        for thread in threads:
            thread.join()
        contents = read_journal(bench.bytes())
        numbers = contents.numbers.tolist()
        assert numbers == list(range(bench.journal.drained + 1, bench.journal.written + 1))
        gone = bench.ring.overwritten["backward_passes"]
        assert gone + len(numbers) == bench.journal.recorded["backward_passes"]
        bench.close()

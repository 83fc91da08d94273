"""The journal: what is written is read back, what is torn is not, what has no room is counted."""

from __future__ import annotations

import os
import platform
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace_recorder.journal.writer import NOWHERE, JournalWriter
from gradtrace_recorder.observers.native.build import CACHE_VARIABLE, library
from gradtrace_recorder.observers.native.choice import journal_of
from gradtrace_recorder.recording.native_library import Native
from gradtrace_schemas import TABLES
from gradtrace_schemas.batches import arrow_table
from gradtrace_schemas.journal import (
    AFTER_MODULE,
    IN_MODULE,
    KINDS,
    NULL_FLOAT,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
    PLACES_OFFSET,
    RECORD_BYTES,
)
from gradtrace_schemas.journal_reader import (
    UnreadableJournal,
    read_journal,
)
from support.environment import native_observer

PASSES = TABLES["backward_passes"]


LINUX = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


def writer(path: Path, **sizes: int) -> JournalWriter:
    sizes = {"half_records": 64, "strings_bytes": 4096, **sizes}
    about = {"rank": 3, "attempt": 1, "wall_start_ns": 10, "monotonic_start_ns": 20, **sizes}
    return journal_of(_kind, path, **about)


_kind: Native | None = None


@pytest.fixture(autouse=True, params=["python", "native"])
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test with the journal in Python, and with the one in C++."""
    global _kind
    before = os.environ[CACHE_VARIABLE]
    if request.param == "native":
        native_observer.build_or_skip()
        _kind = Native(library())
    yield
    _kind = None
    os.environ[CACHE_VARIABLE] = before


def append(journal: JournalWriter, step: int, loss: float = 1.5) -> None:
    string = journal.string
    fields = (NULL_INT32, string("backward"), string("MmBackward0"), loss, 7, 0, 5, 6, NULL_INT64)
    journal.append(KINDS["backward_passes"], step, 0, step % 5, *fields, NULL_STRING, NULL_STRING)


def table_of(data: bytes) -> Any:
    contents = read_journal(data)
    return arrow_table(PASSES, contents.of(PASSES), contents.strings, contents.header["attempt"])


def test_pages_come_into_memory_ahead_of_the_records(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j", half_records=2048)
    append(journal, 0)
    while journal.map_ahead():
        pass
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for step in range(1, 4000):
        append(journal, step)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    got = table_of((tmp_path / "j").read_bytes())["step"].to_pylist()
    journal.close(remove=True)
    assert got == list(range(4000))
    if _kind is not None and LINUX >= (5, 14):
        assert faults < 100  # of 375 pages


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j")
    for step in range(10):
        append(journal, step, loss=step / 2)
    got = table_of((tmp_path / "j").read_bytes()).to_pylist()
    journal.close(remove=False)
    assert [row["step"] for row in got] == list(range(10))
    assert [row["record_index"] for row in got] == list(range(1, 11))
    first = got[3]
    assert (first["kind"], first["root_node_name"], first["loss"]) == (
        "backward",
        "MmBackward0",
        1.5,
    )
    assert first["parent_backward_index"] is None and first["error"] is None
    assert first["device_ns"] is None and first["attempt"] == 1


def test_loss_that_is_nan_is_no_null(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j")
    append(journal, 0, float("nan"))
    append(journal, 1, NULL_FLOAT)
    got = table_of((tmp_path / "j").read_bytes())["loss"].to_pylist()
    journal.close(remove=True)
    assert np.isnan(got[0]) and got[1] is None


def test_full_journal_drops_and_counts(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j", half_records=8)
    for step in range(20):
        append(journal, step)
    assert journal.written == 16 and journal.dropped == {"backward_passes": 4}
    contents = read_journal((tmp_path / "j").read_bytes())
    assert contents.header["dropped"] == 4
    assert contents.dropped == {"backward_passes": (4, 16, 19)}  # count, first and last step
    journal.mark_drained(8)
    append(journal, 99)
    assert journal.written == 17
    got = table_of((tmp_path / "j").read_bytes())["step"].to_pylist()
    journal.close(remove=True)
    assert got == [*range(8, 16), 99]


def test_text_without_room_is_named_as_such(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j", strings_bytes=128)
    numbers = {journal.string(f"a rather long name number {n}") for n in range(10)}
    contents = read_journal((tmp_path / "j").read_bytes())
    journal.close(remove=True)
    assert all(number < len(contents.strings) for number in numbers)
    assert journal.dropped["names"] > 0


def test_what_runs_is_noted_until_it_is_done(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j")
    name = journal.string("MmBackward0")
    fields = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    for depth in range(40):  # deeper than there are places
        journal.push_running(77, name, depth, *fields)
    for _ in range(38):
        journal.pop_running(77)
    contents = read_journal((tmp_path / "j").read_bytes())
    journal.close(remove=True)
    thread = contents.running[0]
    assert (thread["thread"], thread["depth"]) == (77, 2)
    assert thread["entries"]["module_fqn"][:2].tolist() == [0, 1]


def test_place_of_a_thread_is_its_last_and_a_torn_one_is_none(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j")
    name = journal.string("blocks.0")
    journal.move(77, 100, (AFTER_MODULE, name, 0, 1, 2, 3, NULL_INT32))
    journal.move(77, 200, (IN_MODULE, name, 0, 4, 2, 3, NULL_INT32))
    assert journal.place_of(77)[0] == IN_MODULE and journal.place_of(5) == NOWHERE
    data = bytearray((tmp_path / "j").read_bytes())
    place = read_journal(bytes(data)).places[0]
    assert (place["kind"], place["name"], place["call_index"]) == (IN_MODULE, name, 4)
    assert place["moved_ns"] == 200
    data[PLACES_OFFSET : PLACES_OFFSET + 8] = (300).to_bytes(
        8, "little"
    )  # the first word of a new one
    assert read_journal(bytes(data)).places[0]["kind"] == 0
    journal.close(remove=True)


def test_slot_of_a_thread_that_is_in_a_module_is_not_given_to_another(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j")
    inside = (IN_MODULE, journal.string("act"), 0, 0, 0, 0, NULL_INT32)
    journal.move(1, 10, inside)
    for thread in range(2, 100):
        journal.move(thread, thread, (AFTER_MODULE, *inside[1:]))
    assert journal.place_of(1) == inside
    journal.close(remove=True)


def test_forked_child_writes_nowhere(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j")
    append(journal, 0)
    before = (tmp_path / "j").read_bytes()
    journal.forget()
    append(journal, 1)
    journal.move(1, 10, NOWHERE)
    journal.push_running(1, *(0,) * 13)
    journal.string("a new name")
    journal.close(remove=False)
    assert (tmp_path / "j").read_bytes() == before


def test_records_of_many_threads_are_all_there(tmp_path: Path) -> None:
    journal = writer(tmp_path / "j", half_records=4096)

    def work(first: int) -> None:
        for step in range(first, first + 500):
            append(journal, step)

    threads = [threading.Thread(target=work, args=(500 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = table_of((tmp_path / "j").read_bytes())["step"].to_pylist()
    journal.close(remove=True)
    assert sorted(got) == list(range(4000))


def test_file_that_cannot_be_allocated_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        writer(tmp_path / "j", half_records=1 << 44)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def bytes_of_a_journal(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "j"
    journal = writer(path, half_records=16)
    for step in range(40):
        append(journal, step)
        if step % 16 == 15:
            journal.mark_drained(step + 1)
    journal.close(remove=False)
    return path.read_bytes()


@settings(deadline=None, max_examples=150)
@given(cut=st.floats(0, 1))
def test_any_prefix_is_read_without_an_invented_row(bytes_of_a_journal: bytes, cut: float) -> None:
    whole = table_of(bytes_of_a_journal).to_pylist()
    data = bytes_of_a_journal[: int(len(bytes_of_a_journal) * cut)]
    try:
        contents = read_journal(data)
    except UnreadableJournal:
        return
    got = arrow_table(PASSES, contents.of(PASSES), contents.strings, 1).to_pylist()
    texts = ("kind", "root_node_name", "error")
    plain = [{k: v for k, v in row.items() if k not in texts} for row in whole]
    assert all({k: v for k, v in row.items() if k not in texts} in plain for row in got)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_torn_record_is_never_shown(bytes_of_a_journal: bytes, data: st.DataObject) -> None:
    """A process that dies while it writes leaves the beginning of the new record over the old one."""
    contents = read_journal(bytes_of_a_journal)
    place = data.draw(st.integers(0, 31))
    length = data.draw(st.integers(0, RECORD_BYTES - 8))
    start = contents.header["records_offset"] + place * RECORD_BYTES
    torn = bytearray(bytes_of_a_journal)
    torn[start + 8 : start + 8 + length] = b"\xa5" * length
    number = int.from_bytes(torn[start : start + 8], "little")
    if number > contents.header["drained"]:
        torn[start : start + 8] = bytes(8)  # only drained records are overwritten
    got = read_journal(bytes(torn)).numbers.tolist()
    assert got == [n for n in contents.numbers.tolist() if n != number]


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_record_whose_two_numbers_differ_is_torn(
    bytes_of_a_journal: bytes, data: st.DataObject
) -> None:
    """Its first word reached the file and the rest did not: a reader that came in between, a power failure."""
    contents = read_journal(bytes_of_a_journal)
    number = data.draw(st.sampled_from(contents.numbers.tolist()))
    end = contents.header["records_offset"] + ((number - 1) % 32 + 1) * RECORD_BYTES
    torn = bytearray(bytes_of_a_journal)
    torn[end - 8 : end] = (number - 32).to_bytes(8, "little", signed=True)
    got = read_journal(bytes(torn))
    assert got.numbers.tolist() == [n for n in contents.numbers.tolist() if n != number]
    assert got.torn_count == contents.torn_count + 1

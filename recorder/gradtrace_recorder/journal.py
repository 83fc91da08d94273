"""The memory-mapped journal: the only thing that a hook writes. When full it drops and counts.

A record costs no system call, and what was written outlives SIGKILL, `os._exit` and a segfault, since it
lies in the page cache. The layout is declared in `gradtrace_schemas.journal`.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradtrace_schemas import SCHEMA_VERSION
from gradtrace_schemas.journal import (
    DROP_KINDS,
    DROPS,
    DROPS_OFFSET,
    FORMAT_VERSION,
    HEADER,
    HEADER_BYTES,
    HELD_PLACES,
    IN_BACKWARD,
    IN_MODULE,
    IN_OPTIMIZER,
    JOURNAL_TABLES,
    KINDS,
    MAGIC,
    NULL_INT32,
    NULL_STRING,
    PLACE,
    PLACES_OFFSET,
    RECORD_BYTES,
    RUNNING,
    RUNNING_OUTCOME,
    THREAD,
    THREAD_DEPTH,
    THREAD_SLOTS,
    record_struct,
    struct_format,
)

HALF_RECORDS = 32_768
STRINGS_BYTES = 8 << 20
_MOST_TEXT_BYTES = 64 << 10
_LONG_TEXT_BYTES = 256
_AMENDED_AT_ONCE = 256

# Native, where that is the same: it stores the word in one instruction, which no kill cuts in two.
_pack_u64 = struct.Struct("@Q" if sys.byteorder == "little" else "<Q").pack_into
_U32 = struct.Struct("<I")
_RUNNING = struct.Struct("<" + struct_format(RUNNING))
_pack_place = struct.Struct("<" + struct_format(PLACE)).pack_into
_pack_drop = struct.Struct("<" + struct_format(DROPS)).pack_into
INSIDE = (IN_MODULE, IN_BACKWARD, IN_OPTIMIZER)
Place = tuple[int, int, int, int, int, int, int]
NOWHERE: Place = (0, NULL_STRING, NULL_INT32, NULL_INT32, NULL_INT32, NULL_INT32, NULL_INT32)
_THREAD_HEAD = 16
_PLACES_AT = [PLACES_OFFSET + slot * PLACE.itemsize for slot in range(THREAD_SLOTS)]


class JournalWriter:
    """One rank's journal, open for writing. Methods may be called on any thread.

    Raises OSError when the file cannot be allocated: a full disk is an error here, not a SIGBUS later.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        attempt: int,
        wall_start_ns: int,
        monotonic_start_ns: int,
        process_start: int = 0,
        machine: int = 0,
        half_records: int = HALF_RECORDS,
        strings_bytes: int = STRINGS_BYTES,
    ) -> None:
        self.path = path
        self.half_records = half_records
        self.half_is_full = threading.Event()
        self.lost: collections.Counter[str] = collections.Counter()
        self._lost_steps: dict[str, tuple[int, int]] = {}
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._running_offset = HEADER_BYTES
        self._held_offset = HEADER_BYTES + THREAD_SLOTS * THREAD.itemsize
        self._strings_offset = self._held_offset + HELD_PLACES * RECORD_BYTES
        self._strings_bytes = strings_bytes
        self._strings_used = 0
        page = mmap.PAGESIZE
        self._records_offset = -(-(self._strings_offset + strings_bytes) // page) * page
        size = self._records_offset + 2 * half_records * RECORD_BYTES
        self._map = _allocated(path, size)
        self._pack = {KINDS[t.name]: record_struct(t).pack_into for t in JOURNAL_TABLES}
        self._counts = [0] * (max(KINDS.values()) + 1)
        self._names = {KINDS[t.name]: t.name for t in JOURNAL_TABLES}
        self._places = 2 * half_records
        self._written = 0
        self._drained = 0
        self._limit = self._places
        self._next_half = half_records
        # Reentrant: a signal handler of the job may run modules while one of these methods is at work. Hence
        # what is claimed under it (a number, a place) is claimed before it is filled.
        self.lock = threading.RLock()
        self._make_room: Callable[[], bool] | None = None
        self._lasting: list[tuple[int, int, tuple[float | bytes, ...]]] = []
        self._slots: dict[int, int] = {}
        self._depths = [0] * THREAD_SLOTS
        self._places_now: list[Place] = [NOWHERE] * THREAD_SLOTS
        self._free_places = list(range(HELD_PLACES))
        header = np.zeros((), HEADER)
        header["format_version"] = FORMAT_VERSION
        header["schema_version"] = SCHEMA_VERSION
        header["record_bytes"] = RECORD_BYTES
        header["half_records"] = half_records
        header["running_offset"] = self._running_offset
        header["held_offset"] = self._held_offset
        header["strings_offset"] = self._strings_offset
        header["strings_bytes"] = strings_bytes
        header["records_offset"] = self._records_offset
        header["pid"] = os.getpid()
        header["rank"] = rank
        header["attempt"] = attempt
        header["wall_start_ns"] = wall_start_ns
        header["monotonic_start_ns"] = monotonic_start_ns
        header["heartbeat_ns"] = wall_start_ns
        header["process_start"] = process_start
        header["machine"] = machine
        header["places_offset"] = PLACES_OFFSET
        header["drops_offset"] = DROPS_OFFSET
        self._map[: HEADER.itemsize] = header.tobytes()
        self._map[: len(MAGIC)] = MAGIC
        self._no_room = self.string("(a name that the journal had no room for)")
        self.string(RUNNING_OUTCOME)

    def append(self, kind: int, *values: float | bytes) -> None:
        """Write one record: step, microbatch, backward_index, the table's plain fields in order, then each
        summary as bytes."""
        with self.lock:
            if self._written >= self._limit and not self._found_room():
                self._drop(kind, int(values[0]))
                return
            self._written = number = self._written + 1
            offset = self._records_offset + ((number - 1) % self._places) * RECORD_BYTES
            self._pack[kind](self._map, offset + 8, kind, *values, number)
            _pack_u64(self._map, offset, number)
            self._counts[kind] += 1
            if number == self._next_half:
                self._next_half += self.half_records
                self.half_is_full.set()

    def map_ahead(self) -> bool:
        """Bring pages that no record has come to into memory, on the calling thread and not on the job's, some at a
        time. Whether there are more; here whoever writes comes to them first."""
        return False

    def append_lasting(self, kind: int, *values: float | bytes) -> None:
        """Write a record that a ring keeps when its step is let go of: it is written once for all steps."""
        with self.lock:
            before = self._written
            self.append(kind, *values)
            if self._make_room is not None and self._written > before:
                self._lasting.append((self._written, kind, values))

    def hold(self, kind: int, *values: float | bytes) -> int | None:
        """Keep a row that `settle` will complete: it is read as it stands where the rank dies before. Its place,
        None where all are taken."""
        with self.lock:
            if self._limit < 0 or not self._free_places:
                return None
            place = self._free_places.pop()
            offset = self._held_offset + place * RECORD_BYTES
            self._pack[kind](self._map, offset + 8, kind, *values, 0)
            _pack_u64(self._map, offset, 1)
            return place

    def settle(self, place: int | None, kind: int, *values: float | bytes) -> None:
        """Write the complete row in place of a held one."""
        with self.lock:
            if place is not None and self._limit >= 0:
                if self._written >= self._limit:
                    self._found_room()
                offset = self._held_offset + place * RECORD_BYTES
                _pack_u64(self._map, offset + RECORD_BYTES - 8, self._written + 1)
                self.append(kind, *values)
                _pack_u64(self._map, offset, 0)
                self._free_places.append(place)
            else:
                self.append(kind, *values)

    def release(self, place: int | None) -> None:
        """Forget a held row, of which nothing comes."""
        with self.lock:
            if place is not None and self._limit >= 0:
                _pack_u64(self._map, self._held_offset + place * RECORD_BYTES, 0)
                self._free_places.append(place)

    def string(self, text: str | None) -> int:
        """The number of a text, which is written before its first use."""
        if text is None:
            return NULL_STRING
        number = self._numbers.get(text)
        return number if number is not None else self._add_string(text)

    def push_running(self, thread: int, *entry: int) -> None:
        """Note what the thread is about to run: the fields of RUNNING, without the spare one."""
        slot = self._slots.get(thread)
        if slot is None:
            slot = self._new_slot(thread)
            if slot is None:
                return
        depth = self._depths[slot]
        self._depths[slot] = depth + 1
        if depth < THREAD_DEPTH:
            start = self._running_offset + slot * THREAD.itemsize
            _RUNNING.pack_into(
                self._map, start + _THREAD_HEAD + depth * RUNNING.itemsize, *entry, 0
            )
            _pack_u64(self._map, start + 8, depth + 1)

    def pop_running(self, thread: int) -> None:
        """The thread has finished what it noted last."""
        slot = self._slots.get(thread)
        if slot is None or not self._depths[slot]:
            return
        depth = self._depths[slot] - 1
        self._depths[slot] = depth
        if depth < THREAD_DEPTH:
            _pack_u64(self._map, self._running_offset + slot * THREAD.itemsize + 8, depth)

    def move(self, thread: int, moved_ns: int, place: Place) -> None:
        """Note where the thread is from now on: kind, name, root, call_index, step, microbatch, backward_index.

        About half a microsecond a call, so that a rank which hangs or dies outside any Node can say where.
        """
        slot = self._slots.get(thread)
        if slot is None:
            slot = self._new_slot(thread)
            if slot is None:
                return
        self._places_now[slot] = place
        _pack_place(self._map, _PLACES_AT[slot], moved_ns, *place, 0, moved_ns)

    def place_of(self, thread: int) -> Place:
        """Where the thread is, by its last `move`."""
        slot = self._slots.get(thread)
        return NOWHERE if slot is None else self._places_now[slot]

    def beat(self, wall_ns: int) -> None:
        """Say that the process lives. Called on the drain thread, about once a second."""
        self._store("heartbeat_ns", wall_ns)

    @property
    def recorded(self) -> dict[str, int]:
        """Records written so far, by table."""
        return {name: self._counts[k] for k, name in self._names.items() if self._counts[k]}

    @property
    def dropped(self) -> collections.Counter[str]:
        """What had no room, by table, and what was lost otherwise."""
        return self.lost

    @property
    def dropped_steps(self) -> dict[str, tuple[int, int]]:
        """First and last step of what had no room, by table."""
        return self._lost_steps

    @property
    def written(self) -> int:
        """Number of the newest record. Waits for a record that is being written on another thread."""
        with self.lock:
            return self._written

    @property
    def drained(self) -> int:
        """Up to which record everything lies in parts."""
        return self._drained

    def records(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """A view of records `first` to `last`, which lie in one half: uint8, (n, RECORD_BYTES).

        It must be let go of before `close`. Called on the drain thread.
        """
        place = (first - 1) % self._places
        count = last - first + 1
        flat = np.frombuffer(
            self._map, np.uint8, count * RECORD_BYTES, self._records_offset + place * RECORD_BYTES
        )
        return flat.reshape(count, RECORD_BYTES)

    def amend(
        self,
        numbers: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.int64],
        data: npt.NDArray[np.uint8],
    ) -> None:
        """Write `data`, of shape (n, bytes), over the records of these numbers, each at its own offset.

        Records that are drained, or that a ring has let go of, stay as they are. Called on the drain thread, which
        holds the hooks up for a few of them at a time.
        """
        width = data.shape[1]
        for offset in np.unique(offsets).tolist():
            chosen = np.nonzero(offsets == offset)[0]
            for start in range(0, len(chosen), _AMENDED_AT_ONCE):
                some = chosen[start : start + _AMENDED_AT_ONCE]
                with self.lock:
                    if self._limit < 0:
                        return
                    some = some[numbers[some] > self._drained]
                    size = self._places * RECORD_BYTES
                    flat = np.frombuffer(self._map, np.uint8, size, self._records_offset)
                    records = flat.reshape(self._places, RECORD_BYTES)
                    places = (numbers[some].astype(np.int64) - 1) % self._places
                    records[places, offset : offset + width] = data[some]

    def mark_drained(self, last: int) -> None:
        """All records up to `last` lie in parts: their half is free again, of a ring each place."""
        self._store("drained", last)
        with self.lock:
            self._drained = last
            if self._make_room is None:
                last = (last // self.half_records) * self.half_records
            self._lasting = [entry for entry in self._lasting if entry[0] > last]
            self._limit = last + self._places

    def keep_as_ring(self, make_room: Callable[[], bool]) -> None:
        """The newest records are what counts: `make_room` is called when no place is free, and may let go of some."""
        self._make_room = make_room

    def let_go(self, last: int, step: int) -> None:
        """No record up to `last` is wanted any more; lasting ones are written again, as of `step`."""
        with self.lock:
            stale = [entry for entry in self._lasting if entry[0] <= last]
            # A rank that is killed in between has such a row twice rather than not at all.
            has_room = self._limit - self._written >= len(stale)
            if has_room:
                self._carry(stale, step)
            self._store("drained", last)
            self._drained = last
            self._limit = last + self._places
            if not has_room:
                self._carry(stale, step)

    def forget(self) -> None:
        """In a forked child: whatever still writes here writes nowhere. Another process's file is never touched."""
        self.lock = threading.RLock()  # a thread that is not here may have held it
        self._limit = -1
        self._map = mmap.mmap(-1, len(self._map))

    def close(self, *, remove: bool) -> None:
        """Unmap the file, and remove it when all of it lies in parts; else say in it that the rank ended well."""
        with self.lock:
            self._limit = -1
            if not remove:
                self._store("closed_ns", time.time_ns())
        with contextlib.suppress(BufferError):  # a view on a drain thread that did not end in time
            self._map.close()
        if remove:
            self.path.unlink(missing_ok=True)

    def _found_room(self) -> bool:
        return (
            self._limit >= 0
            and self._make_room is not None
            and self._make_room()
            and self._written < self._limit
        )

    def _carry(self, entries: list[tuple[int, int, tuple[float | bytes, ...]]], step: int) -> None:
        for entry in entries:
            self._lasting.remove(entry)
            _, kind, values = entry
            self.append_lasting(kind, step, *values[1:])

    def _drop(self, kind: int, step: int | None) -> None:
        name = self._names[kind] if kind else "names"
        self.lost[name] += 1
        if step is not None:
            first, last = self._lost_steps.get(name, (step, step))
            self._lost_steps[name] = first, last = min(first, step), max(last, step)
        else:
            first = last = NULL_INT32
        if self._limit >= 0 and kind < DROP_KINDS:
            self._store("dropped", sum(self.lost.values()))
            at = DROPS_OFFSET + kind * DROPS.itemsize
            _pack_drop(self._map, at, self.lost[name], first, last)

    def _store(self, name: str, value: int) -> None:
        assert HEADER.fields is not None
        _pack_u64(self._map, HEADER.fields[name][1], value)

    def _add_string(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        if len(data) > _MOST_TEXT_BYTES:
            data = data[:_MOST_TEXT_BYTES].decode("utf-8", "ignore").encode()
        with self.lock:
            if text in self._numbers:
                return self._numbers[text]
            used = self._strings_used
            # Names come first: long texts, such as hyperparameters that change with each step, leave half.
            room = self._strings_bytes if len(data) < _LONG_TEXT_BYTES else self._strings_bytes // 2
            if self._limit < 0 or used + 4 + len(data) > room:
                self._drop(0, None)
                return self._no_room
            at = self._strings_offset + used
            self._strings_used = used + 4 + len(data)
            self.texts.append(data.decode("utf-8", "replace"))
            number = self._numbers[text] = len(self.texts) - 1
            _U32.pack_into(self._map, at, len(data))
            self._map[at + 4 : at + 4 + len(data)] = data
            self._store("strings_used", self._strings_used)
            return number

    def _new_slot(self, thread: int) -> int | None:
        with self.lock:
            if len(self._slots) == THREAD_SLOTS:
                # Threads come and go: the slot of one that runs nothing serves the next.
                idle = [
                    t
                    for t, s in self._slots.items()
                    if self._depths[s] == 0 and self._places_now[s][0] not in INSIDE
                ]
                if not idle:
                    return None
                slot = self._slots.pop(idle[0])
            else:
                slot = len(self._slots)
            self._slots[thread] = slot
            self._places_now[slot] = NOWHERE
            _pack_place(self._map, _PLACES_AT[slot], 0, *NOWHERE, 0, 0)
            struct.pack_into(
                "<qQ", self._map, self._running_offset + slot * THREAD.itemsize, thread, 0
            )
            return slot


def _allocated(path: Path, size: int) -> mmap.mmap:
    """A new file of that size, all of it allocated, mapped."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)

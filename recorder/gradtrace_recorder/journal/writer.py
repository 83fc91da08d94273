"""The memory-mapped journal: the only thing that a hook writes. When full it drops and counts.

A record costs no system call, and what was written outlives SIGKILL, `os._exit` and a segfault, since it
lies in the page cache. The layout is declared in `gradtrace_schemas.journal`.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import struct
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradtrace_recorder.journal.file import new_journal_file
from gradtrace_recorder.journal.ring import Ring
from gradtrace_recorder.journal.thread_notes import INSIDE, NOWHERE, Place, ThreadNotes, pack_u64
from gradtrace_recorder.journal.wakeup import Wakeup
from gradtrace_schemas.journal import (
    DROP_KINDS,
    DROPS,
    DROPS_OFFSET,
    HEADER,
    HELD_PLACES,
    JOURNAL_TABLES,
    KINDS,
    NULL_INT32,
    NULL_STRING,
    RECORD_BYTES,
    RUNNING_OUTCOME,
    record_struct,
    struct_format,
)

__all__ = ["INSIDE", "NOWHERE", "JournalWriter", "Place"]

HALF_RECORDS = 32_768
STRINGS_BYTES = 8 << 20
_MOST_TEXT_BYTES = 64 << 10
_LONG_TEXT_BYTES = 256
_AMENDED_AT_ONCE = 256

_U32 = struct.Struct("<I")
_pack_drop = struct.Struct("<" + struct_format(DROPS)).pack_into


class JournalWriter(ThreadNotes):
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
        self.half_is_full = Wakeup()
        self.lost: collections.Counter[str] = collections.Counter()
        self._lost_steps: dict[str, tuple[int, int]] = {}
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._strings_bytes = strings_bytes
        self._strings_used = 0
        file = new_journal_file(
            path,
            half_records=half_records,
            strings_bytes=strings_bytes,
            rank=rank,
            attempt=attempt,
            wall_start_ns=wall_start_ns,
            monotonic_start_ns=monotonic_start_ns,
            heartbeat_ns=wall_start_ns,
            process_start=process_start,
            machine=machine,
        )
        super().__init__(file.map, file.running_offset)
        self._held_offset = file.held_offset
        self._strings_offset = file.strings_offset
        self._records_offset = file.records_offset
        self._pack = {KINDS[t.name]: record_struct(t).pack_into for t in JOURNAL_TABLES}
        self._counts = [0] * (max(KINDS.values()) + 1)
        self._names = {KINDS[t.name]: t.name for t in JOURNAL_TABLES}
        self._places = 2 * half_records
        self._written = 0
        self._drained = 0
        self._limit = self._places
        self._next_half = half_records
        self._ring: Ring | None = None
        self._free_places = list(range(HELD_PLACES))
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
            pack_u64(self._map, offset, number)
            self._counts[kind] += 1
            # Not by its very record alone: a signal handler may have raised in the middle of that one.
            if number >= self._next_half:
                self.half_is_full.set()
                self._next_half = (number // self.half_records + 1) * self.half_records

    def map_ahead(self) -> bool:
        """Bring pages that no record has come to into memory, on the calling thread and not on the job's, some at a
        time. Whether there are more; here whoever writes comes to them first."""
        return False

    def append_lasting(self, kind: int, *values: float | bytes) -> None:
        """Write a record that a ring keeps when its step is let go of: it is written once for all steps."""
        with self.lock:
            before = self._written
            self.append(kind, *values)
            if self._ring is not None and self._written > before:
                self._ring.add_lasting(self._written, kind, values)

    def hold(self, kind: int, *values: float | bytes) -> int | None:
        """Keep a row that `settle` will complete: it is read as it stands where the rank dies before. Its place,
        None where all are taken."""
        with self.lock:
            if self._limit < 0 or not self._free_places:
                return None
            place = self._free_places.pop()
            offset = self._held_offset + place * RECORD_BYTES
            self._pack[kind](self._map, offset + 8, kind, *values, 0)
            pack_u64(self._map, offset, 1)
            return place

    def settle(self, place: int | None, kind: int, *values: float | bytes) -> None:
        """Write the complete row in place of a held one."""
        with self.lock:
            if place is not None and self._limit >= 0:
                if self._written >= self._limit:
                    self._found_room()
                offset = self._held_offset + place * RECORD_BYTES
                pack_u64(self._map, offset + RECORD_BYTES - 8, self._written + 1)
                self.append(kind, *values)
                pack_u64(self._map, offset, 0)
                self._free_places.append(place)
            else:
                self.append(kind, *values)

    def release(self, place: int | None) -> None:
        """Forget a held row, of which nothing comes."""
        with self.lock:
            if place is not None and self._limit >= 0:
                pack_u64(self._map, self._held_offset + place * RECORD_BYTES, 0)
                self._free_places.append(place)

    def string(self, text: str | None) -> int:
        """The number of a text, which is written before its first use."""
        if text is None:
            return NULL_STRING
        number = self._numbers.get(text)
        return number if number is not None else self._add_string(text)

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
        with self.lock:
            if self._ring is not None:
                self._ring.drained(last)
                self.free(last)
                return
            self._store("drained", last)
            self._drained = last
            self._limit = (last // self.half_records) * self.half_records + self._places

    def keep_as_ring(self) -> Ring:
        """From now on the newest records are what counts. Gives what says which."""
        self._ring = Ring(self)
        return self._ring

    @property
    def room(self) -> int:
        """How many records have room."""
        return self._limit - self._written

    def free(self, last: int) -> None:
        """The places of all records up to `last` are free again."""
        self._store("drained", last)
        with self.lock:
            self._drained = last
            self._limit = last + self._places

    def took_not_finite(self) -> bool:
        """Whether hooks that run without Python have seen a value that is not finite since this was asked last."""
        return False

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
            and self._ring is not None
            and self._ring.make_room()
            and self._written < self._limit
        )

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
        pack_u64(self._map, HEADER.fields[name][1], value)

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

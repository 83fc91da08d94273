"""The journal whose places are claimed in C++, so that threads without the GIL write into it too.

Strings, held rows and the file itself are those of `JournalWriter`. A ring (flight mode) is not for it.
"""

from __future__ import annotations

import collections
import mmap
from pathlib import Path
from typing import Any

from gradtrace_recorder.journal import INSIDE, NOWHERE, JournalWriter, Place
from gradtrace_schemas.journal import (
    DROPS,
    DROPS_OFFSET,
    HEADER,
    JOURNAL_TABLES,
    KINDS,
    NULL_INT32,
    PLACE,
    PLACES_OFFSET,
    RECORD_BYTES,
    RECORD_HEAD,
    SUMMARY,
    THREAD,
    THREAD_DEPTH,
    THREAD_SLOTS,
    plain_fields,
    record_dtype,
    struct_format,
)

_THREAD_HEAD = 16


class NativeJournal(JournalWriter):
    """A `JournalWriter` for threads with and without the GIL. `core` is the library's own."""

    def __init__(self, library: Any, path: Path, **about: Any) -> None:
        self.core = library.Journal()
        super().__init__(path, **about)
        self.half_is_full = self.core.half_is_full
        self.lock = self.core
        self.append = self.core.append  # type: ignore[method-assign]
        self.push_running = self.core.push_running  # type: ignore[method-assign]
        self.pop_running = self.core.pop_running  # type: ignore[method-assign]
        self.move = self.core.move  # type: ignore[method-assign]
        self.core.open(self._map, self._layout(), _formats(), SUMMARY.itemsize)

    def place_of(self, thread: int) -> Place:
        """Where the thread is, by its last `move`."""
        found: Place | None = self.core.place_of(thread)
        return NOWHERE if found is None else found

    def map_ahead(self) -> bool:
        """Bring pages that no record has come to into memory; whether there are more."""
        return bool(self.core.map_ahead())

    @property
    def recorded(self) -> dict[str, int]:
        """Records written so far, by table."""
        counts = self.core.counts
        return {name: counts[kind] for kind, name in self._names.items() if counts[kind]}

    @property
    def dropped(self) -> collections.Counter[str]:
        """What had no room, by table, and what was lost otherwise."""
        drops = collections.Counter(self.lost)
        for kind, (count, _, _) in enumerate(self.core.drops):
            if count:
                drops[self._names[kind] if kind else "names"] += count
        return drops

    @property
    def dropped_steps(self) -> dict[str, tuple[int, int]]:
        """First and last step of what had no room, by table."""
        return {
            self._names[kind]: (first, last)
            for kind, (count, first, last) in enumerate(self.core.drops)
            if count and kind
        }

    def forget(self) -> None:
        """In a forked child: whatever still writes here writes nowhere."""
        self._map = mmap.mmap(-1, len(self._map))
        self.core.forget(self._map)

    def close(self, *, remove: bool) -> None:
        """Unmap the file, and remove it when all of it lies in parts; else say in it that the rank ended well."""
        self.core.let_go()
        super().close(remove=remove)

    def _drop(self, kind: int, step: int | None) -> None:
        self.core.drop(kind, NULL_INT32 if step is None else step)

    def _layout(self) -> dict[str, int]:
        assert HEADER.fields is not None
        return {
            "records_offset": self._records_offset,
            "record_bytes": RECORD_BYTES,
            "running_offset": self._running_offset,
            "thread_bytes": THREAD.itemsize,
            "thread_head": _THREAD_HEAD,
            "thread_slots": THREAD_SLOTS,
            "thread_depth": THREAD_DEPTH,
            "places_offset": PLACES_OFFSET,
            "place_bytes": PLACE.itemsize,
            "drops_offset": DROPS_OFFSET,
            "drop_bytes": DROPS.itemsize,
            "dropped_offset": HEADER.fields["dropped"][1],
            "first_inside": min(INSIDE),
            "last_inside": max(INSIDE),
            "half_records": self.half_records,
        }

    # What `JournalWriter` counts in plain attributes lies in the core.

    @property
    def _written(self) -> int:
        return int(self.core.written)

    @_written.setter
    def _written(self, value: int) -> None:
        self.core.written = value

    @property
    def _limit(self) -> int:
        return int(self.core.limit)

    @_limit.setter
    def _limit(self, value: int) -> None:
        self.core.limit = value

    @property
    def _next_half(self) -> int:
        return int(self.core.next_half)

    @_next_half.setter
    def _next_half(self, value: int) -> None:
        self.core.next_half = value


def _formats() -> dict[int, str]:
    """What the values of a record are, one letter each: as `struct` has them, and `s` for a summary."""
    head = "".join(struct_format(RECORD_HEAD[name]) for name in (RECORD_HEAD.names or ())[1:])
    formats = {}
    for table in JOURNAL_TABLES:
        dtype = record_dtype(table)
        plain = "".join(struct_format(dtype[column.name]) for column in plain_fields(table))
        formats[KINDS[table.name]] = head + plain + "s" * len(table.summaries)
    return formats

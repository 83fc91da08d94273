"""The journal whose places are claimed in C++, so that threads without the GIL write into it too.

Strings and the file itself are those of `JournalWriter`. A ring's steps are let go of in C++ too, by whichever thread
finds it full.

The core has a lock of its own, which no code of Python's can take: hooks that run without the GIL would wait for
whoever has it. `lock` is Python's, and guards what Python alone keeps: the strings.
"""

from __future__ import annotations

import collections
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace_recorder.journal.ring import Ring
from gradtrace_recorder.journal.writer import NOWHERE, JournalWriter, Place
from gradtrace_schemas.journal import NULL_INT32


class NativeJournal(JournalWriter):
    """A `JournalWriter` for threads with and without the GIL. `core` is the library's own."""

    def __init__(self, library: Any, path: Path, **about: Any) -> None:
        self.core = library.Journal()
        self._is_opened = False
        super().__init__(path, **about)
        self.half_is_full = self.core.half_is_full
        self.append = self.core.append  # type: ignore[method-assign]
        self.append_lasting = self.core.append_lasting  # type: ignore[method-assign]
        self.mark_drained = self.core.mark_drained  # type: ignore[method-assign]
        self.took_not_finite = self.core.took_not_finite  # type: ignore[method-assign]
        self.push_running = self.core.push_running  # type: ignore[method-assign]
        self.pop_running = self.core.pop_running  # type: ignore[method-assign]
        self.move = self.core.move  # type: ignore[method-assign]
        self.hold = self.core.hold  # type: ignore[method-assign]
        self.settle = self.core.settle  # type: ignore[method-assign]
        self.release = self.core.release  # type: ignore[method-assign]
        self.core.open(
            self._map, self._running_offset, self._held_offset, self._records_offset, self.half_records
        )  # fmt: skip
        self._is_opened = True

    def place_of(self, thread: int) -> Place:
        """Where the thread is, by its last `move`."""
        found: Place | None = self.core.place_of(thread)
        return NOWHERE if found is None else found

    def keep_as_ring(self) -> Ring:
        """From now on the newest records are what counts. Gives what says which."""
        return NativeRing(self)

    def map_ahead(self) -> bool:
        """Bring pages that no record has come to into memory; whether there are more."""
        return bool(self.core.map_ahead())

    @property
    def recorded(self) -> dict[str, int]:
        """Records written so far, by table."""
        return self.by_table(self.core.counts)

    def by_table(self, counts: list[int]) -> dict[str, int]:
        """Counts of each kind of record that are not 0, by table."""
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

    def amend(
        self,
        numbers: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.int64],
        data: npt.NDArray[np.uint8],
    ) -> None:
        """Write `data`, of shape (n, bytes), over the records of these numbers, each at its own offset; some at a
        time, for which hooks wait."""
        self.core.amend(
            np.ascontiguousarray(numbers, np.uint64),
            np.ascontiguousarray(offsets, np.int64),
            np.ascontiguousarray(data, np.uint8),
        )

    def forget(self) -> None:
        """In a forked child: whatever still writes here writes nowhere."""
        self.lock = threading.RLock()  # a thread that is not here may have held it
        self._map = mmap.mmap(-1, len(self._map))
        self.core.forget(self._map)

    def close(self, *, remove: bool) -> None:
        """Unmap the file, and remove it when all of it lies in parts; else say in it that the rank ended well."""
        self.core.let_go()
        super().close(remove=remove)

    def _drop(self, kind: int, step: int | None) -> None:
        self.core.drop(kind, NULL_INT32 if step is None else step)

    # What `JournalWriter` counts in plain attributes lies in the core, which alone moves it.

    @property
    def _written(self) -> int:
        return int(self.core.written)

    @_written.setter
    def _written(self, value: int) -> None:
        assert value == self.core.written

    @property
    def _limit(self) -> int:
        # Names are given before there is a place for records.
        return int(self.core.limit) if self._is_opened else self._places

    @_limit.setter
    def _limit(self, value: int) -> None:
        assert value == self._limit or not self._is_opened

    @property
    def _drained(self) -> int:
        return int(self.core.drained)

    @_drained.setter
    def _drained(self, value: int) -> None:
        assert value == self.core.drained

    @property
    def _next_half(self) -> int:
        return int(self.core.next_half)

    @_next_half.setter
    def _next_half(self, value: int) -> None:
        assert value == self.core.next_half or not self._is_opened


class NativeRing(Ring):
    """A `Ring` whose steps are let go of in C++."""

    def __init__(self, journal: NativeJournal) -> None:
        super().__init__(journal)
        self._by_table = journal.by_table
        self._core = core = journal.core
        self.end_step = core.end_step  # type: ignore[method-assign]
        self.keep = core.keep_steps  # type: ignore[method-assign]
        self.want = core.want  # type: ignore[method-assign]
        self.wrote = core.wrote  # type: ignore[method-assign]
        core.keep_as_ring()

    @property
    def kept(self) -> tuple[int, int] | None:
        """The first and the last step that has ended and is kept."""
        found: tuple[int, int] | None = self._core.kept
        return found

    @property
    def wanted(self) -> int:
        """Up to which record parts are wanted, 0 where they are not."""
        return int(self._core.ring[0])

    @property
    def overwritten(self) -> collections.Counter[str]:
        """Records that were let go of, by table."""
        return collections.Counter(self._by_table(self._core.ring[2]))

    @property
    def shortened(self) -> int:
        """How often a step was let go of because there was no room."""
        return int(self._core.ring[1])

"""What the journal says of each thread: where it is, and the Nodes that it is running."""

from __future__ import annotations

import mmap
import struct
import sys
import threading

from gradtrace_schemas.journal import (
    IN_BACKWARD,
    IN_MODULE,
    IN_OPTIMIZER,
    NULL_INT32,
    NULL_STRING,
    PLACE,
    PLACES_OFFSET,
    RUNNING,
    THREAD,
    THREAD_DEPTH,
    THREAD_SLOTS,
    struct_format,
)

# Native, where that is the same: it stores the word in one instruction, which no kill cuts in two.
pack_u64 = struct.Struct("@Q" if sys.byteorder == "little" else "<Q").pack_into
_RUNNING = struct.Struct("<" + struct_format(RUNNING))
_pack_place = struct.Struct("<" + struct_format(PLACE)).pack_into
INSIDE = (IN_MODULE, IN_BACKWARD, IN_OPTIMIZER)
Place = tuple[int, int, int, int, int, int, int]
NOWHERE: Place = (0, NULL_STRING, NULL_INT32, NULL_INT32, NULL_INT32, NULL_INT32, NULL_INT32)
_THREAD_HEAD = 16
_PLACES_AT = [PLACES_OFFSET + slot * PLACE.itemsize for slot in range(THREAD_SLOTS)]


class ThreadNotes:
    """The notes of one process's threads in its journal. Methods may be called on any thread."""

    def __init__(self, map: mmap.mmap, running_offset: int) -> None:
        self._map = map
        self._running_offset = running_offset
        # Reentrant: a signal handler of the job may run modules while one of these methods is at work. Hence
        # what is claimed under it (a number, a place) is claimed before it is filled.
        self.lock = threading.RLock()
        self._slots: dict[int, int] = {}
        self._depths = [0] * THREAD_SLOTS
        self._places_now: list[Place] = [NOWHERE] * THREAD_SLOTS

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
            pack_u64(self._map, start + 8, depth + 1)

    def pop_running(self, thread: int) -> None:
        """The thread has finished what it noted last."""
        slot = self._slots.get(thread)
        if slot is None or not self._depths[slot]:
            return
        depth = self._depths[slot] - 1
        self._depths[slot] = depth
        if depth < THREAD_DEPTH:
            pack_u64(self._map, self._running_offset + slot * THREAD.itemsize + 8, depth)

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

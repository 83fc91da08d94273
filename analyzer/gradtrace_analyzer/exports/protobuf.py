"""The few messages of Perfetto's trace format that a time line needs, encoded by hand.

A trace is a sequence of `TracePacket`s in one message. Field numbers are those of Perfetto's
`protos/perfetto/trace/perfetto_trace.proto`, which are never given to anything else once they are published.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_BEGIN, _END = 1, 2
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_EXPLICIT_ORDER = 3

# All packets of a trace come from one writer.
_SEQUENCE = 1

Detail = int | float | str | bool


def varint(value: int) -> bytes:
    """An unsigned number, seven bits a byte; a negative one as its two's complement of 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return varint(field << 3 | _VARINT) + varint(value)


def _fixed(field: int, value: int) -> bytes:
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", value & (1 << 64) - 1)


def _message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | _BYTES) + varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode("utf-8", "replace"))


def _packet(content: bytes) -> bytes:
    return _message(1, content + _number(10, _SEQUENCE))


class TraceWriter:
    """Packets of one trace. Names are written once and numbered after that."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], int] = {}

    def start(self) -> bytes:
        """The first packet: nothing of an earlier writer is meant by the numbers that follow."""
        return _packet(_number(13, _STATE_CLEARED))

    def process(self, track: int, pid: int, name: str) -> bytes:
        """Packet of a process, and of its track, on which its tracks are ordered by their places."""
        about = _number(1, pid) + _text(6, name)
        return _packet(
            _message(60, _number(1, track) + _message(3, about) + _number(11, _EXPLICIT_ORDER))
        )

    def thread(self, track: int, pid: int, tid: int, name: str) -> bytes:
        """Packet of a thread of a process, and of its track."""
        about = _number(1, pid) + _number(2, tid) + _text(5, name)
        return _packet(_message(60, _number(1, track) + _message(4, about)))

    def track(self, track: int, parent: int, name: str, place: int) -> bytes:
        """Packet of another track of a process, the `place`-th of its own; `parent` is the process's track."""
        return _packet(
            _message(
                60, _number(1, track) + _text(2, name) + _number(5, parent) + _number(12, place)
            )
        )

    def begin(
        self,
        track: int,
        at_ns: int,
        name: str,
        category: str,
        *,
        flows: Iterable[int] = (),
        ending_flows: Iterable[int] = (),
        details: Mapping[str, Detail] | None = None,
    ) -> bytes:
        """Something begins on a track. Slices with a common flow are joined by arrows in the order of time."""
        fresh = b""
        event = _number(9, _BEGIN) + _number(11, track)
        number, said = self._interned(2, name)
        fresh += said
        event += _number(10, number)
        number, said = self._interned(1, category)
        fresh += said
        event += _number(3, number)
        for key, value in (details or {}).items():
            number, said = self._interned(3, key)
            fresh += said
            event += _message(4, _number(1, number) + _detail(value))
        event += b"".join(_fixed(47, flow) for flow in flows)
        event += b"".join(_fixed(48, flow) for flow in ending_flows)
        content = _number(8, at_ns) + _number(13, _NEEDS_STATE) + _message(11, event)
        return _packet(content + (_message(12, fresh) if fresh else b""))

    def end(self, track: int, at_ns: int) -> bytes:
        """Packet that ends the innermost of what has begun on a track and not ended."""
        event = _number(9, _END) + _number(11, track)
        return _packet(_number(8, at_ns) + _number(13, _NEEDS_STATE) + _message(11, event))

    def _interned(self, kind: int, text: str) -> tuple[int, bytes]:
        """(the number of a text, unique over all kinds, the bytes that tell it: none from the second time on)."""
        key = (kind, text)
        if key in self._names:
            return self._names[key], b""
        number = self._names[key] = len(self._names) + 1
        return number, _message(kind, _number(1, number) + _text(2, text))


def _detail(value: Detail) -> bytes:
    if isinstance(value, bool):
        return _number(2, value)
    if isinstance(value, int):
        return _number(4, value)
    if isinstance(value, float):
        return varint(5 << 3 | _FIXED64) + struct.pack("<d", value)
    return _text(6, value)

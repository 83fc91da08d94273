"""Which steps, or which ranks: `0,8-15,100:200,::50`. One way of writing for both. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


class NotNumbers(ValueError):
    """A text that says no numbers; this one's text goes on after `GRADTRACE_STEPS is '0:x', `."""


@dataclass(frozen=True)
class Numbers:
    """The union of Python slices over numbers from 0; empty: all."""

    slices: tuple[slice, ...] = ()

    def __contains__(self, number: int) -> bool:
        if not self.slices:
            return True
        return any(
            number >= s.start
            and (s.stop is None or number < s.stop)
            and (number - s.start) % s.step == 0
            for s in self.slices
        )

    def as_slices(self) -> list[str]:
        """Each part as a Python slice: `0:10:1`."""
        return [f"{s.start}:{'' if s.stop is None else s.stop}:{s.step}" for s in self.slices]

    def as_text(self) -> str:
        """All parts as a person writes them: `7,0:10,50:,::3`."""
        return ",".join(map(_text, self.slices))

    def as_spans(self) -> list[str]:
        """Each part with a dash, `8-15`, but for those that have a stride or no end: these as slices."""
        return [
            f"{s.start}-{s.stop - 1}" if s.step == 1 and s.stop is not None else as_slice
            for s, as_slice in zip(self.slices, self.as_slices(), strict=True)
        ]


def _text(part: slice) -> str:
    if part.step == 1 and part.stop == part.start + 1:
        return str(part.start)
    ends = f"{part.start or ''}:{'' if part.stop is None else part.stop}"
    return ends if part.step == 1 else f"{ends}:{part.step}"


def numbers_of(text: str) -> Numbers:
    """Numbers, spans with a dash (the last one is in it) and Python slices (the stop is not), comma-separated.

    Raises NotNumbers.
    """
    return Numbers(tuple(_part(part.strip()) for part in text.split(",")))


def _part(part: str) -> slice:
    if ":" in part:
        return _slice(part)
    first, dash, last = part.partition("-")
    low = _whole(first if first else part)
    high = _whole(last if last else part) if dash else low
    if high < low:
        raise NotNumbers(f"of which {part!r} runs backwards")
    return slice(low, high + 1, 1)


def _slice(part: str) -> slice:
    pieces = part.split(":")
    if len(pieces) > 3:
        raise NotNumbers(f"of which {part!r} is no slice; write 0:10,100:110,::50")
    start, stop, stride = (piece.strip() for piece in [*pieces, ""][:3])
    found = slice(_whole(start or "0"), _whole(stop) if stop else None, _whole(stride or "1"))
    if found.step == 0:
        raise NotNumbers(f"of which {part!r} has a stride of 0")
    if found.stop is not None and found.stop <= found.start:
        raise NotNumbers(
            f"of which {part!r} holds no number: a slice ends before its stop; write 0:10 or 0-9"
        )
    return found


def _whole(text: str) -> int:
    """The number. `isdigit` alone takes digits that `int` does not, and `int` takes `1_0`."""
    if text.isascii() and text.isdigit():
        return int(text)
    raise NotNumbers(f"of which {text!r} is no whole number from 0")

"""One step of a pipeline as a chart of text: which actions and waits lie on each line, and the letters of it.

A column stands for a span of time. It shows an action where actions take a quarter of it, else a wait that does; an
action is its letter, its microbatch where there is room, and `=` until its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb

LETTERS = {"forward": "F", "backward_full": "B", "backward_input": "I", "backward_weight": "W"}
WAITS = {
    "receive_activations": ".",
    "receive_gradients": ":",
    "send_activations": "~",
    "send_gradients": "~",
}
MEANINGS = {
    "F": "forward",
    "B": "backward, whole",
    "I": "its input half",
    "W": "its weight half",
    ".": "waits for activations",
    ":": "waits for gradients",
    "~": "waits until sent",
}
_FEWEST_COLUMNS = 20
_LEAST_SHARE = 0.25


@dataclass(frozen=True)
class Bar:
    """An action or a wait on a line, in nanoseconds since the step's pipeline began."""

    kind: str
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Lane:
    """What a rank did in one stage, in the order of time. `stage_index` is None outside any stage."""

    rank: int
    stage_index: int | None
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Chart:
    """One step of one pipeline (`line`, from 0), from its first action to its last: a lane for each rank and stage."""

    step: int
    line: int
    length_ns: int
    lanes: tuple[Lane, ...]


_TYPICAL = """
SELECT line, step, until_ns - from_ns, from_ns FROM windows
WHERE $step IS NULL OR step = $step
ORDER BY abs(until_ns - from_ns - (SELECT median(until_ns - from_ns) FROM windows)), step, line LIMIT 1
"""

_BARS = """
WITH every AS (
    SELECT rank, line, step, microbatch, stage_index, kind, start_ns, end_ns FROM actions
    UNION ALL SELECT rank, line, step, microbatch, stage_index, kind, start_ns, end_ns FROM stage_waits)
SELECT rank, stage_index, kind, microbatch, start_ns - $from, end_ns - $from FROM every
WHERE line = $line AND step = $step ORDER BY stage_index, rank, start_ns, end_ns
"""


def chart(connection: duckdb.DuckDBPyConnection, step: int | None = None) -> Chart | None:
    """That step, or a typical one: whose length is nearest to the median. Needs the tables of `stage_answer`."""
    found = connection.execute(_TYPICAL, {"step": step}).fetchall()
    if not found:
        return None
    line, number, length, begin = found[0]
    bars: dict[tuple[int, int | None], list[Bar]] = {}
    for rank, stage, kind, microbatch, start, end in connection.execute(
        _BARS, {"line": line, "step": number, "from": begin}
    ).fetchall():
        bars.setdefault((rank, stage), []).append(Bar(kind, microbatch, start, end))
    lanes = (Lane(rank, stage, tuple(of_lane)) for (rank, stage), of_lane in bars.items())
    order = sorted(lanes, key=lambda lane: (lane.rank, lane.stage_index or 0))
    return Chart(number, line, max(length, 1), tuple(order))


def drawn(lanes: Sequence[Lane], length_ns: int, columns: int) -> Iterator[str]:
    """A line of letters for each lane, `columns` long (20 at least): `length_ns` from the step's beginning on."""
    width = max(columns, _FEWEST_COLUMNS)
    for lane in lanes:
        yield _line(lane.bars, length_ns, width)


def _line(bars: Sequence[Bar], length_ns: int, columns: int) -> str:
    """A lane's letters. Several short actions in one column are shown by the longest of them."""
    inside: list[list[tuple[float, Bar]]] = [[] for _ in range(columns)]
    for bar in bars:
        first = max(0, bar.start_ns * columns // length_ns)
        last = min(columns - 1, (bar.end_ns - 1) * columns // length_ns)
        for column in range(first, last + 1):
            left, right = column * length_ns / columns, (column + 1) * length_ns / columns
            covered = min(bar.end_ns, right) - max(bar.start_ns, left)
            inside[column].append((covered * columns / length_ns, bar))
    return "".join(_texts([_shown(of_column) for of_column in inside]))


def _shown(inside: Sequence[tuple[float, Bar]]) -> Bar | None:
    """What a column shows of the shares of it: an action where they take a quarter of it, else a wait that does."""
    for letters in (LETTERS, WAITS):
        of_sort = [(share, bar) for share, bar in inside if bar.kind in letters]
        if sum(share for share, _ in of_sort) >= _LEAST_SHARE:
            return max(of_sort, key=lambda pair: pair[0])[1]
    return None


def _texts(shown: Sequence[Bar | None]) -> Iterator[str]:
    at = 0
    while at < len(shown):
        bar, end = shown[at], at + 1
        while end < len(shown) and shown[end] is bar:
            end += 1
        yield _segment(bar, end - at)
        at = end


def _segment(bar: Bar | None, width: int) -> str:
    if bar is None:
        return " " * width
    if bar.kind in WAITS:
        return WAITS[bar.kind] * width
    named = f"{LETTERS[bar.kind]}{bar.microbatch}"
    return (named if len(named) <= width else LETTERS[bar.kind]).ljust(width, "=")

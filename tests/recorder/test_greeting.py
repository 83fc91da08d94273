"""The line at the start: its numbers are those that were measured."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from gradtrace_recorder.session.greeting import COSTS, greeting, speaks
from gradtrace_recorder.settings.variables import settings_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "internals" / "performance.md"


def test_costs_are_those_of_the_page() -> None:
    """A step's by processor time; with tiny tensors, off and full."""
    text = PAGE.read_text()
    for observer, row in (("native", "native observer"), ("python", "Python observer")):
        number = r"(1\.\d+); .*?"
        [cells] = re.findall(
            rf"^\| {row} \| {number} \| {number} \| {number} \|$", text, re.MULTILINE
        )
        usual = [COSTS[observer, summary].usual for summary in ("off", "norms", "full")]
        assert usual == [float(cell) for cell in cells]
        tiny = {
            summary: Decimal(cell).quantize(Decimal("0.1"), ROUND_HALF_UP)
            for summary, cell in re.findall(
                rf"^\| gradtrace, {observer}, (\w+) \| (\d\.\d+) \|", text, re.MULTILINE
            )
        }
        assert COSTS[observer, "off"].tiny == str(tiny["off"])
        assert COSTS[observer, "norms"].tiny == f"{tiny['off']} to {tiny['full']}"
        assert COSTS[observer, "full"].tiny == str(tiny["full"])


@pytest.mark.parametrize(
    ("given", "is_native", "said"),
    [
        ({}, True, "detail nodes, summary full, native observer; a step is expected to take about 1.08 times as long"),
        ({"observer": "python"}, False, "Python observer, as asked; a step is expected to take about 1.57 times"),
        ({"replay": "*"}, False, "Python observer (Nodes are run again by Python); a step"),
        ({"detail": "steps"}, False, "detail steps, summary full; a step is expected to take at most 1.57 times"),
        ({"mode": "flight"}, True, "the last 8 steps, native observer; a step"),
        ({"steps": "3"}, True, "a step is expected to take at most 1.08 times"),
    ],
    ids=str,
)  # fmt: skip
def test_line_says_what_is_recorded_and_by_whom(
    given: dict[str, str], is_native: bool, said: str
) -> None:
    line = greeting(settings_of("d", **given), Path("/d"), 3, is_native=is_native)
    assert line.startswith("recording into /d, attempt 3: ") and said in line and "\n" not in line
    assert line.endswith("(measured on a CPU)"), "no advice where nobody forgot the build"


def test_first_rank_that_is_recorded_speaks() -> None:
    assert [r for r in range(4) if speaks(settings_of("d"), r, 4)] == [0]
    assert [r for r in range(4) if speaks(settings_of("d", ranks="2-3"), r, 4)] == [2]

"""Which step of the candidate is held against which of the baseline, where their numbers do not say it.

The candidate is read with other numbers, so that everything else compares steps of the same number: those of the
baseline.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gradtrace_analyzer.errors import BadAlignment
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.history import continued_steps
from gradtrace_analyzer.sql.views import connect, connect_pair
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_analyzer.words.numbers import spans
from gradtrace_schemas.steps import PARAMETERS

FRAMEWORK = "framework"
_OFFSET = re.compile(r"offset[=:]([+-]?\d{1,9})")


@dataclass(frozen=True)
class StepAlignment:
    """The candidate's steps are numbered `offset` higher; `framework` is whose counter said so, where one did."""

    offset: int
    framework: str | None = None


def alignment_of(text: str | None, baseline: Run, candidate: Run) -> StepAlignment | None:
    """What `--align-steps` asks for: `framework`, or `offset=N`. Raises BadAlignment."""
    if text is None:
        return None
    if text == FRAMEWORK:
        return _by_framework(baseline, candidate)
    found = _OFFSET.fullmatch(text.strip())
    if found is None:
        raise BadAlignment(
            f"--align-steps is {text!r}; write framework, or offset=N: the candidate's step 0 is the baseline's step N"
        )
    return StepAlignment(int(found[1]))


def _by_framework(baseline: Run, candidate: Run) -> StepAlignment:
    with contextlib.closing(connect_pair(baseline, candidate)) as connection:
        kinds = {}
        for side, run in zip(SIDES, (baseline, candidate), strict=True):
            kinds[side] = _counted_by(connection, side, run)
        if kinds["baseline"] != kinds["candidate"]:
            raise BadAlignment(
                f"the baseline's steps are counted by {kinds['baseline']}, the candidate's by {kinds['candidate']}: "
                "their counters may mean different things; --align-steps offset=N says which steps pair"
            )
        apart = connection.execute(
            "SELECT b.step - c.step AS apart, min(b.framework_step), max(b.framework_step) FROM baseline.steps b "
            "JOIN candidate.steps c ON c.rank = b.rank AND c.framework_step = b.framework_step "
            "GROUP BY apart ORDER BY 2"
        ).fetchall()
        if not apart:
            held = [
                spans(
                    step
                    for (step,) in connection.execute(
                        f"SELECT framework_step FROM {side}.steps WHERE framework_step IS NOT NULL"
                    ).fetchall()
                )
                for side in SIDES
            ]
            raise BadAlignment(
                f"no step of {kinds['baseline']} was recorded on both sides: {held[0]} against {held[1]}"
            )
    if len(apart) > 1:
        (first, _, until), (second, start, _) = apart[:2]
        raise BadAlignment(
            f"the counter of {kinds['baseline']} and our steps do not go alike on both sides: the candidate is {first} "
            f"steps behind up to its step {until}, and {second} at {start}; compare these parts by --align-steps "
            "offset=N"
        )
    return StepAlignment(apart[0][0], kinds["baseline"])


def _counted_by(connection: object, side: str, run: Run) -> str:
    """Whose counter a side recorded, if it is one, and one of our steps for each of its own."""
    execute = connection.execute  # type: ignore[attr-defined]
    names = [
        name
        for (name,) in execute(
            f"SELECT DISTINCT framework FROM {side}.steps WHERE framework_step IS NOT NULL ORDER BY 1"
        ).fetchall()
    ]
    if not names:
        raise BadAlignment(
            f"{run.path} recorded no framework's counter; --align-steps offset=N says which steps pair"
        )
    if len(names) > 1:
        raise BadAlignment(f"the {side}'s steps were counted by {' and '.join(map(str, names))}")
    several = execute(
        f"SELECT framework_step, list(step ORDER BY step) FROM {side}.steps WHERE framework_step IS NOT NULL "
        "GROUP BY rank, framework_step HAVING count(*) > 1 ORDER BY rank, framework_step LIMIT 1"
    ).fetchone()
    if several is not None:
        raise BadAlignment(
            f"step {several[0]} of {names[0]} is several steps of the {side} ({spans(several[1])}): which pairs with "
            "which is not known; --align-steps offset=N says it"
        )
    return str(names[0])


def alignment_hint(runs: Mapping[str, Run]) -> str | None:
    """That one side's first step begins with the parameters that the other had before another step, if it does."""
    a, b = runs["baseline"], runs["candidate"]
    for run, other, is_candidate in ((b, a, True), (a, b, False)):
        first = _first_step(run)
        steps = continued_steps([other], run) if first is not None else frozenset()
        if first is None or len(steps) != 1 or first in steps:
            continue
        [step] = steps
        mine, others = ("candidate", "baseline") if is_candidate else ("baseline", "candidate")
        offset = step - first if is_candidate else first - step
        return (
            f"The {mine}'s step {first} begins with the parameters that the {others}'s step {step} began with: "
            f"--align-steps offset={offset} pairs them."
        )
    return None


def _first_step(run: Run) -> int | None:
    with contextlib.closing(connect([run], tables=(PARAMETERS,))) as connection:
        row = connection.execute("SELECT min(step) FROM parameters").fetchone()
    return None if row is None else row[0]

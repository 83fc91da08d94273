"""The sieve's least tolerances are never looser than what the rule allows once a step is open."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.diff.judging import judged
from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.pairing.sieve import sieved
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scoping import scope_of
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect_pair
from support.synthetic_runs.layer_chain import layered_run

Link = tuple[str, str | None]  # table, point
Place = tuple[str, str | None, int]  # and step

STEPS = 8
# Errors from far below to far above what is allowed, step by step, so that every bound lies between two of them.
RISING = [1e-8 * 3.0**n for n in range(STEPS)]

UPDATED: Link = ("parameters", "after")

# What lies on both sides of which link's bound.
CASES: dict[str, tuple[Link, dict[str, Any]]] = {
    "outputs": (("module_calls", None), {"forward": RISING, "backward": 1e-9}),
    "gradients": (("node_events", None), {"backward": [4 * r for r in RISING]}),
    "final gradients": (
        ("gradients", "final"), {"backward": [4 * r for r in RISING], "optimizer": "SGD"},
    ),
    "both": (("module_calls", None), {"forward": RISING, "backward": RISING[::-1]}),
    "lengths": (
        ("node_events", None),
        {"backward": 1e-8, "times": {(s, "layer1"): 1 + RISING[s] for s in range(STEPS)}},
    ),
    "parameters": (UPDATED, {"drift": [300 * r for r in RISING], "optimizer": "AdamW"}),
    "updates with Adam": (
        UPDATED,
        {"drift": [60 * r**0.5 for r in RISING], "backward": RISING, "optimizer": "AdamW"},
    ),
    "updates with SGD": (
        UPDATED,
        {"drift": [5e3 * r for r in RISING], "backward": [1e3 * r for r in RISING], "optimizer": "SGD"},
    ),
    "half precision": (
        ("module_calls", None),
        {"forward": [500 * r for r in RISING], "backward": 1e-4, "dtype": "float16"},
    ),
}  # fmt: skip


def exceeding(a: Path, b: Path, scale: float) -> tuple[set[Place], set[Place]]:
    """(what exceeds once all steps are open, what the sieve proposes)."""
    runs = {"baseline": open_run(a), "candidate": open_run(b)}
    with contextlib.closing(connect_pair(runs["baseline"], runs["candidate"])) as connection:
        judgement = Judgement(connection, runs, scale=scale)
        scope = scope_of(connection, runs, Question(scale=scale))
        judged(connection, scope, judgement)
        found: set[Place] = set()
        for table in LINK_TABLES:
            if table.sides:
                point = "key_point" if "point" in table.key else "NULL"
                found |= {
                    (table.table, *row)
                    for row in connection.execute(
                        f"SELECT DISTINCT {point}, step FROM differing_{table.table} WHERE exceeds "
                        "AND shown_by IS DISTINCT FROM 'steady'"
                    ).fetchall()
                }
        parts = {
            table.table: (
                scope.pair.parts("baseline", table.table, 0),
                scope.pair.parts("candidate", table.table, 0),
            )
            for table in LINK_TABLES
        }
        lower_bound = judgement.lower_bound()
    # Each step but the first is given what the one before left.
    proposed = sieved(0, parts, frozenset(range(STEPS)), lower_bound, frozenset([0]))
    assert not proposed.unpaired
    steps = {(t.table, t.point, s) for t in proposed.tallies for s in t.steps[t.exceeds].tolist()}
    return found, steps


@pytest.mark.parametrize("case", CASES)
def test_what_exceeds_was_proposed(case: str, tmp_path: Path) -> None:
    link, kind = CASES[case]
    same = {key: kind[key] for key in ("dtype", "optimizer") if key in kind}
    a = layered_run(tmp_path / "a", steps=STEPS, **same)
    b = layered_run(tmp_path / "b", steps=STEPS, **kind)
    for scale in (0.5, 2.0):
        found, proposed = exceeding(a, b, scale)
        assert found <= proposed
        steps = {step for *of, step in found if tuple(of) == link}
        assert 0 < len(steps) < STEPS, (
            "the bound does not lie between two errors: it proves nothing"
        )


def test_noise_with_adam_opens_no_step(tmp_path: Path) -> None:
    """A gradient's rounding turns the sign of some updates: as much of them as its root."""
    a = layered_run(tmp_path / "a", steps=STEPS, optimizer="AdamW")
    drift = [0.0, *[1.5e-3] * (STEPS - 1)]
    b = layered_run(tmp_path / "b", steps=STEPS, optimizer="AdamW", backward=1e-6, drift=drift)
    assert exceeding(a, b, 1.0) == (set(), set())

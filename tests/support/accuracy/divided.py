"""Cases of two ranks: data-parallel, sharded, in stages; one job trains them all."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.accuracy.families import FAMILIES
from support.accuracy.faults import KINDS
from support.accuracy.measuring import STEPS, Case, Laboratory, Outcome
from support.launching.launcher import TESTS, run_job

AGAINST_DDP = "FSDP2 against DDP"
MODES = {
    "two ranks (DDP)": "ddp",
    "FSDP2": "fsdp",
    AGAINST_DDP: "fsdp",
    "pipeline": "pipeline",
}
# Batch normalisation over the rows of a rank is other training; the job has the stages of this GPT alone.
_DIVISIBLE = tuple(
    name for name, family in FAMILIES.items() if not family.normalises_batch and name != "tied"
)
_STAGED = ("gpt",)


def divided_cases(seed: int = 0, families: Sequence[str] = tuple(FAMILIES)) -> list[Case]:
    """Every kind in every mode, and every mode in every family without one."""
    draw = random.Random(seed)
    found: list[Case] = []
    for change in MODES:
        possible = [f for f in _possible(change) if f in families]
        kinds: list[tuple[str, str | None]] = [(family, None) for family in possible]
        kinds += [
            (possible[n % len(possible)], kind)
            for n, kind in enumerate(draw.sample(KINDS, len(KINDS)))
        ]
        found += [Case(f, change, draw.choice(FAMILIES[f].places), kind) for f, kind in kinds]
    return found


def _possible(change: str) -> Sequence[str]:
    return _STAGED if change == "pipeline" else _DIVISIBLE


def run_divided(
    laboratory: Laboratory, cases: Sequence[Case], directory: Path, timeout: float = 900
) -> Iterator[Outcome]:
    """Trains them and compares each with the same training in one process, or on two ranks under DDP."""
    under_ddp = {
        (c.family, c.place): Case(c.family, "two ranks (DDP)", c.place, None)
        for c in cases
        if c.change == AGAINST_DDP
    }
    trained = [*cases, *under_ddp.values()]
    folders = [directory / f"divided-{n}" for n in range(len(trained))]
    numbers = (str(STEPS), str(laboratory.seed))
    arguments = [
        "|".join(
            (MODES[c.change], c.family, c.place, c.kind or "", str(c.step), *numbers, str(folder))
        )
        for c, folder in zip(trained, folders, strict=True)
    ]
    script = TESTS / "support" / "jobs" / "divided.py"
    # What this process would import, the job does too.
    env = {"PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))}
    run_job(script, *arguments, ranks=2, env=env, timeout=timeout).must_succeed()
    baselines = dict(zip(under_ddp, folders[len(cases) :], strict=True))
    for case, folder in zip(cases, folders, strict=False):
        baseline = (
            baselines[case.family, case.place]
            if case.change == AGAINST_DDP
            else laboratory.baseline(case)
        )
        yield laboratory.judged(case, baseline, folder)

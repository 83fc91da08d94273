"""Cases of two ranks: data-parallel, sharded, in stages; one job trains them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from support.accuracy.families import FAMILIES
from support.accuracy.measuring import Case, Laboratory, Outcome
from support.launcher import TESTS, run_job

MODES = {"two ranks (DDP)": "ddp", "FSDP2": "fsdp", "pipeline": "pipeline"}
_KINDS = (
    "times 1.01",
    "sign flipped",
    "one row zeroed",
    "batch rolled",
    "one NaN",
    "a stale value",
)
_PLACES = ("blocks.0.attn.out", "blocks.1.mlp.0", "blocks.2.norm1")


def divided_cases(kinds: Sequence[str] = _KINDS) -> list[Case]:
    """Every mode without a fault, and with each kind at one of the places."""
    return [
        Case("gpt", change, _PLACES[n % len(_PLACES)], kind)
        for change in MODES
        for n, kind in enumerate((None, *kinds))
    ]


def run_divided(
    laboratory: Laboratory, cases: Sequence[Case], directory: Path, timeout: float = 600
) -> Iterator[Outcome]:
    """Trains them and compares each with the same training in one process; FSDP2 with DDP too, where it is sound."""
    folders = [directory / f"divided-{n}" for n in range(len(cases))]
    arguments = [
        "|".join((MODES[c.change], c.place, c.kind or "", str(folder)))
        for c, folder in zip(cases, folders, strict=True)
    ]
    script = TESTS / "support" / "jobs" / "divided.py"
    env = {"PYTHONPATH": str(TESTS)}
    run_job(script, *arguments, ranks=2, env=env, timeout=timeout).must_succeed()
    for case, folder in zip(cases, folders, strict=True):
        baseline = laboratory.baseline(case, FAMILIES[case.family])
        yield laboratory.judged(case, baseline, folder)

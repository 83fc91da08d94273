"""Whether `diff` finds a fault, where it places it, and whether it lets a legal change pass."""

from __future__ import annotations

import json
import random
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.runs.opening import open_run
from support.accuracy.families import FAMILIES
from support.accuracy.faults import KINDS
from support.accuracy.training import BASELINES, CHANGES, DTYPES, train

STEPS = 3

# What noise hides in one step shows when it comes back: such faults are given more steps to do so.
MORE_STEPS = 7

# What nothing that is recorded tells: the person who made the change has to.
DECLARED = {"fp8 (simulated)": "fp8"}
COARSE = (*DECLARED, *DTYPES)

# oneDNN has no LSTM in float16 on a CPU; batch normalisation over microbatches is other training.
IMPOSSIBLE = {("recurrent", "fp16 with a scaler"), ("cnn", "accumulation")}


@dataclass(frozen=True)
class Case:
    """A candidate: a family under a change, with a fault at a place, or without one."""

    family: str
    change: str
    place: str
    kind: str | None

    @property
    def step(self) -> int:
        """From which on it is faulty."""
        return zlib.crc32(f"{self.family} {self.place}".encode()) % STEPS

    @property
    def steps(self) -> int:
        """How many there are."""
        is_factor = self.kind is not None and self.kind.startswith("times")
        return MORE_STEPS if is_factor and self.change in COARSE else STEPS

    @property
    def is_unseen(self) -> bool:
        """Whether no constant was chosen with this model in view."""
        return FAMILIES[self.family].unseen


@dataclass(frozen=True)
class Outcome:
    """What `diff` said of a case.

    `placed`: `exact` (the Node), `module` (the module, one inside it or the one around it), `step` (the right step,
    another place), `elsewhere`, or None where no difference was found.
    """

    case: Case
    verdict: str
    placed: str | None
    explanation: str

    @property
    def is_found(self) -> bool:
        return self.verdict == "different"


def cases(
    count: int,
    seed: int = 0,
    changes: Sequence[str] = CHANGES,
    families: Sequence[str] = tuple(FAMILIES),
) -> list[Case]:
    """`count` faults, spread over changes, kinds and families, and among them every change in every family without one.

    In an order of which any beginning is a fair sample.
    """
    draw = random.Random(seed)
    possible = [(f, c) for c in changes for f in families if (f, c) not in IMPOSSIBLE]
    found = [Case(f, c, draw.choice(FAMILIES[f].places), None) for f, c in possible]
    pairs: list[tuple[str, str]] = []
    for n in range(count):
        if not pairs:
            pairs = draw.sample(possible, len(possible))
        family, change = pairs.pop()
        place = draw.choice(FAMILIES[family].places)
        found.append(Case(family, change, place, KINDS[n % len(KINDS)]))
    return draw.sample(found, len(found))


# Where a laboratory that keeps its pairs writes them: a JSON object a line, runs relative to its directory.
PAIRS = "pairs.jsonl"


class Laboratory:
    """Runs cases in a directory; baselines are shared. With `keeps_pairs` it writes down what it compared."""

    def __init__(self, directory: Path, seed: int = 0, *, keeps_pairs: bool = False) -> None:
        self._directory = directory
        self._keeps_pairs = keeps_pairs
        self.seed = seed
        self._baselines: dict[tuple[str, str, str, int], Path] = {}
        self._count = 0

    def outcome(self, case: Case, scale: float = 1.0) -> Outcome:
        return self.judged(case, self.baseline(case), self.candidate(case), scale)

    def baseline(self, case: Case) -> Path:
        change = BASELINES.get(case.change, "none")
        key = (case.family, case.place, change, case.steps)
        if key not in self._baselines:
            self._baselines[key] = self._train(case, change, None)
        return self._baselines[key]

    def candidate(self, case: Case) -> Path:
        return self._train(case, case.change, case.kind)

    def judged(self, case: Case, baseline: Path, candidate: Path, scale: float = 1.0) -> Outcome:
        if self._keeps_pairs and scale == 1.0:
            self._keep_pair(case, baseline, candidate)
        answer = as_object(
            compare(
                open_run(baseline),
                open_run(candidate),
                precision=DECLARED.get(case.change),
                scale=scale,
            )
        )
        return outcome_of(case, answer)

    def _keep_pair(self, case: Case, baseline: Path, candidate: Path) -> None:
        precision = DECLARED.get(case.change)
        pair = {
            "about": f"{case.family}, {case.change}, {case.kind or 'sound'} at {case.place or 'the root'}",
            "options": ["--precision", precision] if precision else [],
            "runs": [str(run.relative_to(self._directory)) for run in (baseline, candidate)],
        }
        with (self._directory / PAIRS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(pair) + "\n")

    def _train(self, case: Case, change: str, kind: str | None) -> Path:
        self._count += 1
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch's own, of compiling and of second backward passes
            return train(
                self._directory / str(self._count),
                FAMILIES[case.family],
                change,
                fqn=case.place,
                kind=kind,
                fault_step=case.step,
                steps=case.steps,
                seed=self.seed,
            )


def outcome_of(case: Case, answer: dict[str, Any]) -> Outcome:
    """What an answer, as the JSON of `diff`, says of a case."""
    first = answer["first_divergence"]
    placed = None if first is None else _placed(case, first)
    return Outcome(case, answer["verdict"], placed, answer["explanation"])


def _placed(case: Case, first: dict[str, Any]) -> str:
    if first["step"] != case.step:
        return "elsewhere"
    module = first["module_fqn"]
    if module == case.place:
        return "exact" if first["node_name"] == "FaultyBackward" else "module"
    if module is not None and (
        module.startswith(f"{case.place}.") or case.place.startswith(f"{module}.")
    ):
        return "module"
    return "step"

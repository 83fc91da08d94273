"""One or two faults at any link of a computed data-parallel job: `diff` names these origins, and no other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.runs.run import Run
from support.synthetic_runs.builder import build_run, summary_columns
from support.synthetic_runs.known_origins import PLACES, STEP, Fault, Rows, ThreeHeads

# The link, and what names the place besides: a module, a parameter, a bucket.
_LINKS = {
    "parameter": ("parameters", "parameter"),
    "forward": ("forward", "module"),
    "node": ("backward", "module"),
    "arriving": ("backward", "module"),
    "hook": ("local_gradient", "parameter"),
    "local": ("local_gradient", "parameter"),
    "reduced": ("reduced_gradient", "parameter"),
    "clip": ("clip", "parameter"),
    "optimizer": ("optimizer", "parameter"),
    "into": ("bucket", "bucket"),
    "out": ("bucket", "bucket"),
    "input": ("inputs", ""),
    "loss": ("loss", ""),
    "learning": ("optimizer", ""),
}
# Of these kinds, several on one rank are one origin that names the first: one cause changes many at once.
_TOGETHER = ("parameter", "reduced", "clip", "optimizer", "out")

Place = tuple[int, str, str]


def place_of_fault(fault: Fault) -> Place:
    kind, name = fault.place.split()[0], fault.place.split()[-1]
    link, named = _LINKS[kind]
    suffix = {"parameter": f" {name}.weight", "module": f" {name}", "bucket": f" {name}"}
    return fault.rank, link, link + suffix.get(named, "")


def places_of_origin(origin: Origin) -> Iterator[Place]:
    name = origin.parameter_fqn
    if origin.link in ("forward", "backward"):
        name = origin.module_fqn
    if origin.link == "bucket":
        name = str(origin.difference.bucket_index)
    for rank in origin.ranks:
        yield rank, origin.link, origin.link + (f" {name}" if name is not None else "")


def groups(faults: set[Fault]) -> list[set[Place]]:
    """The origins there are to find, each as the places that it may be named by."""
    found: list[set[Place]] = []
    for (_, kind), own in itertools.groupby(sorted(faults), lambda f: (f.rank, f.place.split()[0])):
        places = [place_of_fault(fault) for fault in own]
        found += [set(places)] if kind in _TOGETHER else [{place} for place in places]
    return found


class Jobs:
    """Runs with faults beside one without."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._good: dict[int, Run] = {}

    def diff(self, faults: set[Fault], rank_count: int) -> tuple[ThreeHeads, Answer]:
        if rank_count not in self._good:
            self._good[rank_count] = self._built(
                "good", ThreeHeads((), rank_count).made(), rank_count
            )
        job = ThreeHeads(faults, rank_count)
        name = "+".join(f"{f.rank}{f.place}" for f in sorted(faults)).replace(" ", "-")
        bad = self._built(name, job.made(), rank_count)
        return job, compare(self._good[rank_count], bad)

    def _built(self, name: str, rows: Rows, rank_count: int) -> Run:
        path = self._folder / f"{rank_count}-{name}"
        if not path.exists():  # several tests may draw the same faults
            build_run(path, rows, world_size=rank_count)
        return open_run(path)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


def drawn(count: int, seed: int) -> list[tuple[int, set[Fault]]]:
    """(ranks of the job, two faults) so many times."""
    draw = random.Random(seed)
    found: list[tuple[int, set[Fault]]] = []
    while len(found) < count:
        ranks = draw.choice((2, 3))
        faults = {Fault(draw.randrange(ranks), draw.choice(PLACES)) for _ in range(2)}
        if len(faults) == 2:
            found.append((ranks, faults))
    return found


def must_be_found(job: ThreeHeads, answer: Answer) -> None:
    """Exactly the origins there are, each with the ranks that it reached and no number of rows below the truth."""
    assert answer.verdict == "different"
    named = sorted(place for origin in answer.origins for place in places_of_origin(origin))
    wanted = groups(job.origins)
    assert len(named) == len(wanted), (named, wanted)
    for places in wanted:
        assert places & set(named), (named, wanted)
    assert {origin.step for origin in answer.origins} == {STEP}
    for origin in answer.origins:
        own = set(places_of_origin(origin))
        reached = {*origin.ranks, *(r.rank for r in origin.reached)}
        for fault in job.origins:
            if place_of_fault(fault) in own:
                assert job.reached[fault] <= reached, (origin.link, job.reached[fault], reached)


def test_single_fault_is_the_only_origin(jobs: Jobs) -> None:
    for number, place in enumerate(PLACES):
        if number % 4 == 0:
            must_be_found(*jobs.diff({Fault(1, place)}, 2))


def test_two_faults_are_two_origins_unless_one_hides_the_other(jobs: Jobs) -> None:
    for ranks, faults in drawn(9, seed=7):
        must_be_found(*jobs.diff(faults, ranks))


# In portions: all together may take longer on a busy machine than one test is given.
@pytest.mark.slow
@pytest.mark.parametrize("portion", range(8))
def test_every_single_fault_and_many_pairs(portion: int, jobs: Jobs) -> None:
    cases = [(3, {Fault(0, place)}) for place in PLACES] + drawn(60, seed=8)
    for ranks, faults in cases[portion::8]:
        must_be_found(*jobs.diff(faults, ranks))


@pytest.mark.parametrize(
    ("faults", "count", "heirs"),
    [
        # Two heads of one rank: the trunk inherits from both, each head's weight from its own.
        (("1 node left", "1 node right"), 2, {"local_gradient": (1, 1)}),
        # Two ranks: what each computes alone is its own, what comes out of the reductions is both's.
        (("0 node left", "1 node left"), 1, {"local_gradient": (4, 0)}),
        (("0 hook left", "1 hook right"), 2, {"local_gradient": (1, 0), "clip": (0, 4)}),
        # A forward that differs makes its head's backward differ: one origin.
        (("1 forward left", "1 node left"), 1, {}),
    ],
)
def test_what_inherits_is_told_apart(
    faults: tuple[str, ...], count: int, heirs: dict[str, tuple[int, int]], jobs: Jobs
) -> None:
    wanted = {Fault(int(text[0]), text[2:]) for text in faults}
    _, answer = jobs.diff(wanted, 2)
    assert len(answer.origins) == count
    for link, counts in heirs.items():
        assert answer.origins[0].inherited_counts[link] == counts


def test_what_stayed_equal_is_named(jobs: Jobs) -> None:
    _, answer = jobs.diff({Fault(1, "node left")}, 3)
    equal: dict[str, Any] = dict(answer.equal)
    assert equal["links"] == ("parameters", "inputs", "forward", "loss")
    assert equal["modules"] == ("right", "spare")
    assert [(r.rank, r.link, r.bucket_index) for r in answer.origins[0].reached] == [
        (0, "bucket", 0),
        (2, "bucket", 0),
    ]


def crossing(
    folder: Path, name: str, *, module: float = 1, sent: float = 1, batch: float = 1
) -> Run:
    """Two stages of a pipeline on two ranks, and a SyncBatchNorm that both call: values scaled in one place."""
    x = np.linspace(1, 2, 24, dtype=np.float32)
    y, other = x * np.float32(module), x[::-1] * np.float32(batch)
    got = y * np.float32(sent)
    mean = x + other
    values: dict[int, tuple[tuple[Any, Any, str, str], ...]] = {
        0: ((x, y, "stage.0", "Linear"), (x, mean, "norm", "SyncBatchNorm")),
        1: ((got, got * 2, "stage.1", "Linear"), (other, mean, "norm", "SyncBatchNorm")),
    }
    rows: Rows = {"parameters": [], "module_calls": [], "stage_events": [], "steps": []}
    for step, rank in itertools.product(range(2), range(2)):
        place = {"rank": rank, "step": step, "microbatch": 0}
        scaled = (
            values[rank] if step else tuple((x, x, fqn, kind) for *_, fqn, kind in values[rank])
        )
        for before, after, fqn, kind in scaled:
            rows["module_calls"].append(
                {**place, "root": 0, "module_fqn": fqn, "phase": "forward", "call_index": 0,
                 "module_class": kind, **summary_columns(before, "input_"), **summary_columns(after, "output_")}
            )  # fmt: skip
        (before, after, *_), _ = scaled
        received = summary_columns(before, "received_") if rank else {}
        rows["stage_events"].append(
            {**place, "stage_index": rank, "kind": "forward", "occurrence": 0, "end_ns": 1, **received,
             **summary_columns(after, "sent_")}
        )  # fmt: skip
    return open_run(build_run(folder / name, rows, world_size=2))


@pytest.mark.parametrize(
    ("fault", "origin", "reached"),
    [
        ({"module": 1.5}, (0, "forward", "stage.0"), (1, "stage")),
        ({"sent": 1.5}, (1, "stage", None), None),
        # Rank 1 puts another batch into the SyncBatchNorm: what rank 0's gives comes from there.
        ({"batch": 1.5}, (1, "forward", "norm"), (0, "forward")),
    ],
)
def test_difference_that_is_sent_to_another_rank_is_one_origin(
    fault: dict[str, float],
    origin: tuple[int, str, str | None],
    reached: tuple[int, str] | None,
    tmp_path: Path,
) -> None:
    answer = compare(crossing(tmp_path, "good"), crossing(tmp_path, "bad", **fault))
    [first] = answer.origins
    assert (first.ranks, first.link) == ((origin[0],), origin[1])
    if origin[1] == "forward":
        assert first.difference.key["module_fqn"] == origin[2]
    assert [(r.rank, r.link) for r in first.reached] == ([reached] if reached else [])

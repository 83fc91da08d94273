"""Faults in real pipelines, one at a time: each is named with its stage, microbatch and half, by `check` or `diff`.

And the other way: however a pipeline is scheduled, what it computes is identical.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.answers.commands import asked, told
from support.launching.jobs_ahead import Ahead
from support.launching.launcher import run_job

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "stage_faults.py"
SPLIT = "InterleavedZeroBubble"


@dataclass(frozen=True)
class Fault:
    """A fault, where it is, and the right answers: the law that it breaks, and the link and half of its origin.

    What is received wrong is told at the stage that receives it, `at`. In a diff against a schedule that does not split
    a backward is whole.
    """

    kind: str
    stage: int
    microbatch: int
    phase: str
    says: str
    law: str | None = None
    link: str | None = None
    at: int | None = None
    node: str | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The stage and microbatch that are named."""
        return (self.stage if self.at is None else self.at, self.microbatch)


HANDED, DONE, ADDED = "handovers_equal", "actions_complete", "microbatches_add_up"

FAULTS = [
    Fault("sent-gradient-scaled", 2, 1, "input", "is not what was sent, but 0.5 times that", HANDED, "stage", at=1),
    Fault("received-gradient-scaled", 1, 2, "input", "is not what was sent, but 2 times that", HANDED, "stage"),
    Fault("wrong-microbatch", 2, 2, "input", "it is what was sent for microbatch 1", HANDED, "stage", at=1),
    Fault("activation-corrupted", 2, 1, "forward", "are not what was sent: they differ by", HANDED, "stage"),
    Fault("activation-stale", 2, 3, "forward", "they are what was sent for microbatch 3 of step 0", HANDED, "stage"),
    Fault("weight-half-skipped", 2, 1, "weight", "ran 1 input half and no weight half", DONE, "structure"),
    Fault("weight-half-twice", 1, 2, "weight", "ran 1 input half and 2 weight halves", DONE, "structure"),
    Fault("gradient-zeroed", 1, 1, "weight", "was set to zero before microbatch 2", ADDED, "local_gradient"),
    Fault("input-detached", 2, 1, "input", "is all zero", link="backward", node="MulBackward0"),
    Fault("tied-weight-lost", 2, 1, "weight", "of tied is in the baseline", link="structure", node="AddmmBackward0"),
    Fault("loss-scaled-twice", 3, 1, "input", "the gradient that leaves it is 0.25 times", link="loss"),
    Fault("forward-scaled", 1, 2, "forward", "it is 1.001 times the baseline's", link="forward"),
]  # fmt: skip
OF_WHOLE_STAGES = [
    Fault("not-scaled", 2, 0, "", "were not scaled, those of the other stages multiplied by 0.25", ADDED, "clip"),
]  # fmt: skip
NAN = Fault("nan-in-weight-half", 2, 0, "weight", "the first NaN is born in AbsBackward0")
LOST = [
    Fault("activation-lost", 1, 3, "forward", "(rank 1) made for stage 2 (rank 0) never came", HANDED),
    Fault("gradient-lost", 2, 1, "input", "(rank 0) made for stage 1 (rank 1) never came", HANDED),
]  # fmt: skip


def of_two_ranks() -> list[str]:
    """The runs of the job on two ranks."""
    schedules = {
        "good": SPLIT,
        "again": SPLIT,
        "whole": "Interleaved1F1B",
        "v": "ZBVZeroBubble",
        "dual": "DualPipeV",
    }
    runs = [f"{name}={schedule}" for name, schedule in schedules.items()]
    return runs + [
        f"{f.kind}={SPLIT}:{f.kind}:{f.stage}:{f.microbatch}"
        for f in (*FAULTS, *OF_WHOLE_STAGES, NAN)
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead[str, Path]]:
    """The folders with the recordings of a job, by its name."""
    folder = tmp_path_factory.mktemp("stage-faults")

    def several(ranks: int, runs: list[str]) -> Path:
        run_job(JOB, "--out", folder, "--runs", *runs, ranks=ranks, forked=True).must_succeed()
        return folder

    def failing(fault: Fault) -> Path:
        run = f"{fault.kind}={SPLIT}:{fault.kind}:{fault.stage}:{fault.microbatch}"
        ended = run_job(JOB, "--out", folder, "--timeout", 3, "--runs", run, ranks=2, forked=True)
        assert ended.returncode != 0
        return folder

    jobs = {"two": functools.partial(several, 2, of_two_ranks())}
    jobs["four"] = functools.partial(several, 4, ["line=GPipe", "line-1f1b=1F1B"])
    jobs |= {fault.kind: functools.partial(failing, fault) for fault in LOST}
    ahead = Ahead(jobs)
    yield ahead
    ahead.close()


def diff(baseline: Path, candidate: Path) -> dict[str, Any]:
    return asked("diff", "--format", "json", baseline, candidate, is_quiet=True)[1]


def violations(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked("check", "--format", "json", run)[1]["violations"]
    return found


def id_of(fault: Fault) -> str:
    return fault.kind


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.law], ids=id_of)
def test_check_names_stage_microbatch_and_half(fault: Fault, recorded: Ahead[str, Path]) -> None:
    (found,) = violations(recorded["two"] / fault.kind)
    print(found["explanation"])
    assert found["law"] == fault.law and found["step"] == 1
    assert (found["stage_index"], found["microbatch"]) == fault.place
    assert found["rank"] == fault.place[0] % 2
    if fault.law != ADDED:
        assert found["phase"] == fault.phase
    assert fault.says in found["explanation"]


def test_check_says_where_gradients_are_added_past_every_node(recorded: Ahead[str, Path]) -> None:
    notes = asked("check", "--format", "json", recorded["two"] / "good")[1]["cover"]["notes"]
    assert [note for note in notes if "ranks 0-1 is added by hand" in note]
    whole = asked("check", "--format", "json", recorded["four"] / "line")[1]["cover"]["notes"]
    assert not [note for note in whole if "by hand" in note]


@pytest.mark.parametrize("fault", FAULTS, ids=id_of)
def test_diff_names_one_origin(fault: Fault, recorded: Ahead[str, Path]) -> None:
    good, bad = recorded["two"] / "good", recorded["two"] / fault.kind
    forth, back = diff(good, bad), None
    # The other way round it is the same place; a few show it.
    if fault.link in ("stage", "structure") and fault.stage == 1:
        back = diff(bad, good)
    for answer in filter(None, (forth, back)):
        print(answer["explanation"])
        (first,) = answer["origins"]
        assert (first["step"], first["link"]) == (1, fault.link)
        named = (first["stage_index"], first["microbatch"])
        if fault.kind == "gradient-zeroed":  # shows when the next one is added
            assert named == (fault.stage, fault.microbatch + 1)
        else:
            assert named == fault.place
        assert (first["phase"], first["node_name"]) == (fault.phase, fault.node)
        assert first["rank"] == fault.place[0] % 2
    if fault.law is None:
        assert fault.says in forth["explanation"]


# Those that differ in kind from the others, as seen from there.
AMONG_OTHERS = {
    "sent-gradient-scaled", "activation-corrupted", "weight-half-skipped", "weight-half-twice", "gradient-zeroed",
    "input-detached", "tied-weight-lost", "loss-scaled-twice",
}  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, id=f.kind, marks=[] if f.kind in AMONG_OTHERS else [pytest.mark.slow])
        for f in FAULTS
    ],
)
def test_diff_against_a_schedule_that_does_not_split(
    fault: Fault, recorded: Ahead[str, Path]
) -> None:
    """The fault is at the same stage and microbatch, whatever the schedules and the ranks of stages."""
    others = (recorded["two"] / "whole", recorded["two"] / "v", recorded["four"] / "line")
    answer = diff(others[FAULTS.index(fault) % len(others)], recorded["two"] / fault.kind)
    print(answer["explanation"])
    (first,) = answer["origins"]
    later = fault.kind == "gradient-zeroed"
    place = (fault.place[0], fault.place[1] + later)
    assert (first["step"], first["stage_index"], first["microbatch"]) == (1, *place)
    assert first["rank"] == fault.place[0] % 2  # the candidate's


def test_stage_that_is_not_scaled(recorded: Ahead[str, Path]) -> None:
    (fault,) = OF_WHOLE_STAGES
    (found,) = violations(recorded["two"] / fault.kind)
    assert (found["law"], found["step"], found["stage_index"]) == (ADDED, 1, fault.stage)
    assert found["factor"] == pytest.approx(4, rel=1e-3)
    assert fault.says in found["explanation"]
    for other in ("good", "whole"):
        answer = diff(recorded["two"] / other, recorded["two"] / fault.kind)
        (first,) = answer["origins"]
        assert (first["link"], first["stage_index"], first["rank"]) == ("clip", 2, 0)
        assert first["factor"] == pytest.approx(4, rel=1e-3)


def test_nan_that_is_born_in_a_weight_half(recorded: Ahead[str, Path]) -> None:
    infinity, nan = violations(recorded["two"] / NAN.kind)
    for found in (infinity, nan):
        assert (found["law"], found["step"], found["rank"]) == ("values_finite", 1, 0)
        assert (found["stage_index"], found["microbatch"], found["phase"]) == (2, 0, "weight")
    assert "(stage 2, microbatch 0, weight half): the first infinity" in infinity["explanation"]
    assert NAN.says in nan["explanation"]
    first = diff(recorded["two"] / "good", recorded["two"] / NAN.kind)["first_divergence"]
    assert (first["link"], first["parameter_fqn"], first["stage_index"]) == (
        "parameters",
        "gain",
        2,
    )


@pytest.mark.parametrize("fault", LOST, ids=id_of)
def test_send_that_is_missing_is_named_and_not_what_follows(
    fault: Fault, recorded: Ahead[str, Path]
) -> None:
    run = recorded[fault.kind] / fault.kind
    handed = [v for v in violations(run) if v["law"] in (HANDED, DONE, ADDED)]
    (found,) = handed
    assert (found["step"], found["rank"]) == (1, fault.stage % 2)
    assert (found["stage_index"], found["microbatch"], found["phase"]) == (
        *fault.place,
        fault.phase,
    )
    assert fault.says in found["explanation"]


def test_schedules_of_the_same_pipeline_are_identical(recorded: Ahead[str, Path]) -> None:
    two, four = recorded["two"], recorded["four"]
    runs = [two / "good", two / "whole", two / "v", two / "dual", four / "line"]
    for baseline, candidate in zip(runs, runs[1:] + runs[:1], strict=True):
        answer = diff(baseline, candidate)
        print(answer["explanation"])
        assert answer["verdict"] == "identical"
        assert answer["cover"]["stages"] == [0, 1, 2, 3]
        assert answer["cover"]["rows"]["node_events"] > 400
        assert answer["cover"]["rows"]["gradients"] == 280
        assert answer["structure"] == answer["origins"] == answer["spread"] == []
    for baseline, candidate in ((two / "good", two / "again"), (four / "line", four / "line-1f1b")):
        answer = diff(baseline, candidate)
        assert (answer["verdict"], answer["cover"]["stages"]) == ("identical", None)


@pytest.mark.parametrize("name", ["good", "whole", "v", "dual"])
def test_pipelines_without_a_fault_are_clean(name: str, recorded: Ahead[str, Path]) -> None:
    code, answer = asked("check", "--format", "json", recorded["two"] / name)
    assert (code, answer["verdict"], answer["violations"]) == (0, "clean", [])
    judged = answer["judged"]
    # Six boundaries forth and back, four microbatches, two steps; four stages; seven parameters of each.
    assert (judged[HANDED], judged[DONE]) == (48, 32)
    assert judged[ADDED] >= 2 * 4 * 7 * 3
    assert "48 tensors handed on between stages are what was sent" in answer["explanation"]


def test_answer_is_said_as_a_colleague_would(recorded: Ahead[str, Path]) -> None:
    two = recorded["two"]
    _, said = told("diff", two / "whole", two / "sent-gradient-scaled")
    assert (
        "Step 1, rank 1 (stage 1, microbatch 1, backward): the gradient that it received from stage 2 (rank 0) differs "
        "by 5.0e-01 (it is 0.5 times the baseline's), although stage 2 made the same: the sending, the way or the "
        "receiving is where they part. Stage 0 differs from what was received there on." in said
    )
    assert "The runs are scheduled otherwise: they were compared stage by stage" in said
    _, said = told("check", two / "sent-gradient-scaled")
    assert (
        "Step 1, microbatch 1: the gradient that stage 1 (rank 1) received from stage 2 (rank 0) is not what was sent, "
        "but 0.5 times that." in said
    )

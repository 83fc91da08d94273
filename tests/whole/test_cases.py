"""Jobs from real reports, good and bad, recorded whole: the product's own commands give the right answer.

What the product cannot say yet is a test that is expected to fail, with the reason.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.answers.commands import asked, told
from support.launching.counted_reruns import Reruns, reruns_of
from support.launching.jobs_ahead import Ahead, chosen_items, parameters_of
from support.launching.launcher import RESTING_AT_EXIT, run_job

CASES = Path(__file__).resolve().parents[1] / "cases"

# Cases that run on one rank; the others on two, under torch's launcher.
ONE_RANK = {17, 19, 21, 25, 29, 31, 33, 35, 39, 43, 45, 49}

# The variant whose output is compared with that of a run without recording, where it is not the bad one: in these
# the good one is what recording might break.
BARE_GOOD = {39, 41, 43, 47, 49}

TIMED_CASE = 11

# What of a line holds times, ports or words of the network; the rest must be the same without recording.
TIMED = {
    7: r"(?<=stuck=\(4, ).*",
    TIMED_CASE: r"EVIDENCE rank=.*",
}


@dataclass(frozen=True)
class Case:
    """One case, run three times. `said` are the EVIDENCE and VERDICT lines by variant and `bare`."""

    number: int
    good: Path
    bad: Path
    said: Mapping[str, list[str]]

    def diff(self, *options: str) -> dict[str, Any]:
        """What `analyzer diff good bad` says, which must be that they differ."""
        code, answer = asked("diff", *options, "--format", "json", self.good, self.bad)
        assert code == 1, answer["explanation"]
        return answer

    def swapped(self) -> dict[str, Any]:
        """What `analyzer diff bad good` says."""
        return asked("diff", "--format", "json", self.bad, self.good)[1]

    def check(self, variant: str, *options: str) -> list[dict[str, Any]]:
        """What `analyzer check` finds in one run."""
        options = ("--format", "json", *options)
        violations: list[dict[str, Any]] = asked("check", *options, getattr(self, variant))[1][
            "violations"
        ]
        return violations

    def sql(self, query: str, *variants: str) -> list[tuple[str, ...]]:
        """The rows of a query over the bad run, or the variants; the column `run` then tells them apart."""
        runs = [getattr(self, variant) for variant in variants or ("bad",)]
        _, said = told("sql", query, *runs, "--format", "csv")
        return [tuple(row) for row in csv.reader(io.StringIO(said))][1:]


def bare_variant(number: int) -> str:
    """The variant that also runs without recording."""
    return "good" if number in BARE_GOOD else "bad"


def script(number: int) -> Path:
    (path,) = CASES.glob(f"{number:02}-*.py")
    return path


# Torch 2.13, now and then as an interpreter ends that used gloo, recorded or not, when all is printed: see
# `support.launching.launcher.end_process_group`. The scripts are kept as they are, so their ranks rest at exit; where
# that was too short the job is run again, which is counted.
TORCH_ABORTS = "terminate called without an active exception"


def run(number: int, variant: str, recorded: Path | None, reruns: Reruns) -> list[str]:
    """Runs a case; its EVIDENCE and VERDICT lines, sorted, as two ranks may print in any order."""
    ranks = 1 if number in ONE_RANK else 2
    paths = (str(RESTING_AT_EXIT), os.environ.get("PYTHONPATH", ""))
    env = {"VARIANT": variant, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    while True:
        job = run_job(
            script(number), ranks=ranks, recorded=recorded, env=env, timeout=60, buffered=True
        )
        if ranks == 1 or job.returncode == 0 or TORCH_ABORTS not in job.stderr:
            break
        reruns.count(f"case {number:02} {variant if recorded else 'bare'}", because=TORCH_ABORTS)
        if recorded is not None:
            shutil.rmtree(recorded)
    lines = job.must_succeed().stdout.splitlines()
    said = sorted(line for line in lines if line.startswith(("EVIDENCE", "VERDICT")))
    assert f"VERDICT {'absent' if variant == 'good' else 'present'}" in said, job.tails()
    return said


def number_of(item: pytest.Item) -> int | None:
    """The case that a test is about: `test_case_07_...`, or its parameter."""
    if found := re.match(r"test_case_(\d+)_", item.name):
        return int(found[1])
    number = parameters_of(item).get("number")
    return number if isinstance(number, int) else None


@pytest.fixture(scope="module")
def case_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], Case]]:
    """Cases by number, run good and bad recorded, and one of them bare.

    The jobs of all tests to come are begun at once, two at a time; the one that is timed comes first, alone.
    """
    numbers = dict.fromkeys(n for n in map(number_of, chosen_items(request)) if n is not None)
    place = tmp_path_factory.mktemp("cases")
    reruns = reruns_of(request.config)
    jobs = {
        (number, kind): functools.partial(run, number, variant, recorded, reruns)
        for number in numbers
        for kind, variant, recorded in (
            ("good", "good", place / f"{number:02}" / "good"),
            ("bad", "bad", place / f"{number:02}" / "bad"),
            ("bare", bare_variant(number), None),
        )
    }
    ahead = Ahead(jobs, alone=[key for key in jobs if key[0] == TIMED_CASE])

    def case_of(number: int) -> Case:
        folder = place / f"{number:02}"
        said = {kind: ahead[number, kind] for kind in ("good", "bad", "bare")}
        return Case(number, folder / "good", folder / "bad", said)

    yield case_of
    ahead.close()


@pytest.fixture
def case(request: pytest.FixtureRequest, case_of: Callable[[int], Case]) -> Case:
    """The case that the test's name begins with."""
    number = number_of(request.node)
    assert number is not None, "a test of a case is named after its number"
    return case_of(number)


QUICK = (9, 17, 19, 21, 29, 31)
NUMBERS = sorted(int(path.name[:2]) for path in CASES.glob("[0-9]*.py"))


def test_every_case_has_a_test() -> None:
    tested = {int(m[1]) for name in globals() if (m := re.match(r"test_case_(\d+)_", name))}
    assert len(NUMBERS) == 25 and tested == set(NUMBERS)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in NUMBERS]
)
def test_recording_changes_nothing_that_a_case_prints(
    number: int, case_of: Callable[[int], Case]
) -> None:
    case = case_of(number)
    said = [
        [re.sub(TIMED.get(number, "$^"), "", line) for line in lines]
        for lines in (case.said[bare_variant(number)], case.said["bare"])
    ]
    assert said[0] == said[1]
    assert any(said[0])


def only(violations: list[dict[str, Any]], law: str) -> dict[str, Any]:
    """The one violation of a law."""
    (found,) = [v for v in violations if v["law"] == law]
    return found


def differs_at(answer: dict[str, Any], **wanted: object) -> dict[str, Any]:
    """The first divergence, which must be where it is wanted."""
    first: dict[str, Any] = answer["first_divergence"]
    assert {name: first[name] for name in wanted} == wanted, answer["explanation"]
    return first


@pytest.mark.slow
def test_case_01_no_sync_on_the_wrong_microbatch(case: Case) -> None:
    answer = case.diff()
    first = differs_at(answer, step=0, ranks=[0, 1], link="bucket", microbatch=0)
    assert (first["baseline"], first["candidate"]) == (
        {"ddp_sync": "no_sync"},
        {"ddp_sync": "sync"},
    )
    assert "pass 0 reduces in the candidate and does not reduce" in answer["explanation"]
    found = case.check("bad")
    late = only(found, "last_pass_reduces")
    assert (late["step"], late["count"]) == (0, 3) and "no_sync" in late["explanation"]
    apart = only(found, "parameters_equal")
    assert (apart["step"], apart["severity"]) == (0, "error")
    assert "and 3 more parameters" in apart["explanation"]
    # What the Nodes gave until then is equal: the bucket of microbatch 0 is what moved.
    nodes = (
        "SELECT count(*) FROM node_events a JOIN node_events b USING (rank, step, backward_index, "
        "event_index) WHERE a.run = 'good' AND b.run = 'bad' AND step = 0 AND backward_index = 0 "
        "AND a.grad_output_fingerprint <> b.grad_output_fingerprint"
    )
    assert case.sql(nodes, "good", "bad") == [("0",)]
    assert case.check("good") == []


APART = (
    "SELECT a.root, a.parameter_fqn, a.numel FROM gradients a JOIN gradients b "
    "USING (rank, step, backward_index, root, parameter_fqn, point) WHERE a.run = 'good' "
    "AND b.run = 'bad' AND point = 'local' AND a.fingerprint <> b.fingerprint"
)  # Local gradients whose bits differ between the two runs.


@pytest.mark.slow
def test_case_03_parameters_unused_in_the_last_step(case: Case) -> None:
    differs_at(case.diff(), step=2, ranks=[0, 1], link="structure", module_fqn="aux")
    found = case.check("bad")
    bucket = only(found, "buckets_launched")
    assert bucket["step"] == 2
    assert (
        "launched no bucket of 6 parameters: aux.weight and aux.bias got no gradient"
        in (bucket["explanation"])
    )
    apart = only(found, "parameters_equal")
    assert apart["step"] == 2 and apart["parameter_fqn"].split(".")[0] in ("trunk", "head")
    assert "and 3 more parameters" in apart["explanation"]


@pytest.mark.slow
def test_case_05_token_means_of_uneven_ranks(case: Case) -> None:
    answer = case.diff()
    assert [(o["step"], o["ranks"], o["link"]) for o in answer["origins"]] == [
        (0, [0], "loss"),
        (0, [1], "loss"),
    ]
    factors = [o["factor"] for o in answer["origins"]]
    assert factors == [pytest.approx(13 / 22, rel=1e-4), pytest.approx(13 / 4, rel=1e-4)]
    assert case.check("bad") == []  # the reductions are right: the mean is of the wrong things


@pytest.mark.slow
def test_case_07_one_rank_skips_a_batch(case: Case) -> None:
    answer = case.diff()
    differs_at(answer, step=2, rank=0, link="structure")
    assert (
        "made 1 forward in the baseline that no backward pass followed, and no forward in the"
        in answer["explanation"]
    )
    assert [(o["step"], o["ranks"], o["link"]) for o in answer["inherited"]] == [(2, [1], "bucket")]
    assert [(f["side"], f["step"], f["rank"]) for f in answer["failures"]] in (
        [("candidate", 4, 0)],
        [],  # the good run does not reach step 4 as well where its numbering ends before
    )
    found = case.check("bad")
    waits = only(found, "buckets_launched")
    assert waits["step"] == 4 and waits["rank"] == 0
    never = only(found, "collectives_match")
    assert never["step"] == 4 and "rank 1 never came to the reduction" in never["explanation"]
    skips = only(found, "passes_match")
    assert (skips["step"], skips["rank"]) == (2, 1)
    assert "rank 1 made 1 forward that no backward pass followed" in skips["explanation"]
    assert [v["law"] for v in case.check("good")] == ["values_finite"]


def test_case_09_hook_forgets_to_divide(case: Case) -> None:
    hook = only(case.check("bad"), "reduction_is_mean")
    assert (hook["step"], hook["bucket_index"]) == (0, 0)
    assert hook["hook_name"] == "__main__.my_hook"
    assert hook["factor"] == pytest.approx(2, rel=1e-5)
    first = differs_at(case.diff(), step=0, ranks=[0, 1], link="bucket", bucket_index=0)
    assert first["factor"] == pytest.approx(2, rel=1e-5)
    # Of two models only the one with the hook; what went in is equal.
    before_and_after = (
        "SELECT a.root, a.before_fingerprint = b.before_fingerprint, a.after_fingerprint = "
        "b.after_fingerprint FROM buckets a JOIN buckets b USING (rank, step, backward_index, root, "
        "bucket_index) WHERE a.run = 'good' AND b.run = 'bad' GROUP BY ALL ORDER BY 1"
    )
    found = case.sql(before_and_after, "good", "bad")
    assert found == [("0", "true", "true"), ("1", "true", "false")]
    assert case.check("good") == []


@pytest.mark.slow
def test_case_11_straggler_in_a_backward_pass(case: Case) -> None:
    code, answer = asked("timing", "--buckets", "--format", "json", case.bad)
    assert code == 0
    (group,) = answer["buckets"]["groups"]
    assert group["straggler"] == 1, group["explanation"]
    onset = group["onset"]
    assert onset["bucket"]["bucket_index"] == 1 and onset["modules"] == ["1.fc"]
    assert onset["previous"]["parameter_fqns"] == ["2.bias", "2.weight"]
    assert (onset["node"]["node_name"], onset["node"]["module_fqn"]) == ("DragBackward", "1")
    assert 40e6 < onset["lag_ns"] < 120e6
    on_time = [rank for rank in answer["buckets"]["buckets"][1]["ranks"] if rank["wait_ns"] > 30e6]
    assert answer["buckets"]["buckets"][1]["parameter_fqns"] == ["2.bias", "2.weight"]
    assert on_time == []  # bucket 0 of the rebuilt layout waits for nobody
    assert "Rank 0 waits for it" in group["explanation"]
    assert asked("diff", "--format", "json", case.good, case.bad)[1]["verdict"] == "identical"


@pytest.mark.slow
def test_case_13_gather_without_gradient(case: Case) -> None:
    first = differs_at(case.diff(), step=0, ranks=[0, 1], link="loss", microbatch=1)
    assert first["factor"] == pytest.approx(0.5, rel=1e-4)
    ratios = (
        "SELECT a.parameter_fqn, round(b.norm / a.norm, 4) FROM gradients a JOIN gradients b USING "
        "(rank, step, backward_index, root, parameter_fqn, point) WHERE a.run = 'good' "
        "AND b.run = 'bad' AND point = 'reduced' AND root = 1 GROUP BY ALL ORDER BY 1"
    )
    names = ("0.bias", "0.weight", "2.bias", "2.weight")
    assert case.sql(ratios, "good", "bad") == [(name, "0.5") for name in names]
    assert case.check("bad") == []  # the reduction itself is right


@pytest.mark.slow
def test_case_15_wrong_derivative_of_a_batch_norm(case: Case) -> None:
    answer = case.diff()
    first = differs_at(answer, step=0, ranks=[0, 1], link="backward")
    assert (first["node_name"], first["positions"]) == ("CrossRankNormBackward", [0])
    # fc2 and the weight and bias of bn agree; fc1, of 5 x 4 and 5, inherits it. (Each is a root of its own.)
    fc1 = case.sql(f"SELECT DISTINCT * FROM ({APART}) ORDER BY ALL", "good", "bad")
    assert [row[1:] for row in fc1] == [("bias", "5"), ("weight", "20")]
    assert len({root for root, *_ in fc1}) == 1


def test_case_17_mean_of_means_of_microbatches(case: Case) -> None:
    # Pass 0 is the whole batch, of which the gradients are reset: microbatch 0 of the case is pass 1.
    first = differs_at(case.diff(), step=0, rank=0, link="loss", backward_index=1)
    assert first["factor"] == pytest.approx((1 / 19 / 2) / (1 / 22), rel=1e-4)
    root = (
        "SELECT backward_index, run, node_name, grad_input_norm FROM node_events "
        "WHERE event_index = 0 AND backward_index > 0 ORDER BY ALL"
    )
    found = [(*row[:3], round(float(row[3]), 5)) for row in case.sql(root, "good", "bad")]
    assert found == [
        (index, run, "DivBackward0", value)
        for index in ("1", "2")
        for run, value in (("bad", round(1 / 2, 5)), ("good", round(1 / 22, 5)))
    ]


def test_case_19_gradient_left_by_the_generator(case: Case) -> None:
    answer = case.diff()
    first = differs_at(answer, step=1, rank=0, link="carried_gradient", root=1)
    assert (first["parameter_fqn"], first["only_in"]) == ("0.weight", "candidate")
    assert "(and 3 more) begins the step with a gradient left in .grad" in answer["explanation"]
    # What arrives at the parameters is the good run's until the next iteration.
    nodes = (
        "SELECT min(step) FROM node_events a JOIN node_events b USING (rank, step, backward_index, "
        "event_index) WHERE a.run = 'good' AND b.run = 'bad' "
        "AND a.grad_output_fingerprint <> b.grad_output_fingerprint"
    )
    assert case.sql(nodes, "good", "bad") == [("2",)]


def test_case_21_path_that_is_counted_twice(case: Case) -> None:
    answer = case.diff()
    # The first pass for the inputs alone is where the runs part: it asks core for one gradient, not two.
    differs_at(answer, step=0, rank=0, link="backward", module_fqn="core", node_name="MmBackward0")
    assert (
        "core (MmBackward0) gives 1 gradient instead of 2, in backward pass 1"
        in (answer["explanation"])
    )
    (again,) = answer["repeated"]
    wanted = {
        "side": "candidate",
        "before": 1,
        "backward_index": 2,
        "module_fqn": "core",
        "node_name": "MmBackward0",
        "call_index": 0,
        "times": pytest.approx(2, rel=1e-5),
    }
    assert {name: again[name] for name in wanted} == wanted
    assert [r["side"] for r in case.swapped()["repeated"]] == ["baseline"]


@pytest.mark.slow
def test_case_23_pipeline_scales_its_gradients_twice(case: Case) -> None:
    answer = case.diff()
    wanted = ("rank", "stage_index", "microbatch", "phase", "link")
    # The loss is the last stage's; what stage 0 receives is inherited.
    (first,), (second,) = answer["origins"], answer["inherited"]
    assert [first[name] for name in wanted] == [1, 1, 0, "backward", "loss"]
    assert [second[name] for name in wanted] == [0, 0, 0, "backward", "backward"]
    for origin in (first, second):
        assert origin["factor"] == pytest.approx(4, rel=1e-4)  # the intended scale of the loss
        found = origin["rescaled"]
        # The pass after the four microbatches of window 0: there window 0 counts a quarter.
        assert found["backward_index"] == found["after_backward_index"] + 1
        assert (found["side"], found["others"]) == ("candidate", 1)
        assert found["times"] == pytest.approx(1 / 4, rel=1e-4)
    scaled = [v for v in case.check("bad") if v["law"] == "gradients_accumulate"]
    assert [(v["ranks"], v["factor"]) for v in scaled] == [([0, 1], pytest.approx(1 / 4, rel=1e-4))]
    assert scaled[0]["microbatch"] == 0
    assert "(stages 0, 1, microbatch 0)" in scaled[0]["explanation"]
    assert "4 is the number of microbatches: a schedule divides by it" in scaled[0]["explanation"]
    assert case.check("good") == []
    windows = (
        "SELECT microbatch FROM backward_passes WHERE rank = {rank} AND backward_index = {index}"
    )
    for origin in (first, second):
        index = origin["rescaled"]["backward_index"]
        assert index == 6  # two passes of the oracle, then four of window 0
        assert case.sql(windows.format(rank=origin["rank"], index=index)) == [("0",)]
    sentence = "was multiplied by 0.25 outside backward, in the {} alone"
    assert sentence.format("candidate") in answer["explanation"]
    assert sentence.format("baseline") in case.swapped()["explanation"]


@pytest.mark.slow
def test_case_25_dropout_draws_another_mask_when_recomputed(case: Case) -> None:
    first = differs_at(
        case.diff(), step=0, rank=0, link="forward", module_fqn="blocks.1.drop", phase="recompute"
    )
    assert first["microbatch"] == 1  # pass 0 is without checkpointing
    nodes = (
        "SELECT a.module_fqn, a.node_name, a.backward_index, a.event_index FROM node_events a "
        "JOIN node_events b USING (step, backward_index, event_index) WHERE a.run = 'good' "
        "AND b.run = 'bad' AND a.grad_input_fingerprint <> b.grad_input_fingerprint "
        "ORDER BY a.backward_index, a.event_index LIMIT 1"
    )
    ((module, node, index, event),) = case.sql(nodes, "good", "bad")
    assert (module, node) == ("blocks.1.down", "AddmmBackward0")
    tensors = (
        "SELECT a.position, a.fingerprint = b.fingerprint FROM node_tensors a JOIN node_tensors b "
        "USING (step, backward_index, event_index, direction, position) WHERE a.run = 'good' "
        f"AND b.run = 'bad' AND direction = 'grad_input' AND backward_index = {index} "
        f"AND event_index = {event} ORDER BY 1"
    )
    found = case.sql(tensors, "good", "bad")
    assert [is_equal for _, is_equal in found] == ["true", "true", "false"]  # db and dX, then dW
    apart = case.sql(f"SELECT DISTINCT parameter_fqn FROM ({APART})", "good", "bad")
    names = {name for (name,) in apart}
    assert "blocks.1.down.weight" in names and "blocks.1.down.bias" not in names
    assert not [name for name in names if name.startswith(("head", "blocks.2"))]


@pytest.mark.slow
def test_case_27_parameter_that_is_ready_twice(case: Case) -> None:
    answer = case.diff()
    first = differs_at(
        answer, step=0, ranks=[0, 1], link="backward", parameter_fqn="cell.bias", backward_index=0
    )
    assert first["candidate"]["failure"].startswith(
        "RuntimeError: Expected to mark a variable ready only once"
    )
    assert "inside CheckpointFunctionBackward" in answer["explanation"]
    passes = (
        "SELECT parent_backward_index, error IS NULL FROM backward_passes "
        "WHERE rank = 0 AND parent_backward_index IS NOT NULL ORDER BY backward_index"
    )
    assert case.sql(passes) == [("0", "true"), ("0", "false")]
    failure = answer["failures"][0]
    assert failure["never_reached"] == ["inp.bias", "inp.weight"]
    rejected = only(case.check("bad"), "passes_complete")
    assert (rejected["step"], rejected["parameter_fqn"]) == (0, "cell.bias")


def test_case_29_saved_output_changed_in_place(case: Case) -> None:
    answer = case.diff()
    first = differs_at(
        answer, step=0, rank=0, link="backward", module_fqn="2", node_name="SigmoidBackward0"
    )
    assert "modified by an inplace operation" in first["candidate"]["failure"]
    (failure,) = answer["failures"]
    assert failure["delivered"] == ["3.fc.bias", "3.fc.weight"]
    (raised,) = case.check("bad")
    named = {"law": "passes_complete", "module_fqn": "2", "node_name": "SigmoidBackward0"}
    assert {name: raised[name] for name in named} == named
    assert case.check("good") == []
    blocks = {name.partition(".")[0] for name in failure["never_reached"]}
    assert blocks == {"0", "1", "2"} and len(failure["never_reached"]) == 6
    assert answer["explanation"].startswith(
        "Step 0, rank 0: the candidate's backward pass 0 failed in SigmoidBackward0 of module 2"
    )
    swapped = case.swapped()
    differs_at(swapped, step=0, rank=0, module_fqn="2", node_name="SigmoidBackward0")
    assert "the baseline's backward pass 0 failed" in swapped["explanation"]


def test_case_31_infinity_comes_before_the_nan(case: Case) -> None:
    infinity, nan, raised = case.check("bad")
    assert raised["law"] == "passes_complete" and "returned nan values" in raised["explanation"]
    wanted = ("step", "rank", "node_name", "module_fqn")
    assert [infinity[name] for name in wanted] == [0, 0, "SqrtBackward0", "score"]
    assert [nan[name] for name in wanted] == [0, 0, "MulBackward0", "gate"]
    assert "the first infinity is born in SqrtBackward0" in infinity["explanation"]
    assert "the first NaN is born in MulBackward0" in nan["explanation"]
    first = case.diff()["first_nonfinite"]
    assert [first[name] for name in wanted] == [0, 0, "SqrtBackward0", "score"]
    assert case.check("good") == []


@pytest.mark.slow
def test_case_33_forward_with_stale_weights(case: Case) -> None:
    stale = only(case.check("bad"), "forward_is_fresh")
    assert (stale["step"], stale["rank"], stale["count"]) == (1, 0, 3)
    assert "4 gradients are bit-equal to those of step 0" in stale["explanation"]
    # The first link that shows it is a forward, before the first Node (PowBackward0) does.
    differs_at(case.diff(), step=1, rank=0, link="forward", module_fqn="0", phase="forward")
    assert case.check("good") == []


@pytest.mark.slow
def test_case_35_nan_out_of_a_silent_frame(case: Case) -> None:
    """Which rows of the frames are NaN is out of reach: a summary counts, it does not say where."""
    (born,) = case.check("bad")
    wanted = ("law", "step", "rank", "node_name")
    assert [born[name] for name in wanted] == ["values_finite", 1, 0, "AngleBackward0"]
    owner = (
        f"SELECT DISTINCT module_class FROM module_calls WHERE root = {born['root']} AND depth = 0"
    )
    assert case.sql(owner) == [("PhaseLoss",)]
    mix = "SELECT step, parameter_fqn, dtype FROM gradients WHERE point = 'local' AND nan_count > 0"
    assert case.sql(mix) == [("1", "mix", "complex64")]
    first = case.diff()["first_nonfinite"]
    assert (first["step"], first["node_name"]) == (1, "AngleBackward0")
    assert case.check("good") == []


@pytest.mark.slow
def test_case_37_loss_on_input_gradients(case: Case) -> None:
    differs_at(case.diff(), step=0, ranks=[0, 1], link="loss", backward_index=1)
    passes = (
        "SELECT backward_index, kind, count(n.parameter_fqn) FROM backward_passes p "
        "JOIN node_events n USING (rank, step, backward_index) WHERE rank = 0 GROUP BY ALL ORDER BY 1"
    )
    assert case.sql(passes) == [("0", "grad", "0"), ("1", "backward", "3")]
    delivered = "SELECT DISTINCT parameter_fqn FROM gradients WHERE point = 'local' ORDER BY 1"
    assert case.sql(delivered) == [("0.bias",), ("0.weight",), ("2.weight",)]
    # No bucket was launched, and the ranks' gradients stayed their own.
    assert case.sql("SELECT count(*) FROM buckets") == [("0",)]
    apart = (
        "SELECT a.parameter_fqn FROM gradients a JOIN gradients b USING (step, parameter_fqn, point) "
        "WHERE a.rank = 0 AND b.rank = 1 AND point = 'local' AND a.fingerprint <> b.fingerprint"
    )
    assert len(case.sql(apart)) == 3
    bucket = only(case.check("bad"), "buckets_launched")
    assert bucket["step"] == 0 and "2.bias got no gradient" in bucket["explanation"]


@pytest.mark.slow
def test_case_39_models_are_copied_and_saved_as_without_recording(case: Case) -> None:
    assert "EVIDENCE round trip equal: True hooks on the copy: 0" in case.said["good"]
    # The copy is a root of its own: nothing of it is booked on the original's names.
    roots = "SELECT DISTINCT root, step FROM module_calls ORDER BY ALL"
    assert case.sql(roots, "good") == [("0", "0"), ("0", "1"), ("1", "2")]
    gradients = (
        "SELECT root, step, count(*) FROM gradients WHERE point = 'local' GROUP BY ALL ORDER BY ALL"
    )
    assert case.sql(gradients, "good") == [("0", "0", "4"), ("0", "1", "4"), ("1", "2", "4")]
    assert case.check("good") == [] and case.check("bad") == []


@pytest.mark.slow
def test_case_41_unused_sparse_table(case: Case) -> None:
    answer = case.diff()
    # find_unused_parameters itself adds a Node from step 0 on, which changes nothing; the failure is told beside what
    # the unused table changes in the forward.
    differs_at(answer, step=1, ranks=[0, 1], link="forward", module_fqn="")
    assert "what top receives differs" in answer["explanation"]
    assert ("_DDPSinkBackward", "candidate") in {
        (e["name"], e["only_in"]) for e in answer["set_aside"]
    }
    failures = [(f["side"], f["step"], f["rank"], f["unused"]) for f in answer["failures"]]
    assert failures == [("candidate", 1, rank, ["item.weight"]) for rank in (0, 1)]
    assert (
        "Expected sparse gradient to be defined. item.weight belongs to no module"
        in (answer["explanation"])
    )
    raised = only(case.check("bad"), "passes_complete")
    assert raised["step"] == 1
    assert "item.weight belongs to no module that was called" in raised["explanation"]
    # Sparse gradients are recorded, by their values; the results are those of a run without recording.
    sparse = (
        "SELECT DISTINCT parameter_fqn FROM gradients WHERE point = 'local' "
        "AND parameter_fqn LIKE '%e%.weight' AND numel > 0 ORDER BY 1"
    )
    assert ("item.weight",) in case.sql(sparse, "good")
    assert case.check("good") == []


@pytest.mark.slow
def test_case_43_gradients_that_are_not_accumulated(case: Case) -> None:
    answer = case.diff()
    first = differs_at(answer, step=0, rank=0, link="structure", backward_index=3)
    assert (first["baseline"], first["candidate"]) == ({"kind": "backward"}, {"kind": "grad"})
    passes = (
        "SELECT kind, count(n.parameter_fqn) FROM backward_passes p JOIN node_events n "
        "USING (step, backward_index) GROUP BY backward_index, kind ORDER BY backward_index"
    )
    # grad of a non-leaf, inputs= twice, and the pass of the case.
    three = [("grad", "0"), ("backward", "1"), ("backward", "1")]
    assert case.sql(passes, "good") == [*three, ("backward", "4")]
    assert case.sql(passes, "bad") == [*three, ("grad", "0")]


@pytest.mark.slow
def test_case_45_workers_that_are_forked_after_a_backward_pass(case: Case) -> None:
    assert "EVIDENCE rows trained: 16 error: None" in case.said["good"]
    assert any("Unable to handle autograd's threading" in line for line in case.said["bad"])
    # Workers are no ranks: eight steps of the parent, and nothing of the children.
    steps = "SELECT count(DISTINCT step), count(*) FROM backward_passes"
    assert case.sql(steps, "good") == [("8", "9")]
    assert case.sql("SELECT count(DISTINCT rank) FROM steps", "good") == [("1",)]
    # One pass, one around the checkpoints, and 100 within: more than torch nests on one thread.
    assert case.sql("SELECT count(*) FROM backward_passes", "bad") == [("102",)]
    assert case.check("good") == []


@pytest.mark.slow
def test_case_47_uneven_inputs_under_join(case: Case) -> None:
    assert case.sql("SELECT count(*) FROM backward_passes WHERE rank = 0", "good") == [("3",)]
    kinds = "SELECT kind, count(*) FROM buckets WHERE rank = 0 GROUP BY kind ORDER BY kind"
    assert case.sql(kinds, "good") == [("all_reduce", "3"), ("shadow", "2")]
    compressing = ("--compressing", "*counted")
    assert [v["law"] for v in case.check("good", *compressing)] == ["data_differ"]
    answer = case.diff()
    first = differs_at(answer, step=3, rank=1, link="backward", backward_index=0)
    assert first["candidate"]["failure"].startswith("RuntimeError: ")
    assert "while no Node ran" in answer["explanation"]
    never = only(case.check("bad", *compressing), "collectives_match")
    assert never["step"] == 3 and "rank 0 never came to the reduction" in never["explanation"]


@pytest.mark.slow
def test_case_49_graphs_that_never_run_are_not_kept(case: Case) -> None:
    assert f"EVIDENCE graphs still alive after each step: {[0] * 12}" in case.said["good"]
    kept = [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8]
    assert f"EVIDENCE graphs still alive after each step: {kept}" in case.said["bad"]
    counts = "SELECT count(*) FROM backward_passes"
    assert case.sql(counts, "good") == case.sql(counts, "bad") == [("4",)]
    assert case.sql("SELECT sum(abandoned_forwards) FROM steps", "good") == [("8",)]
    assert case.check("good") == [] and case.check("bad") == []

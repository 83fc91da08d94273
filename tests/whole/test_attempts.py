"""Jobs that were stopped and went on, in the same directory or another: what every command makes of their attempts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.answers.commands import asked, told
from support.launching.launcher import TESTS, JobResult, run_job

JOB = TESTS / "support" / "jobs" / "resuming.py"


class Jobs:
    """Runs of one job, made when they are asked for; each `saves` into a folder of its own."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def run(self, name: str, saves: str, *words: object, offset: int | None = None) -> JobResult:
        folder = self._place / saves
        folder.mkdir(exist_ok=True)
        env = {} if offset is None else {"GRADTRACE_STEP_OFFSET": str(offset)}
        return run_job(
            JOB, folder, *words, recorded=self._place / name, env=env, forked=True, timeout=60
        )

    @functools.cached_property
    def whole(self) -> Path:
        self.run("whole", "of-whole", 10).must_succeed()
        return self._place / "whole"

    def resumed(self, name: str, *words: object, offset: int | None = None) -> Path:
        """A run of ten steps that was killed in step 7, saved after step 4, and resumed."""
        assert self.run(name, f"of-{name}", 10, "dies=7").returncode != 0
        self.run(name, f"of-{name}", 10, *words, offset=offset).must_succeed()
        return self._place / name


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("attempts"))


def history(run: Path) -> list[dict[str, object]]:
    _, answer = asked("info", run, "--format", "json")
    return list(answer["runs"][0]["history"])


def test_job_that_was_killed_and_resumed_is_one_history_and_equal_to_one_that_never_stopped(
    jobs: Jobs,
) -> None:
    run = jobs.resumed("offset", offset=5)
    first, second = history(run)
    assert first["read"] == [0, 4] and "died in step 7" in str(first["ending"])
    assert second["joined_by"] == "offset" and second["repeated"] == [5, 7]
    assert (second["read"], second["ending"]) == ([5, 9], "ended")

    code, answer = asked("diff", jobs.whole, run, "--format", "json")
    assert (code, answer["verdict"], answer["cover"]["steps"]) == (0, "identical", list(range(10)))
    assert "attempt 0, attempt 1 from step 5 on" in answer["explanation"]
    assert asked("diff", run, jobs.whole, "--format", "json")[1]["verdict"] == "identical"

    code, answer = asked("check", run, "--format", "json")
    assert (code, answer["verdict"], answer["violations"]) == (0, "clean", [])
    code, answer = asked("failures", run, "--format", "json")
    assert code == 1 and answer["ranks"][0]["state"] == "ended"
    assert [(e["attempt"], e["ranks"][0]["state"]) for e in answer["before"]] == [(0, "died")]
    _, rows = told("sql", "SELECT attempt, step FROM steps ORDER BY step", run, "--format", "csv")
    assert rows.split()[1:] == [f"{int(step > 4)},{step}" for step in range(10)]
    _, alone = told("sql", "SELECT max(step) FROM parameters", run, "--attempt", 0)
    assert alone.split()[-1] == "7"


def test_job_that_counts_from_0_again_is_joined_where_its_parameters_are(jobs: Jobs) -> None:
    run = jobs.resumed("counted-anew")
    _, second = history(run)
    assert (second["joined_by"], second["step_shift"]) == ("parameters", 5)
    assert "(it counted from 0)" in str(second["sentence"])
    assert asked("diff", jobs.whole, run, "--format", "json")[1]["verdict"] == "identical"
    _, rows = told("timing", run, "--format", "csv")
    assert len(rows.splitlines()) > 1
    code, _ = told("failures", run, "--attempt", 1)
    assert code == 0


def test_optimizer_that_was_not_restored_is_found_where_the_attempt_begins(jobs: Jobs) -> None:
    run = jobs.resumed("forgetful", "forgets", offset=5)
    code, answer = asked("diff", jobs.whole, run, "--format", "json")
    first = answer["first_divergence"]
    assert (code, first["step"], first["link"]) == (1, 5, "optimizer")
    assert "Step 5 is the first of the candidate's attempt 1" in answer["explanation"]


def test_job_that_begins_anew_in_the_same_directory_is_not_joined(jobs: Jobs) -> None:
    assert jobs.run("anew", "of-anew", 10, "dies=3").returncode != 0
    jobs.run("anew", "of-anew", 6).must_succeed()
    run = jobs.whole.parent / "anew"
    first, second = history(run)
    assert first["read"] is None and second["read"] == [0, 5]
    assert "begins anew" in str(second["why_not"])
    assert asked("diff", jobs.whole, run, "--format", "json")[1]["cover"]["steps"] == list(range(6))


@pytest.mark.slow
def test_run_resumed_in_another_directory_is_compared_by_an_offset_that_its_parameters_hint_at(
    jobs: Jobs,
) -> None:
    jobs.run("half", "of-half", 5).must_succeed()
    jobs.run("elsewhere", "of-half", 10).must_succeed()
    whole, run = jobs.whole, jobs.whole.parent / "elsewhere"
    code, answer = asked("diff", whole, run, "--format", "json")
    assert code == 1 and "--align-steps offset=5 pairs them" in answer["explanation"]
    code, answer = asked("diff", whole, run, "--align-steps", "offset=5", "--format", "json")
    assert (code, answer["verdict"], answer["cover"]["steps"]) == (0, "identical", [5, 6, 7, 8, 9])
    assert answer["cover"]["step_alignment"] == {"offset": 5, "framework": None}
    assert "steps 5-9 (the candidate's 0-4)" in answer["explanation"]
    code, answer = asked("diff", run, whole, "--align-steps", "offset=-5", "--format", "json")
    assert (code, answer["cover"]["steps"]) == (0, [0, 1, 2, 3, 4])
    assert "lacks the candidate's steps 0-4" in answer["explanation"]

    jobs.run("forgetful-elsewhere", "of-forgetful-half", 5).must_succeed()
    jobs.run("late", "of-forgetful-half", 10, "forgets").must_succeed()
    late = whole.parent / "late"
    code, answer = asked("diff", whole, late, "--align-steps", "offset=5", "--format", "json")
    assert (code, answer["first_divergence"]["step"]) == (1, 5)
    assert answer["explanation"].startswith("Step 5 (the candidate's 0), rank 0: ")


@pytest.mark.slow
def test_elastic_restart_that_reloads_is_one_history_and_equal_to_a_job_without_failure(
    tmp_path: Path,
) -> None:
    def launched(name: str, *words: str) -> Path:
        folder = tmp_path / f"of-{name}"
        folder.mkdir()
        command = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
        done = subprocess.run(
            [sys.executable, *command.split(), "--max-restarts", "1", JOB, folder, "10", *words],
            env=os.environ | {"GRADTRACE_DIR": str(tmp_path / name), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return tmp_path / name

    whole, run = launched("whole"), launched("restarted", "dies=7")
    first, second = history(run)
    assert (first["read"], second["read"]) == ([0, 4], [5, 9]), (first, second)
    assert (second["joined_by"], second["step_shift"]) == ("parameters", 5)
    assert "no luck" in str(first["ending"])
    code, answer = asked("diff", whole, run, "--format", "json")
    # DDP's first pass of each attempt has its first layout of buckets.
    assert (code, answer["verdict"]) == (0, "identical"), answer["explanation"]
    code, answer = asked("check", run, "--format", "json")
    assert (code, answer["violations"]) == (0, []), answer["violations"]
    code, answer = asked("failures", run, "--format", "json")
    assert code == 1 and answer["before"][0]["verdict"] == "found"
    told("timing", run, "--buckets")


@pytest.mark.slow
def test_trainer_that_resumes_from_its_checkpoint_goes_on_by_its_own_counter(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    job = TESTS / "support" / "jobs" / "hugging_trainer.py"

    def trained(run: str, saves: str, *words: str, offset: str = "0") -> JobResult:
        return run_job(
            job,
            tmp_path / saves,
            10,
            *words,
            recorded=tmp_path / run,
            env={"GRADTRACE_STEP_OFFSET": offset},
        )

    trained("whole", "of-whole").must_succeed()
    assert trained("run", "of-run", "dies=7").returncode != 0
    trained("run", "of-run", "resumes").must_succeed()
    whole, run = tmp_path / "whole", tmp_path / "run"
    first, second = history(run)
    assert (first["read"], second["read"], second["joined_by"]) == ([0, 4], [5, 9], "framework")
    code, answer = asked("diff", whole, run, "--format", "json")
    assert (code, answer["verdict"], answer["cover"]["steps"]) == (0, "identical", list(range(10)))

    # Numbers of its own: what it was told is not what its Trainer counts.
    assert trained("begun", "of-late", "dies=7").returncode != 0
    trained("late", "of-late", "resumes", offset="3").must_succeed()
    late = tmp_path / "late"
    code, answer = asked("diff", whole, late, "--align-steps", "framework", "--format", "json")
    assert (code, answer["verdict"], answer["cover"]["steps"]) == (0, "identical", [5, 6, 7, 8, 9])
    assert answer["cover"]["step_alignment"] == {"offset": 2, "framework": "transformers"}

"""The launcher itself: what fails in a rank surfaces here, and nothing outlives a job."""

import os
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from support.launching.launcher import (
    JobFailed,
    JobTimedOut,
    RankFailed,
    ranks,
    run_job,
)


class WrongAnswer(Exception):
    """An exception that only this module knows."""


def script(folder: Path, text: str) -> Path:
    path = folder / "job.py"
    path.write_text(textwrap.dedent(text))
    return path


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_job_of_one_rank_is_a_plain_process(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
        import os, sys
        print(sys.argv[1:], "RANK" in os.environ, os.environ["OMP_NUM_THREADS"])
        print("to stderr", file=sys.stderr)
        sys.exit(3)
        """,
    )
    result = run_job(job, "--count", 2)
    assert (result.returncode, result.stdout) == (3, "['--count', '2'] False 1\n")
    assert result.stderr == "to stderr\n"
    assert result.seconds > 0
    with pytest.raises(JobFailed, match=r"(?s)ended with 3.*to stderr"):
        result.must_succeed()


def test_only_a_recorded_job_sees_gradtrace_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADTRACE_DIR", "inherited")
    monkeypatch.setenv("GRADTRACE_SUMMARY", "inherited")
    job = script(
        tmp_path,
        """
        import os
        print({name: os.environ[name] for name in sorted(os.environ) if "GRADTRACE" in name})
        """,
    )
    # Tests read what a job says on stderr; a line that a recording begins with is left out.
    quiet = {"GRADTRACE_QUIET": "1"}
    assert run_job(job).stdout == f"{quiet}\n"
    # Nothing in this job imports torch, so nothing is recorded.
    recorded = run_job(job, recorded=tmp_path / "run").stdout
    directory = {"GRADTRACE_DIR": str(tmp_path / "run")}
    assert recorded == f"{directory | quiet | {'GRADTRACE_STRICT': '1'}}\n"
    lenient = run_job(job, recorded=tmp_path / "run", env={"GRADTRACE_STRICT": "0"}).stdout
    assert "'GRADTRACE_STRICT': '0'" in lenient


def test_two_jobs_of_two_ranks_run_side_by_side(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(sys.argv[1])])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(total.item())
        dist.destroy_process_group()
        """,
    )
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda value: run_job(job, value, ranks=2), (1, 10)))
    assert [result.must_succeed().stdout for result in results] == ["2.0\n", "20.0\n"]


@pytest.mark.parametrize(
    ("count", "timeout"), [(1, 3), pytest.param(2, 10, marks=pytest.mark.slow)]
)
def test_timeout_kills_every_process_of_the_job(tmp_path: Path, count: int, timeout: int) -> None:
    job = script(
        tmp_path,
        """
        import os, pathlib, subprocess, sys, time
        rank = os.environ.get("RANK", "0")
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        pathlib.Path(sys.argv[1], f"pids-{rank}").write_text(f"{os.getpid()} {child.pid}")
        print("rank", rank, "waits", flush=True)
        time.sleep(600)
        """,
    )
    began = time.monotonic()
    with pytest.raises(JobTimedOut, match=rf"(?s)killed after {timeout} s.*rank 0 waits"):
        run_job(job, tmp_path, ranks=count, timeout=timeout)
    assert time.monotonic() - began < timeout + 15
    texts = [path.read_text() for path in tmp_path.glob("pids-*")]
    assert len(texts) == count
    pids = [int(pid) for text in texts for pid in text.split()]
    assert [pid for pid in pids if is_alive(pid)] == []


def test_orphan_of_a_job_that_ended_is_killed(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
        import subprocess, sys
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        print(child.pid)
        """,
    )
    result = run_job(job, timeout=60).must_succeed()
    assert not is_alive(int(result.stdout))


@ranks(2)
def test_body_runs_in_every_rank(tmp_path: Path) -> None:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    assert (dist.get_world_size(), total.item()) == (2, 3.0)
    assert not any(name == "GRADTRACE_DIR" for name in os.environ)
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@ranks(2)
def raises_in_rank_1_while_rank_0_waits() -> None:
    if dist.get_rank() == 1:
        raise WrongAnswer("forty-one")
    dist.barrier()


def test_error_of_the_first_rank_that_fails_surfaces() -> None:
    with pytest.raises(WrongAnswer, match="forty-one") as caught:
        raises_in_rank_1_while_rank_0_waits()
    cause = caught.value.__cause__
    assert isinstance(cause, RankFailed)
    assert "rank 1 of 2 raised" in str(cause)
    assert "raises_in_rank_1_while_rank_0_waits" in str(cause)


@ranks(2)
def raises_what_cannot_be_pickled() -> None:
    error = ValueError("holds a function")
    error.function = lambda: None  # type: ignore[attr-defined]
    raise error


def test_error_that_cannot_be_pickled_surfaces_as_text() -> None:
    with pytest.raises(RankFailed, match="holds a function"):
        raises_what_cannot_be_pickled()


@ranks(2)
def skips() -> None:
    pytest.skip("not on this host")


def test_skip_in_a_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not on this host"):
        skips()


@ranks(2)
def dies_without_a_word() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(600)


def test_rank_that_dies_without_an_exception_fails_the_test() -> None:
    with pytest.raises(JobFailed, match=r"exitcode *: 7"):
        dies_without_a_word()


@ranks(2, timeout=15)
def hangs_in_rank_1(folder: Path) -> None:
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


@pytest.mark.slow
def test_timeout_of_a_body_kills_all_ranks_and_says_where_they_were(tmp_path: Path) -> None:
    with pytest.raises(JobTimedOut, match=r"test_launcher\.py.* in hangs_in_rank_1"):
        hangs_in_rank_1(tmp_path)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    assert [pid for pid in pids if is_alive(pid)] == []


def test_body_inside_another_function_is_refused() -> None:
    def body() -> None: ...

    with pytest.raises(TypeError, match="must be a function of a module"):
        ranks(2)(body)


def test_forked_ranks_are_processes_that_start_and_end_as_others_do(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
        import atexit, os, sys, torch, torch.distributed as dist
        atexit.register(lambda: os.write(1, b"ended\\n"))
        dist.init_process_group("gloo")
        total = torch.tensor([float(sys.argv[1])])
        dist.all_reduce(total)
        names = sorted(n for n in os.environ if "GRADTRACE" in n)
        os.write(1, f"{total.item()} {__name__} {names}\\n".encode())  # in one piece
        dist.barrier()
        dist.destroy_process_group()
        if len(sys.argv) > 2 and os.environ["RANK"] == "1":
            raise ValueError("no luck")
        """,
    )
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda value: run_job(job, value, ranks=2, forked=True), (1, 10)))
    for result, total in zip(results, ("2.0", "20.0"), strict=True):
        said = sorted(result.must_succeed().stdout.splitlines())
        assert said == [f"{total} __main__ ['GRADTRACE_QUIET']"] * 2 + ["ended"] * 2
    failed = run_job(job, 1, "fail", ranks=2, forked=True)
    assert failed.returncode == 1 and "ValueError: no luck" in failed.stderr
    recorded = run_job(job, 1, ranks=2, forked=True, recorded=tmp_path / "run").must_succeed()
    assert "['GRADTRACE_DIR', 'GRADTRACE_QUIET', 'GRADTRACE_STRICT']" in recorded.stdout


def test_forked_job_of_one_rank_has_its_own_exit_status_and_is_armed(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
        import os, signal, sys
        from gradtrace_recorder import bootstrap
        print(bootstrap.is_armed(), "RANK" in os.environ)
        sys.stdout.flush()
        sys.exit(3) if len(sys.argv) == 1 else os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    exited = run_job(job, forked=True, recorded=tmp_path / "run")
    assert (exited.returncode, exited.stdout) == (3, "True False\n")
    killed = run_job(job, "kill", forked=True)
    assert (killed.returncode, killed.stdout) == (-9, "False False\n")


def test_timeout_kills_every_rank_of_a_forked_job(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        f"""
        import os, time
        open({str(tmp_path)!r} + "/pid" + os.environ["RANK"], "w").write(str(os.getpid()))
        print("waits", flush=True)
        time.sleep(60)
        """,
    )
    with pytest.raises(JobTimedOut, match=r"(?s)killed after 3 s.*waits"):
        run_job(job, ranks=2, timeout=3, forked=True)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    assert not any(is_alive(pid) for pid in pids)

"""Runs real jobs: a script, or the body of a test, in one or several processes under torch's launcher.

Everything that a job started is gone when a call here returns, also after a timeout: the job's
processes carry a mark in their environment, since torch's launcher gives each worker a session of
its own and killing one process group would leave them alive.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, ParamSpec, cast

import psutil
import pytest

P = ParamSpec("P")

TESTS = Path(__file__).resolve().parents[2]
# A folder for PYTHONPATH: ranks then end as after `end_process_group`, without a word in their script.
RESTING_AT_EXIT = Path(__file__).resolve().parent / "at_exit"
MARK = "LAUNCHER_JOB"
TAIL_LINES = 60


class JobFailed(AssertionError):
    """A job ended otherwise than it should; the text holds the tails of its output."""


class JobTimedOut(JobFailed):
    """A job did not end in time and was killed."""


class RankFailed(JobFailed):
    """What one rank of a `@ranks` test raised, as it looked in its own process."""


@dataclass(frozen=True)
class JobResult:
    """A job that ended by itself. Several ranks' lines are mixed in `stdout` and `stderr`."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def must_succeed(self) -> JobResult:
        """Itself. Raises JobFailed when the job did not end with 0."""
        if self.returncode != 0:
            raise JobFailed(
                f"{' '.join(self.command)} ended with {self.returncode}\n{self.tails()}"
            )
        return self

    def tails(self) -> str:
        """The last lines of both outputs."""
        return _tails(self.stdout, self.stderr)


def run_job(
    script: Path | str,
    *args: object,
    ranks: int = 1,
    recorded: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    buffered: bool = False,
    forked: bool = False,
    own: Sequence[Mapping[str, str]] = (),
) -> JobResult:
    """Runs a script with this Python until it ends, whatever its exit status.

    One rank is a plain process, several run under torch's launcher with a rendezvous of their own, so
    that jobs may run side by side. `recorded` is the run's directory; without it GRADTRACE_* variables
    of this process do not reach the job, and `env` is added last. Torch's launcher starts workers unbuffered: a
    line is several writes, and that of another rank may fall in between; `buffered`, it is one. `forked`, the ranks
    are forked where torch has been imported: for jobs that must not leave their process group, and
    whose start is not what is tested; with `own` each rank has these variables, and none of torch's launcher.
    Raises JobTimedOut.
    """
    ours = {} if recorded is None else {"GRADTRACE_DIR": str(recorded), "GRADTRACE_STRICT": "1"}
    command = [str(script), *(str(argument) for argument in args)]
    if forked:
        return _run_forked(command, len(own) or ranks, {**ours, **(env or {})}, timeout, own)
    head = [sys.executable] if ranks == 1 else _torchrun(ranks)
    if buffered:
        ours["PYTHONUNBUFFERED"] = ""
        head += ["--no-python", sys.executable] if ranks > 1 else []
    return _run([*head, *command], {**ours, **(env or {})}, timeout)


def run_command(
    command: Sequence[str],
    *,
    recorded: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> JobResult:
    """Runs a launcher's own command as `run_job` runs a script. Raises JobTimedOut."""
    ours = {} if recorded is None else {"GRADTRACE_DIR": str(recorded), "GRADTRACE_STRICT": "1"}
    return _run(command, {**ours, **(env or {})}, timeout)


def ranks(count: int, timeout: float = 120) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Runs the test's body in `count` processes on gloo and raises what the first rank to fail raised.

    The process group exists when the body begins. Fixtures' values are pickled. The body is found by
    its module's file and its name, so it must be a function of a module. The exception's cause is a
    RankFailed with the rank's traceback; a rank that dies without an exception gives a JobFailed.
    """

    def decorate(body: Callable[P, None]) -> Callable[P, None]:
        if "." in body.__qualname__:
            raise TypeError(f"{body.__qualname__!r} must be a function of a module to run in ranks")

        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
                bound = inspect.signature(body).bind(*args, **kwargs)
                _run_ranks(body, dict(bound.arguments), count, timeout, Path(folder))

        return test

    return decorate


@dataclass(frozen=True)
class _Task:
    """What a rank needs to run the body of a test."""

    file: str
    module: str
    name: str
    arguments: dict[str, Any]
    deadline: float  # on the host's monotonic clock


@dataclass(frozen=True)
class _Failure:
    """What a rank left when the body raised; `error` is None where it cannot be pickled."""

    rank: int
    when: float
    error: BaseException | None
    text: str
    skip_reason: str | None


def _run_ranks(
    body: Callable[..., None],
    arguments: dict[str, Any],
    count: int,
    timeout: float,
    folder: Path,
) -> None:
    task = _Task(
        file=inspect.getfile(body),
        module=body.__module__,
        name=body.__name__,
        arguments=arguments,
        deadline=time.monotonic() + timeout,
    )
    (folder / "task").write_bytes(pickle.dumps(task))
    command = [*_torchrun(count), __file__, str(folder)]
    ended: JobResult | JobTimedOut
    try:
        ended = _run(command, {"GRADTRACE_STRICT": "1"}, timeout)
    except JobTimedOut as timed_out:
        ended = timed_out
    failures = [_unpickled(path.read_bytes()) for path in folder.glob("failure-*")]
    if failures:
        first = min(failures, key=lambda failure: failure.when)
        if first.skip_reason is not None:
            pytest.skip(first.skip_reason)
        cause = RankFailed(f"rank {first.rank} of {count} raised\n{first.text}")
        if first.error is None:
            raise cause
        raise first.error from cause
    if isinstance(ended, JobTimedOut):
        raise ended
    ended.must_succeed()


def _unpickled(data: bytes) -> _Failure:
    return cast(_Failure, pickle.loads(data))


def run_body(folder: Path) -> None:
    """Runs the body of a test as one rank: what torch's launcher starts for `@ranks`."""
    import torch.distributed as dist

    task = cast(_Task, pickle.loads((folder / "task").read_bytes()))
    # Says on stderr where a rank hangs, shortly before the whole job is killed.
    remaining = task.deadline - time.monotonic() - 2
    if remaining > 0:
        faulthandler.dump_traceback_later(remaining)
    rank = int(os.environ["RANK"])
    try:
        body = _body(task)
        dist.init_process_group("gloo")
        body(**task.arguments)
        end_process_group()
    except BaseException as error:  # a skip is a BaseException, and SystemExit is no success here
        failure = _Failure(
            rank=rank,
            when=time.monotonic(),
            error=_portable(error),
            text=traceback.format_exc(),
            skip_reason=error.msg or "" if isinstance(error, pytest.skip.Exception) else None,
        )
        unfinished = folder / f"unfinished-{rank}"
        unfinished.write_bytes(pickle.dumps(failure))
        unfinished.rename(folder / f"failure-{rank}")
        raise


def end_process_group() -> None:
    """Destroys the default process group, so that the process may end at once without an abort.

    Torch 2.13: a gloo thread drops its last collective's thread-local state a little after the
    collective is done. That needs the GIL; taking it while Python shuts down ends the process with
    "terminate called without an active exception". The sleep lets those threads have it before.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(0.1)


def _body(task: _Task) -> Callable[..., None]:
    spec = importlib.util.spec_from_file_location(task.module, task.file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the body raises is pickled by the name that pytest gave its module, parents included.
    sys.modules[task.module] = module
    parents = task.module.split(".")[:-1]
    for end in range(1, len(parents) + 1):
        name = ".".join(parents[:end])
        sys.modules.setdefault(name, ModuleType(name))
    spec.loader.exec_module(module)
    return cast(Callable[..., None], inspect.unwrap(getattr(module, task.name)))


def _portable(error: BaseException) -> BaseException | None:
    """The exception as another process will see it, without causes."""
    try:
        return cast(BaseException, pickle.loads(pickle.dumps(error)))
    except Exception:
        return None


def _torchrun(count: int) -> list[str]:
    # --standalone: the agent itself binds a free port, so that no port is chosen before it is used;
    # --local-addr: workers would otherwise look the host's name up, which not every host can.
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(count)]


def _run_forked(
    command: Sequence[str],
    count: int,
    extra: Mapping[str, str],
    timeout: float,
    own: Sequence[Mapping[str, str]],
) -> JobResult:
    # Not above: as a rank's script this file finds its own folder alone.
    from support.launching.forked_ranks import FORKED_JOBS

    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        began = time.monotonic()
        environment = {**_environment(), **extra}
        returncode = FORKED_JOBS.run(command, count, environment, (stdout, stderr), timeout, own)
        if returncode is None:
            raise JobTimedOut(
                f"{' '.join(command)} was killed after {timeout:g} s\n{_tails(*_read(stdout, stderr))}"
            )
        seconds = time.monotonic() - began
        return JobResult(tuple(command), returncode, *_read(stdout, stderr), seconds)


def _environment() -> dict[str, str]:
    """That of this process for a job. What a recording says when it begins is left out of the outputs."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    return {**inherited, "OMP_NUM_THREADS": "1", "GRADTRACE_QUIET": "1"}


def _read(stdout: IO[bytes], stderr: IO[bytes]) -> tuple[str, str]:
    for output in (stdout, stderr):
        output.seek(0)
    return stdout.read().decode(errors="replace"), stderr.read().decode(errors="replace")


def _run(command: Sequence[str], extra: Mapping[str, str], timeout: float) -> JobResult:
    mark = uuid.uuid4().hex
    environment = {**_environment(), MARK: mark, **extra}
    # Files, not pipes: a process that outlives the job would hold a pipe open.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill_all(mark, process)
            raise JobTimedOut(
                f"{' '.join(command)} was killed after {timeout:g} s\n{_tails(*_read(stdout, stderr))}"
            ) from None
        finally:
            _kill_all(mark, process)
        seconds = time.monotonic() - began
        return JobResult(tuple(command), returncode, *_read(stdout, stderr), seconds)


def _kill_all(mark: str, process: subprocess.Popen[bytes]) -> None:
    """Kills every process of a job, those of other sessions and orphans too, until none is left."""
    if process.poll() is None:
        # The launcher is stopped first, so that it starts nothing while its workers are killed.
        process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while left := _processes_of(mark):
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        if process.poll() is None:
            process.kill()
            process.wait()
        psutil.wait_procs(left, timeout=1)
        if time.monotonic() > deadline:
            raise JobFailed(f"processes {[one.pid for one in left]} of a job cannot be killed")
    if process.poll() is None:  # killed before it had an environment of its own
        process.kill()
        process.wait()


def _processes_of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _tails(stdout: str, stderr: str) -> str:
    def tail(name: str, text: str) -> str:
        lines = text.splitlines()[-TAIL_LINES:]
        return "\n".join([f"--- the end of {name}:", *(lines or ["(nothing)"])])

    return f"{tail('stdout', stdout)}\n{tail('stderr', stderr)}"


if __name__ == "__main__":
    # As a script this file is called __main__: what is pickled must come from the module's own name.
    sys.path[0] = str(TESTS)
    from support.launching.launcher import run_body as run_body_of_module

    run_body_of_module(Path(sys.argv[1]))

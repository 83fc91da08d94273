"""Jobs that start at once: ranks forked from a process that has imported torch already.

Importing torch costs each process of a job 1.4 to 2.7 s of CPU time, torch's launcher included: most of what a test
of a small fault takes. Ranks from here are processes of their own all the same, with gloo between them, and arm
themselves from their environment as the import of torch would have done. What is about starting, launchers, kills
or restarts runs under torch's own launcher instead (`launcher.run_job` without `forked`).

This file is also the process: it is given requests over the socket that is its standard input, forks one process
for each job, which forks the ranks, and ends when the socket is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

_IMPORTS = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "pyarrow.compute",
    "pyarrow.parquet",
)
# After one rank has failed the others may end by themselves for so long.
_GRACE_SECONDS = 5.0


class ForkedJobs:
    """The process, begun when the first job is asked for. Threads may ask for jobs at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def run(
        self,
        command: Sequence[str],
        count: int,
        environment: Mapping[str, str],
        outputs: tuple[IO[bytes], IO[bytes]],
        timeout: float,
        own: Sequence[Mapping[str, str]] = (),
    ) -> int | None:
        """The exit status of a script in `count` ranks; None where they were killed after `timeout` seconds.

        With `own` each rank has variables of its own, and none of torch's launcher.
        """
        asked = {"command": command, "count": count, "environment": dict(environment)}
        asked["own"] = [dict(one) for one in own]
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb", buffering=0) as reply:
            try:
                with self._lock:
                    descriptors = [*(output.fileno() for output in outputs), writing]
                    socket.send_fds(self._begun(), [json.dumps(asked).encode()], descriptors)
            finally:
                os.close(writing)
            group = int(reply.readline())
            timer = threading.Timer(timeout, _kill_group, [group])
            timer.start()
            try:
                said = reply.readline()
            finally:
                timer.cancel()
                _kill_group(group)
                # Every process of the job holds the other end until it dies, and is seen a little longer.
                reply.read()
                while _is_seen(group):
                    time.sleep(0.002)
        return int(said) if said else None

    def _begun(self) -> socket.socket:
        if self._socket is None:
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
            with its:
                process = subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=its.fileno(),
                    env={**environment, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            self._socket = ours
            atexit.register(process.wait)
            atexit.register(ours.close)  # comes first: the process ends with it
        return self._socket


FORKED_JOBS = ForkedJobs()


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _is_seen(group: int) -> bool:
    """Whether a process of the group is there that is no zombie."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _serve() -> dict[str, Any]:
    """Fork for each request; returns in a rank alone, with what it is to run."""
    asking = socket.socket(fileno=0)
    while True:
        message, descriptors, _, _ = socket.recv_fds(asking, 1 << 20, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            os._exit(0)
        if os.fork() == 0:
            asking.close()
            return _job(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _job(asked: dict[str, Any], stdout: int, stderr: int, reply: int) -> dict[str, Any]:
    """The process of a job: its ranks' exit status is written to `reply`. Returns in the ranks."""
    os.setsid()
    os.write(reply, b"%d\n" % os.getpid())
    nothing = os.open(os.devnull, os.O_RDONLY)
    for there, here in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(there, here)
        os.close(there)
    os.environ.clear()
    os.environ.update(asked["environment"])
    count, own = asked["count"], asked["own"]
    if count > 1 and not own:
        os.environ.update(_rendezvous(count))
    ranks = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            if own:
                os.environ.update(own[rank])
            elif count > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
            return asked
        ranks.append(pid)
    os.write(reply, b"%d\n" % _ended(ranks))
    os._exit(0)


def _rendezvous(count: int) -> dict[str, str]:
    """The variables of torch's launcher, with a store in a process of its own that the job's end kills."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        _keep_store(count, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        port = told.readline().decode().strip()
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": f"forked-{os.getpid()}-{time.monotonic_ns()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _keep_store(count: int, writing: int) -> NoReturn:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, b"%d\n" % store.port)
    os.close(writing)
    while True:
        signal.pause()


def _ended(ranks: Sequence[int]) -> int:
    """0, or how the first rank ended that did not succeed; the others are then ended as torch's launcher does."""
    left, first, deadline = set(ranks), 0, None
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG if deadline is not None else 0)
        if pid == 0:
            if deadline is not None and time.monotonic() > deadline:
                for one in left:
                    os.kill(one, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.02)
            continue
        if pid not in left:
            continue
        left.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code if len(ranks) == 1 else 1
            deadline = time.monotonic() + _GRACE_SECONDS
            for one in left:
                os.kill(one, signal.SIGTERM)
    return first


if __name__ == "__main__":
    for name in _IMPORTS:
        __import__(name)
    script, *arguments = _serve()["command"]
    # From here on this is a rank. It ends as a script does: with its exit status, and what it registered for the end.
    from gradtrace_recorder import bootstrap

    sys.argv = [script, *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[0] = str(Path(script).resolve().parent)
    bootstrap.start_from_env()
    import runpy

    runpy.run_path(script, run_name="__main__")

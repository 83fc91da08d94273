"""Children of multiprocessing end without Python's own end: their recordings are closed all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.runs.opening import open_run
from support.answers.commands import told
from support.launching.launcher import run_job

ENDS = """
import os, sys, torch
import torch.multiprocessing as mp
torch.set_num_threads(1)
def train(rank, how):
    net = torch.nn.Linear(3, 3)
    for _ in range(3):
        net(torch.ones(2, 3)).sum().backward()
    if how == "finalizer":
        from multiprocessing.util import Finalize
        Finalize(None, lambda: net(torch.ones(2, 3)).sum().backward(), exitpriority=-10)
    if how == "handled":
        try:
            raise RuntimeError("nothing")
        except RuntimeError:
            return
    if how == "raise" and rank == 1:
        raise ValueError("no luck")
    if how == "exit" and rank == 1:
        sys.exit(3)
    if how == "os._exit" and rank == 1:
        os._exit(0)
if __name__ == "__main__":
    method, how = sys.argv[1:]
    if how == "plain":
        children = [mp.get_context(method).Process(target=train, args=(0, how))]
        for child in children:
            child.start()
        for child in children:
            child.join()
    else:
        context = mp.start_processes(train, (how,), nprocs=2, join=False, start_method=method)
        for child in context.processes:
            child.join()
"""


KINDS = [(how, "fork") for how in ("finalizer", "plain", "handled", "raise", "exit")]
KINDS += [("raise", "forkserver"), ("raise", "spawn")]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "method"), KINDS)
def test_child_that_ends_closes_its_recording(tmp_path: Path, how: str, method: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(ENDS)
    run_job(script, method, how, recorded=tmp_path / "run").must_succeed()
    run = open_run(tmp_path / "run")
    ranks = [0] if how == "plain" else [0, 1]
    assert (run.attempts, list(run.ranks), run.incomplete_ranks) == ((0,), ranks, ())
    uncaught = {rank: info.facts["uncaught"] for rank, info in run.ranks.items()}
    assert uncaught.pop(1, None) == (["ValueError", "no luck"] if how == "raise" else None)
    assert uncaught == {0: None}
    states = [ending.state for ending in endings(run).ranks]
    assert states == (["ended", "raised"] if how == "raise" else ["ended"] * len(ranks))
    # What other finalizers of the job's still trained is there: ours comes last.
    passes = 4 if how == "finalizer" else 3
    assert [run.ranks[r].facts["recorded"]["backward_passes"] for r in ranks] == [passes] * len(
        ranks
    )


@pytest.mark.slow
def test_child_that_ends_by_os_exit_is_told_from_one_that_runs(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(ENDS)
    run_job(script, "fork", "os._exit", recorded=tmp_path / "run").must_succeed()
    code, said = told("info", tmp_path / "run")
    assert code == 0
    assert "0-1 of ?; not closed (its process is gone): 1" in said

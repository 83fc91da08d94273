"""What a process runs under is written down: switches, variables, command line, commit; and no secret with it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from gradtrace_recorder.launch.environment import autocast, command_line, environment, git_commit
from support.recordings.in_process import recording, rows


def test_variables_that_change_numbers_are_read_and_secrets_and_places_are_not() -> None:
    given = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "x" * 1000,
        "NCCL_ALGO": "Ring",
        "GLOO_ANYTHING": "1",
        "PYTHONHASHSEED": "0",
        "TORCH_HOME": "/home/someone",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
        "TORCH_AUTH_TOKEN": "secret",
        "CUDA_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "USER": "someone",
    }
    found = environment(given)
    assert {name for name in given if name in found} == {
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "NCCL_ALGO",
        "GLOO_ANYTHING",
        "PYTHONHASHSEED",
    }
    assert len(found["PYTORCH_CUDA_ALLOC_CONF"]) == 200 and "secret" not in json.dumps(found)


def test_switches_are_read_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment({})
    assert before["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not before["cudnn_benchmark"]
    try:
        after = environment({})
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = before["cudnn_benchmark"]
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"deterministic_algorithms", "deterministic_warn_only", "cudnn_benchmark"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py", "--lr", "0.1"], ["train.py", "--lr", "0.1"]),
        (["train.py", "--hf-token", "abc", "--lr"], ["train.py", "--hf-token", "***", "--lr"]),
        (["train.py", "--api_key=abc", "x"], ["train.py", "--api_key=***", "x"]),
        (["train.py", "--use-auth", "--lr", "1"], ["train.py", "--use-auth", "--lr", "1"]),
    ],
)
def test_what_sounds_like_a_secret_is_masked(words: list[str], said: list[str]) -> None:
    assert command_line(words) == said


@pytest.mark.skipif(shutil.which("git") is None, reason="asks git whether it agrees")
def test_commit_is_the_one_that_git_names(tmp_path: Path) -> None:
    def git(*words: str, where: Path = tmp_path / "repository") -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.check_output(["git", *names, *words], cwd=where, text=True).strip()

    inside = tmp_path / "repository" / "deep" / "er"
    inside.mkdir(parents=True)
    assert git_commit(tmp_path) is None
    git("init", "-q")
    assert git_commit(inside) is None  # nothing is committed yet
    git("commit", "-q", "--allow-empty", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert git_commit(inside) == head
    git("pack-refs", "--all")
    assert git_commit(inside) == head
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "worktree"))
    git("commit", "-q", "--allow-empty", "-m", "two", where=tmp_path / "worktree")
    assert git_commit(tmp_path / "worktree") == git("rev-parse", "other") != head
    git("checkout", "-q", "--detach", head)
    assert git_commit(inside) == head
    (tmp_path / "repository" / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert git_commit(inside) is None


def test_autocast_of_the_first_forward_is_recorded(tmp_path: Path) -> None:
    assert autocast() == {}
    net = nn.Linear(3, 3)
    with recording(tmp_path), torch.autocast("cpu", dtype=torch.bfloat16):
        net(torch.ones(2, 3)).float().sum().backward()
    [(said, commit)] = rows(tmp_path, "SELECT environment, git_commit FROM ranks")
    assert json.loads(said)["autocast"] == {"cpu": "bfloat16"}
    assert commit is None or len(commit) == 40

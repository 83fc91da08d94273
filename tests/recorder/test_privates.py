"""A torch that lacks what the recorder leans on, or does it otherwise: that source is left out, and the job goes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace_recorder.torch_internals import privates
from gradtrace_recorder.torch_internals.privates import (
    BACKWARD,
    MODULES,
    OPTIMIZER,
    PRIVATES,
    SUMMARIES,
    TESTED_TORCH,
    Finding,
    found,
    is_newer,
    is_tested,
    lookups,
    self_test,
)
from support.recordings.in_process import rank_of, rows

Case = dict[str, str | None]
RECORDER = Path(privates.__file__).parents[1]

# Of each name: a process, forked once torch is imported, in which it is taken from torch, or does something else.
# {name: null} is taken away, {name: text} is what it becomes. What trains no more without it is not recorded.
CHILDREN = """
import json, os, sys, traceback

os.environ.pop("GRADTRACE_DIR", None)
import torch
from torch import nn

cases, folder, observer = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]


def job():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        net(torch.ones(3, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.tolist() for parameter in net.parameters()]


def change(name, text):
    owner, _, last = name.rpartition(".")
    for part in owner.split(".")[1:]:
        of = torch if part == owner.split(".")[1] else of
        of = getattr(of, part, None) or sys.modules[owner]
    of = of if owner != "torch" else torch
    delattr(of, last) if text is None else setattr(of, last, eval(text))


for number, case in enumerate(cases):
    if os.fork() == 0:
        sys.stderr.flush()
        os.dup2(os.open(f"{folder}/{number}.err", os.O_CREAT | os.O_WRONLY), 2)
        answer = {"bare": None, "recorded": None}
        try:
            for name, text in case.items():
                change(name, text)
            answer["bare"] = job()
        except Exception:
            pass
        if answer["bare"] is not None:
            try:
                import gradtrace_recorder

                gradtrace_recorder.start(f"{folder}/{number}", observer=observer)
                answer["recorded"] = job()
                gradtrace_recorder.stop()
            except BaseException:
                traceback.print_exc()
        with open(f"{folder}/{number}.json", "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.wait()
"""


def children(cases: list[Case], folder: Path, observer: str) -> list[Any]:
    """(parameters bare, parameters recorded, stderr, run directory) of each case."""
    folder.mkdir()
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        CHILDREN,
        json.dumps(cases),
        str(folder),
        observer,
    ]
    subprocess.run(command, check=True, timeout=240, env=environment)
    answers = []
    for number in range(len(cases)):
        answer = json.loads((folder / f"{number}.json").read_text())
        said = (folder / f"{number}.err").read_text()
        answers.append((answer["bare"], answer["recorded"], said, folder / str(number)))
    return answers


def removable() -> list[str]:
    """Names that are looked up, and are there."""
    there = {finding.name for finding in lookups() if finding.ok and not finding.detail}
    return [private.name for private in PRIVATES if private.is_path and private.name in there]


def check_without(name: str, answer: Any, observer: str) -> None:
    bare, recorded, said, run = answer
    assert recorded == bare, f"{name}: the job is another\n{said}"
    [private] = [private for private in PRIVATES if private.name == name]
    assert "Traceback" not in said and "failed" not in said, f"{name}:\n{said}"
    if {MODULES, BACKWARD, OPTIMIZER} <= set(private.sources):  # of nothing an event is seen
        assert said.count(name) == len(private.sources), said
        assert not run.exists()
        return
    assert "nothing is recorded" not in said, f"{name}:\n{said}"
    rank = rank_of(run)
    assert rank["observer"]["kind"] == observer, f"{name}: {rank['observer']}\n{said}"
    texts = rank["problems"]
    assert all(name in text for text in texts) and len(texts) == len(private.sources), (
        f"{name}: {texts}"
    )
    [there] = rows(
        run,
        "SELECT (SELECT count(*) FROM module_calls), (SELECT count(*) FROM node_events), "
        "(SELECT count(*) FROM optimizer_groups), (SELECT count(*) FROM gradients)",
    )
    closed = set(private.sources)
    has_gradients = not closed & {SUMMARIES} and not {BACKWARD, OPTIMIZER} <= closed
    want = (MODULES not in closed, BACKWARD not in closed, OPTIMIZER not in closed, has_gradients)
    assert tuple(count > 0 for count in there) == want or MODULES in closed, f"{name}: {there}"
    assert (there[0] > 0, there[1] > 0, there[2] > 0 or MODULES in closed) == want[:3], (
        f"{name}: {there}"
    )


FEW = [
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_graph_task_id",
    "torch.optim.optimizer.register_optimizer_step_pre_hook",
    "torch.utils._python_dispatch._disable_current_modes",
]


@pytest.mark.parametrize("observer", ["python", "native"])
def test_without_a_private_its_source_is_left_out_and_the_job_is_as_ever(
    tmp_path: Path, observer: str, native_library: None
) -> None:
    answers = children([{name: None} for name in FEW], tmp_path / "few", observer)
    # Some versions of torch train no more without one of them (2.9).
    trained = [(name, answer) for name, answer in zip(FEW, answers, strict=True) if answer[0]]
    assert len(trained) >= 3
    for name, answer in trained:
        check_without(name, answer, observer)


@pytest.mark.slow
@pytest.mark.parametrize("observer", ["python", "native"])
def test_no_private_of_the_table_ends_a_job_by_being_gone(
    tmp_path: Path, observer: str, native_library: None
) -> None:
    names = removable()
    answers = children([{name: None} for name in names], tmp_path / "all", observer)
    tried = 0
    for name, answer in zip(names, answers, strict=True):
        if answer[0] is not None:
            check_without(name, answer, observer)
            tried += 1
    assert tried >= 15, f"torch trains without {tried} of {len(names)}"


def test_a_later_torch_is_named_and_tried(tmp_path: Path) -> None:
    """By a version that there is not, as it is, and as it may be: one that numbers Nodes otherwise."""
    version: Case = {"torch.__version__": "torch.torch_version.TorchVersion('2.99.0')"}
    otherwise: Case = version | {"torch._C._autograd._get_sequence_nr": "lambda: 7"}
    same, other = children([version, otherwise], tmp_path / "later", "python")
    passed = [finding for finding in self_test(whole=False) if finding.ok]
    count = len([private for private in PRIVATES if not private.is_whole])
    assert same[1] == same[0]
    newest = ".".join(TESTED_TORCH[-1].split(".")[:2])
    first, *more = (line for line in same[2].splitlines() if "recording into" not in line)
    assert first == (
        f"gradtrace: torch 2.99.0 is newer than what gradtrace 0.1 was tested with ({newest}); "
        f"{len(passed)} of {count} self-tests pass"
    )
    assert len(more) == count - len(passed), more  # what this torch lacks
    assert other[1] == other[0], other[2]
    assert f"{len(passed) - 1} of {count} self-tests pass" in other[2]
    [(problems,)] = rows(other[3], "SELECT problems FROM ranks")
    assert (
        "the module source needs" in problems
        and "_get_sequence_nr (naming the module of a Node): AssertionError" in problems
    )
    counts = "SELECT count(module_fqn), count(*) > 0 FROM node_events"
    assert rows(other[3], counts) == [(0, True)]


def test_every_self_test_passes_here_but_for_what_this_torch_is_known_to_lack() -> None:
    known = {
        "torch.nn.modules.module._has_any_global_hook": (2, 7),
        "node._raw_saved_self.data": (2, 13),
        "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultReduceScatter": (2, 9),
        "torch.distributed.fsdp._fully_shard.FSDPModule.set_custom_reduce_scatter": (2, 9),
    }
    here = tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2])
    failed = {finding.name: finding for finding in self_test() if not finding.ok}
    lacking = {name for name in failed if here < known.get(name, (0,))}
    assert failed.keys() == lacking, failed


def test_the_self_test_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "gradtrace_recorder", "self-test", "--json"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "GRADTRACE_DIR": ""},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said["torch"] == str(torch.__version__) and said["tested"] == list(TESTED_TORCH)
    assert [Finding(**finding).name for finding in said["findings"]] == [p.name for p in PRIVATES]


def test_versions_that_count_as_tested() -> None:
    assert all(is_tested(version) and not is_newer(version) for version in TESTED_TORCH)
    assert is_tested("2.13.2+cu130") and not is_tested("2.7.1") and not is_newer("2.7.1")
    assert not is_tested("2.13.0a0+git1234") and not is_tested("2.99.0") and is_newer("2.99.0")
    assert is_newer("3.0.0")


def test_names_that_code_asks_for_are_in_the_table() -> None:
    asked = set()
    for path in RECORDER.rglob("*.py"):
        text = path.read_text()
        asked |= (
            set(re.findall(r'found\(\s*f?"([^"]+)"', text)) if path.name != "privates.py" else set()
        )
    named = {
        name.replace("{_MODULE}", "torch.nn.modules.module").replace(
            "{_OPTIMIZER}", "torch.optim.optimizer"
        )
        for name in asked
    }
    assert len(named) >= 12 and named <= {private.name for private in PRIVATES}, named


def test_each_name_says_on_which_releases_it_was_proved() -> None:
    assert all(set(private.proved_on) <= set(TESTED_TORCH) for private in PRIVATES)
    assert all(TESTED_TORCH[-1] in private.proved_on for private in PRIVATES)
    if is_tested(str(torch.__version__)):
        release = [int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2]]
        here = [
            tested for tested in TESTED_TORCH if [int(p) for p in tested.split(".")[:2]] == release
        ]
        claimed = {private.name for private in PRIVATES if here[0] in private.proved_on}
        gone = {finding.name for finding in lookups() if not finding.ok}
        assert not claimed & gone


def test_what_is_looked_up_is_what_torch_has() -> None:
    assert found("torch._C._autograd._get_sequence_nr", None) is torch._C._autograd._get_sequence_nr
    assert found("torch.nothing.of.the.kind", 7) == 7

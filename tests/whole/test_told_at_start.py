"""What a job's stderr says when recording begins, and of settings that have no effect: real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradtrace_recorder
from gradtrace_recorder import bootstrap
from support.launching.launcher import run_job

NET = """
import os, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def train(steps=2):
    for _ in range(steps):
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""


def stderr_of(source: str, place: Path, *arguments: str, **variables: str) -> list[str]:
    """The lines that a script leaves on stderr, run in `place`. It must succeed."""
    script = place / "job.py"
    script.write_text(source)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=place,
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_one_line_says_where_recording_goes_and_what_it_costs(tmp_path: Path) -> None:
    [line] = stderr_of(
        NET + "os.makedirs('elsewhere'); os.chdir('elsewhere'); train()",
        tmp_path,
        GRADTRACE_DIR="runs/a",
        GRADTRACE_NATIVE_CACHE=str(tmp_path / "none"),
    )
    assert line == (
        f"gradtrace: recording into {tmp_path / 'runs' / 'a'}, attempt 0: detail nodes, summary full, Python observer; "
        "a step is expected to take about 1.57 times as long, 8.1 times where tensors are tiny (measured on a CPU); "
        "1.08 with the native observer, python -m gradtrace_recorder build"
    )
    assert (tmp_path / "runs" / "a" / "run.json").exists(), (
        "in the directory in which it was started"
    )


def test_first_rank_alone_says_it(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(NET + "torch.distributed.init_process_group('gloo'); train()")
    told = run_job(
        script, ranks=2, recorded=tmp_path / "run",
        env={"GRADTRACE_QUIET": "0", "GRADTRACE_DETIAL": "x"},
    ).must_succeed()  # fmt: skip
    ours = [line for line in told.stderr.splitlines() if line.startswith("gradtrace: ")]
    assert len(ours) == 2 and ours[0].startswith(f"gradtrace: recording into {tmp_path / 'run'}, ")
    assert ours[1] == (
        "gradtrace: GRADTRACE_DETIAL is no variable of gradtrace's, and not used; is GRADTRACE_DETAIL meant?"
    )
    assert len(list((tmp_path / "run" / "ranks").glob("*.json"))) == 2


def test_globs_that_match_nothing_are_told_when_the_first_step_is_over(tmp_path: Path) -> None:
    lines = stderr_of(
        NET + "train(1); print('second', file=sys.stderr); train(2)",
        tmp_path,
        GRADTRACE_DIR="run",
        GRADTRACE_QUIET="1",
        GRADTRACE_MODULES="blocks.*,block.1,transformer.*",
        GRADTRACE_REPLAY="AddmmBackward0,MmBackward7,blocks.0",
    )
    assert lines[0] == "second", "a step is over when the next one begins"
    none = "that this rank has in step 0; there are"
    assert [line.removeprefix("gradtrace: GRADTRACE_") for line in lines[1:]] == [
        f"MODULES: 'block.1' matches no module {none} blocks.*, blocks",
        f"MODULES: 'transformer.*' matches no module {none} blocks, blocks.*",
        f"REPLAY: 'MmBackward7' matches no module or Node {none} AddmmBackward0, SumBackward0, TBackward0",
    ]


def test_names_that_are_numbers_are_listed_as_they_are(tmp_path: Path) -> None:
    """Children of an nn.Sequential: a lone `*` would name nothing."""
    net = "import torch\nfrom torch import nn\nnet = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))\n"
    [line] = stderr_of(
        net + "net(torch.ones(2, 3)).sum().backward()",
        tmp_path, GRADTRACE_DIR="run", GRADTRACE_QUIET="1", GRADTRACE_MODULES="layer*",
    )  # fmt: skip
    assert line.endswith(
        "'layer*' matches no module that this rank has in step 0; there are 0, 1, 2"
    )


@pytest.mark.parametrize(("steps", "is_told"), [("7,50:,9::3", True), ("2:", False)])
def test_steps_that_the_job_does_not_make_are_told_at_its_end(
    steps: str, is_told: bool, tmp_path: Path
) -> None:
    lines = stderr_of(
        NET + "train(3); print('trained', file=sys.stderr)",
        tmp_path, GRADTRACE_DIR="run", GRADTRACE_QUIET="1", GRADTRACE_STEPS=steps,
    )  # fmt: skip
    said = f"GRADTRACE_STEPS: {steps!r} has no step of this job, which made steps 0 to 2; nothing was recorded of them"
    assert lines == ["trained", f"gradtrace: {said}"][: 1 + is_told]
    [rank] = (tmp_path / "run" / "ranks").glob("*.json")
    assert json.loads(rank.read_text())["problems"] == ([said] if is_told else [])


@pytest.mark.parametrize(
    ("last_lines", "is_told"),
    [
        ("os.environ['GRADTRACE_DIR'] = 'late'; train()", True),
        ("os.environ['GRADTRACE_DIR'] = 'late'", False),
        ("train()", False),
        ("os.environ['GRADTRACE_DIR'] = 'late'\nimport gradtrace_recorder\n"
         "with gradtrace_recorder.start('here', quiet=True): train()", False),
    ],
    ids=["trains", "only starts others", "is not set", "starts by hand"],
)  # fmt: skip
def test_directory_that_is_set_after_torch_is_told_at_the_end(
    last_lines: str, is_told: bool, tmp_path: Path
) -> None:
    lines = stderr_of(NET + last_lines, tmp_path)
    said = (
        "gradtrace: nothing of this process was recorded: GRADTRACE_DIR was set after torch had been imported; set it "
        "before Python starts, or before the import, or call gradtrace_recorder.start()"
    )
    assert lines == ([said] if is_told else [])
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize(
    ("variables", "last_lines", "is_told"),
    [
        ({"GRADTRACE_DRI": "runs/zz"}, "train()", True),
        ({"GRADTRACE_DRI": "runs/zz"}, "", False),
        ({"GRADTRACE_DRI": "runs/zz", "GRADTRACE_DIR": ""}, "train()", False),
        ({"GRADTRACE_STEPS": "0:2"}, "train()", False),
    ],
    ids=["trains", "only starts others", "is off", "has others alone"],
)
def test_directory_that_is_misspelt_is_told_at_the_end(
    variables: dict[str, str], last_lines: str, is_told: bool, tmp_path: Path
) -> None:
    lines = stderr_of(NET + last_lines, tmp_path, **variables)
    said = (
        "gradtrace: nothing of this process was recorded: GRADTRACE_DRI is no variable of gradtrace's, and not used; "
        "is GRADTRACE_DIR meant?"
    )
    assert lines == ([said] if is_told else [])
    assert not (tmp_path / "runs").exists()


def test_children_of_multiprocessing_record_where_their_parent_was_started(tmp_path: Path) -> None:
    """Also one that has changed its directory by then, as Hydra's jobs do."""
    source = (
        "import multiprocessing, os\n"
        "def child():\n"
        + "".join(f"    {line}\n" for line in (NET + "train()").splitlines())
        + "if __name__ == '__main__':\n"
        "    os.makedirs('elsewhere'); os.chdir('elsewhere')\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join(); assert process.exitcode == 0\n"
    )
    stderr_of(source, tmp_path, GRADTRACE_DIR="runs/a")
    assert (tmp_path / "runs" / "a" / "run.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_file_switches_recording_on(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "x.toml").write_text('dir = "runs/a"\ndetail = "params"\nsumary = "off"\n')
    place = tmp_path / "conf"
    [first, second] = stderr_of(
        NET + "train()",
        tmp_path,
        GRADTRACE_CONFIG="conf/x.toml",
        GRADTRACE_NATIVE_CACHE=str(tmp_path / "none"),
    )
    assert first.startswith(
        f"gradtrace: recording into {place / 'runs' / 'a'}, attempt 0: detail params, summary full; a step is expected "
        "to take at most 1.57 times"
    )
    assert second == (
        f"gradtrace: sumary in '{place / 'x.toml'}' is no setting, and not used; is summary meant?"
    )
    [told] = stderr_of(NET + "train()", tmp_path, GRADTRACE_CONFIG="x.toml")
    assert re.fullmatch(
        r"gradtrace: recording is off for this process: GRADTRACE_CONFIG names '.*x.toml': No such file or directory; "
        r"give the path of a TOML file",
        told,
    )


def test_start_ends_with_its_block(tmp_path: Path) -> None:
    import torch

    with (
        pytest.raises(ZeroDivisionError),
        gradtrace_recorder.start(tmp_path / "a", strict=True, quiet=True),
    ):
        assert bootstrap.is_armed()
        torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
        1 // 0  # noqa: B018
    assert not bootstrap.is_armed()
    [rank] = (tmp_path / "a" / "ranks").glob("*.json")
    facts = json.loads(rank.read_text())
    assert facts["complete"] is True
    assert facts["uncaught"][0] == "ZeroDivisionError", "it left the block"
    with gradtrace_recorder.start(tmp_path / "b", quiet=True):
        gradtrace_recorder.stop()
        gradtrace_recorder.start(tmp_path / "c", quiet=True)
    assert bootstrap.is_armed(), "the block ends its own recording alone"
    gradtrace_recorder.stop()

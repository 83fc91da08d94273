"""From the environment variable to files, however a process that trains is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching.launcher import run_job
from support.recordings.in_process import rows

STEP = """
import torch
def step():
    torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
"""


def run_python(
    arguments: list[str], directory: Path | None, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    if directory is not None:
        environment |= {
            "GRADTRACE_DIR": str(directory), "GRADTRACE_STRICT": "1", "GRADTRACE_QUIET": "1"
        }  # fmt: skip
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | more,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_nothing_of_ours_but_the_entry_point_is_imported_when_it_is_off() -> None:
    source = (
        "import sys, torch; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('gradtrace_recorder', "
        "'gradtrace_schemas', 'pyarrow', 'duckdb')))"
    )
    done = run_python(["-c", source], None)
    assert eval(done.stdout) == ["gradtrace_recorder", "gradtrace_recorder.bootstrap"]


def test_arming_loads_no_pyarrow_and_leaves_no_file(tmp_path: Path) -> None:
    done = run_python(["-c", "import sys, torch; print('pyarrow' in sys.modules)"], tmp_path / "r")
    assert done.stdout == "False\n" and done.stderr == ""
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("options", [[], ["-I"], ["-S"]], ids=["plain", "isolated", "no site"])
def test_script_is_recorded(options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(STEP + "step()\n")
    packages = [p for p in sys.path if p.endswith("site-packages")]
    roots = [str(Path(__file__).resolve().parents[2] / n) for n in ("recorder", "schemas")]
    # Without `site` nothing adds the environment's packages: the job would bring them itself.
    path = {"PYTHONPATH": os.pathsep.join([*packages, *roots])} if options == ["-S"] else {}
    done = run_python([*options, str(script)], tmp_path / "run", **path)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run", "SELECT count(*) > 2 FROM node_events") == [(True,)]


def test_module_run_with_dash_m_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "a_job.py").write_text(STEP + "step()\n")
    done = run_python(["-m", "a_job"], tmp_path / "run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]


SPAWN = """
import os, sys, torch, torch.multiprocessing as mp
from pathlib import Path
def work(rank, method):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "1")
    mp.start_processes(work, args=(0,), nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_that_multiprocessing_starts_are_recorded_each_as_its_rank(
    method: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SPAWN)
    done = run_python([str(script), method], tmp_path / "run")
    assert done.returncode == 0, done.stderr
    from gradtrace_analyzer.runs.opening import open_run
    from gradtrace_analyzer.sql.views import connect

    run = open_run(tmp_path / "run")
    with connect([run]) as connection:
        found = connection.execute(
            "SELECT rank, count(*) FROM backward_passes GROUP BY rank ORDER BY rank"
        ).fetchall()
    assert found == [(0, 1), (1, 1)]
    assert run.attempts == (0,)


WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Sharpened(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        x = torch.full((3,), float(i), requires_grad=True)
        torch.nn.Linear(3, 3)(x).sum().backward()
        return x.detach() + x.grad
if __name__ == "__main__":
    import sys
    net = torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in DataLoader(Sharpened(), batch_size=2, num_workers=2,
                            multiprocessing_context=sys.argv[1]):
        opt.zero_grad(); net(batch).sum().backward(); opt.step()
    print("trained")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_workers_record_nothing_and_break_nothing(method: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(WORKERS)
    done = run_python([str(script), method], tmp_path / "run", RANK="0")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert len(list((tmp_path / "run" / "ranks").iterdir())) == 1
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(4,)]


def test_launcher_leaves_no_files_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(STEP + "step()\n")
    run_job(script, ranks=2, recorded=tmp_path / "run").must_succeed()
    names = sorted(p.name for p in (tmp_path / "run" / "ranks").iterdir())
    assert names == ["rank=00000-0.json", "rank=00001-0.json"]
    facts = json.loads((tmp_path / "run" / "ranks" / names[1]).read_text())
    assert (facts["rank"], facts["world_size"], facts["complete"]) == (1, 2, True)
    assert list((tmp_path / "run" / "journals").iterdir()) == []


def test_job_started_again_in_the_same_directory_is_another_attempt(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(STEP + "step()\n")
    for _ in range(2):
        run_job(script, ranks=2, recorded=tmp_path / "run").must_succeed()
    names = sorted(p.name for p in (tmp_path / "run" / "ranks").iterdir())
    assert names == [f"rank=0000{r}-{a}.json" for r in (0, 1) for a in (0, 1)]


def test_auto_starts_it_where_torch_is_told_not_to(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    for first, recorded in (("", False), ("import gradtrace_recorder.auto\n", True)):
        script.write_text(first + STEP + "step()\n")
        done = run_python([str(script)], tmp_path / "run", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "run").exists() is recorded


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"GRADTRACE_STEPS": "a:b"}, "recording is off for this process: GRADTRACE_STEPS is 'a:b'"),
        ({"GRADTRACE_DETAIL": "all"}, "recording is off for this process: GRADTRACE_DETAIL is"),
        ({"GRADTRACE_DIR": "/proc/nowhere"}, "nothing is recorded into '/proc/nowhere': "),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line_and_the_job_goes_on(
    variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(STEP + "step(); step(); print('done')\n")
    done = run_python([str(script)], tmp_path / "run", GRADTRACE_STRICT="0", **variables)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"gradtrace: {said}")
    assert not (tmp_path / "run").exists()


def test_directory_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    script, place = tmp_path / "job.py", tmp_path / "file"
    script.write_text(STEP + "step(); print('done')\n")
    place.write_text("")
    done = run_python([str(script)], place, GRADTRACE_STRICT="0")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.count("\n") == 1 and "nothing is recorded into" in done.stderr

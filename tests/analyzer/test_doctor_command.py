"""`analyzer doctor`: what each fact of a Python means, and real Pythons in places where something is broken."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.doctor import trials
from gradtrace_analyzer.doctor.examine import examined
from gradtrace_analyzer.doctor.finding import Finding, Mark, verdict
from gradtrace_analyzer.doctor.interpreter import Interpreter
from gradtrace_analyzer.doctor.recorded import recorded
from gradtrace_analyzer.doctor.surroundings import surroundings
from gradtrace_analyzer.reports.doctor import explanation
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.history import open_history
from gradtrace_analyzer.sql.inventory import inventory
from support.answers.commands import asked
from support.environment.small_disk import small_disk
from support.synthetic_runs.builder import build_run

ROOT = Path(__file__).resolve().parents[2]
SPACE = {"total_bytes": 10**12, "free_bytes": 10**11}
WELL: dict[str, Any] = {
    "python": {"executable": "/usr/bin/python", "version": "3.11.7"},
    "system": "Linux",
    "packages": {"gradtrace": "0.1.0", "torch": "2.13.0", "pyarrow": "26.0.1", "numpy": "2.4.6"},
    "entry_points": ["gradtrace_recorder.bootstrap:start_from_env"],
    "autoload": None,
    "settings": {"detail": "nodes", "steps": ["0:10:1"], "step_offset": 0, "observer": "auto"},
    "settings_error": None,
    "remarks": [],
    "directory": {
        "path": "/runs/a", "exists": False, "asked": "/runs", "is_directory": True, "file_system": "ext4",
        "space": SPACE, "write_error": None, "allocation_error": None, "attempts": [],
    },
    "journal_bytes": 25_000_000,
    "shared_memory": SPACE,
    "limits": {"file_bytes": None, "memory_bytes": None, "open_files": 4096},
    "torch": {"version": "2.13.0+cpu", "tested": ["2.6.0", "2.13.0"]},
    "torch_error": None,
    "native": {"built": "/cache/x.so", "loads": True, "why": None, "compiler": "c++ 12", "unused": None},
}  # fmt: skip


def findings(**changed: Any) -> list[Finding]:
    """What is found where everything is well but for this; `a__b` is the key b in a."""
    facts = copy.deepcopy(WELL)
    for path, value in changed.items():
        place = facts
        *above, last = path.split("__")
        for key in above:
            place = place[key]
        place[last] = value
    return list(surroundings(facts, "python"))


def test_all_is_well_where_nothing_is_broken() -> None:
    found = findings()
    assert {finding.mark for finding in found} == {"ok"} and verdict(found) == "well"
    [settings] = [finding for finding in found if finding.name == "settings"]
    assert settings.said == "detail nodes, steps 0:10:1, observer auto"


@pytest.mark.parametrize(
    ("changed", "mark", "said"),
    [
        ({"python__version": "3.9.2"}, "wrong", "gradtrace needs 3.10 or newer"),
        ({"python__version": "3.13.1"}, "note", "tested with 3.10, 3.11, 3.12"),
        ({"system": "Darwin"}, "wrong", "gradtrace records on Linux alone"),
        ({"torch__version": "2.5.1"}, "wrong", "2.5.1; gradtrace records torch 2.6 and newer"),
        ({"torch__version": "2.19.0a0+git1"}, "note", "2.19.0a0+git1; tested with 2.6, 2.13; see the self-test"),
        ({"torch": None, "torch_error": "no libcuda"}, "wrong", "it cannot be imported: no libcuda"),
        ({"packages__pyarrow": None}, "wrong", "pyarrow is missing"),
        ({"packages__numpy": "3.0.1"}, "note", "tested with numpy 1 and 2"),
        ({"packages__pyarrow": "19.0.1"}, "note", "tested with pyarrow 17 and 26"),
        ({"entry_points": []}, "wrong", "torch does not find gradtrace among its backends"),
        ({"autoload": "0"}, "wrong", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from starting the recorder"),
        ({"settings": None}, "note", "GRADTRACE_DIR is not set here: recording is off"),
        ({"settings_error": "GRADTRACE_STEPS is 'x'"}, "wrong", "recording would be off: GRADTRACE_STEPS is 'x'"),
        ({"remarks": ["GRADTRACE_X is none"]}, "wrong", "GRADTRACE_X is none"),
        ({"directory__is_directory": False}, "wrong", "/runs is no directory"),
        ({"directory__write_error": "Permission denied"}, "wrong", "cannot be written into: Permission denied"),
        ({"directory__file_system": "nfs4"}, "note", "each record crosses the network"),
        ({"directory__file_system": "fuse.s3fs"}, "note", "each record crosses the network"),
        ({"directory__allocation_error": "No space left on device"}, "wrong", "each rank allocates 25 MB"),
        ({"directory__space": {"total_bytes": 1, "free_bytes": 10**8}}, "note", "100 MB are free; each rank"),
        ({"shared_memory": {"total_bytes": 1 << 26, "free_bytes": 1 << 26}}, "note", "67.1 MB are free in /dev/shm; "),
        ({"limits__file_bytes": 1_000_000}, "wrong", "no file may be larger than 1 MB (ulimit -f); a journal is 25 MB"),
        ({"limits__memory_bytes": 10**9}, "note", "a process may map 1 GB (ulimit -v)"),
        ({"native__unused": "Nodes are run again by Python"}, "note", "built, and not used: Nodes are run again"),
        ({"native__loads": False, "native__why": "is damaged"}, "wrong", "built, and does not load: is damaged"),
        ({"native__loads": False, "native__built": None}, "note", "not built; Nodes are watched by the Python"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_fact_means(changed: dict[str, Any], mark: str, said: str) -> None:
    [finding] = [finding for finding in findings(**changed) if finding.mark != "ok"]
    assert finding.mark == mark and said in finding.said, finding
    assert finding.advice or mark == "note" or "gradtrace" in finding.said.lower(), (
        "what would help?"
    )


def test_no_compiler_is_told_with_what_to_install() -> None:
    native = {"loads": False, "built": None, "why": None, "compiler": None, "unused": None}
    finding = findings(native=native)[-1]
    assert finding.mark == "note" and finding.advice == (
        "install g++ or clang++, then python -m gradtrace_recorder build"
    )


def bad(answer: Any) -> dict[str, str]:
    """What is wrong, by name."""
    return {f["name"]: f["said"] for f in answer["findings"] if f["mark"] == "wrong"}


def doctor(*arguments: str) -> Any:
    _, answer = asked("doctor", "--no-trial", "--format", "json", *arguments)
    return answer


def test_several_things_that_are_broken_are_all_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch is told not to start the recorder, a variable is misspelt, and the disk is too small."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("GRADTRACE_SUMARY", "full")
    with small_disk(tmp_path / "disk", "300k") as disk:
        monkeypatch.setenv("GRADTRACE_DIR", str(disk / "runs" / "a"))
        answer = doctor()
        assert list(disk.iterdir()) == []
    found = bad(answer)
    assert answer["verdict"] == "wrong" and set(found) == {"start", "settings", "disk"}
    assert "is GRADTRACE_SUMMARY meant?" in found["settings"]
    assert found["disk"].startswith("No space left on device: each rank allocates ")


def test_directory_that_cannot_be_made_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch is what the recorder was tested with."""
    monkeypatch.setenv("GRADTRACE_DIR", "/proc/nowhere/a")
    assert "/proc/nowhere/a cannot be made: /proc cannot be written into: " in bad(doctor())["directory"]  # fmt: skip


def test_python_without_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python below this environment has none of its packages."""
    python: str = getattr(sys, "_base_executable", None) or sys.executable
    here = subprocess.run([python, "-I", "-c", "import torch"], capture_output=True, check=False)
    if here.returncode == 0:
        pytest.skip("the Python below this environment has torch")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(str(ROOT / n) for n in ("recorder", "schemas"))
    )
    found = bad(doctor("--python", python))
    assert found["torch"] == "there is none in this Python: no job of it can be recorded"
    assert set(found) >= {"torch", "packages", "start"}
    monkeypatch.setenv("PYTHONPATH", "")
    [said] = bad(doctor("--python", python)).values()
    assert said.endswith(" has none: no job of it is recorded")


def test_ranks_that_are_missing_are_told_with_why(tmp_path: Path) -> None:
    run = build_run(tmp_path / "a", {"steps": [{}]}, world_size=4, absent=(2, 3))
    found = recorded(open_run(run))
    [missing] = [finding for finding in found.findings if finding.mark == "wrong"]
    assert missing.name == "missing" and missing.said.startswith("ranks 2-3 of 4 left nothing here")
    assert [one.state for one in found.ranks] == ["ended", "ended", "missing", "missing"]


@pytest.mark.parametrize(
    ("facts", "mark", "name", "said"),
    [
        ({"dropped": {"node_events": 7}}, "wrong", "dropped", "7 node_events found no room in the journal"),
        ({"problems": ["no luck"]}, "wrong", "problem", "rank 0: no luck"),
        ({"unsummarised": {"sparse": 3}}, "note", "unsummarised", "without a summary, by reason: 3 sparse"),
        ({"settings": {"detail": "params", "steps": ["0:5:1", "9:10:1"]}}, "note", "settings",
         "by request: detail params, steps 0:5:1,9:10:1"),
        ({"observer": {"kind": "native", "python_passes": {"a mode": 2}}}, "note", "left to Python", "2 a mode"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_rank_lost_or_left_out_is_told(
    facts: dict[str, Any], mark: str, name: str, said: str, tmp_path: Path
) -> None:
    run = build_run(tmp_path / "a", {"steps": [{}, {"step": 1}]}, rank_facts=facts)
    [finding] = [f for f in recorded(open_run(run)).findings if f.mark != "ok"]
    assert (finding.mark, finding.name) == (mark, name) and said in finding.said


def test_passes_whose_nodes_were_not_asked_for_are_no_loss(tmp_path: Path) -> None:
    passes = {"Nodes are not recorded": 3, "a mode": 2}
    observer = {"kind": "native", "python_passes": passes}
    run = build_run(tmp_path / "a", {"steps": [{}]}, rank_facts={"observer": observer})
    assert inventory(open_run(run)).left_to_python == {"a mode": 2}


def test_ranks_that_were_not_asked_for_are_not_missing(tmp_path: Path) -> None:
    facts = {"settings": {"ranks": ["0::2", "5-5"]}}
    run = build_run(tmp_path / "a", {"steps": [{}]}, world_size=6, absent=(1, 3), rank_facts=facts)
    assert [one.state for one in recorded(open_run(run)).ranks] == [
        "ended", "not_asked", "ended", "not_asked", "ended", "ended",
    ]  # fmt: skip


def test_attempts_that_are_read_as_one_are_not_told_as_others(tmp_path: Path) -> None:
    for attempt, first in enumerate((0, 2)):
        steps = [{"step": first + n} for n in range(2)]
        build_run(tmp_path / "a", {"steps": steps}, attempt=attempt)
    [found] = [f for f in recorded(open_history(tmp_path / "a")).findings if f.name == "attempts"]
    assert (found.mark, found.said) == (
        "ok", "read as one history: attempt 0, attempt 1 from step 2 on",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo '[1, 2]'", "does not tell: what it prints is no answer"),
        ("echo '{}'", "its gradtrace is of another version"),
        (
            r"printf '\377\376'; printf '\377' >&2; exit 3",
            "does not tell: \N{REPLACEMENT CHARACTER}",
        ),
    ],
    ids=["a list", "other facts", "bytes"],
)
def test_python_that_tells_something_else_is_told(tmp_path: Path, answer: str, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo here; else {answer}; fi\n')
    python.chmod(0o755)
    examination = examined(Interpreter(str(python)), with_trial=False)
    assert verdict(examination.findings) == "unknown"
    assert said in examination.findings[0].said


def trial_on_a_busy_machine(
    folder: Path, answers: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[trials.Trial | None, Finding]:
    """A Python that answers a bare and a recorded job, so many in all, and then no more."""
    run = build_run(folder / "a", {"steps": [{}]}, rank_facts={"observer": {"kind": "python"}})
    python = folder / "python"
    told = json.dumps({"model": "a model", "steps": 9, "step_ns": 2_000_000, "least_ns": 1})
    python.write_text(
        f"""#!/bin/sh
echo >> {folder}/asked
test $(wc -l < {folder}/asked) -gt {answers} && exec sleep 60
test -n "$GRADTRACE_DIR" && cp -r {run} "$GRADTRACE_DIR"
echo '{told}'
"""
    )
    python.chmod(0o700)
    monkeypatch.setattr(trials, "_SECONDS", 2.0)
    return trials.tried(Interpreter(str(python)), None)


def test_trial_on_a_busy_machine_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, finding = trial_on_a_busy_machine(tmp_path, 1, monkeypatch)
    assert (trial, finding.mark) == (None, "note")
    assert finding.said == "no small job was recorded within 2 s: this machine is busy, or slow"


def test_trial_of_one_round_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, finding = trial_on_a_busy_machine(tmp_path, 2, monkeypatch)
    assert trial is not None and (trial.steps, trial.ratio, finding.mark) == (9, 1.0, "ok")
    assert finding.said.endswith("; one round within 2 s: this machine is busy")


@pytest.mark.parametrize(
    ("mark", "said"), [("ok", "is recorded"), ("note", "would be recorded with GRADTRACE_DIR set")]
)
def test_last_sentence_says_whether_recording_is_on(mark: Mark, said: str) -> None:
    found = [Finding("settings", mark, ""), Finding("trial", "ok", "")]
    assert explanation(found, is_of_a_run=False) == f"A job that is started here {said}."

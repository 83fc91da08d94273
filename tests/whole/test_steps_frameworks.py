"""A step is what a framework's user calls one, beside its own counter, and a resumed job goes on counting."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.recordings.in_process import rank_of, rows

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "framework_steps.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Module that must be there; steps as (step, passes, ended_by, counter); class, wrapper and names of each optimizer.
_WRAPPED = "AcceleratedOptimizer"
KINDS: dict[str, tuple[str, str | None, list[Any], list[Any]]] = {
    "hf": ("transformers", "transformers", [0, 1, 2, 3], [("AdamW", _WRAPPED, 4)]),
    "lightning": ("lightning", "lightning", [0, 1, 2, 3], [("SGD", "LightningSGD", 4)]),
    "manual": (
        "lightning",
        "lightning",
        [0, 2],  # it counts both optimizers
        [("SGD", "LightningSGD", 2), ("AdamW", "LightningAdamW", 2)],
    ),
    "accelerate": ("accelerate", None, [None] * 4, [("AdamW", _WRAPPED, 4)]),
    # Its own flat copies are what its optimizer steps: they are no parameters of the model.
    "deepspeed": ("deepspeed", "deepspeed", [0, 1, 2, 3], [("AdamW", "DeepSpeedZeroOptimizer", 0)]),
}


def trained(kind: str, out: Path, *more: Path, run: Path | None = None) -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("GRADTRACE_DIR", None)
    if run is not None:
        environment |= {"GRADTRACE_DIR": str(run), "GRADTRACE_STRICT": "1"}
    done = subprocess.run(
        [sys.executable, str(JOB), kind, str(out), *map(str, more)],
        env=environment, cwd=out.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gradtrace:" not in done.stderr, done.stderr
    return out.read_text()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    skip_without(name)
    yield name


def skip_without(kind: str) -> None:
    """Asked of the files: to import one takes as long as its test."""
    if importlib.util.find_spec(KINDS[kind][0]) is None:
        pytest.skip(f"{KINDS[kind][0]} is not installed")


def test_steps_groups_and_gradients_are_what_the_frameworks_user_knows(
    kind: str, tmp_path: Path
) -> None:
    _, framework, counts, optimizers = KINDS[kind]
    run = tmp_path / "run"
    assert trained(kind, tmp_path / "bare") == trained(kind, tmp_path / "seen", run=run)
    passes = 1 if kind == "manual" else 2
    assert rows(
        run,
        "SELECT step, backward_count, ended_by, framework, framework_step FROM steps ORDER BY step",
    ) == [(step, passes, "optimizer", framework, count) for step, count in enumerate(counts)]
    groups = rows(
        run,
        "SELECT optimizer_class, wrapper_class, parameter_fqns FROM optimizer_groups WHERE step = 1 "
        "ORDER BY optimizer_index, group_index",
    )
    named: dict[tuple[str, str], int] = {}
    for optimizer_class, wrapper, names in groups:
        key = (optimizer_class, wrapper)
        named[key] = named.get(key, 0) + sum(name is not None for name in names)
    assert [(*key, count) for key, count in named.items()] == optimizers
    finals = rows(
        run,
        "SELECT step, backward_index, count(*) FROM gradients WHERE point = 'final' GROUP BY ALL ORDER BY ALL",
    )
    assert finals == [(step, passes - 1, 4) for step, _ in enumerate(counts) if kind != "deepspeed"]
    if kind == "lightning":  # it clips inside the closure, to 0.1
        norms = rows(
            run, "SELECT sqrt(sum(norm * norm)) FROM gradients WHERE point = 'final' GROUP BY step"
        )
        assert [norm for (norm,) in norms] == [pytest.approx(0.1, rel=1e-3)] * 4
    rank = rank_of(run)
    assert (rank["step_rule"], rank["first_step_from"]) == ("optimizers", "0")
    names = rows(
        run, "SELECT DISTINCT split_part(parameter_fqn, '.', 1) FROM parameters ORDER BY 1"
    )
    assert names == ([("net",)] if kind == "hf" else [("0",), ("2",)])


@pytest.mark.parametrize("kind", ["hf", "lightning"])
def test_resumed_job_goes_on_with_the_frameworks_number(kind: str, tmp_path: Path) -> None:
    """Also what it evaluates before it trains is of the step to come."""
    skip_without(kind)
    run, saved = tmp_path / "run", tmp_path / "saved"
    trained(kind, tmp_path / "first", saved)
    trained(kind, tmp_path / "second", saved, run=run)
    steps = rows(run, "SELECT step, framework_step, ended_by FROM steps ORDER BY step")
    assert steps == [(2, 2, "optimizer"), (3, 3, "optimizer")]
    assert rows(run, "SELECT DISTINCT step FROM module_calls ORDER BY step") == [(2,), (3,)]
    assert rank_of(run)["first_step_from"] == "framework"

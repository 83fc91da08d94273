"""Noise that is measured from repeats of the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gradtrace_analyzer.diff.pairing.step_index as step_index
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.errors import NoRepeat
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.runs.opening import open_run
from support.answers.commands import asked
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.large import Sizes, build_large
from support.synthetic_runs.layer_chain import layered_run

# A repeat's noise is allowed four times, and a verdict rests on 1.5 times that (Nodes: 4 times).
SURE, SURE_OF_NODES = 4 * 1.5, 4 * 4.0
NOISE = 1e-4


def outcome(a: Path, b: Path, repeat: Path, *more: object) -> tuple[str, int | None, str | None]:
    _, answer = asked("diff", a, b, "--noise", repeat, *more, "--format", "json")
    first = answer["first_divergence"]
    if answer["verdict"] != "different":
        return answer["verdict"], None, None
    return answer["verdict"], first["step"], first["module_fqn"]


WITHIN = ("within_tolerance", None, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("noise")


@pytest.fixture(scope="module")
def baseline(folder: Path) -> Path:
    return layered_run(folder / "a")


@pytest.fixture(scope="module")
def repeat(folder: Path) -> Path:
    return layered_run(folder / "repeat", forward=NOISE, backward=NOISE, seed=10)


def test_noise_is_measured_from_a_repeat(baseline: Path, repeat: Path, tmp_path: Path) -> None:
    other = layered_run(tmp_path / "other", forward=1.2e-4, backward=1.1e-4, seed=30)
    assert asked("diff", baseline, other, "--format", "json")[0] == 1
    code, answer = asked("diff", baseline, other, "--noise", repeat, "--format", "json")
    assert (code, answer["verdict"]) == (0, "within_tolerance")
    assert "measured from repeat" in answer["explanation"]
    assert (
        answer["tolerance"]["measured_from"] == ["repeat"]
        and 5e-5 < answer["tolerance"]["noise"] < 2e-4
    )


def test_what_a_repeat_shows_is_allowed_four_times_and_no_more(
    baseline: Path, repeat: Path, tmp_path: Path
) -> None:
    for share in (0.9, 1.1):
        over = share > 1
        output = layered_run(
            tmp_path / f"output{share}", forward=NOISE, backward=NOISE, seed=30,
            outputs={(1, "layer2"): share * SURE * NOISE},
        )  # fmt: skip
        node = layered_run(
            tmp_path / f"node{share}", forward=NOISE, backward=NOISE, seed=30,
            at={(1, "layer2"): share * SURE_OF_NODES * NOISE},
        )  # fmt: skip
        for b in (output, node):
            wanted = ("different", 1, "layer2") if over else WITHIN
            assert outcome(baseline, b, repeat) == wanted


def test_noise_grows_over_the_steps_and_is_not_forgotten(baseline: Path, tmp_path: Path) -> None:
    late = layered_run(tmp_path / "late", forward=[1e-6, 0, 1e-4], backward=1e-6, seed=10)
    early = layered_run(tmp_path / "early", forward=[1e-4, 1e-6, 1e-6], backward=1e-6, seed=10)
    at_last = layered_run(tmp_path / "b", forward=[1e-6, 1e-6, 2e-4], backward=1e-6, seed=30)
    before = layered_run(tmp_path / "c", forward=[1e-6, 2e-4, 2e-4], backward=1e-6, seed=30)
    assert outcome(baseline, at_last, late) == WITHIN
    assert outcome(baseline, at_last, early) == WITHIN
    assert outcome(baseline, before, late) == ("different", 1, "layer0")


def test_fault_beyond_measured_noise_is_found_and_the_noise_is_named(
    baseline: Path, tmp_path: Path
) -> None:
    repeat = layered_run(tmp_path / "repeat", forward=1e-6, backward=1e-6, seed=10)
    b = layered_run(tmp_path / "b", forward=1e-6, backward=1e-6, seed=30, at={(2, "layer1"): 1e-3})
    code, answer = asked("diff", baseline, b, "--noise", repeat, "--format", "json")
    first = answer["first_divergence"]
    assert code == 1 and (first["step"], first["module_fqn"]) == (2, "layer1")
    assert (
        "measured from repeat" in answer["explanation"] and "Noise here is" in answer["explanation"]
    )


def test_repeat_without_noise_makes_any_bit_a_difference(baseline: Path, tmp_path: Path) -> None:
    repeat = layered_run(tmp_path / "repeat")
    b = layered_run(tmp_path / "b", at={(0, "layer3"): 3e-7})
    assert asked("diff", baseline, b, "--format", "json")[1]["verdict"] == "within_tolerance"
    assert outcome(baseline, b, repeat) == ("different", 0, "layer3")


def test_noise_of_a_module_is_found_under_its_new_name(baseline: Path, tmp_path: Path) -> None:
    """Only one module is noisy: what modules show in the median would not do."""
    noisy = {(step, "layer1"): 1e-3 for step in range(3)}
    quiet: dict[str, Any] = {"forward": 1e-7, "backward": 1e-7, "outputs": noisy}
    repeat = layered_run(tmp_path / "repeat", seed=10, **quiet)
    b = layered_run(tmp_path / "b", seed=30, prefix="net.", **quiet)
    assert outcome(baseline, b, repeat, "--rename", "*=net.*") == WITHIN


def test_repeat_of_any_size_gives_the_same_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(ranks=1, steps=4, nodes=20, modules=4, parts=2)
    a = build_large(folder / "large", sizes)
    repeat = build_large(folder / "large-repeat", sizes, "noise", like=a)
    bug = build_large(folder / "large-bug", sizes, "bug", like=a)
    for b, verdict in ((repeat, "within_tolerance"), (bug, "different")):
        answers = []
        for most in (step_index.MOST_ROWS, 0):
            with monkeypatch.context() as patched:
                patched.setattr(step_index, "MOST_ROWS", most)
                found = as_object(compare(open_run(a), open_run(b), repeats=[open_run(repeat)]))
                answers.append((found["verdict"], found["first_divergence"]))
        assert answers[0] == answers[1] and answers[0][0] == verdict


def test_run_of_another_model_is_no_repeat(tmp_path: Path) -> None:
    for name in ("a", "b"):
        layered_run(tmp_path / name, forward=1e-7 * (name == "b"))
    build_large(tmp_path / "other", Sizes(ranks=1, steps=3, nodes=8, modules=4))
    build_run(tmp_path / "empty", {"steps": [{"step": 50}]})
    pair = open_run(tmp_path / "a"), open_run(tmp_path / "b")
    for noise in ("other", "empty"):
        with pytest.raises(NoRepeat, match=f"--noise {noise} is no repeat of the baseline"):
            compare(*pair, repeats=[open_run(tmp_path / noise)])

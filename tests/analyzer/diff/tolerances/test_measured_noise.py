"""Noise that repeats of the baseline show, written over the rule's tolerances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.diff.tolerances.noise import Noise, RepeatRuns
from gradtrace_analyzer.errors import NoRepeat
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.runs.opening import open_run
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.differences import Row, paired, run_of, sides

Errors = dict[tuple[int, str], float]  # by step and module
MODULES = ("a", "b", "c")
STEPS = (0, 1, 2)


def outputs(errors: Errors, side: int, prefix: str = "") -> list[Row]:
    """A call of each module in each step; the candidate's output is turned by the error."""
    rows = []
    for step in STEPS:
        for name in MODULES:
            key = {"step": step, "root": 0, "module_fqn": f"{prefix}{name}", "phase": "forward"}
            own = sides(errors.get((step, name), 0.0), "output_")[side]
            rows.append({**key, "call_index": 0, **sides(0.0, "input_")[side], **own})
    return rows


def measured(
    folder: Path, seen: Errors, *repeats: Errors, scale: float = 1.0, prefix: str = ""
) -> tuple[Noise, duckdb.DuckDBPyConnection]:
    """The judged comparison with these errors, and the noise of repeats with theirs."""
    runs = [
        open_run(build_run(folder / f"repeat{n}", {"module_calls": outputs(errors, side=1)}))
        for n, errors in enumerate(repeats)
    ]
    baseline = open_run(build_run(folder / "baseline", {"module_calls": outputs({}, side=0)}))
    old, new = (outputs(seen, side, prefix) for side in (0, 1))
    connection = paired({"module_calls": old}, {"module_calls": new})
    both = {"baseline": baseline, "candidate": run_of()}
    judgement = Judgement(connection, both, repeats=runs, scale=scale)
    new_names = {name: f"{prefix}{name}" for name in MODULES} if prefix else {}
    judgement.pair_repeats(is_arranged=False, new_names=new_names)
    try:
        judgement.write()
    finally:
        judgement.close()
    assert judgement.noise is not None
    return judgement.noise, connection


def judged(connection: duckdb.DuckDBPyConnection) -> dict[tuple[int, str], tuple[Any, ...]]:
    found = connection.execute(
        "SELECT step, key_module_fqn, writes_tolerance, beyond, exceeds, noise FROM differing_module_calls"
    ).fetchall()
    return {(step, name): tuple(rest) for step, name, *rest in found}


def test_tolerance_is_four_times_the_noise_of_the_place_so_far(tmp_path: Path) -> None:
    seen = {(0, "a"): 3e-3, (1, "a"): 5e-3, (1, "b"): 5e-3, (2, "a"): 5e-3, (2, "c"): 9e-3}
    repeat = {(0, "a"): 1e-3, (2, "a"): 5e-4, (1, "b"): 1e-3, (0, "b"): 2e-3}
    noise, connection = measured(tmp_path, seen, repeat)
    assert judged(connection) == {
        (0, "a"): (pytest.approx(4e-3), False, False, "measured"),
        # Beyond it, but not by what an estimate from 16 lanes must reach.
        (1, "a"): (pytest.approx(4e-3), True, False, "measured"),
        (1, "b"): (pytest.approx(8e-3), False, False, "measured"),
        (2, "a"): (pytest.approx(4e-3), True, False, "measured"),  # noise that was seen once stays
        # It never differed: forwards show a thousandth in the median.
        (2, "c"): (pytest.approx(4e-3), True, True, "measured"),
    }
    assert (noise.names, noise.is_zero) == (("repeat0",), False)
    assert noise.median == pytest.approx(1e-3) and noise.largest == pytest.approx(2e-3)


def test_largest_noise_of_all_repeats_counts(tmp_path: Path) -> None:
    repeats = [{(0, "a"): 1e-3}, {(0, "a"): 2e-3}]
    noise, connection = measured(tmp_path, {(0, "a"): 1e-4}, *repeats)
    assert judged(connection)[0, "a"][0] == pytest.approx(MODEL.scatter * 2e-3)
    assert noise.names == ("repeat0", "repeat1")


def test_tolerances_from_noise_are_scaled_too(tmp_path: Path) -> None:
    _, connection = measured(tmp_path, {(0, "a"): 1e-4}, {(0, "a"): 1e-3}, scale=0.5)
    assert judged(connection)[0, "a"][0] == pytest.approx(MODEL.scatter * 0.5e-3)


def test_repeat_that_is_equal_bit_for_bit_leaves_the_rules_tolerances(tmp_path: Path) -> None:
    noise, connection = measured(tmp_path, {(0, "a"): 1e-3}, {})
    assert noise.is_zero and (noise.median, noise.largest) == (0.0, 0.0)
    assert judged(connection)[0, "a"][3] is None


def test_repeats_have_the_baselines_names_which_the_comparison_may_show_renamed(
    tmp_path: Path,
) -> None:
    _, connection = measured(tmp_path, {(0, "a"): 1e-4}, {(0, "a"): 1e-3}, prefix="net.")
    assert judged(connection)[0, "net.a"][0] == pytest.approx(MODEL.scatter * 1e-3)


def test_run_of_something_else_is_no_repeat(tmp_path: Path) -> None:
    other = [row | {"output_numel": 7} for row in outputs({}, 1)]
    baseline = open_run(build_run(tmp_path / "a", {"module_calls": outputs({}, 0)}))
    repeats = RepeatRuns(baseline, [open_run(build_run(tmp_path / "b", {"module_calls": other}))])
    with pytest.raises(NoRepeat, match="--noise b is no repeat of the baseline"):
        repeats.measure(paired({"module_calls": outputs({}, 0)}))
    repeats.close()


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (Noise(("a2", "b"), 3e-7, 2e-6, False), "noise is 3e-07 in the median and 2e-06 at most, measured from a2, b"),
        (Noise(("a2",), 0.0, 0.0, True), "the repeat a2 is equal to the baseline bit for bit: there is no noise"),
    ],
)  # fmt: skip
def test_noise_is_said_in_words(noise: Noise, said: str) -> None:
    assert noise.words() == said

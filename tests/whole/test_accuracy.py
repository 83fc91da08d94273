"""A sample of what scripts/accuracy measures: legal changes pass, faults hidden in them are found where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.accuracy.divided import MODES, run_divided
from support.accuracy.measuring import Case, Laboratory
from support.accuracy.training import CHANGES

# One family for each change, so that all families and all changes are there.
_FAMILIES = ("tied", "mixture", "cnn", "mlp", "recurrent", "tied")

# Sharper than rounding of half precision, blunter than a sign.
_FAULTS = ("times 1.2", "sign flipped", "one row zeroed", "a stale value", "one NaN")
_PLACES = {
    "tied": "blocks.0.mlp.0",
    "mixture": "experts.2.1",
    "cnn": "4",
    "mlp": "3",
    "recurrent": "mix",
}


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Laboratory(tmp_path_factory.mktemp("laboratory"))
    torch.set_num_threads(threads)
    torch.compiler.reset()


def case(change: str, kind: str | None) -> Case:
    family = _FAMILIES[CHANGES.index(change) % len(_FAMILIES)]
    if (family, change) in (("cnn", "accumulation"), ("recurrent", "fp16 with a scaler")):
        family = "tied"
    return Case(family, change, _PLACES[family], kind)


@pytest.mark.parametrize("change", CHANGES)
def test_legal_change_passes(change: str, laboratory: Laboratory) -> None:
    outcome = laboratory.outcome(case(change, None))
    assert outcome.verdict in ("identical", "within_tolerance"), outcome.explanation


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "compiled"])
def test_fault_hidden_in_a_legal_change_is_found_at_its_module(
    change: str, laboratory: Laboratory
) -> None:
    kind = _FAULTS[CHANGES.index(change) % len(_FAULTS)]
    # One row of a batch is less than fp8 rounds.
    outcome = laboratory.outcome(case(change, "sign flipped" if "fp8" in change else kind))
    assert outcome.placed in ("exact", "module"), outcome


def test_one_percent_is_found_at_its_node_where_nothing_but_rounding_differs(
    laboratory: Laboratory,
) -> None:
    for change in ("none", "another order of summation", "fused optimizer", "accumulation"):
        outcome = laboratory.outcome(case(change, "times 1.01"))
        assert outcome.placed == "exact", (change, outcome)


def test_one_percent_is_found_at_its_node_in_coarse_arithmetic(laboratory: Laboratory) -> None:
    """By its length, and in fp8, where lengths are noisy too, because it is the same time after time."""
    for change in ("bf16", "fp8 (simulated)"):
        outcome = laboratory.outcome(Case("tied", change, "blocks.0.mlp.0", "times 1.01"))
        assert outcome.placed == "exact", (change, outcome)


def test_rolled_batch_is_placed_in_its_module_where_the_work_is_divided_otherwise(
    laboratory: Laboratory,
) -> None:
    """Sums over the parts do not show it."""
    outcome = laboratory.outcome(Case("mlp", "accumulation", "6", "batch rolled"))
    assert outcome.placed == "module", outcome


def test_fault_in_the_first_step_of_a_compiled_run_is_placed(laboratory: Laboratory) -> None:
    """No step proves that what one side alone has changes nothing."""
    case = Case("gpt", "compiled", "blocks.1.attn.out", "times 1.01")
    assert case.step == 0
    assert laboratory.outcome(case).placed == "exact"


def test_last_bit_is_found_in_a_reproducible_job_alone(laboratory: Laboratory) -> None:
    assert laboratory.outcome(case("none", "one ulp")).placed == "exact"
    assert not laboratory.outcome(case("another order of summation", "one ulp")).is_found


@pytest.mark.slow
def test_work_divided_otherwise_passes_and_a_fault_in_it_is_placed(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    cases = [
        Case("gpt", change, "blocks.1.mlp.0", kind)
        for change in MODES
        for kind in (None, "times 1.01")
    ]
    for outcome in run_divided(laboratory, cases, tmp_path, timeout=200):
        if outcome.case.kind is None:
            assert outcome.verdict == "within_tolerance", outcome
        else:
            assert outcome.placed == "exact", outcome

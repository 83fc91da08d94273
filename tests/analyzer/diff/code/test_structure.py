"""What one side alone has: changed code where it is there in every step and rank, else something that happened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.reports.diff.numbering import Steps
from gradtrace_analyzer.reports.diff.structure import structure_lines
from support.answers.commands import asked, told
from support.synthetic_runs.builder import build_run, summary_columns

RANKS, STEPS = (0, 1), (0, 1, 2)
EVERYWHERE = frozenset((rank, step) for rank in RANKS for step in STEPS)


def node(place: dict[str, Any], index: int, name: str, occurrence: int, value: float) -> dict[str, Any]:  # fmt: skip
    sizes = summary_columns([value, 1.0], "grad_output_", 4)
    sizes |= summary_columns([value, 2.0], "grad_input_", 4)
    return {
        **place,
        **{"backward_index": 0, "event_index": index, "autograd_seq": 9 - index, "node_name": name},
        **{"root": 0, "module_fqn": "m", "call_index": 0, "occurrence": occurrence},
        **{"phase": "backward", "thread": 1, "outcome": "ok", "start_ns": index, "end_ns": index},
        **{"grad_output_count": 1, "grad_input_count": 1},
        **sizes,
    }


def run(
    path: Path,
    extra: Iterable[tuple[int, int]] = (),
    *,
    first: bool = False,
    passes: Iterable[tuple[int, int]] = (),
) -> Path:
    """Two Nodes of module `m`; a `MulBackward0` besides in the given (rank, step), made before the other or after."""
    places = set(extra)
    calls, nodes = [], []
    for rank in RANKS:
        for step in STEPS:
            place = {"rank": rank, "step": step}
            name = {"root": 0, "module_fqn": "m", "module_class": "M", "depth": 1}
            both = summary_columns([1.0], "input_") | summary_columns([2.0], "output_")
            when = {"phase": "forward", "call_index": 0, "start_ns": 1, "end_ns": 2}
            calls.append({**place, **name, **when, **both})
            is_there = (rank, step) in places
            # Backward runs what was made last first.
            made = [("MulBackward0", 5.0)] * (is_there and not first)
            made += [("GeluBackward0", 3.0), ("MulBackward0", 4.0)]
            made += [("MulBackward0", 6.0)] * (is_there and first)
            count = sum(kind == "MulBackward0" for kind, _ in made)
            for index, (kind, value) in enumerate(made):
                is_mul = kind == "MulBackward0"
                count -= is_mul
                nodes.append(node(place, index, kind, count if is_mul else 0, value))
    of_pass = {"backward_index": 1, "kind": "backward", "node_count": 0, "unattributed_count": 0}
    ran = [
        {"rank": rank, "step": step, **of_pass, "start_ns": 9, "end_ns": 9} for rank, step in passes
    ]
    rows = {"module_calls": calls, "node_events": nodes, "backward_passes": ran}
    return build_run(path, rows, world_size=2)


@pytest.mark.parametrize("first", [False, True])
def test_node_of_every_step_and_rank_is_changed_code(first: bool, tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", EVERYWHERE, first=first)
    for pair, side in (((a, b), "candidate"), ((b, a), "baseline")):
        code, answer = asked("diff", "--format", "json", *pair)
        assert (code, answer["verdict"]) == (0, "within_tolerance"), answer["explanation"]
        [entry] = answer["structure"]
        assert (entry["kind"], entry["name"], entry["only_in"]) == ("node", "MulBackward0", side)
        assert (entry["is_code"], entry["count"], entry["ranks"]) == (True, 6, [0, 1])
        assert answer["spread"] == []  # the others pair with their like
    assert "m runs MulBackward0 in the candidate alone" in told("diff", a, b)[1]


@pytest.mark.parametrize(
    ("extra", "step", "ranks"),
    [
        ({(1, 0), (1, 1), (1, 2)}, 0, [1]),  # one rank of two that run the module
        ({(r, s) for r in RANKS for s in (1, 2)}, 1, [0, 1]),  # from a later step on
        ({(0, 0), (1, 0)}, 0, [0, 1]),  # in the first step alone
    ],
)
def test_node_that_is_alone_in_some_ranks_or_steps_happened(
    extra: set[tuple[int, int]], step: int, ranks: list[int], tmp_path: Path
) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", extra)
    code, answer = asked("diff", "--format", "json", a, b)
    first = answer["first_divergence"]
    assert (code, first["step"], first["ranks"]) == (1, step, ranks)
    assert (first["link"], first["only_in"]) == ("structure", "candidate")
    assert first["node_name"] == "MulBackward0"
    assert [e["is_code"] for e in answer["structure"]] == [False]


def test_gate_of_any_difference_lets_other_code_for_the_same_numbers_pass(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", EVERYWHERE)
    assert told("diff", "--fail-on", "any>=0", a, b)[0] == 0
    assert told("diff", "--fail-on", "structure>=0", a, b)[0] == 1
    happened = run(tmp_path / "c", {(1, 1)})
    assert told("diff", "--fail-on", "any>=0", a, happened)[0] == 1


def test_pass_of_one_side_is_found_beside_changed_code(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", EVERYWHERE, passes={(1, 1)})
    _, answer = asked("diff", "--format", "json", a, b)
    assert answer["explanation"].startswith(
        "Step 1, rank 1: backward pass 1 is in the candidate alone"
    )
    assert [(e["kind"], e["is_code"]) for e in answer["structure"]] == [
        ("node", True),
        ("pass", False),
    ]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["0"], "call of module 0 is in the candidate alone"),
        (["0", "1", "2"], "call of module 0 and 2 more are in the candidate alone"),
        (["blocks.0"], "call of blocks.0 is in the candidate alone"),
    ],
)
def test_calls_of_one_side_share_a_line_in_the_plural(names: list[str], said: str) -> None:
    one = [OneSided("call", n, "candidate", ranks=(0,), first_step=0, last_step=0) for n in names]
    assert list(structure_lines(one, Steps())) == [f"{said} (rank 0, step 0)"]

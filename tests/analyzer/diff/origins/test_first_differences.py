"""What a rank's first difference becomes: the link it lies in, and what the rows around it say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.origin import FailureOrigin, LossOrigin, Origin, ScaledOrigin
from gradtrace_analyzer.diff.origins.first_differences import by_rank, first_origins
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from support.synthetic_runs.differences import (
    accumulating,
    action,
    bucket,
    call,
    changed,
    difference,
    given,
    gradient,
    group,
    loss,
    node,
    parameter,
)


def found(
    *differences: Difference,
    rng: Sequence[int] = (),
    modules: Sequence[str] = (),
    exceeding: bool = False,
    **more: Any,
) -> list[Origin]:
    rows = by_rank(differences, exceeding=exceeding)
    called = {rank: modules for rank in rows}
    return first_origins(rows, rng, called, exceeding=exceeding, **more)


def first(*differences: Difference, **more: Any) -> Origin:
    [origin] = found(*differences, **more)
    return origin


def test_differences_are_by_rank_in_program_order() -> None:
    rows = [call("late", 9, rank=1), call("b", 2), call("a", 1), call("early", 3, rank=1)]
    assert {r: [d.key["module_fqn"] for d in own] for r, own in by_rank(rows, exceeding=False).items()} == {
        0: ["a", "b"],
        1: ["early", "late"],
    }  # fmt: skip


def test_what_does_not_exceed_is_no_difference_where_that_is_asked() -> None:
    rows = [call("a", 1, exceeds=False), call("b", 2)]
    assert by_rank(rows, exceeding=True) == {0: [rows[1]]}
    assert by_rank(rows[:1], exceeding=True) == {}


def test_pass_comes_before_what_it_does_though_its_row_is_written_last() -> None:
    rows = [gradient("w", 5), node("m", 6, backward_index=1), loss(9), loss(10, backward_index=1)]
    [own] = by_rank(rows, exceeding=False).values()
    assert [d.link for d in own] == ["loss", "local_gradient", "loss", "backward"]


def test_gradient_that_came_out_of_an_earlier_pass_is_no_deed_of_this_one() -> None:
    rows = [gradient("w", 2, "carried"), gradient("w", 3, "final"), loss(9)]
    [own] = by_rank(rows, exceeding=False).values()
    assert [d.link for d in own] == ["carried_gradient", "clip", "loss"]


def test_module_that_gives_something_else_is_the_forwards_origin() -> None:
    origin = first(call("a.b", 1), call("a", 2))
    assert (origin.link, origin.module_fqn, origin.between) == ("forward", "a.b", False)
    assert origin.change is origin.difference.writes


def test_forward_behind_a_moved_generator_is_laid_at_its_door() -> None:
    assert [o.link for o in found(call("a", 1), call("a", 1, rank=1), rng=[1])] == [
        "rng",
        "forward",
    ]


@pytest.mark.parametrize(
    ("reading", "module"),
    [
        ([], "block"),  # the module around it reads what is the same: its own code lies between
        (["block"], ""),  # it reads what differs too: the root does the same with what it was given
    ],
)
def test_module_whose_code_lies_between_is_the_innermost_that_reads_the_same(
    reading: list[str], module: str
) -> None:
    around = [call(fqn, 2 + n, reads=changed()) for n, fqn in enumerate(reading)]
    origin = first(call("block.deep.layer", 1, reads=changed()), *around, modules=["block", ""])
    assert (origin.link, origin.between, origin.module_fqn) == ("forward", True, module)
    assert origin.change is origin.difference.reads


def test_module_that_another_microbatch_changed_still_reads_the_same_here() -> None:
    other = call("block", 5, reads=changed(), microbatch=1)
    assert (
        first(call("block.a", 1, reads=changed()), other, modules=["block"]).module_fqn == "block"
    )


def test_call_that_reads_within_rounding_is_an_origin_beyond_tolerance_alone() -> None:
    row = call("a.b", 1, reads=changed(1e-9), writes=changed(0.5))
    assert not first(row, exceeding=True).between
    assert first(row, exceeding=False).between


def test_inputs_that_left_their_row_late_come_first_all_the_same() -> None:
    """Keyword arguments are written when the root returns, after the modules inside it."""
    rows = [
        call("a", 1, reads=changed()),
        given(4, "x"),
        given(5, "y"),
        given(6, "z", microbatch=1),
    ]
    origin = first(*rows)
    assert (origin.link, origin.difference.key["name"], origin.other_count) == ("inputs", "x", 1)


def test_input_of_another_root_is_not_the_cause() -> None:
    assert first(call("a", 1), given(4, root=1)).link == "forward"
    assert first(call("a", 1), given(4, root=None)).link == "inputs"  # of no root: of any


def test_node_is_an_origin_by_itself_or_lies_behind_code_between() -> None:
    own = first(node("m", 1))
    assert (own.link, own.module_fqn, own.between) == ("backward", "m", False)
    arrived = first(node("m", 1, reads=changed(lanes=4)))
    assert arrived.between and arrived.change is arrived.difference.reads


def test_gradient_that_arrives_otherwise_at_a_parameter_is_a_local_gradients() -> None:
    origin = first(accumulating("m.weight", 1))
    assert (origin.link, origin.between) == ("local_gradient", True)


def test_loss_is_told_with_the_gradient_that_follows_its_factor() -> None:
    """The first Nodes may be others; the first gradient that is scaled as the loss is tells the divisor."""
    other = node("m", 2, reads=changed(factor=3.0, lanes=4), writes=changed(lanes=4))
    scaled = node("m", 3, reads=changed(lanes=4), writes=changed(factor=2.0, lanes=4))
    origin = first(other, scaled, loss(9, 1.5, 3.0))
    assert (origin.link, origin.factor) == ("loss", 2.0)
    assert origin.change is scaled.writes


@pytest.mark.parametrize(
    "row",
    [
        node("m", 3, writes=changed(factor=2.0, lanes=4), backward_index=1),  # another pass
        node("m", 3, writes=changed(factor=2.0, lanes=4), only_in="candidate"),
        node("m", 3, writes=changed(factor=2.01, lanes=4)),
    ],
)
def test_gradient_of_another_factor_or_pass_tells_no_divisor(row: Difference) -> None:
    origin = first(row, loss(1, 1.5, 3.0))
    assert (origin.link, origin.change) == ("loss", None)


def test_gradient_behind_the_first_parameter_tells_no_divisor() -> None:
    scaled = node("m", 4, writes=changed(factor=2.0, lanes=4))
    assert first(loss(9, 1.5, 3.0), gradient("w", 3), scaled).change is None


def test_loss_without_a_number_has_no_factor() -> None:
    scaled = node("m", 4, writes=changed(factor=2.0, lanes=4))
    assert first(loss(1, 0.0, 3.0), scaled).change is None


def test_synchronisation_that_one_side_left_out_is_the_buckets() -> None:
    origin = first(loss(9, values={"ddp_sync": ("sync", "no_sync"), "loss": (1.0, 2.0)}))
    assert (origin.link, origin.change) == ("bucket", None)


@pytest.mark.parametrize("point", ["before", "after"])
def test_several_parameters_at_once_are_one_origin(point: str) -> None:
    own = [parameter(f"m.{name}", n, point) for n, name in enumerate("abc")]
    origin = first(*own, call("m", 9))
    assert origin.link == own[0].link
    assert (origin.parameter_fqn, origin.module_fqn, origin.other_count) == ("m.a", "m", 2)


def test_group_that_is_set_otherwise_is_counted_by_what_it_is_set_to() -> None:
    rates = [group(n, learning_rate=(0.1, 0.2)) for n in range(2)]
    origin = first(*rates, group(2, hyperparameters=("{}", '{"momentum": 1}')))
    assert (origin.link, origin.other_count, origin.module_fqn) == ("optimizer", 1, None)


def test_gradient_that_is_carried_in_on_one_side_alone_is_a_carried_gradient() -> None:
    assert first(gradient("w", 1, "carried", only_in="candidate")).link == "carried_gradient"


@pytest.mark.parametrize(
    "row", [gradient("w", 1, only_in="baseline"), call("m", 1, only_in="candidate")]
)
def test_row_of_one_side_alone_is_the_structures(row: Difference) -> None:
    origin = first(row)
    assert (origin.link, origin.change) == ("structure", None)


def test_pass_of_another_kind_is_one_row_with_both_kinds() -> None:
    lone = [loss(4, kind="grad", only_in="candidate"), loss(5, only_in="baseline")]
    difference = first(*lone).difference
    assert (difference.only_in, difference.values) == (None, {"kind": ("backward", "grad")})
    of_another_number = loss(5, only_in="baseline", backward_index=1)
    assert first(lone[0], of_another_number).difference.only_in == "candidate"


@pytest.mark.parametrize(("kind", "link"), [("forward", "forward"), ("backward_full", "backward")])
def test_action_of_a_stage_is_its_half_or_the_way_between_stages(kind: str, link: str) -> None:
    assert first(action(1, 3, kind)).link == link
    arrived = first(action(1, 3, kind, reads=changed()))
    assert (arrived.link, arrived.between) == ("stage", True)


def test_bucket_is_told_with_what_differs_of_it() -> None:
    own = bucket(["w"], 1)
    assert (first(own).link, first(own).change, first(own).between) == ("bucket", own.writes, False)
    arrived = bucket(["w"], 1, reads=changed(factor=2.0))
    assert (first(arrived).between, first(arrived).factor) == (True, 2.0)


def test_origins_come_in_the_order_of_the_chain_and_those_of_all_ranks_last() -> None:
    """First by microbatch, then by link: a rank that differs in its forward is told before one that does later."""
    rows = [
        gradient("w", 1, "final", rank=0),
        call("m", 7, rank=1, microbatch=1),
        node("m", 8, rank=2),
        call("m", 9, rank=3),
        bucket(["w"], 1, rank=4),
    ]
    assert [o.ranks for o in found(*rows)] == [(3,), (2,), (1,), (4,), (0,)]


def failure(rank: int = 0, backward_index: int = 0, side: str = "candidate") -> OneSidedFailure:
    row: Mapping[str, Any] = {
        "microbatch": 0, "root": 0, "module_fqn": "m", "call_index": 0, "node_name": "MulBackward0",
        "parameter_fqn": None, "event_index": 3, "exception_type": "ValueError", "exception_text": "no",
    }  # fmt: skip
    return OneSidedFailure(rank, 0, backward_index, row, side=side)


def test_pass_that_failed_is_the_origin_of_a_rank_without_differences() -> None:
    origin = first(failures={2: failure(rank=2)})
    d = origin.difference
    assert (origin.link, origin.ranks, origin.module_fqn) == ("backward", (2,), "m")
    assert (d.table, d.values, d.event_indices) == (
        "failures",
        {"failure": (None, "ValueError: no")},
        (None, 3),
    )
    other = first(failures={0: failure(side="baseline")}).difference
    assert (other.values, other.event_indices) == ({"failure": ("ValueError: no", None)}, (3, None))


NOTHING_CAME = Change(True, None, 0.0, {"norm": 1.0}, {"norm": None})


@pytest.mark.parametrize(
    "row",
    [
        call("m", 1, phase="recompute"),  # it was made for the pass
        node("m", 1, only_in="baseline"),
        node("m", 1, writes=NOTHING_CAME),
        bucket(["w"], 1, only_in="baseline"),
        gradient("w", 1, only_in="baseline"),
    ],
)
def test_what_a_failed_pass_left_undone_follows_from_it(row: Difference) -> None:
    origin = first(row, failures={0: failure()})
    assert isinstance(origin, FailureOrigin) and origin.difference.order == row.order


@pytest.mark.parametrize(
    "row",
    [
        call("m", 1),
        given(1),
        parameter("w", 1),
        loss(1),
        gradient("w", 1, "carried"),
        node("m", 1),  # it gave another gradient, which may be why the pass failed
        gradient("w", 1, only_in="baseline", backward_index=0),  # of the pass before the one that failed
    ],
)  # fmt: skip
def test_what_comes_before_a_failure_is_the_origin(row: Difference) -> None:
    assert not isinstance(first(row, failures={0: failure(backward_index=1)}), FailureOrigin)


def unused_forward(*rest: Difference) -> Origin:
    """A forward at 1 to 3 that no backward pass followed, and what comes behind it."""
    return first(call("m", 2), *rest, unused={0: [(1.0, 3.0)]})


def test_unused_forward_is_passed_over_where_a_factor_explains_the_rest() -> None:
    scaled = node("m", 6, reads=changed(factor=2.0, lanes=4))
    origin = unused_forward(loss(9, 1.0, 2.0), scaled)
    assert (origin.link, origin.factor) == ("loss", 2.0)
    assert origin.aside is not None and origin.aside.key["module_fqn"] == "m"
    arrived = unused_forward(scaled)  # without a recorded loss: what comes into the first Node
    assert (arrived.link, arrived.between, arrived.aside) == ("backward", True, origin.aside)


def test_unused_forward_is_the_origin_where_no_factor_explains_the_rest() -> None:
    assert unused_forward(loss(9, 1.0, 2.0), node("m", 6, reads=changed(lanes=4))).link == "forward"
    assert unused_forward(call("n", 5, writes=changed(factor=2.0))).module_fqn == "m"
    alone = unused_forward()
    assert (alone.module_fqn, alone.aside) == ("m", None)


def test_forward_that_was_used_is_not_passed_over() -> None:
    scaled = node("m", 6, reads=changed(factor=2.0, lanes=4))
    origin = first(call("m", 4), loss(9, 1.0, 2.0), scaled, unused={0: [(1.0, 3.0)]})
    assert (origin.link, origin.aside) == ("forward", None)


def test_factor_of_a_pass_is_followed_to_where_it_ends() -> None:
    passes = [
        row
        for n, times in enumerate([2.0, 3.0])
        for row in (
            accumulating("m.w", 10 * n + 5, reads=changed(factor=2.0, lanes=4), backward_index=n),
            gradient("m.w", 10 * n + 4, writes=changed(factor=times), backward_index=n),
        )
    ]
    scaled = node("m", 2, reads=changed(factor=2.0, lanes=4))
    origin = first(scaled, loss(6), *passes)
    assert isinstance(origin, LossOrigin) and origin.rescaled is not None
    assert origin.rescaled.backward_index == 1
    without_loss = first(scaled, *passes)
    assert isinstance(without_loss, ScaledOrigin) and without_loss.link == "backward"
    assert without_loss.rescaled is not None
    no_factor = first(node("m", 2), *passes)  # nothing to follow
    assert isinstance(no_factor, ScaledOrigin) and no_factor.rescaled is None


def test_row_that_is_no_summary_is_told_by_its_values() -> None:
    row = difference(
        "parameters", 1, parameter_fqn="w", point="before", values={"requires_grad": (True, False)}
    )
    origin = first(row, parameter("v", 2))
    assert (origin.link, origin.change, origin.other_count) == ("parameters", None, 0)

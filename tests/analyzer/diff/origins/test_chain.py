"""What a row of a rank's step can have inherited from: by what depends on what, in program order."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.origins import inheriting_backward, inheriting_forward
from gradtrace_analyzer.diff.origins.chain import INHERITING, RankChain
from gradtrace_analyzer.diff.origins.dataflow import (
    Dataflow,
    RowKey,
    RowTensors,
    TensorId,
    row_keys,
)
from gradtrace_analyzer.diff.origins.dependency_graph import DependencyGraph
from gradtrace_analyzer.diff.origins.rank_rows import enclosing, way_of
from gradtrace_analyzer.diff.origins.stage_edges import StageEdges
from gradtrace_analyzer.diff.origins.step_facts import StepFacts
from gradtrace_analyzer.sql import pipelines
from support.synthetic_runs.differences import (
    accumulating,
    action,
    bucket,
    call,
    changed,
    given,
    gradient,
    group,
    loss,
    node,
    parameter,
    unchanged,
)

READS = {"reads": changed()}


class Chain:
    """The graph of one rank's rows, which are named by their place in the arguments."""

    def __init__(
        self,
        *rows: Difference,
        dataflow: Dataflow | None = None,
        edges: StageEdges | None = None,
        exceeding: bool = False,
        **known: Any,
    ) -> None:
        self.causes = DependencyGraph()
        self.rows = rows
        self.chain = RankChain(
            self.causes, 0, dataflow or Dataflow(), StepFacts(**known), edges, exceeding=exceeding
        )  # fmt: skip
        for d in rows:
            self.chain.look_ahead(d)
        self.vertices = [self.chain.add(d) for d in rows]

    def from_(self, n: int) -> set[int]:
        """The rows that one can have inherited from, without what these have inherited."""
        found: set[int] = set()
        open_, done = list(self.causes.feeders[self.vertices[n]]), {self.vertices[n]}
        while open_:
            v = open_.pop()
            if v in done:
                continue
            done.add(v)
            row = self.causes.rows[v]
            if row is None or row is self.rows[n]:  # a scope, or the other vertex of the same row
                open_ += self.causes.feeders[v]
            else:
                found |= {m for m, d in enumerate(self.rows) if d is row}
        return found

    @property
    def origins(self) -> list[int]:
        of_rows = [self.causes.rows[v] for v in self.causes.origins()]
        return sorted({n for n, d in enumerate(self.rows) for row in of_rows if row is d})


def test_call_inherits_from_calls_before_it_where_it_reads_what_differs() -> None:
    chain = Chain(call("a", 1), call("b", 2, **READS), call("c", 3))
    assert chain.from_(1) == {0}
    assert chain.origins == [0, 2]  # the third reads what is equal: a fault of its own


@pytest.mark.parametrize(
    "other",
    [call("a", 1, microbatch=1), call("a", 1, root=1), given(1, microbatch=1), given(1, root=1)],
)
def test_call_inherits_from_another_microbatch_or_root_only_where_its_own_shows_nothing(
    other: Difference,
) -> None:
    own = call("b", 2)
    assert 0 not in Chain(other, own, call("c", 3, **READS)).from_(2)
    # What else could have changed what it reads? All of the forward so far, inputs not.
    alone = Chain(other, call("c", 3, **READS))
    assert alone.from_(1) == ({0} if other.table == "module_calls" else set())


def test_call_reads_inputs_of_its_root_or_of_none() -> None:
    for root in (0, None):
        assert Chain(given(1, root=root), call("m", 2, **READS)).from_(1) == {0}


def test_call_gives_what_its_parameters_and_the_modules_in_it_give() -> None:
    chain = Chain(
        parameter("block.a.weight", 0), call("block.a", 1), call("block", 2), call("b", 3)
    )
    assert chain.from_(1) == {0}
    assert chain.from_(2) == {0, 1}
    assert chain.origins == [0, 3]


def test_parameter_of_the_module_around_a_call_changes_what_it_reads_never_what_it_gives() -> None:
    scale = parameter("block.scale", 0)
    assert Chain(scale, call("block.a", 1, **READS)).from_(1) == {0}
    assert Chain(scale, call("block.a", 1)).origins == [0, 1]
    own = parameter("block.a.weight", 0)  # of the module itself: that changes nothing that comes in
    assert Chain(own, call("block.a", 1, **READS, writes=unchanged())).origins == [0, 1]
    inside = parameter(
        "block.b.weight", 0
    )  # of the neighbour: the module around holds it, and does not use it
    assert Chain(inside, call("block.a", 1, **READS)).origins == [0, 1]


def test_recomputed_call_follows_the_forward_of_its_module_in_any_microbatch() -> None:
    again = call("m", 5, phase="recompute", microbatch=1)
    assert Chain(call("m", 1), again).from_(1) == {0}
    assert Chain(call("n", 1), again).origins == [0, 1]


def test_call_that_one_side_alone_made_changes_what_the_next_reads() -> None:
    lone = call("extra", 1, only_in="candidate")
    assert Chain(lone, call("b", 2, **READS)).from_(1) == {0}
    assert Chain(lone, call("b", 2)).origins == [0, 1]


def test_lone_call_explains_what_was_changed_on_the_way_to_the_next() -> None:
    """Between the call that left it and the one that received it ran what one side alone has."""
    x, lone, b = given(0, writes=None), call("extra", 1, only_in="candidate"), call("b", 2, **READS)
    rows: dict[str, dict[RowKey, RowTensors]] = {}
    for n, side in enumerate(("baseline", "candidate")):
        left, came = RowTensors(0, (), (TensorId(4, 7),)), RowTensors(2, (TensorId(4, 7 + n),), ())
        rows[side] = {row_keys(x)[n]: left, row_keys(b)[n]: came}
    assert Chain(lone, b, dataflow=Dataflow(rows)).from_(1) == {0}
    assert Chain(call("a", 1), b, dataflow=Dataflow(rows)).origins == [0, 1]


def test_what_one_side_alone_has_may_follow_from_anything_before_it() -> None:
    chain = Chain(gradient("w", 1, "carried"), call("m", 2, only_in="baseline"))
    assert chain.from_(1) == {0}


def test_what_one_side_alone_ran_in_a_module_explains_what_its_nodes_saved() -> None:
    assert Chain(call("m", 1, only_in="candidate"), node("m", 2)).from_(1) == {0}
    assert Chain(node("m", 1, only_in="candidate"), node("n", 2)).origins == [0, 1]


def test_draw_follows_the_first_forward_that_differs_where_generators_were_disturbed() -> None:
    rows = (call("a", 1), call("dropout", 2))
    assert Chain(*rows).origins == [0, 1]
    assert Chain(*rows, disturbed={0}).from_(1) == {0}
    assert Chain(*rows, disturbed={1}).origins == [0, 1]
    assert Chain(*rows, random={(0, "dropout")}).from_(1) == {0}


def test_loss_follows_the_forward_and_else_is_an_origin() -> None:
    assert Chain(call("m", 1), loss(9)).from_(1) == {0}
    assert Chain(parameter("w", 0), loss(9)).origins == [0, 1]


def test_forward_after_a_loss_may_follow_from_it() -> None:
    assert Chain(loss(1), call("m", 2, **READS, microbatch=1)).from_(1) == {0}


def test_node_inherits_from_those_before_it_in_its_pass_where_it_reads_what_differs() -> None:
    chain = Chain(
        node("a", 1), node("b", 2, **READS), node("b", 3), node("c", 4, **READS, backward_index=1)
    )
    assert chain.from_(1) == {0}
    assert chain.origins == [0, 2, 3]


def test_node_follows_the_loss_of_its_pass() -> None:
    rows = (loss(0), loss(1, backward_index=1), node("a", 2, **READS))
    assert Chain(*rows).from_(2) == {0}


def test_node_saved_what_its_module_was_called_with_and_holds() -> None:
    chain = Chain(
        parameter("a.weight", 0), call("a", 1), node("a", 2), node("b", 3), node("a", 4, root=1)
    )
    assert chain.from_(2) == {0, 1}
    assert chain.origins == [0, 3, 4]


def test_node_outside_any_module_saved_what_the_forward_gave() -> None:
    assert Chain(call("a", 1), node(None, 2, root=None)).from_(1) == {0}


def test_node_may_have_saved_what_an_inner_gradient_pass_gave() -> None:
    rows = (node("a", 1), node("b", 2, backward_index=1))
    assert Chain(*rows, pass_kinds={(0, 0): "grad"}).from_(1) == {0}
    assert Chain(*rows, pass_kinds={(0, 0): "backward"}).origins == [0, 1]


def test_gradient_that_arrives_at_a_parameter_is_none_that_its_node_saved() -> None:
    # It would follow from the forward of its module, were it any other Node.
    assert Chain(call("m", 1), accumulating("m.w", 2, reads=unchanged())).origins == [0, 1]


def moved(*rows: tuple[Difference, str, str]) -> Dataflow:
    """What each row received and left: size:bits of the baseline, of the candidate one more."""
    by_side: dict[str, dict[RowKey, RowTensors]] = {"baseline": {}, "candidate": {}}
    for order, (d, came, went) in enumerate(rows):
        for n, side in enumerate(by_side):
            tensors = []
            for text in (came, went):
                parts = [word.split(":") for word in text.split()]
                tensors.append(tuple(TensorId(int(size), int(bits) + n) for size, bits in parts))
            by_side[side][row_keys(d)[n]] = RowTensors(order, *tensors)
    return Dataflow(by_side)


def test_tensor_that_was_handed_on_shows_the_way_and_no_other_is_taken() -> None:
    a, b, c = node("a", 1), node("b", 2), node("c", 3, **READS)
    flow = moved((a, "", "4:1"), (b, "", "4:5"), (c, "4:5", ""))
    assert Chain(a, b, c, dataflow=flow).from_(2) == {1}


def test_sum_can_have_come_from_nodes_that_gave_as_many_numbers() -> None:
    a, b, c = node("a", 1), node("b", 2), node("c", 3, **READS)
    flow = moved((a, "", "4:1"), (b, "", "2:5"), (c, "4:9", ""))
    assert Chain(a, b, c, dataflow=flow).from_(2) == {0}


def test_call_takes_the_way_that_its_tensor_took() -> None:
    a, b, c = call("a", 1), call("b", 2), call("c", 3, **READS)
    flow = moved((a, "", "4:1"), (b, "", "4:5"), (c, "4:1", ""))
    assert Chain(a, b, c, dataflow=flow).from_(2) == {0}
    x = given(4)
    flow = moved((a, "", "4:1"), (b, "", "4:5"), (x, "4:5", "4:5"))
    assert Chain(a, b, x, dataflow=flow).from_(2) == {1}


def test_input_follows_the_forward_in_front_of_it() -> None:
    assert Chain(call("a", 1), given(4)).from_(1) == {0}
    assert Chain(parameter("w", 1), given(4)).origins == [0, 1]


@pytest.mark.parametrize("accumulated", [(), [(0, 0, "m.w")]])
def test_local_gradient_follows_what_arrives_at_its_parameter_though_that_row_comes_later(
    accumulated: Any,
) -> None:
    rows = (node("m", 1), gradient("m.w", 2), accumulating("m.w", 3))
    chain = Chain(*rows, accumulated=accumulated)
    assert chain.from_(1) == {0}
    assert 1 in chain.from_(2) and chain.origins == [0]


def test_local_gradient_is_an_origin_where_its_node_was_recorded_and_agrees() -> None:
    rows = (node("m", 1), gradient("m.w", 2))
    assert Chain(*rows, accumulated=[(0, 0, "m.w")]).origins == [0, 1]
    assert Chain(*rows).from_(1) == {0}  # nothing tells what arrived: all before it


def test_local_gradient_of_a_later_pass_follows_the_one_that_was_there() -> None:
    rows = (gradient("m.w", 2), gradient("m.w", 9, backward_index=1))
    assert Chain(*rows, accumulated=[(0, 0, "m.w")]).from_(1) == {0}


def test_gradients_that_were_changed_between_two_passes_are_one_origin() -> None:
    rows = (gradient("m.v", 8, backward_index=1), gradient("m.w", 9, backward_index=1))
    known = [(0, 0, "m.v"), (0, 0, "m.w")]
    assert Chain(*rows, accumulated=known).origins == [0]
    first_pass = (gradient("m.v", 8), gradient("m.w", 9))
    assert Chain(*first_pass, accumulated=known).origins == [0, 1]


def test_carried_gradient_is_what_the_step_begins_with_wherever_its_row_stands() -> None:
    rows = (gradient("m.w", 2), gradient("m.w", 5, "carried", only_in="candidate"))
    chain = Chain(*rows, accumulated=[(0, 0, "m.w")])
    assert (chain.origins, chain.from_(0)) == ([1], {1})


def test_reduced_gradient_follows_its_bucket_and_without_one_its_own_gradient() -> None:
    out = bucket(["m.v", "m.w"], 4)
    assert Chain(out, gradient("m.w", 5, "reduced")).from_(1) == {0}
    rows = (gradient("m.w", 2), gradient("m.w", 5, "reduced"))
    assert Chain(*rows).from_(1) == {0}
    # Its bucket was recorded and is equal: it cannot have come through there.
    assert Chain(*rows, bucketed=[(0, 0, "m.w")]).origins == [0, 1]


def test_bucket_inherits_from_the_gradients_in_it() -> None:
    rows = (gradient("m.v", 1), gradient("m.w", 2), gradient("m.u", 3))
    into = bucket(["m.v", "m.w"], 4, **READS)
    assert Chain(*rows, into).from_(3) == {0, 1}
    assert Chain(*rows, bucket(["m.v"], 4)).from_(3) == set()  # what went in is equal
    met = Chain(*rows, into).chain.buckets[0]
    assert met.before is not None and met.before != met.after


def test_pass_that_was_not_synchronised_explains_its_buckets_and_what_the_optimizer_saw() -> None:
    rows = (loss(1, values={"ddp_sync": ("sync", "no_sync")}), bucket(["w"], 2, **READS))
    assert Chain(*rows).from_(1) == {0}
    assert Chain(rows[0], gradient("w", 9, "final")).from_(1) == {0}
    other = bucket(["w"], 2, **READS, backward_index=1)
    assert Chain(rows[0], other).origins == [0, 1]


def test_what_the_optimizer_saw_follows_the_parameters_own_gradient_or_any() -> None:
    rows = (gradient("v", 1, "reduced"), gradient("w", 2, "reduced"))
    assert Chain(*rows, gradient("w", 3, "final")).from_(2) == {1}
    clipped = Chain(*rows, gradient("u", 3, "final"))  # clipping goes by the norm of all
    assert clipped.from_(2) == {0, 1}


def test_parameter_after_the_step_follows_its_gradient_its_value_and_the_settings() -> None:
    rows = (
        parameter("m.w", 0),
        gradient("m.w", 1, "final"),
        group(2, learning_rate=(0.1, 0.2)),
        parameter("m.w", 3, "after"),
    )
    assert Chain(*rows).from_(3) == {0, 1, 2}


def test_parameter_after_the_step_may_follow_other_gradients_where_none_was_left_alone() -> None:
    rows = (gradient("m.v", 1, "final"), parameter("m.w", 3, "after"))
    assert Chain(*rows).from_(1) == {0}
    assert Chain(*rows, untouched={0}).origins == [0, 1]


def test_only_the_learning_rate_may_follow_the_loss() -> None:
    assert Chain(loss(1), group(2, learning_rate=(0.1, 0.2))).from_(1) == {0}
    betas = group(2, hyperparameters=('{"b": 1}', '{"b": 2}'))
    assert Chain(loss(1), betas).origins == [0, 1]


def test_statistics_after_the_step_follow_the_calls_of_their_module() -> None:
    assert Chain(call("norm", 1), parameter("norm.mean", 9, "after"), untouched={0}).from_(1) == {0}


def test_nothing_is_independent_of_what_came_before_where_modules_were_left_out() -> None:
    rows = (call("a", 1), node("b", 2))
    assert Chain(*rows).origins == [0, 1]
    assert Chain(*rows, is_filtered=True).from_(1) == {0}


@pytest.mark.parametrize(("error", "stands_out"), [(3.9e-6, False), (4.1e-6, True)])
def test_second_origin_among_rounding_must_stand_out(error: float, stands_out: bool) -> None:
    """By four times its tolerance: so much an estimate from four lanes may err."""
    rows = (call("a", 1), node("b", 2, writes=changed(error, tolerance=1e-6, lanes=4)))
    assert Chain(*rows, exceeding=True).origins == ([0, 1] if stands_out else [0])
    assert Chain(*rows, exceeding=False).origins == [0, 1]


def test_noise_that_comes_in_counts_too_where_an_origin_must_stand_out() -> None:
    row = node("b", 2, reads=changed(1e-5, tolerance=1e-4), writes=changed(3e-5, tolerance=1e-6))
    assert Chain(call("a", 1), row, exceeding=True).origins == [0]


def staged(**more: Any) -> StageEdges:
    """Rank 0 holds stages 0 and 1, of roots 0 and 1: forwards end at 10 and 20, backwards at 30 and 40."""
    ends = [(10, 0, "forward"), (20, 1, "forward"), (30, 1, "backward"), (40, 0, "backward")]
    actions = [
        (float(order), pipelines.StagePlace(stage, 0, phase)) for order, stage, phase in ends
    ]
    by_side = {(side, 0): actions for side in ("baseline", "candidate")}
    return StageEdges(by_side, {(0, 0): 0, (0, 1): 1}, more.get("sources", {}))


def test_what_an_action_received_comes_before_all_that_ran_in_it() -> None:
    rows = (call("m", 12, **READS, root=1), action(1, 20, reads=changed()))
    chain = Chain(*rows, edges=staged())
    assert chain.from_(0) == {1} and chain.origins == [1]
    assert [d.order for d, _ in chain.chain.received] == [20]


def test_action_sends_what_ran_in_it() -> None:
    rows = (call("m", 5), call("n", 15, root=1), action(1, 20))
    chain = Chain(*rows, edges=staged())
    assert chain.from_(2) == {1}
    assert set(chain.chain.sent) == {(1, 0, "forward")}


def test_action_sends_what_it_received() -> None:
    chain = Chain(action(1, 20, reads=changed()), edges=staged())
    [received] = chain.causes.origins()
    assert received != chain.vertices[0]


def test_action_of_which_nothing_else_is_known_follows_what_came_before() -> None:
    rows = (call("m", 5), action(1, 20), action(1, 30, "backward_full"))
    chain = Chain(*rows, edges=staged())
    assert chain.from_(1) == {0} and chain.from_(2) == {0, 1}


def test_half_of_a_pass_that_was_left_out_is_one_origin_for_all_its_nodes() -> None:
    less = changed(None, lanes=4, numel=4)
    assert less.baseline is not None
    other = type(less)(True, None, 0.0, {**less.baseline, "numel": 8}, less.candidate)
    rows = (node("a", 32, writes=other), node("b", 34, writes=other), node("c", 36))
    assert Chain(*rows, edges=staged()).origins == [0, 2]
    assert Chain(*rows).origins == [0, 1, 2]  # without stages there are no halves


def test_modules_around_a_module_lead_outwards_to_the_root() -> None:
    assert enclosing("a.b.c") == ["a.b.c", "a.b", "a", ""]
    assert enclosing("") == [""]


def test_only_a_forward_goes_forward() -> None:
    assert [way_of(action(0, 1, kind)) for kind in ("forward", "backward_input", "backward_weight")] == [
        "forward", "backward", "backward",
    ]  # fmt: skip


def public(module: ModuleType) -> set[object]:
    own = (value for name, value in vars(module).items() if not name.startswith("_"))
    return {f for f in own if isinstance(f, FunctionType) and f.__module__ == module.__name__}


def test_rows_of_each_link_table_inherit_in_a_way_of_their_own() -> None:
    """What is there is of a table; one that is not there inherits from anything before it."""
    assert set(INHERITING) == {table.table for table in LINK_TABLES}
    ways = public(inheriting_forward) | public(inheriting_backward)
    assert set(INHERITING.values()) == ways - {inheriting_forward.whatever}
    assert len(set(INHERITING.values())) == len(INHERITING)

"""What an origin's sentence rests on, and what the sentence says where a side did not record it."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.findings.grounds import with_grounds
from gradtrace_analyzer.diff.origin import (
    ArrivingOrigin,
    BucketInputOrigin,
    BucketOrigin,
    CallInputOrigin,
    ClipOrigin,
    ForwardOrigin,
    Ground,
    LocalGradientOrigin,
    LossOrigin,
    NodeOrigin,
    Origin,
    ParametersOrigin,
    ReducedGradientOrigin,
    UpdateOrigin,
)
from gradtrace_analyzer.diff.scope.recorded import Recorded
from gradtrace_analyzer.reports.diff.origins.sentences import origin_sentence
from gradtrace_analyzer.reports.diff.wording import Wording
from support.synthetic_runs.differences import (
    Row,
    bucket,
    call,
    gradient,
    loss,
    node,
    parameter,
    sides,
    views,
)

VALUES = sides()[0]


def summary(prefix: str) -> Row:
    return sides(prefix=prefix)[0]


def weight(point: str, name: str = "m.w", **more: Any) -> Row:
    return {"root": 0, "parameter_fqn": name, "point": point, **VALUES} | more


def called(fqn: str, **more: Any) -> Row:
    key = {"root": 0, "module_fqn": fqn, "phase": "forward", "call_index": 0}
    return {**key, **summary("input_"), **summary("output_")} | more


def ran(fqn: str, event_index: int, **more: Any) -> Row:
    key = {"root": 0, "module_fqn": fqn, "backward_index": 0, "event_index": event_index}
    key |= {"node_name": "MmBackward0", "call_index": 0, "occurrence": 0}
    return {**key, **summary("grad_output_"), **summary("grad_input_")} | more


GROUP = {
    "optimizer_index": 0,
    "group_index": 0,
    "learning_rate": 0.1,
    "hyperparameters": "{}",
    "parameter_fqns": ["m.w"],
}
WHOLE: dict[str, list[Row]] = {
    "parameters": [weight("before"), weight("after")],
    "module_calls": [called("k"), called("m")],
    "backward_passes": [{"backward_index": 0, "kind": "backward", "loss": 1.0}],
    "node_events": [ran("n", 0), ran("m", 1)],
    "gradients": [weight(point, backward_index=0) for point in ("local", "reduced", "final")],
    "optimizer_groups": [GROUP],
}


def sentence(origin: Origin) -> str:
    return origin_sentence(origin, Wording())


def grounded(
    d: Difference, rows: dict[str, list[Row]], kind: type[Origin] = Origin, **more: Any
) -> Origin:
    origin = kind(d, (d.rank,), d.key.get("module_fqn"), None, **more)
    return with_grounds(Recorded(views(rows)), origin, are_sums=False)


@pytest.mark.parametrize(
    ("row", "grounds"),
    [
        (call("m", 3), {"reads", "parameters", "outputs"}),
        (call("k", 3), {"reads", "no parameters"}),  # it is the first, and has no parameters
        (loss(3), {"outputs"}),
        (node("m", 4, event_indices=(1, 1)), {"reads", "nodes"}),
        (node("n", 3, event_indices=(0, 0)), {"reads"}),
        (gradient("m.w", 5), {"local", "after backward", "final", "nodes"}),
        (gradient("m.w", 5, "final"), {"local", "after backward", "final", "nodes"}),
        (parameter("m.w", 9, "after"), {"final", "before", "settings"}),
        (parameter("m.w", 0), set()),
    ],
)
def test_grounds_are_what_both_sides_recorded(row: Difference, grounds: set[Ground]) -> None:
    assert grounded(row, WHOLE).rests_on == grounds


@pytest.mark.parametrize("table", sorted(WHOLE))
def test_nothing_rests_on_a_table_that_is_not_there(table: str) -> None:
    of_table: dict[str, set[Ground]] = {
        "parameters": {"parameters", "no parameters", "before"},
        "module_calls": {"outputs"},
        "node_events": {"nodes"},
        "gradients": {"local", "after backward", "final"},
        "optimizer_groups": {"settings"},
    }
    rows = {name: own for name, own in WHOLE.items() if name != table}
    for d in (
        call("m", 3),
        loss(3),
        node("m", 4),
        gradient("m.w", 5),
        parameter("m.w", 9, "after"),
    ):
        assert not grounded(d, rows).rests_on & of_table.get(table, set())


def test_root_that_was_never_seen_with_parameters_has_unknown_ones() -> None:
    other = {**WHOLE, "parameters": [weight("before", root=1)]}
    said = sentence(grounded(call("m", 3), other, ForwardOrigin))
    assert said.endswith(
        "although its inputs are equal; its parameters were not recorded on both sides."
    )
    assert sentence(grounded(call("m", 3), WHOLE, ForwardOrigin)).endswith(
        "although its inputs are equal, and its parameters were when the step began."
    )
    assert sentence(grounded(call("k", 3), WHOLE, ForwardOrigin)).endswith(
        "although its inputs are equal."
    )


def test_update_of_which_the_settings_are_unknown_says_so() -> None:
    after = parameter("m.w", 9, "after")
    wrapped = {**WHOLE, "optimizer_groups": [{**GROUP, "learning_rate": None}]}
    said = sentence(grounded(after, wrapped, UpdateOrigin))
    assert (
        "although its gradient and its value before the forward are equal; the optimizer's settings were not "
        "recorded on both sides: these, the optimizer," in said
    )
    nothing = sentence(grounded(after, {}, UpdateOrigin))
    assert "although" not in nothing and "equal" not in nothing


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (call("m", 3), ForwardOrigin),
        (call("m", 3), CallInputOrigin),
        (loss(3, values={"loss": (1.0, 2.0)}), LossOrigin),
        (node("m", 4), NodeOrigin),
        (node("m", 4), ArrivingOrigin),
        (gradient("m.w", 5), LocalGradientOrigin),
        (gradient("m.w", 5, "reduced"), ReducedGradientOrigin),
        (gradient("m.w", 5, "final"), ClipOrigin),
        (parameter("m.w", 9, "after"), UpdateOrigin),
        (parameter("m.w", 0, step=1), ParametersOrigin),
        (bucket(["m.w"], 6), BucketInputOrigin),
        (bucket(["m.w"], 6), BucketOrigin),
    ],
)
def test_where_nothing_is_known_no_sentence_says_equal(row: Difference, kind: type[Origin]) -> None:
    said = sentence(grounded(row, {}, kind))
    assert " equal" not in said and "changed since" not in said


def test_bucket_rests_on_what_every_rank_put_in() -> None:
    def reduced(rank: int, **more: Any) -> Row:
        return {"rank": rank, "root": 0, "module_fqn": "", "kind": "all_reduce", "backward_index": 0,
                "parameter_fqns": ["m.w"], **summary("before_"), **summary("after_")} | more  # fmt: skip

    d = bucket(["m.w"], 6)
    own = {k: d.key[k] for k in ("root", "module_fqn", "kind", "backward_index")}
    assert "reads" in grounded(d, {"buckets": [reduced(0, **own), reduced(1, **own)]}).rests_on
    lacking = {"buckets": [reduced(0, **own), reduced(1, before_norm=None, **own)]}
    assert "reads" not in grounded(d, lacking).rests_on


def test_sums_over_parts_lie_on_any_rank() -> None:
    d = parameter("m.w", 9, "after")
    rows = {table: [{**row, "rank": 3} for row in own] for table, own in WHOLE.items()}
    origin = UpdateOrigin(d, (0,), None, d.writes)
    recorded = Recorded(views(rows))
    assert with_grounds(recorded, origin, are_sums=True).rests_on == {"final", "before", "settings"}
    assert not with_grounds(recorded, origin, are_sums=False).rests_on

"""Which steps may differ, and in which tables: by digests, and by values that are in none."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.links import TABLE_NAMES
from gradtrace_analyzer.diff.pairing.suspect_steps import PROVEN, suspect_steps
from gradtrace_analyzer.sql.footers import Counts, table_counts
from gradtrace_schemas.digests import TABLE_OF
from gradtrace_schemas.steps import DIGEST_LINKS
from support.synthetic_runs.differences import Row, Rows, started

FULL = {f"digest_{link}": n for n, link in enumerate(DIGEST_LINKS)}
EVERYTHING = frozenset(TABLE_OF.values())


def found(a: Rows, b: Rows, counts: Counts | None = None) -> dict[Any, frozenset[str]]:
    connection = started(a, b)
    known = {
        side: counts or table_counts(connection, side, TABLE_NAMES)
        for side in ("baseline", "candidate")
    }
    return suspect_steps(connection, known)


def steps(*rows: Row) -> Rows:
    return {"steps": [{**FULL, "step": n, **row} for n, row in enumerate(rows)]}


def test_steps_with_equal_digests_are_no_suspects() -> None:
    assert found(steps({}, {}), steps({}, {})) == {}


@pytest.mark.parametrize(
    ("link", "table"),
    [("forward", "module_calls"), ("optimizer", "parameters"), ("buckets", "buckets")],
)
def test_step_whose_digest_is_another_may_differ_in_its_table(link: str, table: str) -> None:
    other = steps({}, {f"digest_{link}": 99}, {})
    assert found(steps({}, {}, {}), other) == {(0, 1): frozenset({table})}


def test_digest_that_one_side_lacks_proves_nothing() -> None:
    assert found(steps({}), steps({"digest_inputs": None})) == {(0, 0): frozenset({"inputs"})}


def test_step_without_any_digest_may_differ_in_everything() -> None:
    nothing = dict.fromkeys(FULL)
    assert found(steps(nothing), steps(nothing)) == {(0, 0): EVERYTHING}


def test_step_that_only_other_tables_name_may_differ_in_everything() -> None:
    calls: Rows = {"module_calls": [{"root": 0, "module_fqn": "m", "phase": "forward", "step": 1}]}
    assert found({**steps({}), **calls}, {**steps({}), **calls}) == {(0, 1): EVERYTHING}


def test_link_without_a_digest_on_both_sides_is_looked_at_where_it_has_rows() -> None:
    """It has none where there are no rows, and where a row lacks a fingerprint."""
    node = {"root": 0, "module_fqn": "m", "node_name": "A", "step": 1}
    unknown = {"digest_backward": None}
    a: Rows = {**steps(unknown, unknown), "node_events": [node]}
    assert found(a, a) == {(0, 1): frozenset({"node_events"})}
    one_side: Rows = steps(unknown, unknown)
    assert found(one_side, a) == {(0, 1): frozenset({"node_events"})}
    # Where the ends of the parts say that no side has a row of the table, nothing is opened to look.
    assert found(a, a, Counts({})) == {}


def test_parameters_without_a_digest_are_looked_at_at_their_own_point() -> None:
    row = {"root": 0, "parameter_fqn": "w", "point": "after"}
    unknown = {"digest_parameters": None}
    rows: Rows = {**steps(unknown), "parameters": [row]}
    assert found(rows, rows) == {}
    rows = {**steps({"digest_optimizer": None}), "parameters": [row]}
    assert found(rows, rows) == {(0, 0): frozenset({"parameters"})}


def test_value_that_is_in_no_digest_is_compared_in_every_step() -> None:
    def side(loss: float) -> Rows:
        row = {"backward_index": 0, "kind": "backward"}
        return {
            **steps({}, {}),
            "backward_passes": [row | {"loss": 1.0}, row | {"loss": loss, "step": 1}],
        }

    assert found(side(0.5), side(0.25)) == {(0, 1): frozenset({"backward_passes"})}


def test_names_in_a_group_are_compared_in_the_first_step_alone() -> None:
    def side(*names: list[str]) -> Rows:
        row = {"optimizer_index": 0, "group_index": 0}
        groups = [row | {"parameter_fqns": own, "step": n} for n, own in enumerate(names)]
        return {**steps({}, {}), "optimizer_groups": groups}

    assert found(side(["w"], ["w"]), side(["w"], ["v"])) == {}
    assert found(side(["w"], ["w"]), side(["v"], ["v"])) == {
        (0, 0): frozenset({"optimizer_groups"})
    }


def test_several_reasons_are_taken_together() -> None:
    def side(loss: float, forward: int) -> Rows:
        row = {"backward_index": 0, "kind": "backward", "loss": loss}
        return {**steps({"digest_forward": forward}), "backward_passes": [row]}

    assert found(side(0.5, 1), side(0.25, 2)) == {
        (0, 0): frozenset({"backward_passes", "module_calls"})
    }


def test_digests_prove_a_table_only_where_its_values_are_compared_besides() -> None:
    """Whether a parameter asks for a gradient is compared in the steps alone whose digests differ."""
    assert "parameters" not in PROVEN
    assert {"module_calls", "node_events", "gradients", "inputs", "buckets"} == PROVEN

"""What is told beside the origins of a step: their root, and what stayed equal."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.findings.annotations import equal_in_step, with_root
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.sql.pipelines import StagePlace
from support.synthetic_runs.differences import (
    bucket,
    call,
    cover,
    gradient,
    group,
    loss,
    node,
    parameter,
)

ROOTS = {0: "Generator", 1: "Discriminator"}


def origin(d: Difference, **more: Any) -> Origin:
    return Origin(d, (d.rank,), None, None, **more)


@pytest.mark.parametrize(
    ("found", "roots", "name"),
    [
        (origin(call("m", 1, root=1)), ROOTS, "root 1 (Discriminator)"),
        (origin(call("m", 1, root=1)), {0: "A", 1: ""}, "root 1"),
        (origin(call("m", 1, root=1)), {1: "Discriminator"}, None),  # the only one
        (origin(call("m", 1, root=2)), ROOTS, None),  # it was not called
        (origin(call("m", 1, root=1), place=StagePlace(0)), ROOTS, None),  # its stage tells
        (origin(loss(1)), ROOTS, None),
        (origin(group(1)), ROOTS, None),
    ],
)
def test_root_is_named_where_there_are_several(
    found: Origin, roots: dict[int, str], name: str | None
) -> None:
    assert with_root(found, roots).root_name == name


MODULES = {(0, ""), (0, "a"), (0, "a.b"), (0, "a.c"), (0, "d"), (0, "d.e")}


def equal(*differences: Difference, of: Cover | None = None, **more: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "modules": MODULES,
        "roots": {0: "Net"},
        "recorded": set(LINKS) - {"reduced_gradient"},
    }
    known |= more
    return dict(
        equal_in_step(
            differences, of or cover(), known["modules"], known["roots"], known["recorded"]
        )
    )


def test_outermost_modules_without_a_difference_are_named_once() -> None:
    assert equal(call("a.b", 1))["modules"] == ("a.c", "d")
    assert equal()["modules"] == ("the root module",)
    assert equal(call("", 1))["modules"] == ("a", "d")


def test_module_is_touched_by_its_nodes_and_parameters_too() -> None:
    assert equal(node("a", 1))["modules"] == ("a.b", "a.c", "d")
    assert equal(gradient("d.e.weight", 1))["modules"] == ("a",)
    assert equal(parameter("scale", 1))["modules"] == ("a", "d")


def test_what_is_of_no_module_touches_none() -> None:
    assert equal(loss(1), bucket(["a.weight"], 2))["modules"] == ("the root module",)
    assert equal(node(None, 1, root=None))["modules"] == ("the root module",)


def test_modules_of_several_roots_are_told_apart() -> None:
    both = {(0, "a"), (1, "a")}
    assert equal(call("a", 1), modules=both, roots=ROOTS)["modules"] == (
        "a of root 1 (Discriminator)",
    )


def test_links_of_which_no_row_differs_are_equal_if_both_recorded_any() -> None:
    rows = {"parameters": 3, "module_calls": 2, "gradients": 4, "buckets": 0}
    links = equal(call("a", 1), of=cover(rows=rows))["links"]
    assert links == ("parameters", "local_gradient", "clip", "optimizer")
    # Gradients are only those of the points at which both recorded some.
    assert "reduced_gradient" in equal(recorded=LINKS, of=cover(rows=rows))["links"]


def test_links_that_nobody_asked_for_are_not_called_equal() -> None:
    chosen = Selection(links=("parameters", "forward"))
    assert equal(of=cover(selection=chosen))["links"] == ("parameters", "forward")


def test_ranks_without_a_difference_are_told_as_spans() -> None:
    ranks = cover(ranks=(0, 1, 2, 3, 4))
    assert equal(call("a", 1, rank=2), of=ranks)["ranks"] == ("0-1", "3-4")
    assert equal(call("a", 1))["ranks"] == ()

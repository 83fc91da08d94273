"""A graph of what may have come from what: origins, ancestors, scopes."""

from __future__ import annotations

from gradtrace_analyzer.diff.origins.dependency_graph import DependencyGraph
from support.synthetic_runs.differences import call


def graph_of(count: int, feeders: dict[int, set[int]]) -> DependencyGraph:
    graph = DependencyGraph()
    for n in range(count):
        graph.add(call(f"m{n}", n), feeders.get(n, ()))
    return graph


def test_rows_that_nothing_feeds_are_origins() -> None:
    assert graph_of(4, {1: {0}, 3: {1, 2}}).origins() == [0, 2]


def test_vertex_of_a_scope_is_never_an_origin() -> None:
    graph = graph_of(2, {})
    graph.join(0, "forward")
    graph.join(1, "forward")
    assert len(graph.rows) == 3 and graph.rows[2] is None
    assert graph.origins() == [0, 1]


def test_row_can_have_inherited_from_all_that_feeds_it_however_far() -> None:
    # 0 -> 1 -> 3, 2 -> 3, 4 alone.
    graph = graph_of(5, {1: {0}, 3: {1, 2}})
    assert graph.ancestors({0: 0, 2: 1, 4: 2}) == [0b001, 0b001, 0b010, 0b011, 0b100]


def test_rows_that_feed_each_other_share_what_either_inherits() -> None:
    """Ranks that meet in a reduction do; an edge may point to a vertex that came later."""
    graph = graph_of(4, {1: {0, 2}, 2: {1}, 3: {2}})
    graph.feeders[0].add(3)
    assert graph.origins() == []
    assert graph.ancestors({3: 0}) == [1, 1, 1, 1]


def test_later_vertex_feeds_an_earlier_one() -> None:
    graph = graph_of(3, {0: {1}, 1: {2}})
    assert graph.origins() == [2]
    assert graph.ancestors({2: 5}) == [1 << 5] * 3


def test_scope_stands_for_what_has_joined_it_so_far() -> None:
    graph = graph_of(2, {})
    assert graph.so_far(0, "forward") == []
    graph.join(0, 0, "forward")
    first = graph.so_far(0, "forward")
    assert first == [0]  # one row needs no vertex of its own
    graph.join(1, 0, "forward")
    both = graph.so_far(0, "forward")
    assert both != first
    early, late = graph.add(call("early", 8), first), graph.add(call("late", 9), both)
    masks = graph.ancestors({0: 0, 1: 1})
    assert (masks[early], masks[late]) == (0b01, 0b11)


def test_scopes_of_other_names_are_apart() -> None:
    graph = graph_of(1, {})
    graph.join(0, 0, "forward")
    assert graph.so_far(1, "forward") == graph.so_far(0, "nodes") == []

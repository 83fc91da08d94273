"""The independent origins of a step over all ranks, and what inherits from each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origin import FailureOrigin, LossOrigin, Origin, Reached
from gradtrace_analyzer.diff.origins.across_ranks import joined
from gradtrace_analyzer.diff.origins.dataflow import Dataflow
from gradtrace_analyzer.diff.origins.dependency_graph import DependencyGraph
from gradtrace_analyzer.diff.origins.stage_edges import StageEdges
from gradtrace_analyzer.diff.origins.step_facts import StepFacts

# Its place in the answer, its vertex, the origin.
Numbered = tuple[tuple[Any, ...], int, Origin]
# An origin told from the rows of a rank that begin with it.
OriginOf = Callable[[int, list[Difference]], Origin]


class Join(Protocol):
    """Says that two origins are one fault."""

    def __call__(self, origin: Origin, known: Sequence[Origin], /) -> tuple[int, Origin] | None:
        """(which of those that are known an origin is one with, what they are together), or None."""


def independent(
    first_origins: Sequence[Origin],
    rows: Mapping[int, Sequence[Difference]],
    dataflow: Dataflow,
    step_facts: StepFacts,
    origin_of: OriginOf,
    *,
    edges: StageEdges | None = None,
    joins: Sequence[Join] = (),
    exceeding: bool,
) -> tuple[list[Origin], list[Origin]]:
    """(origins, inherited): `first_origins` are each rank's first difference, in the order of the chain.

    A rank's first is inherited where it follows from another rank's; what else differs on a rank without
    following from its first, or from anything, is an origin of its own. `edges` are those of a pipeline, and
    `joins` say which of the origins are one.
    """
    begun = {first.difference.rank: first for first in first_origins}
    chains = {rank: _from_first(first, rows.get(rank, ())) for rank, first in begun.items()}
    failed = {
        rank: first.failure.row["node_name"] is None
        for rank, first in begun.items()
        if isinstance(first, FailureOrigin)
    }
    graph = joined(chains, dataflow, step_facts, failed, edges, exceeding=exceeding)
    found: list[Numbered] = []
    place_in_chain = {id(first): n for n, first in enumerate(first_origins)}
    for v in graph.origins():
        d = graph.rows[v]
        assert d is not None
        first = begun[d.rank]
        if d is chains[d.rank][0]:
            found.append(((0, place_in_chain[id(first)]), v, first))
        else:
            own = chains[d.rank]
            at = next(n for n, row in enumerate(own) if row is d)
            origin = origin_of(d.rank, own[at:])
            others = _others(graph, v)
            found.append(((1, v), v, replace(origin, other_count=others)))
    found.sort(key=lambda entry: entry[0])
    found = _joined(found, graph, joins)
    merged, numbers = _merged(found)
    if not merged:
        return list(first_origins), []
    origins = _with_inherited_counts(merged, graph, graph.ancestors(numbers))
    own_ranks = {rank for origin in origins for rank in origin.ranks}
    return origins, [first for first in first_origins if first.difference.rank not in own_ranks]


def _joined(
    found: Sequence[Numbered], graph: DependencyGraph, joins: Sequence[Join]
) -> list[Numbered]:
    """The origins, without those that are one with another: what such a one has fed follows from that."""
    kept: list[Numbered] = []
    for place, v, origin in found:
        known = [other for _, _, other in kept]
        one = next(filter(None, (join(origin, known) for join in joins)), None)
        if one is None:
            kept.append((place, v, origin))
            continue
        n, together = one
        graph.feeders[v].add(kept[n][1])
        kept[n] = (*kept[n][:2], together)
    return kept


def _from_first(first: Origin, own: Sequence[Difference]) -> list[Difference]:
    """A rank's rows with its first in front; what lies before it is left out where that cannot be its cause."""
    at = next((n for n, row in enumerate(own) if row is first.difference), None)
    if at is None:
        key = (first.difference.table, dict(first.difference.key))
        at = next((n for n, row in enumerate(own) if (row.table, dict(row.key)) == key), None)
    if at is None:
        return [first.difference, *own]
    before = [] if first.aside is not None else own[:at]
    return [own[at], *before, *own[at + 1 :]]


def _others(graph: DependencyGraph, v: int) -> int:
    """How many rows of the same kind follow this one alone: one cause changes many of them."""
    row = graph.rows[v]
    return sum(
        1
        for other, feeders in zip(graph.rows, graph.feeders, strict=True)
        if feeders == {v}
        and other is not None
        and other is not row
        and row is not None
        and (other.table, other.link) == (row.table, row.link)
        and row.table in ("parameters", "gradients", "buckets", "inputs")
    )


def same_place_merged(origins: Sequence[Origin]) -> list[Origin]:
    """The same place on several ranks is one origin."""
    return _merged([((n,), n, origin) for n, origin in enumerate(origins)])[0]


def _merged(
    found: Sequence[Numbered],
) -> tuple[list[Origin], dict[int, int]]:
    """The same place on several ranks, or in several passes, is one origin: they, and the number of each vertex."""
    numbers: dict[int, int] = {}
    place_numbers: dict[tuple[Any, ...], int] = {}
    origins: list[Origin] = []
    for _, v, origin in found:
        place = _place(origin)
        number = place_numbers.setdefault(place, len(origins))
        numbers[v] = number
        if number == len(origins):
            origins.append(origin)
            continue
        known = origins[number]
        if origin.difference.rank in known.ranks:
            origins[number] = replace(known, repeat_count=known.repeat_count + 1)
        else:
            origins[number] = replace(known, ranks=(*known.ranks, *origin.ranks))
    return origins, numbers


def _place(origin: Origin) -> tuple[Any, ...]:
    d = origin.difference
    scale = None
    if isinstance(origin, LossOrigin) and origin.factor is not None:
        scale = f"{origin.factor:.3g}"
    passing = () if isinstance(origin, FailureOrigin) else ("microbatch", "backward_index")
    key = (str(d.key[k]) for k in sorted(d.key) if k not in passing)
    return (origin.link, d.table, origin.between, scale, *key)


def _with_inherited_counts(
    origins: Sequence[Origin], graph: DependencyGraph, ancestors: Sequence[int]
) -> list[Origin]:
    """The origins, each with the rows that inherit from it, and where it reached each other rank first."""
    inherited_counts: list[dict[str, tuple[int, int]]] = [{} for _ in origins]
    reached: list[dict[int, Reached]] = [{} for _ in origins]
    masks: dict[int, int] = {}
    rows: dict[int, Difference] = {}
    for row, mask in zip(graph.rows, ancestors, strict=True):
        if row is not None:
            rows.setdefault(id(row), row)
            masks[id(row)] = masks.get(id(row), 0) | mask
    for key, row in rows.items():
        mask = masks[key]
        for number in _numbers_in(mask):
            alone, shared = inherited_counts[number].get(row.link, (0, 0))
            if mask == 1 << number:
                alone += 1
            else:
                shared += 1
            inherited_counts[number][row.link] = (alone, shared)
            if row.rank not in origins[number].ranks:
                reached[number].setdefault(row.rank, Reached.by(row))
    return [
        replace(
            origin,
            inherited_counts=inherited_counts[n],
            reached=tuple(reached[n][r] for r in sorted(reached[n])),
        )
        for n, origin in enumerate(origins)
    ]


def _numbers_in(mask: int) -> list[int]:
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found

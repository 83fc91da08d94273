"""What lies around the origins of a step: its root's name, and all that stayed equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.links import LINK_TABLES, LINKS
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.origins.rank_rows import enclosing
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.words.numbers import spans

_Kind = TypeVar("_Kind", bound=Origin)


def with_root(origin: _Kind, roots: Mapping[int, str]) -> _Kind:
    """The origin with its root module's number and class, where there are several and no stage tells them apart."""
    root = origin.difference.key.get("root")
    if root is None or origin.place is not None or len(roots) < 2 or root not in roots:
        return origin
    return replace(origin, root_name=root_name(root, roots))


def root_name(root: int, roots: Mapping[int, str]) -> str:
    """`root 1 (Discriminator)`."""
    return f"root {root} ({roots[root]})" if roots.get(root) else f"root {root}"


def equal_in_step(
    differences: Sequence[Difference],
    cover: Cover,
    modules: Collection[tuple[int, str]],
    roots: Mapping[int, str],
    recorded: Collection[str],
) -> dict[str, tuple[str, ...]]:
    """What has no row that differs: ranks, links on all ranks, and modules with all that is in them on all ranks.

    `recorded` are the links of which both sides hold values in the step.
    """
    apart = {d.link for d in differences}
    # A gradient that is carried into a step is the step before's.
    links = {
        table.link_at(point)
        for table in LINK_TABLES
        if cover.rows.get(table.table)
        for point in table.each_point
    } & set(recorded) - {"carried_gradient"}
    touched = {place for d in differences for place in _modules_of(d)}
    # Of a module without values nothing is known.
    seen = modules if "forward" in recorded else ()
    untouched = {place for place in seen if place not in touched}
    outermost = [
        (root, fqn)
        for root, fqn in sorted(untouched)
        if not any((root, around) in untouched for around in enclosing(fqn)[1:])
    ]
    ranks = sorted(set(cover.ranks) - {d.rank for d in differences}) if links else []
    return {
        "ranks": tuple(spans(ranks).split(",")) if ranks else (),
        "links": tuple(
            link for link in LINKS if link in links - apart and cover.selection.wants_link(link)
        ),
        "modules": tuple(
            (fqn or "the root module") + (f" of {root_name(root, roots)}" if len(roots) > 1 else "")
            for root, fqn in outermost
        ),
    }


def _modules_of(d: Difference) -> set[tuple[int, str]]:
    """The modules that a difference lies in: its own and those around it.

    A bucket's parameters have rows of their own.
    """
    root, fqn, name = (d.key.get(k) for k in ("root", "module_fqn", "parameter_fqn"))
    if root is None or d.table == "buckets":
        return set()
    owners = [] if name is None else [str(name).rpartition(".")[0]]
    owners += [] if fqn is None else [fqn]
    return {(root, around) for owner in owners for around in enclosing(owner)}

"""A parameter that other code than the optimizer changed between the step's first forward and its end.

The optimizer left it elsewhere than its gradient says, and a Node of its module gave another gradient before: the two
are one, the parameter was changed in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.diff.origin import NodeOrigin, Origin


@dataclass(frozen=True)
class RewrittenParameters(Explanation):
    """For each origin in its place, the parameter that was changed; None of one without."""

    of_origins: tuple[str | None, ...]


def rewritten(origin: Origin, known: Sequence[Origin], /) -> tuple[int, Origin] | None:
    """The Node's origin that a parameter's, after the optimizer, is one with: it names the parameter then."""
    d = origin.difference
    if origin.link != "optimizer" or d.table != "parameters":
        return None
    name = str(d.key.get("parameter_fqn") or "")
    place = (d.rank, d.key["root"], name.rpartition(".")[0])
    for n, other in enumerate(known):
        key = other.difference.key
        if isinstance(other, NodeOrigin) and place == (
            other.difference.rank,
            key["root"],
            other.module_fqn,
        ):
            return n, replace(other, rewritten=name)
    return None


def _explain(context: Context) -> RewrittenParameters | None:
    names = tuple(o.rewritten if isinstance(o, NodeOrigin) else None for o in context.origins)
    return RewrittenParameters(names) if any(names) else None


EXPLAINER = Explainer(RewrittenParameters, _explain, links=frozenset({"backward"}), joins=rewritten)

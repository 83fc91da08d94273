"""All plug-ins that explain origins, in the order in which they are asked and told."""

from __future__ import annotations

from gradtrace_analyzer.diff.explanations import (
    ends,
    factor_causes,
    later_ranks,
    replays,
    rerun_nodes,
    rewritten_parameter,
    skipped_batches,
)
from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.origins.independent import Join

EXPLAINERS: tuple[Explainer, ...] = (
    later_ranks.EXPLAINER,
    replays.EXPLAINER,
    rewritten_parameter.EXPLAINER,
    ends.EXPLAINER,
    factor_causes.EXPLAINER,
    rerun_nodes.EXPLAINER,
    skipped_batches.EXPLAINER,
)


def joins() -> tuple[Join, ...]:
    """What says of origins that they are one."""
    return tuple(explainer.joins for explainer in EXPLAINERS if explainer.joins is not None)


def explanations(context: Context) -> tuple[tuple[Origin, ...], tuple[Explanation, ...]]:
    """(the origins with what is told of each, all that was found, in the registry's order)."""
    origins, found = context.origins, []
    for explainer in EXPLAINERS:
        one = explainer.explain(context) if explainer.is_asked(context) else None
        if one is not None:
            origins = one.onto(origins)
            found.append(one)
    return origins, tuple(found)

"""A parameter that was rewritten after the forward, and the Node that saw it, are one origin."""

from __future__ import annotations

import pytest

from gradtrace_analyzer.diff.explanations.rewritten_parameter import (
    EXPLAINER,
    RewrittenParameters,
    rewritten,
)
from gradtrace_analyzer.diff.origin import (
    ArrivingOrigin,
    ForwardOrigin,
    NodeOrigin,
    Origin,
    ParametersOrigin,
    UpdateOrigin,
)
from support.synthetic_runs.differences import call, context, node, parameter

UPDATED = UpdateOrigin(parameter("m.w", 9, "after"), (0,), "m")
SAW = NodeOrigin(node("m", 1), (0,), "m")


def test_node_of_its_module_saw_the_parameter() -> None:
    one = rewritten(UPDATED, [ForwardOrigin(call("m", 0), (0,), "m"), SAW])
    assert one is not None
    n, together = one
    assert n == 1 and isinstance(together, NodeOrigin) and together.rewritten == "m.w"
    assert EXPLAINER.explain(context(together)) == RewrittenParameters(("m.w",))
    assert EXPLAINER.explain(context(SAW)) is None


@pytest.mark.parametrize(
    "known",
    [
        NodeOrigin(node("other", 1), (0,), "other"),
        NodeOrigin(node("m", 1, root=1), (0,), "m"),
        NodeOrigin(node("m", 1, rank=1), (1,), "m"),
        ArrivingOrigin(node("m", 1), (0,), "m"),
        ForwardOrigin(call("m", 1), (0,), "m"),  # a forward may change statistics
    ],
)
def test_parameter_that_no_node_of_its_module_saw_is_an_origin_of_its_own(known: Origin) -> None:
    assert rewritten(UPDATED, [known]) is None


def test_parameter_before_the_forward_was_not_rewritten_after_it() -> None:
    assert rewritten(ParametersOrigin(parameter("m.w", 0), (0,), "m"), [SAW]) is None

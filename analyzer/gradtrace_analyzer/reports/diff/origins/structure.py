"""Origins of which one side has no row: changed code, a lone row, another kind of pass, a pass that failed."""

from __future__ import annotations

from gradtrace_analyzer.diff.origin import (
    CodeOrigin,
    FailureOrigin,
    LoneRowOrigin,
    Origin,
    PassKindOrigin,
    UnseenGradientOrigin,
)
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.reports.diff.origins.clause import clause
from gradtrace_analyzer.reports.diff.places import (
    module_of,
    node_phrase,
    parameter_of,
    row_name,
    size_phrase,
)
from gradtrace_analyzer.reports.diff.structure import code_phrase
from gradtrace_analyzer.reports.diff.wording import Wording
from gradtrace_analyzer.words.nouns import other_side

_PASS = {"grad": "autograd.grad(), which accumulates nothing,", "backward": "backward()"}


@clause.register
def code(origin: CodeOrigin, say: Wording) -> str:
    """Which code was changed, and the first row that differs by it."""
    said = f"the code is another: {code_phrase(origin.code)}."
    d = origin.follower
    if d is None:
        return said
    place, size = _follower(origin), size_phrase(origin)
    if d.table == "parameters" and d.step == 0:
        return (
            f"{said} {place} {size}, as parameters do that are drawn after another number of random values; what "
            "differs from there on follows."
        )
    return (
        f"{said} What differs follows from it, first {place}, which {size}; all that differs reads something that "
        "differs already, so no other cause can be told."
    )


def _follower(origin: CodeOrigin) -> str:
    """The first difference that follows from changed code, in words."""
    d = origin.follower
    if d is None:
        return "nothing"
    row = Origin(d, origin.ranks, d.key.get("module_fqn"), root_name=origin.root_name)
    reads = d.reads is not None and d.reads.differs
    if d.table == "backward_passes":
        return "the loss"
    if d.table == "module_calls":
        return f"what {module_of(row, row.module_fqn)} {'receives' if reads else 'returns'}"
    if d.table == "node_events":
        return f"the gradient {'arriving at' if reads else 'leaving'} {node_phrase(row)}"
    return row_name(row)


@clause.register
def pass_kind(origin: PassKindOrigin, say: Wording) -> str:
    """Which pass is of another kind."""
    d = origin.difference
    a, b = (_PASS.get(v, v) for v in d.values["kind"])
    return (
        f"backward pass {d.key['backward_index']} is {b} in the candidate and {a} in the baseline; all that was "
        f"recorded before it is {say.equal}."
    )


@clause.register
def unseen_gradient(origin: UnseenGradientOrigin, say: Wording) -> str:
    """That the optimizer saw a gradient on one side alone; or that on the other nothing tells what it saw."""
    other = other_side(str(origin.difference.only_in))
    if "final" not in origin.rests_on:
        return (
            f"what the optimizer saw was not recorded in the {other}, that of {parameter_of(origin)} was in the "
            f"{origin.difference.only_in}."
        )
    return (
        f"the optimizer saw no gradient of {parameter_of(origin)} in the {other}: it had none when the "
        f"optimizer stepped, or is in no group of it. All that was recorded before it is {say.equal}."
    )


@clause.register
def lone_row(origin: LoneRowOrigin, say: Wording) -> str:
    """Which row one side alone has."""
    alone = f"{row_name(origin)} is in the {origin.difference.only_in} alone"
    return f"{alone}; all that was recorded before it is {say.equal}."


@clause.register
def failure(origin: FailureOrigin, say: Wording) -> str:
    """Which pass failed."""
    return failure_clause(origin.failure)


def failure_clause(failure: OneSidedFailure) -> str:
    """Which pass failed where, why, and what it had reached: a sentence without its place in front."""
    return f"the {failure.side}'s backward pass {failure.backward_index} failed {failure.told}"

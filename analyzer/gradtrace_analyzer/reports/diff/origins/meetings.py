"""Origins where ranks meet: in a bucket's reduction, and in what stages of a pipeline hand to each other."""

from __future__ import annotations

from gradtrace_analyzer.diff.origin import (
    BucketInputOrigin,
    BucketOrigin,
    BucketSettingsOrigin,
    Origin,
    ReceivedOrigin,
    SentOrigin,
    SyncOrigin,
)
from gradtrace_analyzer.reports.diff.grounds import if_known, unless_known
from gradtrace_analyzer.reports.diff.origins.clause import clause
from gradtrace_analyzer.reports.diff.places import bucket_of, size_phrase
from gradtrace_analyzer.reports.diff.wording import Wording

_SYNC = {"sync": "reduces", "no_sync": "does not reduce (no_sync)"}


@clause.register
def sync(origin: SyncOrigin, say: Wording) -> str:
    """Which pass reduces on one side alone."""
    d = origin.difference
    a, b = (_SYNC.get(v, f"is {v}") for v in d.values["ddp_sync"])
    return (
        f"backward pass {d.key['backward_index']} {b} in the candidate and {a} in the baseline; "
        f"all that was recorded before it is {say.equal}."
    )


@clause.register
def bucket_settings(origin: BucketSettingsOrigin, say: Wording) -> str:
    """What of the reduction is another."""
    changed = (f"{name} is {b} instead of {a}" for name, (a, b) in origin.difference.values.items())
    return f"{bucket_of(origin)} is reduced otherwise: {'; '.join(changed)}."


@clause.register
def bucket_input(origin: BucketInputOrigin, say: Wording) -> str:
    """That something changed it between the backward pass and the reduction."""
    equal = if_known(origin, "local", f", although the local gradients are {say.equal}")
    return (
        f"{bucket_of(origin)} {size_phrase(origin)} as it goes into its reduction{equal}: something changed them, or "
        "what .grad held, in between."
    )


@clause.register
def bucket_output(origin: BucketOrigin, say: Wording) -> str:
    """That it is the reduction, where what was put in is known to be equal."""
    equal = if_known(origin, "reads", f", although what every rank put in is {say.equal}")
    return (
        f"{bucket_of(origin)} {size_phrase(origin)} as it comes out of its reduction{equal}: the reduction"
        f"{unless_known(origin, 'reads', ', or what was put into it,')} is where they part."
    )


@clause.register
def sent(origin: SentOrigin, say: Wording) -> str:
    """That a stage made something else of what it received."""
    equal = if_known(origin, "reads", f", although what it received is {say.equal}")
    what = f"what the stage makes for its neighbour (the {_handed(origin)})"
    return f"{what} {size_phrase(origin)}{equal}."


@clause.register
def received(origin: ReceivedOrigin, say: Wording) -> str:
    """That it is the way between two stages, where what the other made is known."""
    sender, of_rank = "its neighbour", ""
    if origin.source is not None:
        sender, of_rank = f"stage {origin.source[1]}", f" (rank {origin.source[0]})"
    handed = _handed(origin)
    size = size_phrase(origin, are_many=handed == "activations")
    said = f"the {handed} that it received from {sender}{of_rank} {size}"
    if "sender" not in origin.rests_on:
        return f"{said}; what {sender} made was not recorded on both sides."
    return f"{said}, although {sender} made the same: the sending, the way or the receiving is where they part."


def _handed(origin: Origin) -> str:
    return "activations" if origin.difference.key["kind"] == "forward" else "gradient"

"""Origins in the gradients of parameters, from what they accumulate to what the optimizer sees, and in its step."""

from __future__ import annotations

from gradtrace_analyzer.diff.origin import (
    CarriedGradientOrigin,
    ClipOrigin,
    LocalGradientOrigin,
    OptimizerSettingsOrigin,
    ReducedGradientOrigin,
    UpdateOrigin,
)
from gradtrace_analyzer.reports.diff.grounds import (
    if_known,
    nodes_equal,
    unless_known,
    update_equal,
    update_unknown,
)
from gradtrace_analyzer.reports.diff.origins.clause import clause
from gradtrace_analyzer.reports.diff.places import (
    and_others,
    parameter_of,
    place_of,
    settings_phrase,
    size_phrase,
)
from gradtrace_analyzer.reports.diff.wording import Wording


@clause.register
def carried(origin: CarriedGradientOrigin, say: Wording) -> str:
    """What the step begins with in `.grad`."""
    d, who = origin.difference, f"{parameter_of(origin)}{and_others(origin)}"
    if d.only_in is not None:
        return f"{who} begins the step with a gradient left in .grad, in the {d.only_in} alone."
    return (
        f"{who} begins the step with another .grad: it {size_phrase(origin)} before the first "
        "backward pass."
    )


@clause.register
def local(origin: LocalGradientOrigin, say: Wording) -> str:
    """What changed it: between two microbatches, between two passes, or a hook on the parameter."""
    index, in_pass, others = origin.difference.key["backward_index"], "", ""
    why = "a hook on the parameter changed it"
    name = parameter_of(origin)
    if origin.place is not None:
        name = str(origin.parameter_fqn)
        why = "something changed .grad since the microbatch before, or what came was not added as it is"
    elif index:
        in_pass, others = f" in backward pass {index}", and_others(origin)
        why = (
            f".grad was changed or cleared between passes {index - 1} and {index}, or a hook on the parameter "
            "changed what came"
        )
    return (
        f"the gradient accumulated for {name}{others}{in_pass} {size_phrase(origin)}{nodes_equal(origin, say)}: "
        f"{why}."
    )


@clause.register
def reduced(origin: ReducedGradientOrigin, say: Wording) -> str:
    """That it is the reduction, where what went into it is known to be equal."""
    equal = if_known(
        origin, "local", f", although the local gradients are {say.equal} on all ranks"
    )
    return (
        f"the reduced gradient of {parameter_of(origin)}{and_others(origin)} {size_phrase(origin)}{equal}: the "
        f"reduction{unless_known(origin, 'local', ', or what went into it,')} is where they part."
    )


@clause.register
def seen_by_optimizer(origin: ClipOrigin, say: Wording) -> str:
    """That it is code between `backward()` and the optimizer, or, of sums over the parts, what these do not show."""
    said = (
        f"the gradient of {parameter_of(origin)}{and_others(origin)} that the optimizer saw "
        f"{size_phrase(origin)}"
    )
    if origin.change is not None and origin.change.shown_by == "sums":
        return (
            f"{said}, although what was compared of the step before it, sums over the parts, is {say.equal} (they do "
            "not show what permutes rows, nor where a gradient that adds up to nothing turns)."
        )
    known = f", although it was {say.equal} after the backward pass"
    return (
        f"{said}{if_known(origin, 'after backward', known)}: "
        f"{unless_known(origin, 'after backward', 'the backward pass, or ')}code between backward() and the "
        "optimizer's step (clipping, unscaling) is where they part."
    )


@clause.register
def settings(origin: OptimizerSettingsOrigin, say: Wording) -> str:
    """Which group, and which of its settings."""
    return f"{place_of(origin)} {settings_phrase(origin)}."


@clause.register
def update(origin: UpdateOrigin, say: Wording) -> str:
    """That it is the optimizer, as far as what it read is known to be equal."""
    equal, unknown = update_equal(origin, say), update_unknown(origin)
    return (
        f"{parameter_of(origin)}{and_others(origin)} {size_phrase(origin)} after the optimizer's step"
        f"{f', {equal}' if equal else ''}{unknown}: {'these, ' if unknown else ''}the optimizer, its state, or code "
        "that changed it in between is where they part."
    )

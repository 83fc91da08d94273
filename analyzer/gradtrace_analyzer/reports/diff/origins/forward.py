"""Origins in what a step begins with, and in its forward."""

from __future__ import annotations

from gradtrace_analyzer.diff.origin import (
    CallInputOrigin,
    ForwardOrigin,
    FrozenOrigin,
    InputsOrigin,
    LossOrigin,
    Origin,
    ParametersOrigin,
    RngOrigin,
)
from gradtrace_analyzer.reports.diff.grounds import call_equal, if_known
from gradtrace_analyzer.reports.diff.origins.clause import clause, factor_end
from gradtrace_analyzer.reports.diff.places import and_others, module_of, parameter_of, size_phrase
from gradtrace_analyzer.reports.diff.wording import Wording
from gradtrace_analyzer.words.numbers import number


@clause.register
def frozen(origin: FrozenOrigin, say: Wording) -> str:
    """That a parameter asks for gradients on one side alone, and on which it is frozen."""
    side = "baseline" if origin.difference.values["requires_grad"][0] is False else "candidate"
    verb = "are" if origin.other_count else "is"
    also = "" if origin.change is None or not origin.change.differs else " Its value differs too."
    return (
        f"{parameter_of(origin)}{and_others(origin)} {verb} frozen in the {side}: requires_grad is False there and "
        f"True on the other side.{also}"
    )


@clause.register
def parameters(origin: ParametersOrigin, say: Wording) -> str:
    """Whether it changed since the step before, or differs from the start."""
    since = if_known(origin, "left", "changed since the step before: it ")
    what = since if origin.step else "differs from the start: it "
    unknown = "; what the step before left was not recorded on both sides" if not what else ""
    return (
        f"{parameter_of(origin)}{and_others(origin)} {what}{size_phrase(origin)} before the step's first "
        f"forward{unknown}."
    )


@clause.register
def inputs(origin: InputsOrigin, say: Wording) -> str:
    """Which of the arguments of the root module."""
    return f"the input {origin.difference.key['name']!r}{and_others(origin)} {size_phrase(origin)}."


@clause.register
def rng(origin: RngOrigin, say: Wording) -> str:
    """Which call is the first to show it."""
    return (
        "the random generator stands elsewhere when the step begins, for the first time; "
        f"{_called(origin)} is the first to show it: what it {'receives' if origin.receives else 'returns'} "
        f"{size_phrase(origin)}."
    )


@clause.register
def call_input(origin: CallInputOrigin, say: Wording) -> str:
    """Which module's own code lies in front of the call."""
    equal = if_known(
        origin, "outputs", f", although the outputs of all modules before it are {say.equal}"
    )
    return (
        f"what {_called(origin)} receives{_in_microbatch(origin)} {size_phrase(origin)}{equal}: "
        f"the code of {module_of(origin, origin.module_fqn)} in front of it is where they part."
    )


@clause.register
def output(origin: ForwardOrigin, say: Wording) -> str:
    """Which of the module's inputs and parameters are known to be equal."""
    is_again = origin.difference.key.get("phase") == "recompute"
    again = ", recomputed in the backward pass," if is_again else ""
    return (
        f"the output of {module_of(origin, origin.module_fqn)}{_in_microbatch(origin)}{again} {size_phrase(origin)}"
        f"{call_equal(origin, say)}."
    )


@clause.register
def loss(origin: LossOrigin, say: Wording) -> str:
    """The loss on both sides, and whether what it is made of is known to be equal."""
    a, b = origin.difference.values.get("loss", (None, None))
    scaled = ""
    if origin.factor is not None:
        scaled = f", and the gradient that leaves it is {origin.factor:.4g} times the baseline's"
    on_which = " that it depends on" if origin.aside is not None else ""
    equal = f", although the outputs of all modules{on_which} are {say.equal}: "
    before = ""
    if "outputs" not in origin.rests_on:
        equal, before = (
            ": what modules gave was not recorded on both sides, so ",
            " or what came before",
        )
    return (
        f"the loss is {number(b)} instead of {number(a)}{scaled}{equal}the code between the model and "
        f"backward(){before} is where they part.{factor_end(origin, origin.rescaled)}"
    )


def _called(origin: Origin) -> str:
    return module_of(origin, origin.difference.key["module_fqn"])


def _in_microbatch(origin: Origin) -> str:
    """` in microbatch 2`, of a call that is not of the step's first; where a stage is named, it names that too."""
    number = origin.difference.key.get("microbatch")
    return f" in microbatch {number}" if number and origin.place is None else ""

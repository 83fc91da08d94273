"""A place at which a value is not finite, and how its birth is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradtrace_analyzer.numerics.hook_promises import FLOAT16_LARGEST, hook_phrase, promise_of
from gradtrace_analyzer.sql.pipelines import StagePlace
from gradtrace_analyzer.words.nouns import module_phrase
from gradtrace_analyzer.words.numbers import ranks_phrase

_WORDS = {"inf": "infinity", "nan": "NaN"}


@dataclass(frozen=True)
class Birthplace:
    """A row that holds values which are not finite. `source` is the kind of row; counts are of elements that came in
    and went out; `order` is its place in program order, which late rows have not in `record_index`. A module may have
    read its own `infinite_parameter`; it may lie in a pipeline's `stage`. `is_fed` says that what came before it was
    recorded: finite, or it would be the place."""

    source: str
    rank: int
    step: int
    record_index: int
    microbatch: int | None
    backward_index: int | None
    root: int | None
    module_fqn: str | None
    node_name: str | None
    parameter_fqn: str | None
    bucket_index: int | None
    hook_name: str | None
    event_index: int | None
    name: str | None
    in_nan: int
    in_inf: int
    out_nan: int
    out_inf: int
    order: float = 0.0
    infinite_parameter: str | None = None
    stage: StagePlace | None = None
    is_fed: bool = True

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes it the same place on another rank."""
        arrived = (self.in_nan > 0, self.in_inf > 0)
        return (
            self.source,
            self.microbatch,
            self.backward_index,
            self.root,
            self.module_fqn,
            self.node_name,
            self.parameter_fqn,
            self.bucket_index,
            self.name,
            arrived,
        )

    def arrived(self, kind: str) -> bool:
        """Whether it was there already in what came in."""
        return (self.in_nan if kind == "nan" else self.in_inf) > 0

    def count(self, kind: str) -> int:
        """How many elements went out so, or, where it had arrived, came in."""
        counts = (self.out_nan, self.in_nan) if kind == "nan" else (self.out_inf, self.in_inf)
        return counts[0] or counts[1]


def birth_sentence(
    kind: str, place: Birthplace, ranks: Sequence[int], largest_sum: float | None
) -> str:
    """Where and how the first value of its kind came to be. `largest_sum`: the ranks' largest magnitudes, added up."""
    word = _WORDS[kind]
    where = f" ({place.stage.said})" if place.stage is not None else ""
    start = f"Step {place.step}, {ranks_phrase(ranks)}{where}: the first {word} "
    if place.source in ("module", "node", "bucket") and place.arrived(kind):
        return start + _arrives(place, word)
    made_of = ""
    if kind == "nan" and place.in_inf:
        made_of = " out of the infinity that came in"
    elif kind == "nan" and place.infinite_parameter is not None:
        made_of = f" out of the infinity in parameter {place.infinite_parameter}"
    return start + _born(place, made_of, largest_sum)


def _arrives(place: Birthplace, word: str) -> str:
    if place.source == "module":
        what = f"arrives at {module_phrase(place.module_fqn)}"
    elif place.source == "node":
        what = f"arrives at {_node(place)}"
    else:
        what = f"arrives in bucket {place.bucket_index}"
    return f"{what}: the {word} was born in front of it, in code that was not recorded."


# Of places of which it is not known what came before: where they are, and what that was.
_UNFED = {
    "reduced": ("{gradient}", "the local gradients were"),
    "final": ("{gradient}", "what the backward pass left was"),
    "after": ("parameter {name} after the optimizer's step", "its gradient was"),
}


def _born(place: Birthplace, made_of: str, largest_sum: float | None) -> str:
    if place.source == "before":
        when = ", although it was finite after the last step"
        if place.step == 0:
            when = ": it is there from the start"
        elif not place.is_fed:
            when = "; what the last step left was not recorded"
        return f"is in parameter {place.parameter_fqn} before the forward pass{when}."
    if place.source == "input":
        return f"came in with the data: input {place.name!r}."
    if place.source == "module":
        fed = "whose input is finite" if place.is_fed else "whose input was not recorded"
        finite = "" if made_of else f", {fed}"
        return f"is born in {module_phrase(place.module_fqn)}{made_of}{finite}."
    if place.source == "loss":
        if not place.is_fed:
            return "is the loss itself; what the modules gave was not recorded."
        return "is the loss itself: the modules' outputs are finite, so it is born in the loss's own code."
    if place.source == "node":
        fed = "is finite" if place.is_fed else "was not recorded"
        finite = "" if made_of else f", whose incoming gradient {fed}"
        return f"is born in {_node(place)}{made_of}{finite}."
    if place.source == "bucket":
        return _in_reduction(place, largest_sum)
    gradient = f"the {place.source} gradient of {place.parameter_fqn}"
    if place.source == "local":
        return f"is in {gradient}: it is born where the gradient is accumulated."
    if not place.is_fed:
        where, fed = _UNFED.get(place.source, _UNFED["after"])
        return f"is in {where.format(gradient=gradient, name=place.parameter_fqn)}; {fed} not recorded."
    if place.source == "reduced":
        return f"is in {gradient}, although the local gradients are finite: it is born in the reduction."
    if place.source == "final":
        return (
            f"is in {gradient}, although it was finite after the backward pass: it is born between backward() and the "
            "optimizer's step (unscaling, clipping)."
        )
    return (
        f"is in parameter {place.parameter_fqn} after the optimizer's step, although its gradient is finite: it is "
        "born in the optimizer."
    )


def _in_reduction(place: Birthplace, largest_sum: float | None) -> str:
    if not place.is_fed:
        return (
            f"is in what came out of the reduction of bucket {place.bucket_index}; what the ranks put in was not "
            "recorded."
        )
    said = (
        f"is born in the reduction of bucket {place.bucket_index} by {hook_phrase(place.hook_name)}: "
        "the ranks' buckets are finite, what came out is not"
    )
    if promise_of(place.hook_name).wire == "float16" and largest_sum is not None:
        return f"{said} (largest magnitudes add up to {largest_sum:.6g}, float16 holds up to {FLOAT16_LARGEST:.0f})."
    return f"{said}."


def _node(place: Birthplace) -> str:
    owner = place.parameter_fqn or module_phrase(place.module_fqn)
    return f"{place.node_name} of {owner}"

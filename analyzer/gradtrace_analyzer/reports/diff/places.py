"""Where an origin is and how large, in words: the parts that its sentences are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from gradtrace_analyzer.diff.difference import LENGTHS, Change, settings_apart
from gradtrace_analyzer.diff.origin import (
    CallInputOrigin,
    CodeOrigin,
    FailureOrigin,
    ForwardOrigin,
    FrozenOrigin,
    GradientsOrigin,
    InputsOrigin,
    LossOrigin,
    OptimizerSettingsOrigin,
    Origin,
    RngOrigin,
)
from gradtrace_analyzer.diff.pairing.whereabouts import whereabouts
from gradtrace_analyzer.words.nouns import bucket_name, listed, module_phrase
from gradtrace_analyzer.words.numbers import number


def bucket_of(origin: Origin) -> str:
    """The origin's bucket: `bucket 0 (head.weight and 5 more)`; `?` where its parameters are not known."""
    names = [str(name) for name in origin.difference.key.get("parameter_fqns") or ()]
    return bucket_name(origin.difference.bucket_index, listed(names) or "?")


@dataclass(frozen=True)
class _Verbs:
    """Of one thing, or of several."""

    differs: str = "differs"
    it_is: str = "it is"


_OF_ONE, _OF_MANY = _Verbs(), _Verbs("differ", "they are")


def size_phrase(origin: Origin, *, are_many: bool = False) -> str:
    """`differs by 1.0e-02 (1.01 times the baseline)`, or what became of finite numbers; `are_many`: `differ by`."""
    change, verbs = origin.change, _OF_MANY if are_many else _OF_ONE
    if change is None or change.baseline is None or change.candidate is None:
        return _size_of_one(origin, verbs)
    return (
        _nonfinite_phrase(change.baseline, change.candidate)
        or _elements_phrase(change.baseline, change.candidate)
        or _distance(origin, change, verbs) + _dtypes_phrase(change)
    )


def _nonfinite_phrase(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """`has 3 of 8 elements NaN where the baseline has 0`, where such a count is another."""
    for count, what in (("nan_count", "NaN"), ("inf_count", "infinite")):
        a, b = before[count] or 0, after[count] or 0
        if a != b:
            return f"has {b:,} of {after['numel']:,} elements {what} where the baseline has {a:,}"
    return ""


def _elements_phrase(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """That all became zero, or that there are more or fewer elements."""
    if after["norm"] == 0 and before["norm"]:
        return "is all zero"
    a, b = before["numel"], after["numel"]
    return f"has {b} elements instead of {a}" if a != b and None not in (a, b) else ""


def _distance(origin: Origin, change: Change, verbs: _Verbs) -> str:
    """How far both sides lie apart, and in which way."""
    assert change.baseline is not None and change.candidate is not None
    factor = change.factor
    if factor is not None and abs(factor + 1) < 1e-3:
        return "has its sign flipped"
    if factor is not None:
        times = f"{factor:.4g}" if abs(factor - 1) > 1e-3 else f"{factor:.8g}"
        by = f"{abs(factor - 1):.1e}"
        return f"{verbs.differs} by {by} ({verbs.it_is} {times} times the baseline's)"
    if change.error is None:
        return verbs.differs
    if change.error == 0:
        return f"{verbs.differs} in bits that its norm, sum and sketch do not show"
    ratio: float = change.candidate["norm"] / (change.baseline["norm"] or 1.0)
    if change.shown_by in LENGTHS:
        longer = ratio / _ratio(origin.difference.reads)
        if abs(longer - 1) < 1e-3:
            return f"{verbs.differs} by {change.error:.1e}"
        return f"has {longer:.4g} times the baseline's norm, given what comes in"
    larger = f" (its norm is {ratio:.3g} times the baseline's)" if ratio > 3 else ""
    return f"{verbs.differs} by {change.error:.1e}{larger}"


def _ratio(change: Change | None) -> float:
    """How many times the baseline's the candidate's norm is; 1 where that cannot be said."""
    sides = (change.candidate, change.baseline) if change is not None else (None, None)
    after, before = ((side or {}).get("norm") or 0.0 for side in sides)
    return float(after / before) if after and before else 1.0


def _dtypes_phrase(change: Change) -> str:
    """` (bfloat16, the baseline's float32)`, where the sides differ in it."""
    assert change.baseline is not None and change.candidate is not None
    a, b = change.baseline["dtype"], change.candidate["dtype"]
    return f" ({b}, the baseline's {a})" if a != b and None not in (a, b) else ""


def _size_of_one(origin: Origin, verbs: _Verbs) -> str:
    """What there is to say of a row that one side alone has."""
    change = origin.change
    held = {} if change is None else change.candidate or change.baseline or {}
    for count, what in (("nan_count", "NaN"), ("inf_count", "infinite")):
        if held.get(count) and origin.difference.only_in is not None:
            return (
                f"has {held[count]:,} of {held['numel']:,} elements {what}, and is in the "
                f"{origin.difference.only_in} alone"
            )
    return "differs"


@singledispatch
def place_of(origin: Origin) -> str:
    """Where an origin is, without step and rank, for a list: `blocks.0.mlp (AddmmBackward0)`, `0.weight (clip)`."""
    table, key = origin.difference.table, origin.difference.key
    if table == "stage_events" and origin.place is not None:
        return f"what {origin.place.said} {'received' if origin.between else 'made'}"
    if table == "optimizer_groups":
        return f"group {key['group_index']} of optimizer {key['optimizer_index']}"
    if origin.parameter_fqn is not None:
        return f"{parameter_of(origin)} ({origin.link.replace('_', ' ')})"
    return bucket_of(origin) if table == "buckets" else origin.link


@place_of.register
def _place_of_code(_: CodeOrigin) -> str:
    return "the changed code"


@place_of.register
def _place_of_failure(origin: FailureOrigin) -> str:
    if origin.node_name is None:
        return f"the end of backward pass {origin.failure.backward_index}"
    return node_phrase(origin)


@place_of.register
def _place_of_gradients(origin: GradientsOrigin) -> str:
    return node_phrase(origin)


@place_of.register
def _place_of_input(origin: InputsOrigin) -> str:
    return f"the input {origin.difference.key['name']!r}"


@place_of.register
def _place_of_loss(_: LossOrigin) -> str:
    return "the loss"


@place_of.register(CallInputOrigin)
@place_of.register(ForwardOrigin)
@place_of.register(RngOrigin)
def _place_of_call(origin: Origin) -> str:
    return f"{module_of(origin, origin.module_fqn)} ({origin.link})"


def size_of(origin: Origin) -> str:
    """How an origin differs, for a list: `size_phrase`, or the settings that are others."""
    if isinstance(origin, FrozenOrigin):
        return "requires_grad"
    return (
        settings_phrase(origin)
        if isinstance(origin, OptimizerSettingsOrigin)
        else size_phrase(origin)
    )


def settings_phrase(origin: OptimizerSettingsOrigin) -> str:
    """`was set otherwise: learning_rate is 0.2 instead of 0.1`."""
    changed = settings_apart(origin.difference.values).items()
    return f"was set otherwise: {'; '.join(_setting_phrase(name, *pair) for name, pair in changed)}"


def _setting_phrase(name: str, before: Any, after: Any) -> str:
    if name != "parameter_fqns":
        return f"{name} is {number(after)} instead of {number(before)}"
    old, new = before or (), after or ()
    said = [
        f"{verb} {fqns[0]}" + (f" and {len(fqns) - 1} more parameters" if len(fqns) > 1 else "")
        for verb, fqns in (
            ("it lacks", [fqn for fqn in old if fqn not in new]),
            ("it holds", [fqn for fqn in new if fqn not in old]),
        )
        if fqns
    ]
    return " and ".join(said) or "its parameters are in another order"


def row_name(origin: Origin) -> str:
    """`Node MmBackward0 of blocks.0`: a row by its kind and name, or in the words that its table declares."""
    d = origin.difference
    named = _NAMES.get(d.table)
    if named is not None:
        return named(origin)
    said = whereabouts(d.table, d.key)
    link = d.link.replace("_", " ")
    return f"a row of {d.table}" if said is None else f"{said} ({link})"


def _node_name(origin: Origin) -> str:
    return (
        f"Node {origin.node_name} of {module_of(origin, origin.difference.key.get('module_fqn'))}"
    )


def _failure_name(origin: Origin) -> str:
    return "a row of failures" if origin.node_name is None else _node_name(origin)


def _call_name(origin: Origin) -> str:
    key = origin.difference.key
    return f"the {key['phase']} call of {module_of(origin, key['module_fqn'])}"


def _parameter_name(origin: Origin) -> str:
    return f"{parameter_of(origin)} ({origin.difference.link.replace('_', ' ')})"


def _input_name(origin: Origin) -> str:
    key = origin.difference.key
    return f"the input {key['name']!r} of call {key['call_index']}"


def _group_name(origin: Origin) -> str:
    key = origin.difference.key
    return f"the step of optimizer {key['optimizer_index']} (group {key['group_index']})"


def _pass_name(origin: Origin) -> str:
    return f"backward pass {origin.difference.key['backward_index']}"


def _bucket_name(origin: Origin) -> str:
    return f"the reduction of {bucket_of(origin)} in {_pass_name(origin)}"


# The rows of each table by name.
_NAMES: Mapping[str, Callable[[Origin], str]] = {
    "parameters": _parameter_name,
    "inputs": _input_name,
    "module_calls": _call_name,
    "backward_passes": _pass_name,
    "node_events": _node_name,
    "failures": _failure_name,
    "stage_events": lambda _: "this action",
    "buckets": _bucket_name,
    "gradients": _parameter_name,
    "optimizer_groups": _group_name,
}


def node_phrase(origin: Origin) -> str:
    """The origin's Node in its module: `blocks.0.mlp (AddmmBackward0)`."""
    return f"{module_of(origin, origin.module_fqn)} ({origin.node_name})"


def module_of(origin: Origin, fqn: str | None) -> str:
    """A module of the origin's root, with the root's name where there are several roots."""
    return module_phrase(fqn, origin.root_name)


def parameter_of(origin: Origin) -> str:
    """The origin's parameter, with the root's name where there are several roots."""
    return module_phrase(origin.parameter_fqn, origin.root_name)


def and_others(origin: Origin) -> str:
    """How many more rows of the step differ alike: ` (and 3 more)`, or nothing."""
    return f" (and {origin.other_count} more)" if origin.other_count > 0 else ""

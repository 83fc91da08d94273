"""Where an origin is and how large, in words: the parts that its sentences are made of."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.diff.difference import LENGTHS, Change, settings_apart
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.words.nouns import bucket_name, listed, module_phrase
from gradtrace_analyzer.words.numbers import number


def bucket_of(origin: Origin) -> str:
    """The origin's bucket: `bucket 0 (head.weight and 5 more)`; `?` where its parameters are not known."""
    names = [str(name) for name in origin.difference.key.get("parameter_fqns") or ()]
    return bucket_name(origin.difference.bucket_index, listed(names) or "?")


def size_phrase(origin: Origin) -> str:
    """`differs by 1.0e-02 (1.01 times the baseline)`, or what became of finite numbers."""
    change = origin.change
    if change is None or change.baseline is None or change.candidate is None:
        return _size_of_one(origin)
    for count, what in (("nan_count", "NaN"), ("inf_count", "infinite")):
        a, b = change.baseline[count] or 0, change.candidate[count] or 0
        if a != b:
            of = f"{b:,} of {change.candidate['numel']:,} elements {what}"
            return f"has {of} where the baseline has {a:,}"
    if change.candidate["norm"] == 0 and change.baseline["norm"]:
        return "is all zero"
    a, b = change.baseline["numel"], change.candidate["numel"]
    if a != b and None not in (a, b):
        return f"has {b} elements instead of {a}"
    return _distance(origin, change) + _dtypes_phrase(change)


def _distance(origin: Origin, change: Change) -> str:
    """How far both sides lie apart, and in which way."""
    assert change.baseline is not None and change.candidate is not None
    factor = change.factor
    if factor is not None and abs(factor + 1) < 1e-3:
        return "has its sign flipped"
    if factor is not None:
        times = f"{factor:.4g}" if abs(factor - 1) > 1e-3 else f"{factor:.8g}"
        return f"differs by {abs(factor - 1):.1e} (it is {times} times the baseline's)"
    if change.error is None:
        return "differs"
    if change.error == 0:
        return "differs in bits that its norm, sum and sketch do not show"
    ratio: float = change.candidate["norm"] / (change.baseline["norm"] or 1.0)
    if change.shown_by in LENGTHS:
        longer = ratio / _ratio(origin.difference.reads)
        if abs(longer - 1) < 1e-3:
            return f"differs by {change.error:.1e}"
        return f"has {longer:.4g} times the baseline's norm, given what comes in"
    larger = f" (its norm is {ratio:.3g} times the baseline's)" if ratio > 3 else ""
    return f"differs by {change.error:.1e}{larger}"


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


def _size_of_one(origin: Origin) -> str:
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


def place_of(origin: Origin) -> str:
    """Where an origin is, without step and rank, for a list: `blocks.0.mlp (AddmmBackward0)`, `0.weight (clip)`."""
    if origin.code:
        return "the changed code"
    if origin.failure is not None and origin.node_name is None:
        return f"the end of backward pass {origin.failure.backward_index}"
    if origin.difference.table == "stage_events" and origin.place is not None:
        return f"what {origin.place.said} {'received' if origin.between else 'made'}"
    if origin.difference.table == "optimizer_groups":
        key = origin.difference.key
        return f"group {key['group_index']} of optimizer {key['optimizer_index']}"
    if origin.link == "backward":
        return node_phrase(origin)
    if origin.parameter_fqn is not None:
        return f"{parameter_of(origin)} ({origin.link.replace('_', ' ')})"
    if origin.difference.table == "buckets":
        return bucket_of(origin)
    if origin.link in ("forward", "rng"):
        return f"{module_of(origin, origin.module_fqn)} ({origin.link})"
    return origin.link


def size_of(origin: Origin) -> str:
    """How an origin differs, for a list: `size_phrase`, or the settings that are others."""
    values = origin.difference.values
    if "requires_grad" in values:
        return "requires_grad"
    if origin.difference.table == "optimizer_groups" and origin.difference.only_in is None:
        changed = (_setting_phrase(name, *pair) for name, pair in settings_apart(values).items())
        return f"was set otherwise: {'; '.join(changed)}"
    return size_phrase(origin)


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
    """`Node MmBackward0 of blocks.0`: a row by its kind and name."""
    key = origin.difference.key
    if origin.difference.table == "stage_events":
        return "this action"
    if origin.node_name is not None:
        return f"Node {origin.node_name} of {module_of(origin, key.get('module_fqn'))}"
    if "phase" in key:
        return f"the {key['phase']} call of {module_of(origin, key['module_fqn'])}"
    if origin.parameter_fqn is not None:
        return f"{parameter_of(origin)} ({origin.difference.link.replace('_', ' ')})"
    if origin.difference.table == "buckets":
        return f"the reduction of {bucket_of(origin)} in backward pass {key['backward_index']}"
    if "name" in key:
        return f"the input {key['name']!r} of call {key['call_index']}"
    if "group_index" in key:
        return f"the step of optimizer {key['optimizer_index']} (group {key['group_index']})"
    if "kind" in key:
        return f"backward pass {key['backward_index']}"
    return f"a row of {origin.difference.table}"


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

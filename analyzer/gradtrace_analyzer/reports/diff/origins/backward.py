"""Origins at a Node of a backward pass: in what arrives, in what leaves, in how many gradients there are."""

from __future__ import annotations

from gradtrace_analyzer.diff.difference import LENGTHS, Change
from gradtrace_analyzer.diff.origin import ArrivingOrigin, GradientsOrigin, NodeOrigin, Replay
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.reports.diff.grounds import (
    if_known,
    unless_known,
    update_equal,
    update_unknown,
)
from gradtrace_analyzer.reports.diff.origins.clause import clause, factor_end
from gradtrace_analyzer.reports.diff.places import module_of, node_phrase, size_phrase
from gradtrace_analyzer.reports.diff.wording import Wording
from gradtrace_analyzer.words.nouns import module_phrase
from gradtrace_analyzer.words.numbers import noun


@clause.register
def arriving(origin: ArrivingOrigin, say: Wording) -> str:
    """That code outside any Node changed a gradient between two of them."""
    if origin.gradient_counts is not None:
        return _counts(origin, origin.gradient_counts, "receives")
    equal = if_known(
        origin, "nodes", f", although all Nodes that ran before gave {say.equal} gradients"
    )
    return (
        f"the gradient arriving at {node_phrase(origin)} {size_phrase(origin)}{equal}: a tensor hook, the gradient "
        f"given to backward(), or code outside any Node changed it.{factor_end(origin, origin.rescaled)}"
    )


@clause.register
def leaving(origin: NodeOrigin, say: Wording) -> str:
    """Which of the Node's gradients, and what running it again says."""
    if origin.gradient_counts is not None:
        return _counts(origin, origin.gradient_counts, "gives")
    size = f"{size_phrase(origin)}{_again(origin)}"
    if origin.positions:
        which = ", ".join(map(str, origin.positions))
        reads = if_known(origin, "reads", ", and everything recorded that it reads,")
        said = (
            f"{noun(len(origin.positions), 'gradient')} {which} of the {origin.position_count} that leave "
            f"{node_phrase(origin)} {size}, although the others{reads} are {say.equal}{_rounding(origin.change)}."
        )
    else:
        reads = if_known(
            origin, "reads", f", although everything recorded that it reads is {say.equal}"
        )
        said = (
            f"the gradient leaving {node_phrase(origin)} {size}{reads}{_rounding(origin.change)}."
            f"{unless_known(origin, 'reads', ' What it reads was not recorded on both sides.')}"
        )
    return said + _why(origin, say)


def _counts(origin: GradientsOrigin, counts: tuple[int, int], verb: str) -> str:
    """That the Node has another number of gradients."""
    a, b = counts
    index = origin.difference.key["backward_index"]
    in_pass, which = (
        ("", "a pass") if index is None else (f", in backward pass {index}", "the pass")
    )
    return (
        f"{module_of(origin, origin.module_fqn)} ({origin.node_name}) {verb} {b} {noun(b, 'gradient')} instead of {a}"
        f"{in_pass}: {which} asks for other gradients, or the graph is another."
    )


def _again(origin: NodeOrigin) -> str:
    """That the same place shows it in further passes of the step, and how often."""
    n = origin.repeat_count
    return f" (and {n} {noun(n, 'more time')} in the step, in other passes)" if n else ""


def tells_rounding(origin: object) -> bool:
    """Whether the sentence of an origin says by itself what rounding would explain."""
    return isinstance(origin, NodeOrigin) and origin.gradient_counts is None


def _rounding(change: Change | None) -> str:
    """What rounding would explain, where that is a number to hold the difference against."""
    if change is None or change.error is None or not change.tolerance:
        return ""
    if change.shown_by in LENGTHS:
        return f"; {length_words(change)}"
    if change.noise is not None:
        return f"; noise here is {change.tolerance / MODEL.scatter:.0e}, which would explain {change.tolerance:.1e}"
    return f"; rounding would explain {change.tolerance:.1e}"


def length_words(change: Change) -> str:
    """Why a length is too large or too small, where its direction is what rounding may make of it."""
    if change.shown_by == "steady":
        return "it is that much longer or shorter time after time, and rounding is never the same twice"
    return f"rounding would explain that it is longer or shorter by {change.tolerance:.1e}"


def _why(origin: NodeOrigin, say: Wording) -> str:
    """What running the Node again says, or what of it was not seen: what it saved."""
    if origin.replays:
        return f" {_replayed(origin, say)}"
    if origin.rewritten is None:
        return f" {_SAVED}"
    equal = update_equal(origin, say)
    return (
        f" {module_phrase(origin.rewritten, origin.root_name)} was changed after the forward and before the step's "
        f"end, in place or through .data: it differs after the optimizer{f' {equal}' if equal else ''}"
        f"{update_unknown(origin)}."
    )


# A Node's saved tensors are its own: no row holds them.
_SAVED = (
    "What it saved in the forward is not recorded: its derivative is wrong, or an activation or a weight was changed "
    "after the forward, in place or through .data."
)


def _replayed(origin: NodeOrigin, say: Wording) -> str:
    """Whether the Node gave the same again, and what that says."""
    apart = [r for r in origin.replays if r.apart_count]
    if not apart:
        sides = "both runs" if len(origin.replays) > 1 else f"the {origin.replays[0].side}"
        return (
            f"Run again with the same gradients, the Node gave the same bits in {sides}: it is deterministic where "
            "it ran, and its code, or what it saved, is where they part."
        )
    said = "; ".join(_apart(r, origin.step, say) for r in apart)
    return (
        f"The Node disagrees with itself: run again with the same gradients it gave other bits {said}. "
        "That is a nondeterministic kernel, a Function that draws or keeps something, or a faulty device, not the data."
    )


def _apart(r: Replay, step: int, say: Wording) -> str:
    where = f"elsewhere, not in {say.steps.one(step)}"
    if r.equal is False:
        where = "here" if r.error is None else f"here (by {r.error:.1e})"
    return f"in {r.apart_count:,} of {r.run_count:,} runs of the {r.side}, {where}"

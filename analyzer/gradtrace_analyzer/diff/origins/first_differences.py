"""Where each rank of a step first differs, as an origin: pure, from the step's differences.

The chain of a step runs in program order within a rank. A rank's first difference is an *origin* when what it
reads agrees; where what it reads differs although everything before it agrees, the code in between is the
origin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.links import LINKS, LOCAL_LINKS
from gradtrace_analyzer.diff.origin import (
    ArrivingOrigin,
    BucketInputOrigin,
    BucketOrigin,
    BucketSettingsOrigin,
    CallInputOrigin,
    CarriedGradientOrigin,
    ClipOrigin,
    FailureOrigin,
    ForwardOrigin,
    FrozenOrigin,
    InputsOrigin,
    LocalGradientOrigin,
    LoneRowOrigin,
    LossOrigin,
    NodeOrigin,
    OptimizerSettingsOrigin,
    Origin,
    ParametersOrigin,
    PassKindOrigin,
    ReceivedOrigin,
    ReducedGradientOrigin,
    RngOrigin,
    RowOrigin,
    ScaledOrigin,
    SentOrigin,
    SyncOrigin,
    UnseenGradientOrigin,
    UpdateOrigin,
)
from gradtrace_analyzer.diff.origins.rescaled import first_rescaled
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.numerics.sketches import is_same_factor

_Kind = TypeVar("_Kind", bound=Origin)


def by_rank(differences: Sequence[Difference], *, exceeding: bool) -> dict[int, list[Difference]]:
    """The differences of one step that count, by rank, in program order."""
    found: dict[int, list[Difference]] = {}
    for d in differences:
        if not exceeding or d.exceeds:
            found.setdefault(d.rank, []).append(d)
    return {rank: _in_order(own) for rank, own in sorted(found.items())}


def origin_of(
    own: list[Difference], *, rng_differs: bool, modules: Collection[str], exceeding: bool
) -> Origin:
    """The first of a rank's differences as an origin; the others tell what lies around it."""
    return _first(own, rng_differs, modules, exceeding)


def first_origins(
    rows: Mapping[int, list[Difference]],
    rng_ranks: Collection[int],
    modules: Mapping[int, Collection[str]],
    *,
    exceeding: bool,
    failures: Mapping[int, OneSidedFailure] | None = None,
    unused: Mapping[int, Sequence[tuple[float, float]]] | None = None,
) -> list[Origin]:
    """Each rank's first difference of a step, as an origin, in the order of the chain.

    `rows` are those of one step, as `by_rank` gives them; `rng_ranks` the ranks whose generators differ at its start;
    `modules` the modules that each rank called; `failures` the backward passes of the step that failed on one
    side alone; `unused` each rank's stretches of the step that hold a forward that no `backward()` followed.
    """
    found = []
    failed = failures or {}
    for rank in sorted(set(rows) | set(failed)):
        own = rows.get(rank, [])

        def first_of(some: list[Difference], rank: int = rank) -> Origin:
            return _first(some, rank in rng_ranks, modules.get(rank, ()), exceeding)

        first = first_of(own) if own else None
        if first is not None:
            first = _past_unused(first, own, (unused or {}).get(rank, ()), first_of)
        if (
            isinstance(first, ScaledOrigin)
            and first.factor is not None
            and first.link in ("loss", "backward")
        ):
            first = replace(first, rescaled=first_rescaled(own, first.factor))
        if rank in failed and (first is None or _is_explained(first, failed[rank])):
            first = _failed(failed[rank], first)
        if first is not None:
            found.append(first)
    return sorted(found, key=_chain_order)


def _past_unused(
    first: Origin,
    own: Sequence[Difference],
    unused: Sequence[tuple[float, float]],
    first_of: Callable[[list[Difference]], Origin],
) -> Origin:
    """The first origin outside a forward that no `backward()` followed, where that forward cannot be its cause.

    Its outputs may have entered a loss as numbers; a loss that all its gradients follow by one factor does not
    come from there. (The shape inference of pipelining runs a forward on memory that was never written.)
    """

    def is_unused(d: Difference) -> bool:
        return any(a <= d.order <= b for a, b in unused)

    if not is_unused(first.difference):
        return first
    rest = _in_order([d for d in own if not is_unused(d)])
    later = first_of(rest) if rest else first
    is_scaled = later.factor is not None and (isinstance(later, LossOrigin) or later.between)
    return replace(later, aside=first.difference) if is_scaled else first


def _is_explained(first: Origin, failure: OneSidedFailure) -> bool:
    """Whether a rank's first difference is something that its failed backward pass left undone or half done."""
    d = first.difference
    if d.table == "module_calls" and d.key.get("phase") != "recompute":
        return False
    if d.table in ("inputs", "steps") or first.link in ("parameters", "loss", "carried_gradient"):
        return False
    index = d.key.get("backward_index")
    if index is not None and index < failure.backward_index:
        return False
    change = first.change
    if d.table != "node_events" or change is None or d.only_in is not None:
        return True
    # A Node that gave another gradient did so before the failure, which may be its consequence.
    return None in (s and s["norm"] for s in (change.baseline, change.candidate))


def _failed(failure: OneSidedFailure, first: Origin | None) -> Origin:
    """The origin that a failed backward pass is."""
    row, is_baseline = failure.row, failure.side == "baseline"
    key = ("microbatch", "root", "module_fqn", "call_index", "node_name", "parameter_fqn")
    index = row["event_index"]
    difference = Difference(
        table="failures",
        rank=failure.rank,
        step=failure.step,
        order=first.difference.order if first is not None else 0.0,
        only_in=None,
        key={"backward_index": failure.backward_index, **{name: row[name] for name in key}},
        event_indices=(index, None) if is_baseline else (None, index),
        values={"failure": (failure.said, None) if is_baseline else (None, failure.said)},
    )
    return FailureOrigin(
        difference, (difference.rank,), difference.key["module_fqn"], failure=failure
    )


def _in_order(differences: list[Difference]) -> list[Difference]:
    """Program order, a pass in front of what it does: its row is written when it is over."""
    first_deed: dict[Any, float] = {}
    for d in differences:
        if d.table in ("node_events", "buckets") or d.key.get("point") in ("local", "reduced"):
            index = d.key.get("backward_index")
            first_deed[index] = min(first_deed.get(index, d.order), d.order)

    def place(d: Difference) -> float:
        if d.table == "backward_passes":
            return first_deed.get(d.key.get("backward_index"), d.order) - 0.5
        return d.order

    return sorted(differences, key=place)


def _first(
    own: list[Difference], rng_differs: bool, modules: Collection[str], exceeding: bool
) -> Origin:
    first = own[0]
    if first.only_in is not None and first.link != "carried_gradient":
        return _lone(own, first)
    told_by = _OF_TABLE.get(first.table, _of_parameter if first.link in _OF_LINK else _of_row)
    return told_by(
        _Around(
            own,
            modules,
            rng_differs=rng_differs,
            arrived=first.reads is not None and first.reads.is_apart(exceeding=exceeding),
        ),
        first,
    )


@dataclass(frozen=True)
class _Around:
    """The rows of a rank from its first difference on, and what else its kind hangs on: whether that `arrived`."""

    own: list[Difference]
    modules: Collection[str]
    rng_differs: bool
    arrived: bool


def _lone(own: list[Difference], first: Difference) -> Origin:
    first = _with_other_kind(own, first)
    if first.only_in is None:
        return _at(PassKindOrigin, first)
    if first.table == "gradients" and first.key["point"] == "final":
        return _at(UnseenGradientOrigin, first)
    return _at(LoneRowOrigin, first)


def _of_call(around: _Around, first: Difference) -> Origin:
    inputs = [d for d in around.own if d.table == "inputs" and _same_call(d, first)]
    if inputs:
        # Keyword arguments leave their row when the root returns, after the modules inside it.
        return replace(_at(InputsOrigin, inputs[0], inputs[0].writes), other_count=len(inputs) - 1)
    module, change = str(first.key["module_fqn"]), first.writes
    if around.arrived:
        module, change = _module_between(around.own, first, around.modules), first.reads
    if around.rng_differs:
        return replace(_at(RngOrigin, first, change, module), receives=around.arrived)
    return _at(CallInputOrigin if around.arrived else ForwardOrigin, first, change, module)


def _of_pass(around: _Around, first: Difference) -> Origin:
    if "ddp_sync" in first.values:
        return _at(SyncOrigin, first)
    return _at(LossOrigin, first, _scaled_alike(around.own, first))


def _of_node(around: _Around, first: Difference) -> Origin:
    if not around.arrived:
        return _at(NodeOrigin, first, first.writes)
    if first.key.get("node_name") == "AccumulateGrad":
        return replace(_at(LocalGradientOrigin, first, first.reads), arrives=True)
    return _at(ArrivingOrigin, first, first.reads)


def _of_action(around: _Around, first: Difference) -> Origin:
    if around.arrived:
        return _at(ReceivedOrigin, first, first.reads)
    return _at(SentOrigin, first, first.writes)


def _of_bucket(around: _Around, first: Difference) -> Origin:
    change = first.reads if around.arrived else first.writes
    if first.values:
        return _at(BucketSettingsOrigin, first, change)
    return _at(BucketInputOrigin if around.arrived else BucketOrigin, first, change)


def _of_parameter(around: _Around, first: Difference) -> Origin:
    """Of a row that is of one parameter, or of a group of them."""
    kind = _OF_LINK[first.link]
    if first.table == "optimizer_groups":
        kind = OptimizerSettingsOrigin
    elif "requires_grad" in first.values:
        kind = FrozenOrigin
    owner = first.key.get("parameter_fqn")
    holder = str(owner).rpartition(".")[0] if owner is not None else None
    others = sum(_is_alike(d, first) for d in around.own) - 1
    return replace(_at(kind, first, first.writes, holder), other_count=others)


def _of_row(around: _Around, first: Difference) -> Origin:
    """Of a row of which nothing more is known than what its table declares."""
    change = first.reads if around.arrived else first.writes
    return _at(RowOrigin, first, change, first.key.get("module_fqn"))


# How a rank's first difference is told by the table of its row; of all others by its link, if that has a kind.
_OF_TABLE: Mapping[str, Callable[[_Around, Difference], Origin]] = {
    "module_calls": _of_call,
    "backward_passes": _of_pass,
    "node_events": _of_node,
    "stage_events": _of_action,
    "buckets": _of_bucket,
}
_OF_LINK: Mapping[str, type[Origin]] = {
    "parameters": ParametersOrigin,
    "inputs": InputsOrigin,
    "carried_gradient": CarriedGradientOrigin,
    "local_gradient": LocalGradientOrigin,
    "reduced_gradient": ReducedGradientOrigin,
    "clip": ClipOrigin,
    "optimizer": UpdateOrigin,
}


def _is_alike(d: Difference, first: Difference) -> bool:
    """Whether a row is one more of the same kind that differs in the same way."""
    return (d.table, d.link, sorted(d.values)) == (first.table, first.link, sorted(first.values))


def _with_other_kind(own: Sequence[Difference], first: Difference) -> Difference:
    """A pass that one side alone has, as a pass of two kinds where the other side has one of its number."""
    if first.table != "backward_passes":
        return first
    index = first.key["backward_index"]
    for d in own:
        if d.table == first.table and d.key["backward_index"] == index and d.only_in is not None:
            if d.only_in == first.only_in:
                continue
            kinds = {first.only_in: first.key["kind"], d.only_in: d.key["kind"]}
            return replace(
                first, only_in=None, values={"kind": (kinds["baseline"], kinds["candidate"])}
            )
    return first


def _scaled_alike(own: Sequence[Difference], loss: Difference) -> Change | None:
    """A gradient on its way from the loss to the first parameter that is scaled as the loss is: a wrong divisor.

    The first Nodes of the pass may be others, or others' factors: it is there that the code differs.
    """
    before, after = loss.values.get("loss", (None, None))
    if not before or not after:
        return None
    for d in own:
        if d.key.get("backward_index") != loss.key["backward_index"]:
            continue
        if d.table == "gradients":
            return None
        for change in (d.reads, d.writes) if d.table == "node_events" else ():
            factor = change.factor if change is not None and d.only_in is None else None
            if is_same_factor(factor, after / before):
                return change
    return None


def _at(
    kind: type[_Kind], d: Difference, change: Change | None = None, module: str | None = None
) -> _Kind:
    """An origin of that kind on the row's rank; without a `module` it lies in that of the row."""
    if module is None:
        module = d.key.get("module_fqn")
    return kind(d, (d.rank,), module, change)


def _same_call(inputs: Difference, call: Difference) -> bool:
    return inputs.key["microbatch"] == call.key["microbatch"] and (
        inputs.key["root"] == call.key["root"] or inputs.key["root"] is None
    )


def _module_between(own: list[Difference], call: Difference, modules: Collection[str]) -> str:
    """The module whose own code lies in front of this call: the innermost recorded one around it whose own
    input agrees."""
    reading = {
        d.key["module_fqn"]
        for d in own
        if d.table == "module_calls"
        and d.reads is not None
        and d.reads.differs
        and (d.key["microbatch"], d.key["root"]) == (call.key["microbatch"], call.key["root"])
    }
    fqn = str(call.key["module_fqn"])
    while fqn:
        fqn = fqn.rpartition(".")[0]
        if fqn in modules and fqn not in reading:
            return fqn
    return ""


def _chain_order(origin: Origin) -> tuple[Any, ...]:
    d = origin.difference
    if origin.link not in LOCAL_LINKS:
        return (1, 0, LINKS.index(origin.link), d.order, d.rank)
    microbatch = d.key.get("microbatch") or 0
    return (0, microbatch, LINKS.index(origin.link), d.order, d.rank)

"""A diff's answer for a program: the JSON of `analyzer diff`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.code.structure import as_object as lone_object
from gradtrace_analyzer.diff.explanations.factor_causes import FactorCauses
from gradtrace_analyzer.diff.explanations.rerun_nodes import RerunNodes
from gradtrace_analyzer.diff.origin import (
    GradientsOrigin,
    NodeOrigin,
    Origin,
    Rescaled,
    ScaledOrigin,
)
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.reports.diff.explanations import cause_words
from gradtrace_analyzer.reports.diff.inheritance import chain_objects, reached_object
from gradtrace_analyzer.reports.diff.text import asides, explanation


def as_object(answer: Answer) -> dict[str, Any]:
    """The answer for a program. Keys that do not apply are null."""
    first = answer.origins[0] if answer.origins and answer.verdict == "different" else None
    causes, rerun = answer.explanation(FactorCauses), answer.explanation(RerunNodes)
    return {
        "verdict": answer.verdict,
        "configuration": list(answer.configuration),
        "first_divergence": None if first is None else _origin_object(first),
        "origins": [_origin_object(o) for o in answer.origins],
        "inherited": [_origin_object(o) for o in answer.inherited],
        "spread": list(answer.spread),
        "structure": [lone_object(entry) for entry in answer.structure],
        "renames": [str(rename) for rename in answer.renames],
        "likely_renames": [str(rename) for rename in answer.likely_renames],
        "failures": [_failure_object(f) for f in answer.failures],
        "first_nonfinite": (
            None if answer.first_nonfinite is None else _origin_object(answer.first_nonfinite)
        ),
        "repeated": [] if rerun is None else [asdict(r) for r in rerun.nodes],
        "equal": {what: list(names) for what, names in answer.equal.items()},
        "chain": chain_objects(answer) or None,
        "cover": _cover_object(answer.cover),
        "factor": None if first is None else first.factor,
        "factor_causes": [] if causes is None else cause_words(causes),
        "tolerance": {
            "unit": None if answer.rule is None else answer.rule.unit,
            "arithmetic": None if answer.rule is None else answer.rule.arithmetic,
            "summands": None if answer.rule is None else answer.rule.summands,
            "layers": None if answer.rule is None else answer.rule.layers,
            "measured_from": None if answer.noise is None else list(answer.noise.names),
            "noise": None if answer.noise is None else answer.noise.median,
        },
        "set_aside": [asdict(a) for a in answer.aside],
        "loss_scales": [asdict(s) for s in answer.scaled],
        "divided": None
        if answer.sums is None
        else {
            "baseline": asdict(answer.sums.divisions[0]),
            "candidate": asdict(answer.sums.divisions[1]),
            "compared": dict(answer.sums.compared),
            "largest_error": answer.sums.largest,
            "factor": answer.sums.factor,
        },
        "explanation": " ".join((explanation(answer), *asides(answer))),
    }


def _origin_object(origin: Origin) -> dict[str, Any]:
    d, change = origin.difference, origin.change
    sides: dict[str, Any] = {}
    for side, index in (("baseline", 0), ("candidate", 1)):
        statistics = None if change is None else getattr(change, side)
        sides[side] = {
            **({k: v for k, v in statistics.items() if k != "sketch"} if statistics else {}),
            **{name: pair[index] for name, pair in d.values.items()},
        } or None
    factor = origin.factor
    error = None if change is None else change.error
    return {
        "step": origin.step,
        "rank": origin.ranks[0],
        "ranks": list(origin.ranks),
        "link": origin.link,
        "root": d.key.get("root"),
        "module_fqn": origin.module_fqn,
        "node_name": origin.node_name,
        "parameter_fqn": origin.parameter_fqn,
        "bucket_index": d.bucket_index,
        "stage_index": None if origin.place is None else origin.place.stage_index,
        "microbatch": d.key.get(
            "microbatch", None if origin.place is None else origin.place.microbatch
        ),
        "backward_index": d.key.get("backward_index"),
        "call_index": d.key.get("call_index"),
        "name": d.key.get("name"),
        "event_index": d.event_index,
        "phase": d.key.get("phase", None if origin.place is None else origin.place.phase),
        "only_in": d.only_in,
        **_of_gradients(origin),
        "root_name": origin.root_name,
        **_of_node(origin),
        "repeat_count": origin.repeat_count,
        "reached": [reached_object(r) for r in origin.reached],
        "inherits": {
            link: {"alone": alone, "shared": shared}
            for link, (alone, shared) in origin.inherited_counts.items()
        },
        "relative_error": abs(factor - 1) if factor is not None else error,
        "tolerance": None if change is None else change.tolerance,
        "factor": factor,
        **sides,
    }


def _of_gradients(origin: Origin) -> dict[str, Any]:
    """What only origins of gradients can have."""
    rescaled = origin.rescaled if isinstance(origin, ScaledOrigin) else None
    positions = origin.positions if isinstance(origin, GradientsOrigin) else ()
    replays = origin.replays if isinstance(origin, NodeOrigin) else ()
    return {
        "positions": list(positions) or None,
        "rescaled": None if rescaled is None else _rescaled_object(rescaled),
        "replays": [asdict(r) for r in replays] or None,
    }


def _of_node(origin: Origin) -> dict[str, Any]:
    """What only the gradient that leaves a Node can have."""
    if not isinstance(origin, NodeOrigin):
        return {"rewritten": None, "shares_input": False}
    return {"rewritten": origin.rewritten, "shares_input": origin.shares_input}


def _rescaled_object(found: Rescaled) -> dict[str, Any]:
    return {
        "parameter_fqn": found.parameter_fqn,
        "after_backward_index": found.after,
        "backward_index": found.backward_index,
        "microbatch": found.difference.key.get("microbatch"),
        "side": found.side,
        "times": found.times,
        "others": found.others,
    }


def _failure_object(failure: OneSidedFailure) -> dict[str, Any]:
    names = ("event_index", "node_name", "root", "module_fqn", "parameter_fqn", "exception_type")
    return {
        "side": failure.side,
        "step": failure.step,
        "rank": failure.rank,
        "microbatch": failure.row["microbatch"],
        "backward_index": failure.backward_index,
        **{name: failure.row[name] for name in names},
        "exception_text": failure.row["exception_text"],
        "delivered": list(failure.delivered),
        "never_reached": list(failure.never_reached),
        "unused": list(failure.unused),
    }


def _cover_object(cover: Cover) -> dict[str, Any]:
    return {
        "ranks": sorted({cover.stages.get(rank, rank) for rank in cover.ranks}),
        "stages": list(cover.ranks) if cover.by_stage else None,
        "steps": sorted({step for own in cover.steps.values() for step in own}),
        "steps_by_rank": {str(r): list(own) for r, own in cover.steps.items()},
        "rows": dict(cover.rows),
        "missing_ranks": {s: list(r) for s, r in cover.missing_ranks.items()},
        "missing_steps": {
            s: {str(r): list(own) for r, own in by_rank.items()}
            for s, by_rank in cover.missing_steps.items()
        },
        "problems": {s: list(p) for s, p in cover.problems.items()},
        "incomplete_ranks": {s: list(r) for s, r in cover.incomplete_ranks.items()},
        "dropped": {s: dict(r) for s, r in cover.dropped.items()},
        "unsummarised": {s: dict(r) for s, r in cover.unsummarised.items()},
        "unread": {s: [{"table": t, "rank": r} for t, r in p] for s, p in cover.unread.items()},
        "asked_for": cover.selection.phrase or None,
        **({} if cover.alignment is None else {"step_alignment": asdict(cover.alignment)}),
        "flights": {s: list(steps) for s, steps in cover.flights.items()},
        "filters": {s: dict(r) for s, r in cover.filters.items()},
        "crashes": {
            s: [{"rank": c.rank, "step": c.step, "ended": c.ended} for c in found]
            for s, found in cover.crashes.items()
        },
        "without_values": list(cover.without_values),
    }

"""A diff's answer as a colleague would say it, as the lines of a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gradtrace_analyzer.cover import Cover
from gradtrace_analyzer.diff import Answer, Origin
from gradtrace_analyzer.differences import Change
from gradtrace_analyzer.failures import Failure
from gradtrace_analyzer.noise import SCATTER
from gradtrace_analyzer.reports.inheritance import (
    chain_lines,
    chain_objects,
    inheritance_lines,
    reached_object,
    reached_sentence,
    told_apart,
)
from gradtrace_analyzer.reports.origins import (
    failure_clause,
    nonfinite_sentence,
    origin_sentence,
    repeated_sentence,
    unseen_sentence,
)
from gradtrace_analyzer.reports.places import place_of, size_of
from gradtrace_analyzer.reports.structure import (
    code_phrase,
    compiled_lines,
    configuration_lines,
    naming_lines,
    structure_lines,
)
from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.rescaled import Rescaled
from gradtrace_analyzer.run import ranks_phrase, spans
from gradtrace_analyzer.structure import as_object as lone_object
from gradtrace_analyzer.tolerance import STANDARD_ERROR


def explanation(answer: Answer) -> str:
    """The one sentence (or two) that a person would say."""
    cover = answer.cover
    if answer.verdict == "incomparable":
        said = f"Cannot tell: {answer.reason}."
        if cover.ranks and cover.steps and not cover.is_whole:
            said += f" What can be compared is identical ({_extent(cover)})."
        return said
    if answer.verdict == "identical":
        how = "bit for bit" if cover.has_fingerprints else "in norms, sums and counts"
        return f"Identical, {how}, in all that both recorded: {_extent(cover)}.{_lacking(cover)}"
    if answer.verdict == "within_tolerance" and answer.sums is not None:
        return (
            f"The same within rounding: {answer.sums.words()} {_sentence(tolerance_words(answer))}."
            f"{_lacking(cover)}"
        )
    if answer.verdict == "within_tolerance" and not answer.origins:
        alone = list(structure_lines(answer.structure))
        other = " by other code" if alone else ", compiled" if answer.structure else ""
        more = f" (and {len(alone) - 1} more)" if len(alone) > 1 else ""
        return (
            f"The same numbers{other}: all values that pair are identical"
            f"{', bit for bit' if cover.has_fingerprints else ''}"
            f"{f', and {alone[0]}{more}' if alone else ''}.{_lacking(cover)}"
        )
    if answer.verdict == "within_tolerance":
        origin = answer.origins[0]
        if origin.code:
            return (
                f"The same within rounding, by other code: {code_phrase(origin.code)}; no output, loss or "
                f"gradient that pairs differs by more than the tolerance.{_lacking(cover)}"
            )
        return (
            f"The same within rounding: the first bits differ in step {origin.step}, "
            f"{ranks_phrase(origin.ranks)}, at {place_of(origin)}, and no output, loss or "
            f"gradient differs by more than the tolerance: {tolerance_words(answer)}.{_lacking(cover)}"
        )
    if not answer.origins:
        return f"All values that pair are identical, but the models differ: {code_phrase(answer.structure)}."
    origin = answer.origins[0]
    said = unseen_sentence(origin, answer) if answer.unseen else origin_sentence(origin)
    if answer.sums is not None or answer.first_bits is not None:
        said = said.replace(" equal", " equal within rounding")
    if answer.first_bits is not None:
        bits = answer.first_bits
        said += f" (The first bits differ in step {bits.step}, {ranks_phrase(bits.ranks)}, at {place_of(bits)}.)"
    said += _tolerance_here(answer) if "would explain" not in said else ""
    if answer.sums is not None:
        said += f" {answer.sums.words()}"
    if answer.causes:
        said += f" A likely reason of the factor {answer.causes[0]}"
        said += "." if not said.endswith("?") else ""
    said = " ".join((*answer.deaths, said))
    others = (_inheritance(answer), _more(answer), _other_failures(answer), _nonfinite(answer))
    return said + "".join(others) + "".join(f" {repeated_sentence(r)}" for r in answer.repeated[:1])


def tolerance_words(answer: Answer) -> str:
    """Where the tolerance comes from, and what it is where the parameters are equal."""
    rule = answer.rule
    if answer.noise is not None:
        return answer.noise.words()
    if rule is None:
        return "rounding explains nothing"
    return (
        f"rounding explains up to {rule.forward():.0e} in forward, {rule.backward():.0e} in backward "
        f"({rule.words()}), and more as the parameters drift apart"
    )


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _tolerance_here(answer: Answer) -> str:
    """What noise would explain at the origin, where the verdict hangs on it."""
    change = answer.origins[0].change
    measured = answer.noise is not None and not answer.noise.is_zero
    if change is None or change.error is None or not change.tolerance:
        return ""
    if not measured and answer.first_bits is None and answer.sums is None:
        return ""
    return f" {_sentence(_explained(change, answer))}."


def _explained(change: Change, answer: Answer) -> str:
    if change.noise is not None and answer.noise is not None:
        measured = change.tolerance / SCATTER
        return f"noise here is {measured:.0e}, measured from {', '.join(answer.noise.names)}"
    rule = f": {answer.rule.words()}" if answer.rule is not None else ""
    return f"rounding explains up to {change.tolerance:.1e}{rule}"


def lines(answer: Answer, names: tuple[str, str], top: int | None = None) -> Iterator[str]:
    """The answer for a terminal; its lists are no longer than `top`."""
    yield f"{answer.verdict.replace('_', ' ')}: {names[0]} (baseline) and {names[1]} (candidate)"
    if answer.configuration:
        yield ""
        yield from configuration_lines(answer.configuration)
    yield ""
    yield explanation(answer)
    yield from answer.notes
    yield from compiled_lines(answer.structure)
    yield from naming_lines(answer)
    if answer.origins and answer.origins[0].change is not None:
        yield ""
        yield from _numbers(answer.origins[0].change, answer)
    if len(answer.origins) > 1:
        yield ""
        yield (
            "Other first differences in the same step:"
            if answer.unseen
            else "Other origins in the same step, none of which follows from another:"
        )
        yield from _limited(list(map(_other, answer.origins[1:])), top or 5, "")
    alone = list(structure_lines(answer.structure))
    if alone and answer.verdict != "incomparable":
        yield ""
        yield "On one side alone:"
        yield from _limited(alone, top or len(alone), "")
    if answer.spread and answer.verdict in ("different", "within_tolerance"):
        yield ""
        yield from inheritance_lines(answer, top or 8)
        yield from _spread(answer.spread, top or 24)
    if answer.chain:
        yield ""
        yield from chain_lines(answer)
    yield ""
    yield f"Compared: {_compared(answer.cover)}"
    yield from _caveats(answer.cover, are_summed=answer.sums is not None)


def as_object(answer: Answer) -> dict[str, Any]:
    """The answer for a program. Keys that do not apply are null."""
    first = answer.origins[0] if answer.origins and answer.verdict == "different" else None
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
        "repeated": [asdict(r) for r in answer.repeated],
        "equal": {what: list(names) for what, names in answer.equal.items()},
        "chain": chain_objects(answer) or None,
        "cover": _cover_object(answer.cover),
        "factor": None if first is None else first.factor,
        "factor_causes": list(answer.causes),
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
        "explanation": " ".join(
            (
                explanation(answer),
                *answer.notes,
                *compiled_lines(answer.structure),
                *naming_lines(answer),
            )
        ),
    }


def _inheritance(answer: Answer) -> str:
    """What became of the other ranks."""
    failed = sorted({r for o in answer.inherited if o.failure is not None for r in o.ranks})
    then = f" {ranks_phrase(failed).capitalize()} then failed while no Node ran." if failed else ""
    if not answer.origins:
        return then
    first = answer.origins[0]
    left = tuple(r for r in first.reached if r.rank not in failed)
    if answer.cover.by_stage:
        stages = sorted({r.key["stage_index"] for r in left if r.link == "stage"})
        if not stages:
            return then
        verb = "differs" if len(stages) == 1 else "differ"
        return f"{then} {_stages(stages).capitalize()} {verb} from what was received there on."
    others = set(answer.cover.ranks) - set(first.ranks)
    return then + reached_sentence(replace(first, reached=left), others)


def _more(answer: Answer) -> str:
    count = len(answer.origins) - 1
    if not count:
        return ""
    second = answer.origins[1]
    if answer.unseen:
        are = "is another first difference" if count == 1 else f"are {count} more first differences"
        return f" There {are} in this step; whether they have one cause cannot be told."
    said = f"{ranks_phrase(second.ranks)}, {place_of(second)} {size_of(second)}"
    if answer.origins[0].shares_input and second.shares_input:
        said += (
            "; both modules were called with the same tensor, so that one change of it after the forward would explain "
            "both"
        )
    if count == 1:
        return f" A second origin in this step does not follow from it: {said}."
    return f" There are {count} more origins in this step, which do not follow from it; the next is {said}."


def _other_failures(answer: Answer) -> str:
    """The first failure that is none of the origins."""
    told = [o.failure for o in answer.origins if o.failure is not None]
    steps = {(f.side, f.step) for f in told}
    left = [f for f in answer.failures if f not in told and (f.side, f.step) not in steps]
    if not left:
        return ""
    first = left[0]
    ranks = [f.rank for f in left if (f.side, f.step) == (first.side, first.step)]
    return f" Step {first.step}, {ranks_phrase(ranks)}: {failure_clause(first)}"


def _nonfinite(answer: Answer) -> str:
    found = answer.first_nonfinite
    return f" {nonfinite_sentence(found)}" if found is not None else ""


def _numbers(change: Change, answer: Answer) -> Iterator[str]:
    rows = []
    for name in ("norm", "abs_max", "sum", "nan_count", "inf_count"):
        a = None if change.baseline is None else change.baseline[name]
        b = None if change.candidate is None else change.candidate[name]
        if name.endswith("_count") and not a and not b:
            continue
        rows.append((name, *told_apart(a, b)))
    heads = ("", "baseline", "candidate")
    yield from table_lines(heads, rows, right=heads[1:])
    factor = change.factor
    if factor is not None:
        yield f"relative error {abs(factor - 1):.1e}; {_explained(change, answer)}"
    elif change.error is not None:
        lanes = len((change.candidate or {}).get("sketch") or ())
        within = STANDARD_ERROR.get(lanes)
        how = f", estimated within {within:.0%}" if within is not None else ""
        yield f"relative error {change.error:.1e}{how}; {_explained(change, answer)}"


def _spread(spread: Sequence[Mapping[str, Any]], most: int) -> Iterator[str]:
    yield "What differs, by rank:"
    by_stage = any("stage_index" in e for e in spread)
    rows = [
        (
            e["rank"],
            *([e["stage_index"]] if by_stage else []),
            e["link"],
            e["first_step"],
            e["row_count"],
            _largest(e),
        )
        for e in spread
    ]
    shown = rows[:most]
    heads = ("rank", *(["stage"] if by_stage else []), "link", "from step", "rows", "largest error")
    yield from table_lines(heads, shown, right=("largest error",))
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown)} more (--format json has all)"


def _largest(entry: Mapping[str, Any]) -> str:
    """The largest error; where there is none, finite values turned into others, or rows have no partner."""
    error = entry["largest_error"]
    return "-" if error is None else f"{error:.1e}"


def _limited(said: Sequence[str], most: int, what: str) -> Iterator[str]:
    """Lines, the rest counted."""
    yield from (f"  {line}" for line in said[:most])
    if len(said) > most:
        yield f"  and {len(said) - most} more{what} (--top {len(said)} shows all)"


def _other(origin: Origin) -> str:
    """One more origin: its place and size, and whom it reached."""
    reached = reached_sentence(origin)
    return (
        f"{ranks_phrase(origin.ranks)}: {place_of(origin)} {size_of(origin)}"
        f"{'.' + reached if reached else ''}"
    )


def _extent(cover: Cover) -> str:
    """`ranks 0-1, steps 0-5`; rank by rank where their steps differ."""
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for rank in cover.ranks:
        by_steps.setdefault(cover.steps.get(rank, ()), []).append(rank)
    who = _stages if cover.by_stage else ranks_phrase
    return "; ".join(f"{who(ranks)}, {_steps(steps)}" for steps, ranks in by_steps.items() if steps)


def _stages(stages: Collection[int]) -> str:
    return f"stage {spans(stages)}" if len(stages) == 1 else f"stages {spans(stages)}"


def _steps(steps: Sequence[int]) -> str:
    text = spans(steps)
    return f"step {text}" if text.isdigit() else f"steps {text}"


def _compared(cover: Cover) -> str:
    rows = ", ".join(f"{count:,} {table}" for table, count in cover.rows.items() if count)
    return f"{_extent(cover)}; {rows}" if cover.steps and rows else "nothing"


def _lacking(cover: Cover) -> str:
    said = list(_lacking_steps(cover))
    if not cover.chosen.is_all:
        said.append(f"anything but what was asked for ({cover.chosen.said})")
    return f" Not compared: {'; '.join(said)}." if said else ""


def _lacking_steps(cover: Cover) -> Iterator[str]:
    for side, by_rank in cover.missing_steps.items():
        by_steps: dict[tuple[int, ...], list[int]] = {}
        for rank, steps in by_rank.items():
            by_steps.setdefault(steps, []).append(rank)
        who = _stages if cover.by_stage else ranks_phrase
        for steps, ranks in by_steps.items():
            yield f"the {side} lacks {_steps(steps)} of {who(ranks)}"


def _caveats(cover: Cover, *, are_summed: bool = False) -> Iterator[str]:
    if not cover.chosen.is_all:
        yield f"Compared only, as asked: {cover.chosen.said}."
    for lacking in _lacking_steps(cover):
        yield f"Not compared: {lacking}."
    for side, steps in cover.flights.items():
        yield f"The {side} is a flight recording: it holds {_steps(steps)} only."
    for side in ("baseline", "candidate"):
        missing = cover.missing_ranks[side]
        if missing and not are_summed:
            yield f"Not compared: the {side} lacks {ranks_phrase(missing)}."
        for table, rank in cover.unread[side]:
            yield f"Not compared: the {side} has lost rows of {table} of rank {rank}."
        if cover.incomplete_ranks[side]:
            ranks = ranks_phrase(cover.incomplete_ranks[side])
            yield (
                f"The {side}'s {ranks} did not end the recording (killed, or still running): "
                "what its last step lacks is no difference."
            )
        for what, counts in (
            ("rows dropped", cover.dropped[side]),
            ("tensors without a summary", cover.unsummarised[side]),
        ):
            if counts:
                by_reason = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
                yield f"The {side} has {what}: {by_reason}."
        for problem in cover.problems[side]:
            yield f"The {side}'s recorder gave up in part: {problem}."
        if cover.filters[side]:
            chosen = "; ".join(
                f"{k} {', '.join(map(str, v))}" for k, v in cover.filters[side].items()
            )
            yield f"The {side} recorded only {chosen}."


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
        "positions": list(origin.positions) or None,
        "rescaled": None if origin.rescaled is None else _rescaled_object(origin.rescaled),
        "replays": [asdict(r) for r in origin.replays] or None,
        "root_name": origin.root_name,
        "rewritten": origin.rewritten,
        "shares_input": origin.shares_input,
        "repeat_count": origin.repeat_count,
        "reached": [reached_object(r) for r in origin.reached],
        "inherits": {
            link: {"alone": alone, "shared": shared}
            for link, (alone, shared) in origin.heirs.items()
        },
        "relative_error": abs(factor - 1) if factor is not None else error,
        "tolerance": None if change is None else change.tolerance,
        "factor": factor,
        **sides,
    }


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


def _failure_object(failure: Failure) -> dict[str, Any]:
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
        "asked_for": cover.chosen.said or None,
        "flights": {s: list(steps) for s, steps in cover.flights.items()},
        "filters": {s: dict(r) for s, r in cover.filters.items()},
    }

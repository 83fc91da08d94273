"""What `analyzer diff --timing` says: what got slower or faster, by how much, against which spread; JSON rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.reports.timing.stages import KIND_WORDS
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.timing.series import RunSeries, TimedPlace
from gradtrace_analyzer.timing.slower import (
    FEWEST_STEPS,
    RANGES,
    SURE_STEPS,
    Compared,
    Slowdown,
    TimeChange,
)
from gradtrace_analyzer.words.nouns import module_with_noun, upper_first
from gradtrace_analyzer.words.numbers import counted, ms_text, ranks_phrase, spans

_MOST_CAUSES = 3
_CONSEQUENCES = ("receive", "bucket_wait")
# What makes the same code take longer, or shorter, when it is recorded otherwise.
_SETTINGS = ("detail", "summary", "modules", "replay")


def timing_lines(found: Compared, runs: tuple[Run, Run], top: int) -> Iterator[str]:
    """The answer for a terminal: sentences, then the places that changed most in a step."""
    yield from sentences(found, runs)
    changed = [c for c in found.changes if c.verdict in ("slower", "faster")]
    changed.sort(key=lambda c: (c.place.what in _CONSEQUENCES, -abs(c.step_difference_ns)))
    if not changed:
        return
    columns = (
        "place",
        "where",
        "baseline",
        "candidate",
        "difference",
        "spread",
        "in a step",
        "steps",
    )
    yield ""
    yield "What changed, most in a step first, then who waits for it (medians over steps; of stages, of a microbatch):"
    yield from table_lines(
        columns,
        [
            (
                _what_cell(change.place),
                _where_cell(change),
                ms_text(change.baseline_ns),
                ms_text(change.candidate_ns),
                _signed(change.difference_ns),
                ms_text(change.spread_ns),
                _signed(change.step_difference_ns),
                f"{change.baseline_count} and {change.candidate_count}",
            )
            for change in changed[:top]
        ],
        right=set(columns[2:]),
    )
    if len(changed) > top:
        yield f"and {counted(len(changed) - top, 'more place')} (--top)"


def sentences(found: Compared, runs: tuple[Run, Run]) -> Iterator[str]:
    """The verdict, the whole step, up to three causes of each direction, and what makes the times hard to compare."""
    if found.verdict == "no_verdict":
        yield _no_verdict_text(found)
        return
    if found.step is not None:
        yield _step_text(found.step)
    for causes, word in ((found.slower, "slower"), (found.faster, "faster")):
        for cause in causes[:_MOST_CAUSES]:
            yield f"{_cause_text(cause)}."
        if len(causes) > _MOST_CAUSES:
            yield f"{counted(len(causes) - _MOST_CAUSES, 'more place')} took longer or shorter ({word})."
    if not found.slower and not found.faster:
        changed = [c for c in found.changes if c.verdict in ("slower", "faster")]
        yield (
            "No place takes longer or shorter itself, beyond the spread."
            if not changed or found.step is None or found.step.verdict == "same"
            else "No recorded place explains it: the time is between them, in waits, or spread over many."
        )
    if found.common_ratio is not None:
        word = "longer" if found.common_ratio > 1 else "shorter"
        yield (
            f"Nearly everything takes {word} (median {found.common_ratio:.2f} times): rather the machine, what else "
            "runs on it, or the size of a microbatch than one place."
        )
    yield from _remarks(found, runs)


def timing_object(found: Compared, runs: tuple[Run, Run]) -> dict[str, Any]:
    """The same as JSON, with a row for each place of both runs. Times are nanoseconds."""
    return {
        "verdict": found.verdict,
        "explanation": " ".join(sentences(found, runs)),
        "steps": {"baseline": found.baseline.steps, "candidate": found.candidate.steps},
        "left_out": {
            "baseline": found.baseline.left_out,
            "candidate": found.candidate.left_out,
        },
        "slower": [_cause_object(cause) for cause in found.slower],
        "faster": [_cause_object(cause) for cause in found.faster],
        "common_ratio": found.common_ratio,
        "unpaired_place_count": found.unpaired,
        "rows": [change_object(change) for change in found.changes],
    }


def change_object(change: TimeChange) -> dict[str, Any]:
    """A place's row in JSON: what it is of, then its times in nanoseconds and the verdict."""
    return {
        **asdict(change.place),
        "ranks": change.ranks,
        "baseline_ns": change.baseline_ns,
        "candidate_ns": change.candidate_ns,
        "difference_ns": change.difference_ns,
        "spread_ns": change.spread_ns,
        "per_step": change.per_step,
        "baseline_count": change.baseline_count,
        "candidate_count": change.candidate_count,
        "verdict": change.verdict,
    }


def _cause_object(cause: Slowdown) -> dict[str, Any]:
    inside = None if cause.inside is None else change_object(cause.inside)
    return change_object(cause.change) | {"inside": inside}


def _no_verdict_text(found: Compared) -> str:
    a, b = len(found.baseline.steps), len(found.candidate.steps)
    if not found.changes and min(a, b) >= FEWEST_STEPS:
        return "No verdict on times: the two runs have no place in common."
    is_left_out = any(run.left_out is not None for run in (found.baseline, found.candidate))
    after = "after the first step, which is left out, " if is_left_out else ""
    return (
        f"No verdict on times: {after}the baseline has {counted(a, 'step')} and the candidate {counted(b, 'step')}; "
        f"{FEWEST_STEPS} are needed to know the spread, {SURE_STEPS} for small changes."
    )


def _step_text(step: TimeChange) -> str:
    took = (
        f"A step takes {ms_text(step.candidate_ns)}, {ms_text(step.baseline_ns)} in the baseline (medians of "
        f"{step.candidate_count} and {step.baseline_count} steps on the slowest rank, spread {ms_text(step.spread_ns)})"
    )
    if step.verdict == "no_verdict":
        return f"{took}: no verdict from so few."
    return f"{took}{'' if step.verdict in ('slower', 'faster') else ': no difference beyond the spread'}."


def _cause_text(cause: Slowdown) -> str:
    """`Stage 1's weight half takes 41 ms a microbatch, 12 ms in the baseline (spread 2 ms): 1.lin2, AddmmBackward0`."""
    change, inside = cause.change, cause.inside
    spread = f"(spread {ms_text(change.spread_ns)})"
    now, before = ms_text(change.candidate_ns), ms_text(change.baseline_ns)
    if change.place.what == "transfer":
        return (
            f"{upper_first(change.place.kind or '')} take {now} from stage {change.place.other_stage} to stage "
            f"{change.place.stage_index} once they are made, {before} in the baseline {spread}"
        )
    per = " a microbatch" if change.place.stage_index is not None else " a step"
    said = f"{_subject(change)} takes {now}{per}, {before} in the baseline {spread}"
    if inside is None:
        return said
    of = module_with_noun(inside.place.module_fqn)
    what = (
        inside.place.name if inside.place.what == "node" else f"its forward ({inside.place.name})"
    )
    return f"{said}: {of}, {what} ({ms_text(inside.candidate_ns)} against {ms_text(inside.baseline_ns)})"


def _subject(change: TimeChange) -> str:
    place = change.place
    on = f" on {ranks_phrase(change.ranks)}" if change.ranks else ""
    if place.what == "stage":
        return f"Stage {place.stage_index}'s {KIND_WORDS[place.kind or 'backward']}"
    stage = "" if place.stage_index is None else f"Stage {place.stage_index}: "
    if place.what == "module":
        return f"{stage}{'the' if stage else 'The'} forward of {module_with_noun(place.module_fqn)} ({place.name}){on}"
    if place.what == "node":
        return f"{stage}{place.name} of {module_with_noun(place.module_fqn)}{on}"
    if place.what == "optimizer":
        return f"The optimizer{on}"
    if place.what == "between":
        return f"What runs between steps (data, logging){on}"
    if place.what == "bucket_transport":
        return f"The transport of the bucket with {place.name}"
    return f"{upper_first(place.what)}{on}"


def _remarks(found: Compared, runs: tuple[Run, Run]) -> Iterator[str]:
    """What was left out, and what makes the two runs' times hard to compare."""
    yield from _left_out_text(found.baseline, found.candidate)
    counts = len(found.baseline.steps), len(found.candidate.steps)
    if min(counts) < SURE_STEPS:
        yield (
            f"With fewer than {SURE_STEPS} steps ({counts[0]} and {counts[1]}) only what lies beyond {RANGES} times "
            "the range of either run is told."
        )
    differing = [name for name in _SETTINGS if len({str(_setting(run, name)) for run in runs}) > 1]
    if differing:
        names = ", ".join(f"GRADTRACE_{name.upper()}" for name in differing)
        yield f"The runs were recorded with different {names}: that alone makes one of them slower."
    hosts = [sorted({info.host for info in run.ranks.values() if info.host}) for run in runs]
    if hosts[0] != hosts[1] and all(hosts):
        yield f"They ran on different hosts ({', '.join(hosts[0][:3])} against {', '.join(hosts[1][:3])})."
    if found.unpaired:
        yield f"Not compared: {counted(found.unpaired, 'place')} that one run alone has (--format json counts them)."


def _left_out_text(baseline: RunSeries, candidate: RunSeries) -> Iterator[str]:
    a, b = baseline.left_out, candidate.left_out
    if a == b and a is not None:
        yield f"Step {a} of both, the first recorded, is left out: it warms up."
    elif a is not None and b is not None:
        yield f"The first recorded step of each (baseline {a}, candidate {b}) is left out: it warms up."


def _setting(run: Run, name: str) -> Any:
    for info in run.ranks.values():
        settings = info.facts.get("settings")
        if isinstance(settings, dict):
            return settings.get(name)
    return None


def _what_cell(place: TimedPlace) -> str:
    if place.what == "stage":
        return f"stage {place.stage_index} {place.kind}"
    if place.what in ("transfer", "receive"):
        word = "transfer" if place.what == "transfer" else "waits for"
        return f"stage {place.stage_index} {word} {place.kind}"
    stage = "" if place.stage_index is None else f"stage {place.stage_index} "
    if place.what == "node":
        return f"{stage}{place.name}"
    if place.what == "module":
        return f"{stage}forward ({place.name})"
    return place.what.replace("_", " ")


def _where_cell(change: TimeChange) -> str:
    place = change.place
    if place.what in ("transfer", "receive"):
        return f"from stage {place.other_stage}"
    said = []
    if place.what in ("module", "node"):
        said.append(
            place.module_fqn if place.module_fqn else "(root)" if place.module_fqn == "" else "-"
        )
    elif place.name:
        said.append(place.name)
    said += [f"rank {spans(change.ranks)}"] if change.ranks else []
    return ", ".join(said)


def _signed(ns: float) -> str:
    return f"+{ms_text(ns)}" if ns >= 0 else f"-{ms_text(-ns)}"

"""A check's answer as the lines of a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from gradtrace_analyzer.check.check import CheckAnswer, CheckCover
from gradtrace_analyzer.check.law import Violation
from gradtrace_analyzer.check.laws.equality import parameters_equal
from gradtrace_analyzer.check.laws.finite import values_finite
from gradtrace_analyzer.check.laws.handovers import handovers_equal
from gradtrace_analyzer.check.laws.reductions import reduction_is_mean
from gradtrace_analyzer.failures.crashes import crashes_sentence
from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.words.numbers import counted, ranks_phrase, steps_phrase

_KEYS = (
    "step",
    "rank",
    "group",
    "microbatch",
    "backward_index",
    "bucket_index",
    "root",
    "module_fqn",
    "node_name",
    "parameter_fqn",
    "hook_name",
    "factor",
    "relative_error",
    "tolerance",
    "event_index",
    "stage_index",
    "phase",
    "count",
    "explanation",
)


def explanation(answer: CheckAnswer) -> str:
    """What a person would say first."""
    if answer.verdict == "incomparable":
        reasons = dict.fromkeys(answer.not_judged.values())
        told = f" {_crashed(answer.cover)}" if answer.cover.crashes else ""
        return f"Cannot tell: nothing could be judged ({'; '.join(reasons)}).{told}"
    errors = [v for v in answer.violations if v.severity == "error"]
    if errors:
        more = len(answer.violations) - 1
        others = f" There {'is' if more == 1 else 'are'} {more} more." if more else ""
        return f"{_cause(errors[0], answer).explanation}{others}"
    warnings = [v.explanation for v in answer.violations]
    return " ".join((_clean(answer), *warnings))


def headline(answer: CheckAnswer) -> str:
    """The verdict; `clean` alone is said of a run that came to its end and of which all was there to be judged."""
    if answer.verdict != "clean":
        return answer.verdict
    cover = answer.cover
    if any(crash.is_told for crash in cover.crashes):
        return "clean until it crashed"
    if cover.crashes:
        return "clean until it was cut off"
    if answer.violations:
        return f"clean, with {counted(len(answer.violations), 'warning')}"
    # Of groups that hold copies of a module nothing but single values may have been judged.
    alone = cover.groups and not any(map(answer.judged.get, (parameters_equal, reduction_is_mean)))
    return "clean in what could be judged" if alone or _lacks(cover) else "clean"


def _lacks(cover: CheckCover) -> bool:
    """Whether something of the run is not there to be judged: ranks, rows, values, or reductions that no rank saw."""
    left_out = any(cover.settings.get(name) for name in ("steps", "ranks", "modules"))
    less = cover.settings.get("summary") not in ("full", None) or cover.settings.get(
        "detail"
    ) not in ("nodes", None)
    unseen = any(g["unobserved"] for g in cover.groups)
    return bool(
        cover.missing_ranks or cover.dropped or cover.problems or cover.damaged or unseen
    ) or (left_out or less)


def _crashed(cover: CheckCover) -> str:
    """That ranks were stopped before their end, and by what."""
    how = "crashed" if any(crash.is_told for crash in cover.crashes) else "was cut off"
    return f"The run {how}: {crashes_sentence(cover.crashes)}."


def _cause(v: Violation, answer: CheckAnswer) -> Violation:
    """What a violation follows from, a warning too; itself where it follows from nothing."""
    causes = (w for w in answer.violations if w.law is v.inherits and w.step == v.step)
    found = next(causes, None)
    return v if found is None else _cause(found, answer)


def lines(answer: CheckAnswer, name: str) -> Iterator[str]:
    """The answer for a terminal: sentences, then what was judged and what was not."""
    yield f"{headline(answer)}: {name}"
    yield ""
    if answer.verdict != "violated":
        yield _clean(answer) if answer.verdict == "clean" else explanation(answer)
    for v in answer.violations:
        yield f"{v.severity}  {v.law.name}"
        yield f"  {v.explanation}"
    if answer.compression:
        yield ""
        yield "What compressing hooks lose (relative error of a bucket):"
        yield from table_lines(
            ("hook", "group", "buckets", "median", "largest", "promised"),
            [
                (
                    c.hook_name,
                    c.group,
                    c.bucket_count,
                    c.median_error,
                    c.largest_error,
                    "-" if c.promised is None else c.promised,
                )
                for c in answer.compression
            ],
            right=("promised",),
        )
    yield ""
    yield from answer.notes
    for reason in dict.fromkeys(answer.not_judged.values()):
        laws = [law.name for law, why in answer.not_judged.items() if why == reason]
        yield f"Not judged, since {reason}: {', '.join(laws)}."
    yield from _caveats(answer.cover)
    yield f"Judged: {_judged(answer)}; {_extent(answer.cover)}."


def as_object(answer: CheckAnswer) -> dict[str, Any]:
    """The answer for a program. Keys that do not apply are null."""
    return {
        "verdict": answer.verdict,
        "violations": [_violation_object(v) for v in answer.violations],
        "compression": [asdict(c) for c in answer.compression],
        "judged": {law.name: count for law, count in answer.judged.items()},
        "not_judged": {law.name: reason for law, reason in answer.not_judged.items()},
        "cover": {
            **asdict(answer.cover),
            "crashes": [
                {"rank": c.rank, "step": c.step, "ended": c.ended} for c in answer.cover.crashes
            ],
            "steps": {str(rank): own for rank, own in answer.cover.steps.items()},
            "notes": answer.notes,
        },
        "explanation": explanation(answer),
    }


def _violation_object(v: Violation) -> dict[str, Any]:
    return {
        "law": v.law.name,
        "severity": v.severity,
        **{key: getattr(v, key) for key in _KEYS},
        "ranks": list(v.ranks),
        "inherits": None if v.inherits is None else v.inherits.name,
    }


def _clean(answer: CheckAnswer) -> str:
    """`Clean: 12 parameters equal on ranks 0-1 before and after 3 steps, 6 buckets are the mean.`

    Of a law that a warning is about nothing is said here: the warning says it.
    """
    said = []
    counts = answer.clean_counts
    told = {v.law for v in answer.violations}
    judged = {law: count for law, count in answer.judged.items() if law not in told}
    if judged.get(parameters_equal):
        said.append(
            f"{counted(counts['parameters'], 'parameter')} equal on {_holders(answer.cover)} {_when(counts)} "
            f"{counted(counts['steps'], 'step')}"
        )
    buckets = judged.get(reduction_is_mean)
    if buckets:
        said.append(
            f"{counted(buckets, 'bucket')} {'is' if buckets == 1 else 'are'} the mean of the ranks' own"
        )
    handed = judged.get(handovers_equal)
    if handed:
        said.append(
            f"{counted(handed, 'tensor')} handed on between stages {'is' if handed == 1 else 'are'} what was sent"
        )
    if judged.get(values_finite):
        said.append(f"{counted(judged[values_finite], 'tensor')} finite")
    none = (
        "no error was found in what was judged"
        if told
        else "no law is broken of those that could be judged"
    )
    clean = f"Clean: {', '.join(said) or none}."
    if not answer.cover.crashes:
        return clean
    return f"{_crashed(answer.cover)} Until then: {', '.join(said) or none}."


def _when(counts: Mapping[str, int]) -> str:
    """Before the steps, after them, or both: where parameters were recorded."""
    points = [name for name in ("before", "after") if counts[name]]
    return " and ".join(points)


def _holders(cover: CheckCover) -> str:
    """The ranks that hold copies of one module; of several groups, that each group's own are equal."""
    teams = {tuple(g["recorded"]) for g in cover.groups if g["module_fqn"] is not None}
    if len(teams) > 1:
        return f"the ranks of each of {len(teams)} groups"
    return ranks_phrase(teams.pop() if teams else cover.ranks)


def _judged(answer: CheckAnswer) -> str:
    return (
        ", ".join(f"{law.name} ({law.counted(count)})" for law, count in answer.judged.items())
        or "nothing"
    )


def _extent(cover: CheckCover) -> str:
    """`ranks 0-1, steps 0-2`; rank by rank where their steps differ."""
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for rank, steps in cover.steps.items():
        by_steps.setdefault(steps, []).append(rank)
    said = [f"{ranks_phrase(ranks)}, {steps_phrase(steps)}" for steps, ranks in by_steps.items()]
    return "; ".join(said) or "no steps"


def _caveats(cover: CheckCover) -> Iterator[str]:
    if cover.flight_steps is not None:
        yield (
            f"A flight recording, of which the last steps ({cover.flight_steps} at most) and those before a trigger "
            "are there: other steps are not judged."
        )
    if cover.missing_ranks:
        yield f"Not recorded: {ranks_phrase(cover.missing_ranks)}."
    if cover.incomplete_ranks:
        yield (
            f"The recording of {ranks_phrase(cover.incomplete_ranks)} was not ended (killed, or still running): what "
            "its last step lacks breaks no law."
        )
    for what, counts in (
        ("Rows dropped", cover.dropped),
        ("Tensors without a summary", cover.unsummarised),
        ("Nodes chosen for a replay and not run again", cover.replay_skipped),
    ):
        if counts:
            yield f"{what}: {', '.join(f'{count:,} {reason}' for reason, count in counts.items())}."
    for part in cover.damaged:
        yield f"Damaged, and not read: a part of {part}."
    for problem in cover.problems:
        yield f"The recorder gave up in part: {problem}."
    for group, why in dict.fromkeys((g["group"], g["unobserved"]) for g in cover.groups):
        if why:
            yield f"The reductions of group {group} were not recorded: {why}."
    chosen = [
        f"{name} {cover.settings[name]}"
        for name in ("steps", "ranks", "modules")
        if cover.settings.get(name)
    ]
    if cover.settings.get("summary") not in ("full", None):
        chosen.append(f"summary {cover.settings['summary']}")
    if cover.settings.get("detail") not in ("nodes", None):
        chosen.append(f"detail {cover.settings['detail']}")
    if chosen:
        yield f"Recorded only: {', '.join(chosen)}."

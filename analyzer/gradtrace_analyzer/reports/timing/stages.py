"""What `analyzer timing --stages` says: the slow stage in a sentence, a chart of a typical step, tables; JSON, CSV.

Times are nanoseconds in JSON and CSV, milliseconds in text. A share is a fraction in JSON and CSV.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.timing.gantt import LETTERS, MEANINGS, WAITS, Chart, drawn
from gradtrace_analyzer.timing.pipelines import MessageClock
from gradtrace_analyzer.timing.slowest import (
    CHANCE,
    SMALLEST_SHARE,
    PartTime,
    SlowPlace,
    StageJudgement,
)
from gradtrace_analyzer.timing.stages import RankIdle, StageAnswer, Waited
from gradtrace_analyzer.words.nouns import module_with_noun, upper_first
from gradtrace_analyzer.words.numbers import (
    counted,
    ms_text,
    percent_text,
    ranks_phrase,
    spans,
    steps_phrase,
    verb,
)

KIND_COLUMNS = ("stage_index", "kind", "ranks", "count", "median_ns", "p95_ns", "total_ns")
KIND_WORDS = {
    "forward": "forward",
    "backward_full": "full backward",
    "backward_input": "input half",
    "backward_weight": "weight half",
    "backward": "backward",
}
WAIT_WORDS = {
    "receive_activations": "activations from",
    "receive_gradients": "gradients from",
    "send_activations": "activations to reach",
    "send_gradients": "gradients to reach",
}
_PIPED_WIDTH = 80
_MOST_LANES = 40
_MOST_RANKS = 32
_HEAVY_RECORDER = 0.1
_ALIKE_SHARES = 0.01


def stage_lines(
    answer: StageAnswer, chart: Chart | None, top: int, width: int | None = None
) -> Iterator[str]:
    """The answer for a terminal: sentences, chart, tables, what is missing."""
    yield from headlines(answer)
    yield from map(_clock_text, answer.clocks)
    if chart is not None:
        yield ""
        yield from chart_lines(chart, answer.line_count, width or terminal_width())
    yield ""
    yield from _kind_table(answer)
    yield ""
    yield from _idle_table(answer)
    if answer.hand_overs:
        yield ""
        yield from _hand_over_table(answer, top)
    notes = list(_notes(answer))
    if notes:
        yield ""
        yield from notes


def headlines(answer: StageAnswer) -> list[str]:
    """A sentence each: which stage is slow and why, which link is (where one is), which rank is idle most."""
    said = [_judgement_text(answer.judgement)]
    if answer.link is not None:
        link = answer.link
        said.append(
            f"{upper_first(link.what)} from stage {link.from_stage} reach stage {link.to_stage} "
            f"{ms_text(link.transfer_ns)} after they were made (median of {link.count:,}), against "
            f"{ms_text(link.other_ns)} between other stages: what lies between the two is slow (the link, or a rank "
            "that waits for its core), not the stage."
        )
    said += _idle_text(answer.idle)
    return said


def kind_rows(answer: StageAnswer) -> list[tuple[Any, ...]]:
    """A row per stage and kind, in the order of KIND_COLUMNS."""
    return [
        (k.stage_index, k.kind, spans(k.ranks), k.count, k.median_ns, k.p95_ns, k.total_ns)
        for k in answer.kinds
    ]


def stage_object(answer: StageAnswer, chart: Chart | None) -> dict[str, Any]:
    """The answer as JSON. What does not apply is null; times are nanoseconds."""
    judgement = answer.judgement
    slow = judgement.slow
    return {
        "steps": answer.steps,
        "warm_up_step": answer.warm_up,
        "pipelines": answer.line_count,
        "window_ns": answer.window_ns,
        "slowest": {
            **{k: v for k, v in asdict(judgement).items() if k != "slow"},
            "is_slow": slow is not None,
            "ranks": None if slow is None else slow.ranks,
            "kind": slow.parts[0].kind if slow is not None and slow.is_one_part else None,
            "parts": []
            if slow is None
            else [asdict(part) | {"excess_ns": part.excess_ns} for part in slow.parts],
            "place": None if slow is None or slow.place is None else asdict(slow.place),
        },
        "slow_link": None if answer.link is None else asdict(answer.link),
        "kinds": [asdict(kind) for kind in answer.kinds],
        "idle": [asdict(idle) for idle in answer.idle],
        "hand_overs": [asdict(one) for one in answer.hand_overs],
        "chart": None if chart is None else asdict(chart),
        "clocks": [asdict(clock) for clock in answer.clocks],
        "recorder_share": answer.recorder_share,
        "notes": answer.notes,
        "explanation": " ".join(headlines(answer)),
    }


def terminal_width() -> int:
    """Columns of the terminal, 80 where the answer goes elsewhere."""
    if not sys.stdout.isatty():
        return _PIPED_WIDTH
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


def _judgement_text(judgement: StageJudgement) -> str:
    load, other = ms_text(judgement.load_ns), ms_text(judgement.other_ns)
    stage = f"stage {judgement.stage_index}"
    count = counted(judgement.sample_count, "microbatch")
    slow = judgement.slow
    if slow is not None:
        said = (
            f"{upper_first(stage)} ({ranks_phrase(slow.ranks)}) is the slowest: it takes {load} a microbatch, the "
            f"others {other} (slower in {judgement.slower_count:,} of {count})."
        )
        return f"{said} {_parts_text(slow.parts, slow.is_one_part)}{_place_text(slow.place, slow.places_seen)}"
    if judgement.reason == "one":
        return "There is one stage with actions; nothing to compare it with."
    if judgement.reason == "few":
        return (
            f"No stage is named slowest: {count} is too few. In {verb(judgement.sample_count, 'it', 'them')} "
            f"{stage} takes {load} each, the others {other}."
        )
    if judgement.reason == "even":
        return (
            f"No stage stands out: {stage} has most to do, {load} a microbatch, the others {other} "
            f"(medians; only {SMALLEST_SHARE:.0%} more would be named)."
        )
    return (
        f"No stage is named slowest: {stage} takes {load} a microbatch, the others {other}, but it is the slower in "
        f"{judgement.slower_count:,} of {count} only, which may be chance (beyond {CHANCE:.0%})."
    )


def _parts_text(parts: Sequence[PartTime], is_one: bool) -> str:
    if is_one:
        part = parts[0]
        each = "" if part.count == 1 else " each"
        return (
            f"Its {KIND_WORDS[part.kind]} makes it so: {ms_text(part.own_ns)}{each}, against "
            f"{ms_text(part.other_ns)} in the others."
        )
    shown = [
        f"{KIND_WORDS[part.kind]} {ms_text(part.own_ns)} against {ms_text(part.other_ns)}"
        for part in parts
    ]
    return f"No part alone makes it so: {', '.join(shown)}."


def _place_text(place: SlowPlace | None, places_seen: bool) -> str:
    if place is None:
        if places_seen:
            return " No single module or Node explains it: the time is between them, or spread over many."
        return ""
    of = module_with_noun(place.module_fqn)
    what = (
        f"{place.name} of {of}" if place.what == "node" else f"the forward of {of} ({place.name})"
    )
    elsewhere = (
        ""
        if place.other_ns is None
        else f", against {ms_text(place.other_ns)} at most in other stages"
    )
    return f" The time is in {what}: {ms_text(place.own_ns)} of it{elsewhere}."


def _idle_text(idle: Sequence[RankIdle]) -> Iterator[str]:
    """The rank that is idle most, against the busiest, and what it waits for; nothing where none was seen."""
    if not idle:
        return
    most = max(idle, key=lambda own: own.bubble_share)
    least = min(idle, key=lambda own: own.bubble_share)
    share, where = percent_text(most.bubble_share), f"Rank {most.rank}"
    if len(idle) == 1:
        said = f"{where} is idle {share} of a step"
    elif most.bubble_share - least.bubble_share < _ALIKE_SHARES:
        said = f"All ranks are idle alike, {share} of a step"
    else:
        said = (
            f"{where} is idle most: {share} of a step (rank {least.rank}, the busiest, "
            f"{percent_text(least.bubble_share)})"
        )
    longest = most.waits[0] if most.waits else None
    if longest is not None and longest.wait_ns >= max(most.early_ns, most.other_ns):
        yield f"{said}; rank {most.rank} waits {percent_text(longest.share)} for {_waited_text(longest)}."
    elif most.early_ns > most.other_ns:
        yield f"{said}; rank {most.rank} mostly because it has done all before the others have."
    else:
        yield f"{said}; rank {most.rank} mostly in no wait that was recorded."


def _waited_text(wait: Waited) -> str:
    return f"{WAIT_WORDS.get(wait.kind, wait.kind)} stage {wait.other_stage}"


def chart_lines(chart: Chart, line_count: int, width: int) -> Iterator[str]:
    """The chart of a step, one line per rank, per stage where a rank has several."""
    shown = chart.lanes[:_MOST_LANES]
    several = len({lane.rank for lane in chart.lanes}) < len(chart.lanes)
    labels = [
        f"rank {lane.rank}"
        + (f" stage {'-' if lane.stage_index is None else lane.stage_index}" if several else "")
        for lane in shown
    ]
    label_width = max(map(len, labels))
    columns = max(20, width - label_width - 3)
    of = f" of the first of {line_count} pipelines" if line_count > 1 and chart.line == 0 else ""
    if line_count > 1 and chart.line:
        of = f" of pipeline {chart.line} of {line_count} (counted from 0)"
    column = ms_text(chart.length_ns / columns)
    yield f"Step {chart.step}{of}, {ms_text(chart.length_ns)} from its first action to its last (a column is {column}):"
    used = set()
    for label, text in zip(labels, drawn(shown, chart.length_ns, columns), strict=True):
        used |= set(text)
        yield f"{label.ljust(label_width)} |{text}|"
    if len(chart.lanes) > _MOST_LANES:
        yield f"and {counted(len(chart.lanes) - _MOST_LANES, 'more line')} (--format json)"
    meanings = [
        f"{sign} {MEANINGS[sign]}"
        for sign in (*LETTERS.values(), *dict.fromkeys(WAITS.values()))
        if sign in used
    ]
    meanings += ["blank: neither"] if " " in used else []
    yield from _wrapped("; ".join([*meanings, "digits: the microbatch"]), width)


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Lines of at most `width` characters, cut where a clause ends at `; `."""
    line = ""
    for clause in text.split("; "):
        if line and len(line) + 2 + len(clause) > width:
            yield f"{line};"
            line = clause
        else:
            line = f"{line}; {clause}" if line else clause
    yield line


def _kind_table(answer: StageAnswer) -> Iterator[str]:
    columns = ("stage", "rank", "kind", "count", "median", "95%", "total")
    which = steps_phrase(answer.steps)
    out = "" if answer.warm_up is None else f"; step {answer.warm_up}, the first, is left out"
    yield f"Actions ({which}{out}):"
    yield from table_lines(
        columns,
        [
            (
                "-" if k.stage_index is None else str(k.stage_index),
                spans(k.ranks),
                k.kind,
                k.count,
                ms_text(k.median_ns),
                ms_text(k.p95_ns),
                ms_text(k.total_ns),
            )
            for k in answer.kinds
        ],
        right={"stage", "rank", "median", "95%", "total"},
    )


def _idle_table(answer: StageAnswer) -> Iterator[str]:
    columns = ("rank", "stages", "step", "busy", "bubble", "of it: waits", "done early", "no wait")
    shown = answer.idle[:_MOST_RANKS]
    yield "Idle in a step, from the first action of any stage to the last (means, shares of that time):"
    yield from table_lines(
        columns,
        [
            (
                own.rank,
                spans(own.stages) or "-",
                ms_text(own.window_ns),
                ms_text(own.busy_ns),
                percent_text(own.bubble_share),
                _waits_cell(own),
                percent_text(own.early_ns / own.window_ns),
                percent_text(own.other_ns / own.window_ns),
            )
            for own in shown
        ],
        right={"rank", "stages", "step", "busy", "bubble", "done early", "no wait"},
        widest=100,
    )
    if len(answer.idle) > len(shown):
        yield f"and {counted(len(answer.idle) - len(shown), 'more rank')} (--format json)"


def _waits_cell(own: RankIdle) -> str:
    told = [
        f"{percent_text(wait.share)} {_waited_text(wait)}"
        for wait in own.waits
        if wait.share >= 0.005
    ]
    return ", ".join(told[:3]) or "none"


def _hand_over_table(answer: StageAnswer, top: int) -> Iterator[str]:
    columns = ("what", "from", "to", "receives", "wait", "sender late", "transfer", "95%")
    slowest = sorted(answer.hand_overs, key=lambda one: (-one.transfer_ns, one.from_stage))
    yield "Receives (medians; a wait is for a sender that has not made it yet, then for the transfer):"
    yield from table_lines(
        columns,
        [
            (
                one.what,
                one.from_stage,
                one.to_stage,
                one.count,
                *map(ms_text, (one.wait_ns, one.late_ns, one.transfer_ns, one.p95_transfer_ns)),
            )
            for one in slowest[:top]
        ],
        right=set(columns[1:]),
    )
    if len(slowest) > top:
        yield f"and {counted(len(slowest) - top, 'more boundary')} (--top)"


def _notes(answer: StageAnswer) -> Iterator[str]:
    share = answer.recorder_share
    if share is not None and share >= _HEAVY_RECORDER:
        yield (
            f"The recorder itself took {percent_text(share)} of the steps, in the actions and between them "
            "(GRADTRACE_SUMMARY=off for truer times)."
        )
    if answer.notes:
        yield f"Not whole: {'; '.join(answer.notes)}."


def _clock_text(clock: MessageClock) -> str:
    sent = counted(clock.message_count, "message")
    by = f"The clock of {clock.host} was laid over that of {clock.reference} by {sent}"
    if clock.error_ns is None:
        return f"{by}, all in one direction: how long they took is not known, and is 0 here."
    return f"{by} in both directions; it is off by {ms_text(clock.error_ns)} at most."

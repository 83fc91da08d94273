"""How ranks ended, in the words of a colleague: a sentence for each rank, a table, JSON."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gradtrace_analyzer.failures.endings import Ending, Endings
from gradtrace_analyzer.failures.failed_passes import FailedPass
from gradtrace_analyzer.failures.phrases import first_line, where_phrase
from gradtrace_analyzer.failures.under_way import StageAction
from gradtrace_analyzer.failures.waiting import Wait
from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.runs.last_seen import LastSeen, RankPlace
from gradtrace_analyzer.words.nouns import listed, module_phrase
from gradtrace_analyzer.words.numbers import (
    clock_text,
    counted,
    ranks_phrase,
    seconds_text,
    spans,
    verb,
)

COLUMNS = ("rank", "state", "step", "where", "since", "waits for", "exception")
_MOST_ALIKE = 8  # ranks of which each gets a sentence where they all ended by themselves


def lines(found: Endings, name: str) -> Iterator[str]:
    """The answer for a terminal: a sentence over all, a table, then one for each rank that did not just end."""
    yield f"{name} (attempt {found.run.attempt}): {explanation(found)}"
    yield ""
    yield from table_lines(COLUMNS, [_row(ending) for ending in found.ranks])
    told = [e for e in found.ranks if e.state not in ("ended", "not_asked") or e.place]
    if told or len(found.ranks) <= _MOST_ALIKE:
        yield ""
        for ending in told or found.ranks:
            yield sentence(ending)
    for earlier in reversed(found.before):
        yield ""
        yield f"Before, attempt {earlier.run.attempt}: {explanation(earlier)}"
        if earlier.verdict != "well":
            ranks = [e for e in earlier.ranks if e.state not in ("ended", "not_asked") or e.place]
            yield from (sentence(ending) for ending in ranks[:_MOST_ALIKE])


def as_object(found: Endings, name: str) -> dict[str, Any]:
    """The answer as JSON. Keys that do not apply are null."""
    told = {"run": name, **_attempt_object(found)}
    if found.before:
        told["before"] = [_attempt_object(earlier) for earlier in found.before]
    return told


def _attempt_object(found: Endings) -> dict[str, Any]:
    return {
        "attempt": found.run.attempt,
        "verdict": found.verdict,
        "explanation": explanation(found),
        "ranks": [_rank_object(ending) for ending in found.ranks],
    }


def explanation(found: Endings) -> str:
    """One sentence over all ranks of the newest attempt: who failed, and who only waited for them."""
    if not found.ranks:
        return "nothing was recorded, so nothing can be told."
    if replace(found, before=()).verdict == "well":
        asked = [ending.rank for ending in found.ranks if ending.state == "ended"]
        return f"{ranks_phrase(asked)} ended without an exception."
    said = []
    left = [ending.rank for ending in found.of("ended") if ending.place]
    if left:
        said.append(f"{ranks_phrase(left)} ended inside a forward or an optimizer's step")
    for states, words in (
        (("raised",), "raised an exception"),
        (("died",), "died"),
        (("silent",), "gave no sign of life"),
        (("stuck",), "{} stuck"),
        (("waits",), "{}"),
        (("running",), "{} running"),
        (("unknown",), "left nothing that tells about the end"),
        (("missing",), "recorded nothing"),
    ):
        ranks = [e.rank for e in found.of(*states)]  # type: ignore[arg-type]
        if ranks:
            is_are = (
                verb(ranks, "waits", "wait") if states == ("waits",) else verb(ranks, "is", "are")
            )
            said.append(f"{ranks_phrase(ranks)} {words.format(is_are)}")
    waited = sorted(
        {rank for ending in found.ranks for rank in ending.for_ranks}
        - {ending.rank for ending in found.ranks if ending.for_ranks}
    )
    text = "; ".join(said)
    if waited:
        waiting = [ending.rank for ending in found.ranks if ending.for_ranks]
        text += f"; {ranks_phrase(waiting)} waited for {ranks_phrase(waited)}"
    return f"{text}."


def sentence(ending: Ending) -> str:
    """How one rank ended or where it is, in a sentence each: state, exception, what it waits for, what was dropped."""
    rank, seen, place = f"Rank {ending.rank}", ending.seen, ending.place
    said: list[str] = []
    if ending.state == "missing":
        return f"{rank} recorded nothing: it died before its first step, or never began."
    if ending.state == "not_asked":
        return f"{rank} was not recorded (GRADTRACE_RANKS)."
    if ending.state == "unknown":
        said.append(
            f"{rank} did not close its recording and left no journal that can be read: nothing tells how it ended."
        )
    if ending.state == "ended":
        said.append(
            f"{rank} ended by itself{_last_step(ending)}, without an exception that was seen."
        )
        if place is not None:
            said.append(
                f"It was last seen {where_phrase(place)}, which an exception or sys.exit left."
            )
    if ending.last_failure is not None:
        said.append(_raised(ending, ending.last_failure))
    if ending.uncaught is not None and not _is_said(ending):
        kind, text = ending.uncaught
        first = first_line(text)
        what = f"{kind}: {first}" if first else kind
        end = "" if what.endswith((".", "!", "?")) else "."
        last = "" if place is None else f"; the rank was last seen {where_phrase(place)}"
        said.append(
            f"{rank} was ended by {what}{end} It came from outside any backward pass{last}."
        )
    elif ending.state == "raised":
        said.append(
            "After that the process ended by itself."
            if ending.uncaught is None
            else "It ended the process."
        )
    if seen is not None and ending.state not in ("ended", "raised"):
        said.append(f"{rank} {_whereabouts(ending, seen, place)}.")
    if ending.stage is not None:
        said.append(_stage_text(ending.stage, seen))
    if ending.wait is not None and seen is not None:
        said.append(_waiting(ending.wait, seen))
    if ending.dropped:
        said.append(f"Not in the answer: {_dropped(ending)}.")
    return " ".join(said)


def _whereabouts(ending: Ending, seen: LastSeen, place: RankPlace | None) -> str:
    """`died in step 3, in SigmoidBackward0 of blocks.2, which began at 11:02:03.456 ...`"""
    where = "before its first event" if place is None else where_phrase(place)
    since = "" if place is None else _since(place, seen)
    last = f"its last sign of life was at {clock_text(seen.last_unix_ns)}"
    idle = (ending.idle_ns or 0) / 1e9
    if ending.state == "died":
        return f"died {where}{since}; {last}"
    if ending.state == "silent":
        ago = (datetime.datetime.now().timestamp() * 1e9 - seen.last_unix_ns) / 1e9
        host = ending.facts.get("host") or "another host"
        return f"was last seen {where}{since}; {last}, {seconds_text(ago)} ago, on {host}: it died, or its disk stalls"
    if ending.state == "stuck":
        return f"lives and has not moved for {seconds_text(idle)}: it is {where}{since}"
    if ending.state == "waits":
        return f"has waited for {seconds_text(idle)} {where}{since}"
    return f"is running: {where}{since}"


def _since(place: RankPlace, seen: LastSeen) -> str:
    began = "which began at" if place.doing == "node" else "since"
    at = clock_text(seen.wall_start_ns + place.since_ns)
    return f", {began} {at} ({seconds_text(place.since_ns / 1e9)} after its recording began)"


def _waiting(wait: Wait, seen: LastSeen) -> str:
    """`It waits in bucket 0 of step 3 (head.weight and 3 more) for rank 1, which has not launched it.`"""
    what = (
        f"Bucket {wait.bucket_index} of step {wait.step} ({listed(wait.parameter_fqns)}), launched at "
        f"{clock_text(seen.wall_start_ns + wait.launched_ns)}, was not reduced"
    )
    if wait.others:
        rank, step, bucket, fqns = wait.others[0]
        return (
            f"{what}: rank {rank} came with bucket {bucket} of step {step} ({listed(fqns)}) instead, so the two "
            "collectives do not match."
        )
    if wait.absent:
        return (
            f"{what}: {ranks_phrase(wait.absent)} {verb(wait.absent, 'has', 'have')} not launched "
            f"{verb(wait.absent, 'its', 'their')} own."
        )
    return f"{what}, though every rank has launched its own."


def _stage_text(stage: StageAction, seen: LastSeen | None) -> str:
    """`Of its pipeline it was in stage 1's weight half of microbatch 3 of step 2, since 11:02:03.456.`"""
    since = ""
    if seen is not None and stage.error is None:
        since = f", since {clock_text(seen.wall_start_ns + stage.start_ns)}"
    if stage.error is not None:
        came = first_line(stage.error).rstrip(".:")
        return f"Its pipeline was {stage.told} in step {stage.step} when an exception came: {came}."
    return f"Its pipeline was {stage.told} in step {stage.step}{since}."


def _raised(ending: Ending, failed: FailedPass) -> str:
    row = failed.row
    said = f"Rank {ending.rank} raised in step {failed.step}, backward pass {failed.backward_index}, {failed.told}"
    if row["grad_outputs"]:
        came = [one or "nothing" for one in row["grad_outputs"]]
        said += f" What came in: {', '.join(came)}."
    if row["call_phase"] is not None and row["module_fqn"] is not None:
        said += (
            f" The Node was made by call {row['call_index']} of {module_phrase(row['module_fqn'])} in microbatch "
            f"{row['call_microbatch']} of step {row['call_step']} ({row['call_phase']})."
        )
    if row["changed_between"] is not None:
        inside = (
            f"during call {row['changed_call_index']} of {module_phrase(row['changed_module_fqn'])}, "
            if row["changed_module_fqn"] is not None
            else ""
        )
        said += f" The tensor that this Node holds was changed {inside}{row['changed_between']}."
    if ending.failure_count > 1:
        said += f" It was the last of {counted(ending.failure_count, 'such pass')}."
    if ending.went_on:
        said += " The job caught it and went on."
    return said


def _is_said(ending: Ending) -> bool:
    """Whether what ended the process is the exception of the last failed pass."""
    last = ending.last_failure
    if last is None or ending.uncaught is None:
        return ending.uncaught is None
    return ending.uncaught[0] == last.row["exception_type"] and (
        ending.uncaught[1][:400] == str(last.row["exception_text"])[:400]
    )


def _dropped(ending: Ending) -> str:
    said = []
    for table, (count, first, last) in sorted(ending.dropped.items()):
        steps = "" if first is None or last is None else f" (steps {spans(range(first, last + 1))})"
        said.append(f"{count:,} {'rows of ' if table != 'names' else ''}{table}{steps}")
    return f"{', '.join(said)} had no room in the journal"


def _row(ending: Ending) -> tuple[Any, ...]:
    place, seen, failed = ending.place, ending.seen, ending.last_failure
    where: str | None = None
    since: str | None = None
    step = ending.facts.get("last_step") if place is None else place.step
    if place is not None and seen is not None:
        where = where_phrase(place).removeprefix(f"in step {place.step}, ")
        since = clock_text(seen.wall_start_ns + place.since_ns)
    elif place is not None:
        where = where_phrase(place).removeprefix(f"in step {place.step}, ")
    elif failed is not None and (ending.uncaught is None or _is_said(ending)):
        step = failed.step
        name = failed.row["node_name"]
        where = None if name is None else f"in {name} of {module_phrase(failed.row['module_fqn'])}"
    waits = spans(ending.for_ranks) or (None if ending.wait is None else "none: all have come")
    # Of a rank that went on, what counts is how it ended.
    is_over = ending.went_on or (
        place is not None and failed is not None and place.step != failed.step
    )
    raised = None if failed is None or (is_over and ending.state != "raised") else failed.said
    if ending.uncaught is not None:
        raised = f"{ending.uncaught[0]}: {first_line(ending.uncaught[1])}".removesuffix(": ")
    texts = ("" if text is None else text for text in (where, since, waits, raised))
    return ending.rank, ending.state, "" if step is None else step, *texts


def _rank_object(ending: Ending) -> dict[str, Any]:
    seen, place, failed, wait = ending.seen, ending.place, ending.last_failure, ending.wait
    doing = None
    if place is not None and seen is not None:
        doing = vars(place) | {
            "since_unix_ns": seen.wall_start_ns + place.since_ns,
            "for_seconds": seen.idle_ns(place.since_ns) / 1e9
            if ending.idle_ns is not None
            else None,
        }
    return {
        "rank": ending.rank,
        "state": ending.state,
        "sentence": sentence(ending),
        "host": ending.facts.get("host"),
        "pid": ending.facts.get("pid"),
        "last_seen_unix_ns": None if seen is None else seen.last_unix_ns,
        "idle_seconds": None if ending.idle_ns is None else ending.idle_ns / 1e9,
        "doing": doing,
        "threads": [] if seen is None else [vars(one) for one in seen.places],
        "waits": None if wait is None else vars(wait) | {"for_ranks": wait.for_ranks},
        "stage": None if ending.stage is None else vars(ending.stage) | {"told": ending.stage.told},
        "exception": None if failed is None else dict(failed.row),
        "exception_count": ending.failure_count,
        "went_on": ending.went_on,
        "uncaught": None if ending.uncaught is None else list(ending.uncaught),
        "dropped": {
            table: {"rows": count, "first_step": first, "last_step": last}
            for table, (count, first, last) in ending.dropped.items()
        },
    }


def _last_step(ending: Ending) -> str:
    step = ending.facts.get("last_step")
    return "" if step is None else f" after step {step}"

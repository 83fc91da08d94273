"""A diff's answer as a colleague would say it, as the lines of a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.difference import LENGTHS, Change
from gradtrace_analyzer.diff.origin import CodeOrigin, FailureOrigin, NodeOrigin, Origin
from gradtrace_analyzer.diff.scope.cover import crash_words, lacking_words
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.numerics.tolerance import STANDARD_ERROR
from gradtrace_analyzer.reports.diff.cover import (
    caveats,
    compared,
    crashes_told,
    extent,
    lacking,
    nothing_more,
)
from gradtrace_analyzer.reports.diff.explanations import told
from gradtrace_analyzer.reports.diff.inheritance import (
    chain_lines,
    inheritance_lines,
    reached_sentences,
)
from gradtrace_analyzer.reports.diff.notes import note_sentence
from gradtrace_analyzer.reports.diff.numbering import Steps, numbering_sentence
from gradtrace_analyzer.reports.diff.origins.backward import length_words, tells_rounding
from gradtrace_analyzer.reports.diff.origins.sentences import (
    nonfinite_sentence,
    origin_sentence,
    unseen_sentence,
)
from gradtrace_analyzer.reports.diff.origins.structure import failure_clause
from gradtrace_analyzer.reports.diff.places import place_of, size_of
from gradtrace_analyzer.reports.diff.structure import (
    code_phrase,
    compiled_lines,
    configuration_lines,
    naming_lines,
    structure_lines,
)
from gradtrace_analyzer.reports.diff.wording import Wording, noise_word, wording_of
from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.words.nouns import upper_first
from gradtrace_analyzer.words.numbers import ranks_phrase, stages_phrase, told_apart, verb


def headline(answer: Answer) -> str:
    """The verdict, and that runs which agree were not run to their end."""
    cover = answer.cover
    said = answer.verdict.replace("_", " ")
    if answer.verdict not in ("identical", "within_tolerance") or not cover.crashed:
        return said
    how = "crashed" if cover.raised else "were cut off" if len(cover.crashed) > 1 else "was cut off"
    if len(cover.crashed) > 1:
        return f"{said} until they {how}"
    return f"{said}, but the {cover.crashed[0]} {how}"


def explanation(answer: Answer) -> str:
    """The answer in a sentence or a few, as a colleague would say it: verdict, origin, and what follows from it."""
    return " ".join(filter(None, _explanation(answer, wording_of(answer))))


def _explanation(answer: Answer, say: Wording) -> Iterator[str]:
    """Its sentences, made in the order in which they are read."""
    if answer.verdict == "different":
        yield from _different(answer, say)
        return
    if answer.verdict != "incomparable":
        yield crashes_told(answer.cover, say.steps)
    how = {"identical": _identical, "within_tolerance": _within, "incomparable": _incomparable}
    yield from how[answer.verdict](answer, say)
    if answer.verdict == "incomparable":
        if "crashed (" not in answer.reason:
            yield crashes_told(answer.cover, say.steps)
    else:
        yield lacking(answer.cover, say.steps)


def _incomparable(answer: Answer, say: Wording) -> Iterator[str]:
    cover = answer.cover
    yield f"Cannot tell: {_reason(answer, say)}."
    agrees = cover.steps and any(cover.rows.values()) and not answer.origins
    if agrees and (cover.raised or not cover.is_whole):
        yield f"What can be compared is identical ({extent(cover, say.steps)})."


def _reason(answer: Answer, say: Wording) -> str:
    """Why nothing can be said; of what the cover tells, with the steps as both sides number them."""
    cover = answer.cover
    if not cover.is_whole and answer.reason == lacking_words(cover):
        return lacking_words(cover, say.steps.many)
    if len(cover.raised) == 1 and answer.reason == crash_words(cover, cover.raised[0]):
        return crash_words(cover, cover.raised[0], say.steps.one)
    return answer.reason


def _identical(answer: Answer, say: Wording) -> Iterator[str]:
    cover = answer.cover
    how = "bit for bit" if cover.has_fingerprints else "in norms, sums and counts"
    if not cover.has_fingerprints and any(
        one["name"] in ("observer", "device") for one in answer.configuration
    ):
        how += " (norms to 1e-6, as they were not added up alike)"
    yield f"Identical, {how}, in all that both recorded: {extent(cover, say.steps)}."


def _within(answer: Answer, say: Wording) -> Iterator[str]:
    """That nothing differs by more than the tolerance, or by other code only."""
    noise = noise_word(answer)
    if answer.sums is not None:
        yield f"The same within {noise}."
        yield answer.sums.words()
        yield f"{upper_first(tolerance_words(answer))}."
    elif not answer.origins:
        yield _same_numbers(answer, say)
    elif isinstance(code := answer.origins[0], CodeOrigin):
        yield (
            f"The same within {noise}, by other code: {code_phrase(code.code)}; {nothing_more(answer.cover)} that "
            "pairs differs by more than the tolerance."
        )
    else:
        first = answer.origins[0]
        yield (
            f"The same within {noise}: the first bits differ in {_at(first, say)}, and {nothing_more(answer.cover)} "
            f"differs by more than the tolerance: {tolerance_words(answer)}."
        )


def _same_numbers(answer: Answer, say: Wording) -> str:
    """That all which pairs is equal, by other code, or compiled."""
    bits = ", bit for bit" if answer.cover.has_fingerprints else ""
    count = len(list(structure_lines(answer.structure, Steps())))
    if not count:
        other = ", compiled" if answer.structure else ""
        return f"The same numbers{other}: all values that pair are identical{bits}."
    alone = next(structure_lines(answer.structure, say.steps))
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"The same numbers by other code: all values that pair are identical{bits}, and {alone}{more}."


def _different(answer: Answer, say: Wording) -> Iterator[str]:
    if not answer.origins:
        models = code_phrase(answer.structure)
        yield f"All values that pair are identical, but the models differ: {models}."
        return
    origin = answer.origins[0]
    yield from told(answer, "front", say)
    yield unseen_sentence(origin, answer, say) if answer.unseen else origin_sentence(origin, say)
    if answer.first_bits is not None:
        yield f"(The first bits differ in {_at(answer.first_bits, say)}.)"
    if answer.unseen or not tells_rounding(origin):
        yield _tolerance_here(answer)
    if answer.sums is not None:
        yield answer.sums.words()
    yield from told(answer, "behind", say)
    yield from _inheritance(answer, say)
    yield _more(answer)
    yield _other_failures(answer, say)
    if answer.first_nonfinite is not None:
        yield nonfinite_sentence(answer.first_nonfinite, say)
    yield from told(answer, "end", say)


def _at(origin: Origin, say: Wording) -> str:
    """`step 3, rank 1, at blocks.0.mlp (AddmmBackward0)`."""
    return f"{say.steps.one(origin.step)}, {ranks_phrase(origin.ranks)}, at {place_of(origin)}"


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


def _tolerance_here(answer: Answer) -> str:
    """What noise would explain at the origin, where the verdict hangs on it."""
    change = answer.origins[0].change
    measured = answer.noise is not None and not answer.noise.is_zero
    if change is None or change.error is None or not change.tolerance:
        return ""
    if not measured and answer.first_bits is None and answer.sums is None:
        return ""
    if change.shown_by in LENGTHS:
        return f"{upper_first(length_words(change))}."
    return f"{upper_first(_explained(change, answer))}."


def _explained(change: Change, answer: Answer) -> str:
    if change.noise is not None and answer.noise is not None:
        measured = change.tolerance / MODEL.scatter
        return f"noise here is {measured:.0e}, measured from {', '.join(answer.noise.names)}"
    if not change.tolerance:
        return "rounding explains nothing"
    rule = f": {answer.rule.words()}" if answer.rule is not None else ""
    return f"rounding explains up to {change.tolerance:.1e}{rule}"


def notes(answer: Answer) -> Iterator[str]:
    """What a person should know beside the explanation, a sentence each."""
    numbering = numbering_sentence(answer.cover)
    if numbering is not None:
        yield numbering
    yield from (note_sentence(note, wording_of(answer)) for note in answer.notes)
    yield from told(answer, "note", wording_of(answer))


def asides(answer: Answer) -> Iterator[str]:
    """All that is said of an answer behind its explanation, a sentence each."""
    yield from notes(answer)
    yield from compiled_lines(answer.structure)
    yield from naming_lines(answer)


def lines(answer: Answer, names: tuple[str, str], top: int | None = None) -> Iterator[str]:
    """The answer for a terminal; its lists are no longer than `top`."""
    yield f"{headline(answer)}: {names[0]} (baseline) and {names[1]} (candidate)"
    if answer.configuration:
        yield ""
        yield from configuration_lines(answer.configuration)
    yield ""
    yield explanation(answer)
    yield from asides(answer)
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
    alone = list(structure_lines(answer.structure, Steps()))
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
    cover, offset = answer.cover, answer.cover.step_offset
    yield f"Compared: {compared(cover, Steps(offset))}"
    yield from caveats(cover, lambda: Steps(offset), are_summed=answer.sums is not None)


def _inheritance(answer: Answer, say: Wording) -> Iterator[str]:
    """Which ranks failed after the first origin; and which other ranks, or stages, it reached."""
    failed = sorted({r for o in answer.inherited if isinstance(o, FailureOrigin) for r in o.ranks})
    if failed:
        yield f"{upper_first(ranks_phrase(failed))} then failed while no Node ran."
    first = answer.origins[0]
    left = tuple(r for r in first.reached if r.rank not in failed)
    if answer.cover.by_stage:
        stages = sorted({r.key["stage_index"] for r in left if r.link == "stage"})
        if stages:
            are = verb(stages, "differs", "differ")
            yield f"{upper_first(stages_phrase(stages))} {are} from what was received there on."
        return
    others = set(answer.cover.ranks) - set(first.ranks)
    yield from reached_sentences(replace(first, reached=left), say.steps, others)


def _more(answer: Answer) -> str:
    count = len(answer.origins) - 1
    if not count:
        return ""
    second = answer.origins[1]
    if answer.unseen:
        are = "is another first difference" if count == 1 else f"are {count} more first differences"
        return f"There {are} in this step; whether they have one cause cannot be told."
    said = f"{ranks_phrase(second.ranks)}, {place_of(second)} {size_of(second)}"
    if all(isinstance(o, NodeOrigin) and o.shares_input for o in answer.origins[:2]):
        said += (
            "; both modules were called with the same tensor, so that one change of it after the forward would explain "
            "both"
        )
    if count == 1:
        return f"A second origin in this step does not follow from it: {said}."
    return f"There are {count} more origins in this step, which do not follow from it; the next is {said}."


def _other_failures(answer: Answer, say: Wording) -> str:
    """The first backward pass that failed on one side and is no origin, nor in the step of one."""
    origins = [o.failure for o in answer.origins if isinstance(o, FailureOrigin)]
    steps = {(f.side, f.step) for f in origins}
    left = [f for f in answer.failures if f not in origins and (f.side, f.step) not in steps]
    if not left:
        return ""
    first = left[0]
    ranks = [f.rank for f in left if (f.side, f.step) == (first.side, first.step)]
    return f"{say.steps.first(first.step)}, {ranks_phrase(ranks)}: {failure_clause(first)}"


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
    """`most` lines, indented, and how many are left out."""
    yield from (f"  {line}" for line in said[:most])
    if len(said) > most:
        yield f"  and {len(said) - most} more{what} (--top {len(said)} shows all)"


def _other(origin: Origin) -> str:
    """One more origin: its place and size, and whom it reached."""
    said = f"{ranks_phrase(origin.ranks)}: {place_of(origin)} {size_of(origin)}"
    reached = " ".join(reached_sentences(origin, Steps()))
    return f"{said}. {reached}" if reached else said

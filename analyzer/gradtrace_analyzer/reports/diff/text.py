"""A diff's answer as a colleague would say it, as the lines of a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.difference import LENGTHS, Change
from gradtrace_analyzer.diff.origin import Origin
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
from gradtrace_analyzer.reports.diff.inheritance import (
    chain_lines,
    inheritance_lines,
    reached_sentence,
)
from gradtrace_analyzer.reports.diff.numbering import numbering_sentence, with_both_numbers
from gradtrace_analyzer.reports.diff.origins import (
    failure_clause,
    length_words,
    nonfinite_sentence,
    origin_sentence,
    repeated_sentence,
    unseen_sentence,
)
from gradtrace_analyzer.reports.diff.places import place_of, size_of
from gradtrace_analyzer.reports.diff.structure import (
    code_phrase,
    compiled_lines,
    configuration_lines,
    naming_lines,
    structure_lines,
)
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
    said = _explanation(answer)
    crashed = crashes_told(answer.cover) if answer.verdict != "different" else ""
    if crashed and "crashed (" not in answer.reason:
        said = f"{said} {crashed}" if answer.verdict == "incomparable" else f"{crashed} {said}"
    return with_both_numbers(said, answer.cover)


def _explanation(answer: Answer) -> str:
    cover = answer.cover
    if answer.verdict == "incomparable":
        said = f"Cannot tell: {answer.reason}."
        agrees = cover.steps and any(cover.rows.values()) and not answer.origins
        if agrees and (cover.raised or not cover.is_whole):
            said += f" What can be compared is identical ({extent(cover)})."
        return said
    if answer.verdict == "identical":
        how = "bit for bit" if cover.has_fingerprints else "in norms, sums and counts"
        if not cover.has_fingerprints and any(
            one["name"] in ("observer", "device") for one in answer.configuration
        ):
            how += " (norms to 1e-6, as they were not added up alike)"
        return f"Identical, {how}, in all that both recorded: {extent(cover)}.{lacking(cover)}"
    if answer.verdict == "within_tolerance" and answer.sums is not None:
        return (
            f"The same within {_noise(answer)}. {answer.sums.words()} {upper_first(tolerance_words(answer))}."
            f"{lacking(cover)}"
        )
    if answer.verdict == "within_tolerance" and not answer.origins:
        alone = list(structure_lines(answer.structure))
        other = " by other code" if alone else ", compiled" if answer.structure else ""
        more = f" (and {len(alone) - 1} more)" if len(alone) > 1 else ""
        return (
            f"The same numbers{other}: all values that pair are identical"
            f"{', bit for bit' if cover.has_fingerprints else ''}"
            f"{f', and {alone[0]}{more}' if alone else ''}.{lacking(cover)}"
        )
    if answer.verdict == "within_tolerance":
        origin = answer.origins[0]
        nothing = nothing_more(cover)
        if origin.code:
            return (
                f"The same within {_noise(answer)}, by other code: {code_phrase(origin.code)}; {nothing} that pairs "
                f"differs by more than the tolerance.{lacking(cover)}"
            )
        return (
            f"The same within {_noise(answer)}: the first bits differ in step {origin.step}, "
            f"{ranks_phrase(origin.ranks)}, at {place_of(origin)}, and {nothing} "
            f"differs by more than the tolerance: {tolerance_words(answer)}.{lacking(cover)}"
        )
    if not answer.origins:
        return f"All values that pair are identical, but the models differ: {code_phrase(answer.structure)}."
    origin = answer.origins[0]
    said = unseen_sentence(origin, answer) if answer.unseen else origin_sentence(origin)
    if answer.sums is not None or answer.first_bits is not None:
        said = said.replace(" equal", f" equal within {_noise(answer)}")
    if answer.first_bits is not None:
        bits = answer.first_bits
        said += f" (The first bits differ in step {bits.step}, {ranks_phrase(bits.ranks)}, at {place_of(bits)}.)"
    is_told = "would explain" in said or "time after time" in said
    said += _tolerance_here(answer) if not is_told else ""
    if answer.sums is not None:
        said += f" {answer.sums.words()}"
    if answer.causes:
        said += f" A likely reason of the factor {answer.causes[0]}"
        said += "." if not said.endswith("?") else ""
    said = " ".join((*answer.deaths, said))
    others = (_inheritance(answer), _more(answer), _other_failures(answer), _nonfinite(answer))
    return said + "".join(others) + "".join(f" {repeated_sentence(r)}" for r in answer.repeated[:1])


def _noise(answer: Answer) -> str:
    return "rounding" if answer.noise is None or answer.noise.is_zero else "noise"


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
        return f" {upper_first(length_words(change))}."
    return f" {upper_first(_explained(change, answer))}."


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
    yield from (with_both_numbers(note, answer.cover) for note in answer.notes)


def lines(answer: Answer, names: tuple[str, str], top: int | None = None) -> Iterator[str]:
    """The answer for a terminal; its lists are no longer than `top`."""
    yield f"{headline(answer)}: {names[0]} (baseline) and {names[1]} (candidate)"
    if answer.configuration:
        yield ""
        yield from configuration_lines(answer.configuration)
    yield ""
    yield explanation(answer)
    yield from notes(answer)
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
    said = (
        f"Compared: {compared(answer.cover)}",
        *caveats(answer.cover, are_summed=answer.sums is not None),
    )
    yield from (with_both_numbers(line, answer.cover) for line in said)


def _inheritance(answer: Answer) -> str:
    """Which other ranks, or stages, the first origin reached; and which ranks failed after it."""
    failed = sorted({r for o in answer.inherited if o.failure is not None for r in o.ranks})
    then = f" {upper_first(ranks_phrase(failed))} then failed while no Node ran." if failed else ""
    if not answer.origins:
        return then
    first = answer.origins[0]
    left = tuple(r for r in first.reached if r.rank not in failed)
    if answer.cover.by_stage:
        stages = sorted({r.key["stage_index"] for r in left if r.link == "stage"})
        if not stages:
            return then
        verb_ = verb(stages, "differs", "differ")
        return (
            f"{then} {upper_first(stages_phrase(stages))} {verb_} from what was received there on."
        )
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
    """The first backward pass that failed on one side and is no origin, nor in the step of one."""
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
    """`most` lines, indented, and how many are left out."""
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

"""What follows from the origins of a diff, what stayed equal, and the chain around the first: in words and tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.diff.origin import Origin, Reached
from gradtrace_analyzer.diff.origins.chain_rows import ChainRow
from gradtrace_analyzer.reports.diff.numbering import Steps
from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.words.nouns import upper_first
from gradtrace_analyzer.words.numbers import and_more, ranks_phrase, told_apart, verb

_LINK_PHRASE = {
    "parameters": "the parameters",
    "inputs": "the inputs",
    "forward": "the forward pass",
    "loss": "the loss",
    "backward": "the backward pass",
    "carried_gradient": "the carried gradients",
    "local_gradient": "the local gradients",
    "bucket": "the buckets",
    "stage": "what its stages received",
    "reduced_gradient": "the reduced gradients",
    "clip": "the gradients that the optimizer saw",
    "optimizer": "the parameters after the optimizer",
}


def reached_sentences(origin: Origin, steps: Steps, others: Collection[int] = ()) -> Iterator[str]:
    """`Rank 0 differs from bucket 0 of that step on.`; `others` are all ranks that it could have reached."""
    by_place: dict[tuple[int, str], list[int]] = {}
    for reached in origin.reached:
        by_place.setdefault((reached.step, _reached_place(reached)), []).append(reached.rank)
    for (step, place), ranks in list(by_place.items())[:3]:
        everyone = len(ranks) > 1 and set(ranks) >= set(others) > set()
        who = "All other ranks" if everyone else upper_first(ranks_phrase(ranks))
        when = "of that step on" if step == origin.step else f"of {steps.one(step)} on"
        yield f"{who} {verb(ranks, 'differs', 'differ')} from {place} {when}."
    if len(by_place) > 3:
        yield f"{len(origin.reached)} ranks inherit from it in all."


def _reached_place(reached: Reached) -> str:
    if reached.link == "bucket" and reached.bucket_index is not None:
        return f"bucket {reached.bucket_index}"
    if reached.link == "stage" and reached.key.get("stage_index") is not None:
        return f"what stage {reached.key['stage_index']} received for microbatch {reached.key['microbatch']}"
    return _LINK_PHRASE.get(reached.link, reached.link)


def reached_object(reached: Reached) -> dict[str, Any]:
    """Where an origin reached another rank, as JSON: step, link and what the first row there is of."""
    names = ("root", "module_fqn", "parameter_fqn", "node_name", "stage_index", "microbatch")
    return {
        "rank": reached.rank,
        "step": reached.step,
        "link": reached.link,
        **{name: reached.key.get(name) for name in names},
        "bucket_index": reached.bucket_index,
    }


# How many origins the table of what they hand on has a column for.
_MOST_SHOWN = 4

# What `Answer.equal` holds, and that a link or module is in it only where all ranks that were compared agree.
_EVERYWHERE = {
    "ranks": "all of rank",
    "links": "on all ranks the links",
    "modules": "the modules",
}


def inheritance_lines(answer: Answer, most: int) -> Iterator[str]:
    """What follows from each of several origins in their step, and what of the step is equal."""
    if answer.verdict == "different" and len(answer.origins) > 1 and not answer.unseen:
        yield from _heirs(answer.origins)
        yield ""
    equal = [
        f"{_EVERYWHERE[what]} {', '.join(_shown(names, most))}"
        for what, names in answer.equal.items()
        if names
    ]
    if equal:
        yield f"Equal in that step: {'; '.join(equal)}."
        yield ""


def _shown(names: Sequence[str], most: int) -> list[str]:
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return [*names[:most], *more]


def _heirs(origins: Sequence[Origin]) -> Iterator[str]:
    """By link, how many rows of the step can have inherited from each."""
    of = (
        "each origin" if len(origins) <= _MOST_SHOWN else f"each of the first {_MOST_SHOWN} origins"
    )
    yield f"Rows of that step that can have inherited from {of} (in brackets: from another too):"
    origins = origins[:_MOST_SHOWN]
    rows = []
    for link in LINKS:
        counts = [origin.inherited_counts.get(link, (0, 0)) for origin in origins]
        if any(map(any, counts)):
            rows.append((link, *(_count(*pair) for pair in counts)))
    heads = ("link", *(f"origin {n + 1}" for n in range(len(origins))))
    yield from table_lines(heads, rows, right=heads[1:])


def _count(alone: int, shared: int) -> str:
    both = f" ({shared:,})" if shared else ""
    return f"{alone + shared:,}{both}" if alone or shared else "-"


def chain_lines(answer: Answer) -> Iterator[str]:
    """The rows around the first origin as a table, with both sides' norms; origins are marked with `>`."""
    first = answer.chain[0]
    yield f"The chain around the first origin, step {answer.origins[0].step}, rank {first.rank} (norms):"
    rows = []
    for p in answer.chain:
        alone = f" ({p.only_in} alone)" if p.only_in else ""
        a, b = told_apart(p.baseline, p.candidate)
        error = "equal" if p.error == 0 else "-" if p.error is None else f"{p.error:.1e}"
        allowed = "-" if p.tolerance is None else f"{p.tolerance:.1e}"
        mark = ">" if p.is_origin else ""
        row = f"{_row(p)} {p.way}".strip() + alone
        rows.append((mark, p.link, row, a, b, error, allowed))
    heads = ("", "link", "row", "baseline", "candidate", "relative error", "tolerance")
    yield from table_lines(heads, rows, right=heads[3:])


def chain_objects(answer: Answer) -> list[dict[str, Any]]:
    """The same rows as JSON, an object each."""
    return [asdict(p) for p in answer.chain]


def _row(p: ChainRow) -> str:
    key = p.key
    if key.get("node_name") is not None:
        module = key["module_fqn"]
        return f"{'(no module)' if module is None else module or 'root'} ({key['node_name']})"
    if key.get("parameter_fqns"):
        return f"{key['parameter_fqns'][0]}" + and_more(len(key["parameter_fqns"]) - 1)
    if key.get("parameter_fqn") is not None:
        return f"{key['parameter_fqn']} ({key['point']})"
    if "phase" in key:
        again = f", {key['phase']}" if key["phase"] != "forward" else ""
        return f"{key['module_fqn'] or 'root'}{again}"
    if "stage_index" in key:
        return f"stage {key['stage_index']} {key['kind']}, microbatch {key['microbatch']}"
    if "name" in key:
        return f"input {key['name']}"
    return f"backward pass {key['backward_index']}" if "backward_index" in key else ""

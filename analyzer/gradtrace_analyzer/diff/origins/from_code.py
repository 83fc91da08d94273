"""Which differences of a step follow from changed code, and which have another cause: pure.

Forward runs through an added layer, so what comes after it reads other values, and all that depends on these. A link
that reads what is equal and gives what is not has another cause, unless the changed code lies inside it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gradtrace_analyzer.diff.code.structure import Structure
from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origin import CodeOrigin


@dataclass(frozen=True)
class CodeSplit:
    """The differences of a step by whether they follow from changed code."""

    others: list[Difference]
    following: list[Difference]


def split_by_code(
    differences: Sequence[Difference],
    structure: Structure,
    rng_ranks: Collection[int],
    *,
    exceeding: bool,
    is_proven: bool,
) -> CodeSplit:
    """`rng_ranks` are those whose generators stand elsewhere at the step's start.

    `is_proven` says that steps before this one agreed although the code was changed there too: what differs now does so
    for another reason, if no parameter of the changed code may have moved meanwhile.
    """
    found = CodeSplit([], [])
    spreads = not is_proven or structure.has_parameters
    changed = structure.trained if is_proven else structure.touched
    for rank in sorted({d.rank for d in differences}):
        _split_rank(
            sorted((d for d in differences if d.rank == rank), key=lambda d: d.order),
            structure,
            found,
            draws=rank in rng_ranks and structure.has_parameters,
            exceeding=exceeding,
            spreads=spreads,
            changed=changed,
        )
    return found


def origin_of_code(
    structure: Structure,
    following: Sequence[Difference],
    changed: Difference | None,
    *,
    exceeding: bool,
) -> CodeOrigin:
    """The origin that changed code is, with the first difference that follows from it.

    `changed` is the first row that it left on one side alone in that step, where it left one.
    """
    apart = [d for d in following if d.exceeds or not exceeding] or following
    first = min(apart, key=lambda d: (d.step, d.rank, d.order))
    return CodeOrigin(
        changed or first,
        tuple(sorted({d.rank for d in apart})),
        structure.code[0].module_fqn,
        first.reads if first.reads is not None and first.reads.differs else first.writes,
        code=structure.code,
        follower=first,
    )


def _split_rank(
    own: Sequence[Difference],
    structure: Structure,
    found: CodeSplit,
    *,
    draws: bool,
    exceeding: bool,
    spreads: bool,
    changed: Collection[str | None],
) -> None:
    """`draws`: random numbers differ because the changed code took some; `changed`: modules it may have a hand in."""
    if set(changed) == {None} and any("loss" in d.values for d in own):
        found.others.extend(own)  # it is the code of the loss: what it gives is where the runs part
        return
    place = structure.places.get((own[0].rank, own[0].step))
    is_after = False
    modules: set[object] = set()
    for d in own:
        is_behind = is_after or (spreads and place is not None and d.order > place)
        module: tuple[Any, str | None] = (d.key.get("root"), d.key.get("module_fqn"))
        if d.only_in is not None:  # what is no changed code: it happened
            follows = False
        elif exceeding and not d.exceeds and d.table != "parameters":
            follows = True  # it is no difference here
        elif d.table == "parameters" and d.key.get("point") == "before":
            follows = structure.has_parameters
        elif d.table == "optimizer_groups":
            follows = set(d.values) == {"parameter_fqns"} and structure.has_parameters
        elif d.table in ("module_calls", "node_events"):
            inside = place is not None and module[1] in changed
            if d.reads is not None and d.reads.is_apart(exceeding=exceeding):
                follows = is_behind
            elif d.table == "module_calls":
                # Other random numbers make no constant factor.
                follows = inside or (draws and (d.writes is None or d.writes.factor is None))
            elif module[1] is None:  # it has saved what the model gave
                follows = inside or is_behind
            else:
                follows = inside or module in modules
            if follows and d.table == "module_calls":
                modules.add(module)
        elif d.table == "inputs":
            follows = False
        else:
            follows = is_behind
        is_after = is_after or (follows and not exceeding) or (follows and d.exceeds)
        (found.following if follows else found.others).append(d)

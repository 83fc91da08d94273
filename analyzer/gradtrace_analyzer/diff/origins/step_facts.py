"""What is known of a step, besides its rows that differ, that says whether these can depend on each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.words.numbers import ranks_in

RankParameter = tuple[int, int, str]


@dataclass(frozen=True)
class StepFacts:
    """`disturbed` are the ranks whose generators stood elsewhere when the step began or when the next one did.

    `pass_kinds` is the kind of each (rank, backward_index); `accumulated` the (rank, root, parameter) whose
    AccumulateGrad Node was recorded, `bucketed` those that a recorded bucket reduced; `untouched` the ranks where the
    optimizer made the same of some parameter's equal gradient, `unseen_updates` those of which one side did not record
    what the optimizer saw; `random` the (root, module) that draw, `collective` those that talk to other ranks;
    `together` the ranks of each group that shares a module.
    `is_whole` is False where some rank was not compared; `is_filtered` is True where modules or links were left
    out: of what comes after a difference nothing is then known to be independent of it.
    """

    disturbed: Collection[int] = ()
    pass_kinds: Mapping[tuple[int, int], str] = field(default_factory=dict)
    accumulated: Collection[RankParameter] = ()
    bucketed: Collection[RankParameter] = ()
    untouched: Collection[int] = ()
    unseen_updates: Collection[int] = ()
    random: Collection[tuple[int, str]] = ()
    collective: Collection[tuple[int, str]] = ()
    together: Sequence[Collection[int]] = ()
    is_whole: bool = True
    is_filtered: bool = False


def step_facts(
    connection: duckdb.DuckDBPyConnection,
    step: int,
    differences: Sequence[Difference],
    classes: Collection[tuple[int, str, str]],
    disturbed: Collection[int],
    *,
    is_whole: bool,
    is_filtered: bool,
) -> StepFacts:
    """Those of the step in which these rows differ; `classes` are those of its modules, by root and name."""

    ranks = sorted({d.rank for d in differences})

    def named(query: str) -> set[RankParameter]:
        found = connection.execute(f"{query} AND list_contains(?, rank)", [step, ranks]).fetchall()
        return {(rank, root, name) for rank, root, name in found}

    apart = {
        (d.rank, d.key["root"], d.key["parameter_fqn"])
        for d in differences
        if d.link in ("parameters", "clip", "optimizer") and "parameter_fqn" in d.key
    }
    seen = named(
        "SELECT rank, root, parameter_fqn FROM baseline.gradients WHERE step = ? AND point = 'final'"
    )
    seen_too = {
        rank
        for (rank,) in connection.execute(
            "SELECT DISTINCT rank FROM candidate.gradients WHERE step = ? AND point = 'final'",
            [step],
        ).fetchall()
    }
    groups = connection.execute(
        "SELECT DISTINCT ranks FROM baseline.groups WHERE role NOT IN ('dp', 'pp')"
    ).fetchall()
    kinds = connection.execute(
        "SELECT rank, backward_index, kind FROM baseline.backward_passes WHERE step = ?", [step]
    ).fetchall()
    return StepFacts(
        disturbed=set(disturbed),
        pass_kinds={(rank, index): kind for rank, index, kind in kinds},
        accumulated=named(
            "SELECT DISTINCT rank, root, parameter_fqn FROM baseline.node_events WHERE step = ? "
            "AND parameter_fqn IS NOT NULL"
        ),
        bucketed=named(
            "SELECT DISTINCT rank, root, unnest(parameter_fqns) FROM baseline.buckets WHERE step = ?"
        ),
        untouched={rank for rank, _, _ in seen - apart},
        unseen_updates=set(ranks) - ({rank for rank, _, _ in seen} & seen_too),
        random={(root, fqn) for root, fqn, name in classes if "dropout" in name},
        collective={(root, fqn) for root, fqn, name in classes if "syncbatchnorm" in name},
        together=[list(ranks_in(ranks)) for (ranks,) in groups],
        is_whole=is_whole,
        is_filtered=is_filtered,
    )

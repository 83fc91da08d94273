"""How a difference travels over a pipeline: what stages handed to each other in the step that differs.

Forward it goes from a stage to the next, a gradient to the one before, microbatch by microbatch. A rank whose first
difference lies behind something that its stage received otherwise has inherited it, if the neighbour sent it
otherwise; if not, the way between them is the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import duckdb

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origin import (
    CodeOrigin,
    LoneRowOrigin,
    Origin,
    ReceivedOrigin,
    StructureOrigin,
)
from gradtrace_analyzer.diff.scope.stages import Stages
from gradtrace_analyzer.sql.pipelines import (
    ACTIONS,
    FORWARD,
    PHASES,
    StagePlace,
    make_handed,
    stages_of_roots,
)
from gradtrace_analyzer.words.nouns import SIDES

_Origin = TypeVar("_Origin", bound=Origin | None)

# (rank, stage, microbatch, whether it is a forward): an action, its halves taken as one.
Action = tuple[int, int, int, bool]


@dataclass(frozen=True)
class StageEdges:
    """The actions of each rank's step by side, in order, and who sends what to whom.

    `stages` is the stage that a root of a rank is of, `sources` is by (rank, stage, whether it is a forward) the rank
    and stage that what it receives comes from.
    """

    actions: Mapping[tuple[str, int], Sequence[tuple[float, StagePlace]]]
    stages: Mapping[tuple[int, int], int]
    sources: Mapping[tuple[int, int, bool], tuple[int, int]]

    def place(self, d: Difference) -> StagePlace | None:
        """The action that a row was written in, or the stage alone of what is of none."""
        if d.table == "stage_events":
            key = d.key
            return StagePlace(key["stage_index"], key["microbatch"], PHASES[key["kind"]])
        root = d.key.get("root")
        stage = None if root is None else self.stages.get((d.rank, root))
        owner = None if stage is None else StagePlace(stage)
        if d.table not in _INSIDE or d.key.get("point") in ("carried", "reduced", "final"):
            return owner
        microbatch = d.key.get("microbatch")
        place = self._around(d.only_in or "baseline", d)
        return place if place is not None and microbatch in (None, place.microbatch) else owner

    def _around(self, side: str, d: Difference) -> StagePlace | None:
        """The first action that ended after a row."""
        actions = self.actions.get((side, d.rank), ())
        return next((place for order, place in actions if order >= d.order), None)

    def source_of(self, d: Difference) -> tuple[int, int] | None:
        """The rank and stage that what an action received comes from."""
        return self.sources.get((d.rank, d.key["stage_index"], d.key["kind"] == FORWARD))

    def lone_action(self, first: Origin, differences: Sequence[Difference]) -> Origin:
        """The origin; where what one side alone has is a whole action of a stage, that."""
        if not isinstance(first, StructureOrigin) or isinstance(first, CodeOrigin):
            return first
        if first.difference.table == "stage_events":
            return first
        for d in differences:
            if (
                d.table == "stage_events"
                and d.rank == first.difference.rank
                and d.only_in is not None
                and self._around(d.only_in, first.difference) == self.place(d)
            ):
                return LoneRowOrigin(d, first.ranks, first.module_fqn)
        return first

    def placed(self, origin: Origin, apart: Mapping[Action, Difference]) -> Origin:
        """The origin with where in the pipeline it is, and where what it received came from if `apart` has that."""
        place = self.place(origin.difference)
        origin = replace(origin, place=place)
        if not isinstance(origin, ReceivedOrigin) or place is None or place.microbatch is None:
            return origin
        action = (
            origin.difference.rank,
            place.stage_index,
            place.microbatch,
            place.phase == "forward",
        )
        received = apart.get(action)
        source = None if received is None else self.source_of(received)
        return replace(origin, source=source)


def on_ranks(origin: _Origin, stages: Stages | None) -> _Origin:
    """An origin with the candidate's ranks in place of the stages that were compared as such."""
    if stages is None or origin is None:
        return origin
    held = stages.ranks["candidate"]
    if isinstance(origin, ReceivedOrigin) and origin.source is not None:
        rank, stage = origin.source
        origin = replace(origin, source=(held[rank], stage))
    # Passes have been numbered by microbatch.
    key = {**origin.difference.key, "backward_index": None}
    return replace(
        origin,
        difference=replace(origin.difference, key=key),
        ranks=tuple(held[stage] for stage in origin.ranks),
        place=origin.place or StagePlace(origin.ranks[0] % stages.count),
        reached=tuple(
            replace(r, rank=held[r.rank], key={**r.key, "stage_index": r.rank % stages.count})
            for r in origin.reached
        ),
    )


def received_apart(differences: Sequence[Difference]) -> dict[Action, Difference]:
    """The actions that received something else, each with its row."""
    return {
        (d.rank, d.key["stage_index"], d.key["microbatch"], d.key["kind"] == FORWARD): d
        for d in differences
        if d.table == "stage_events" and d.reads is not None and d.reads.differs
    }


_INSIDE = frozenset({"inputs", "module_calls", "node_events", "backward_passes", "gradients"})


def stage_edges(connection: duckdb.DuckDBPyConnection, step: int) -> StageEdges | None:
    """Those of a step of the baseline, beside which the candidate's rows are placed; None where it has no stages."""
    actions: dict[tuple[str, int], list[tuple[float, StagePlace]]] = {}
    for side in SIDES:
        rows = connection.execute(
            f"SELECT e.rank, e.record_index - s.first, stage_index, microbatch, kind FROM {side}.stage_events e "
            "JOIN step_start s ON s.side = ? AND s.rank = e.rank AND s.step = e.step "
            f"WHERE e.step = ? AND kind IN {ACTIONS} AND stage_index IS NOT NULL ORDER BY 1, 2",
            [side, step],
        ).fetchall()
        for rank, order, stage, microbatch, kind in rows:
            place = StagePlace(stage, microbatch, PHASES[kind])
            actions.setdefault((side, rank), []).append((order, place))
    if not actions:
        return None
    known = connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'pair_neighbours'")
    # Where the baseline is no pipeline, nothing of it is handed over.
    has_neighbours = known.fetchone() is not None or make_handed(connection, "baseline.", "pair_")
    met = connection.execute("SELECT * FROM pair_neighbours").fetchall() if has_neighbours else []
    return StageEdges(
        actions,
        {
            (rank, root): stage
            for rank, root, stage in connection.execute(stages_of_roots("baseline.")).fetchall()
        },
        {
            (rank, stage, what == "activations"): (other_rank, other_stage)
            for rank, stage, what, other_stage, other_rank in met
        },
    )

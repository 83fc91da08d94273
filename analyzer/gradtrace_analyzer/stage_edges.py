"""How a difference travels over a pipeline: what stages handed to each other in the step that differs.

Forward it goes from a stage to the next, a gradient to the one before, microbatch by microbatch. A rank whose first
difference lies behind something that its stage received otherwise has inherited it, if the neighbour sent it
otherwise; if not, the way between them is the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import duckdb

from gradtrace_analyzer.diff import Origin
from gradtrace_analyzer.differences import Difference
from gradtrace_analyzer.pipelines import ACTIONS, PHASES, Place, make_handed, stages_of_roots

# (rank, stage, microbatch, whether it is a forward): an action, its halves taken as one.
_Action = tuple[int, int, int, bool]


@dataclass(frozen=True)
class StageEdges:
    """The actions of each rank's step by side, in order, and who sends what to whom.

    `stages` is the stage that a root of a rank is of, `sources` is by (rank, stage, whether it is a forward) the rank
    and stage that what it receives comes from.
    """

    actions: Mapping[tuple[str, int], Sequence[tuple[float, Place]]]
    stages: Mapping[tuple[int, int], int]
    sources: Mapping[tuple[int, int, bool], tuple[int, int]]

    def place(self, d: Difference) -> Place | None:
        """The action that a row was written in, or the stage alone of what is of none."""
        if d.table == "stage_events":
            key = d.key
            return Place(key["stage_index"], key["microbatch"], PHASES[key["kind"]])
        root = d.key.get("root")
        stage = None if root is None else self.stages.get((d.rank, root))
        owner = None if stage is None else Place(stage)
        if d.table not in _INSIDE or d.key.get("point") in ("carried", "reduced", "final"):
            return owner
        microbatch = d.key.get("microbatch")
        place = self._around(d.only_in or "baseline", d)
        return place if place is not None and microbatch in (None, place.microbatch) else owner

    def _around(self, side: str, d: Difference) -> Place | None:
        """The first action that ended after a row."""
        actions = self.actions.get((side, d.rank), ())
        return next((place for order, place in actions if order >= d.order), None)

    def _lone_action(self, first: Origin, differences: Sequence[Difference]) -> Origin:
        """Where what one side alone has is a whole action of a stage: that."""
        if first.link != "structure" or first.difference.table == "stage_events":
            return first
        for d in differences:
            if (
                d.table == "stage_events"
                and d.rank == first.difference.rank
                and d.only_in is not None
            ):
                around = self._around(d.only_in, first.difference)
                if around == self.place(d):
                    return replace(first, difference=d, place=around)
        return first

    def placed(
        self, firsts: Sequence[Origin], differences: Sequence[Difference]
    ) -> tuple[list[Origin], list[Origin]]:
        """(the origins with their stage, those that came from another stage)."""
        received = {_action(d): d for d in differences if _is_apart(d, "reads")}
        sent = {_action(d) for d in differences if _is_apart(d, "writes")}
        origins, travelled = [], []
        for first in firsts:
            first = self._lone_action(first, differences)
            place = self.place(first.difference)
            first = replace(first, place=place)
            if place is None or place.microbatch is None:
                origins.append(first)
                continue
            rank, is_forward = first.difference.rank, place.phase == "forward"
            arrived = received.get((rank, place.stage_index, place.microbatch, is_forward))
            source = self.sources.get((rank, place.stage_index, is_forward))
            if arrived is None or source is None or place.phase == "weight":
                origins.append(first)
            elif (*source, place.microbatch, is_forward) in sent:
                travelled.append(replace(first, source=source))
            else:
                way = Origin("stage", arrived, first.ranks, None, arrived.reads, between=True)
                origins.append(replace(way, place=place, source=source))
        return (origins, travelled) if origins else (travelled, [])


_INSIDE = frozenset({"inputs", "module_calls", "node_events", "backward_passes", "gradients"})


def _action(d: Difference) -> _Action:
    return (d.rank, d.key["stage_index"], d.key["microbatch"], d.key["kind"] == "forward")


def _is_apart(d: Difference, side: str) -> bool:
    change = getattr(d, side)
    return d.table == "stage_events" and change is not None and change.differs


def stage_edges(connection: duckdb.DuckDBPyConnection, step: int) -> StageEdges | None:
    """Those of a step of the baseline, beside which the candidate's rows are placed; None where it has no stages."""
    actions: dict[tuple[str, int], list[tuple[float, Place]]] = {}
    for side in ("baseline", "candidate"):
        rows = connection.execute(
            f"SELECT e.rank, e.record_index - s.first, stage_index, microbatch, kind FROM {side}.stage_events e "
            "JOIN step_start s ON s.side = ? AND s.rank = e.rank AND s.step = e.step "
            f"WHERE e.step = ? AND kind IN {ACTIONS} AND stage_index IS NOT NULL ORDER BY 1, 2",
            [side, step],
        ).fetchall()
        for rank, order, stage, microbatch, kind in rows:
            place = Place(stage, microbatch, PHASES[kind])
            actions.setdefault((side, rank), []).append((order, place))
    if not actions:
        return None
    known = connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'pair_neighbours'")
    if known.fetchone() is None:
        make_handed(connection, "baseline.", "pair_")
    met = connection.execute("SELECT * FROM pair_neighbours").fetchall()
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

"""What a rank's pipeline stage was about when the rank was last seen, or when an exception left it."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.sql.pipelines import HALF_WORDS, PHASES

_NEEDED_BY = {"receive_activations": "forward", "receive_gradients": "backward"}


@dataclass(frozen=True)
class StageAction:
    """An action, or a wait, of a stage that did not end as it should. `error` is None where it did not end at all.

    Of a wait, `other_stage` is the one that it is for, and `for_ranks` are the ranks that hold that one.
    """

    rank: int
    step: int
    microbatch: int
    stage_index: int | None
    kind: str
    start_ns: int
    error: str | None
    other_stage: int | None
    for_ranks: tuple[int, ...]

    @property
    def is_receive(self) -> bool:
        """Whether it waits for another stage to send."""
        return self.kind in _NEEDED_BY

    @property
    def told(self) -> str:
        """`in stage 1's weight half of microbatch 3`, `waiting to receive gradients from stage 2 (rank 2) for ...`."""
        stage = (
            "a stage without a number" if self.stage_index is None else f"stage {self.stage_index}"
        )
        of = f"of microbatch {self.microbatch}"
        if self.is_receive:
            what = self.kind.removeprefix("receive_")
            return (
                f"waiting to receive {what} from stage {self.other_stage}{_held_by(self.for_ranks)} for {stage}'s "
                f"{_NEEDED_BY[self.kind]} {of}"
            )
        if self.kind.startswith("send_"):
            what = self.kind.removeprefix("send_")
            return (
                f"waiting until {what} {of} have gone from {stage} to stage {self.other_stage}"
                f"{_held_by(self.for_ranks)}"
            )
        return f"in {stage}'s {HALF_WORDS.get(PHASES.get(self.kind, ''), self.kind)} {of}"


# The one that began last: an action begins when the wait before it is over.
_OPEN = """
SELECT rank, step, microbatch, stage_index, kind, start_ns, error,
    CASE WHEN kind IN ('receive_activations', 'send_gradients') THEN stage_index - 1
        WHEN kind IN ('receive_gradients', 'send_activations') THEN stage_index + 1 END AS other_stage
FROM stage_events s
WHERE end_ns IS NULL OR (error IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM stage_events later WHERE later.rank = s.rank AND later.record_index > s.record_index
        AND later.error IS NULL))
QUALIFY row_number() OVER (PARTITION BY rank ORDER BY start_ns DESC, record_index DESC) = 1
ORDER BY rank
"""


def under_way(connection: duckdb.DuckDBPyConnection) -> dict[int, StageAction]:
    """By rank: the last action or wait, where it never ended, or ended with an exception and none followed."""
    rows = connection.execute(_OPEN).fetchall()
    if not rows:
        return {}
    holders = dict(
        connection.execute(
            "SELECT stage_index, list(DISTINCT rank ORDER BY rank) FROM stage_events "
            "WHERE stage_index IS NOT NULL GROUP BY stage_index"
        ).fetchall()
    )
    found = {}
    for rank, step, microbatch, stage_index, kind, start_ns, error, other in rows:
        theirs = tuple(holder for holder in holders.get(other, ()) if holder != rank)
        found[rank] = StageAction(
            rank, step, microbatch, stage_index, kind, start_ns, error, other, theirs
        )
    return found


def _held_by(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return ""
    return f" (rank {ranks[0]})" if len(ranks) == 1 else f" (ranks {', '.join(map(str, ranks))})"

"""Who waits for whom: reductions of gradient buckets that were launched and never seen to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.numbers import ranks_in


@dataclass(frozen=True)
class Wait:
    """A bucket that `rank` launched in a pass which has not ended, or was ended while no Node ran.

    `absent` are the ranks of its group that have not launched theirs, `others` those that launched something else
    in its place: (rank, step, bucket_index, parameters). Where both are empty, all have come.
    """

    rank: int
    step: int
    microbatch: int
    backward_index: int
    bucket_index: int
    parameter_fqns: tuple[str | None, ...]
    group: str | None
    collective_seq: int | None
    launched_ns: int
    absent: tuple[int, ...]
    others: tuple[tuple[int, int, int, tuple[str | None, ...]], ...]

    @property
    def for_ranks(self) -> tuple[int, ...]:
        """The ranks that it waits for: absent, or with another collective in its place."""
        return tuple(sorted({*self.absent, *(rank for rank, *_ in self.others)}))


# Apart from its join, whose condition may not hold a subquery before DuckDB 2.
_OPEN = """
WITH ended AS (SELECT p.rank, p.step, p.backward_index FROM backward_passes p
    WHERE p.error IS NULL OR EXISTS (FROM failures f WHERE f.rank = p.rank AND f.step = p.step
        AND f.backward_index = p.backward_index AND f.node_name IS NOT NULL))
SELECT b.rank, b.step, b.microbatch, b.backward_index, b.bucket_index, b.parameter_fqns, b."group", b.collective_seq,
    b.launched_ns, b.root, b.module_fqn
FROM buckets b
ANTI JOIN ended e ON e.rank = b.rank AND e.step = b.step AND e.backward_index = b.backward_index
WHERE b.done_ns IS NULL AND b.kind = 'all_reduce'
QUALIFY row_number() OVER (PARTITION BY b.rank ORDER BY b.step DESC, b.backward_index DESC, b.launched_ns) = 1
ORDER BY b.rank
"""

_COUNTERPARTS = """
SELECT rank, step, bucket_index, parameter_fqns FROM buckets
WHERE rank <> $rank AND "group" IS NOT DISTINCT FROM $group
    AND CASE WHEN $seq IS NOT NULL AND collective_seq IS NOT NULL THEN collective_seq = $seq
        ELSE step = $step AND backward_index = $backward AND bucket_index = $bucket
            AND root IS NOT DISTINCT FROM $root AND module_fqn IS NOT DISTINCT FROM $module END
QUALIFY row_number() OVER (PARTITION BY rank ORDER BY step DESC) = 1
ORDER BY rank
"""


def waits(run: Run, connection: duckdb.DuckDBPyConnection) -> dict[int, Wait]:
    """By rank: the first bucket that is, or was, under way in its last pass with such a one."""
    teams = _teams(connection)
    everyone = tuple(range(run.world_size or 0)) or tuple(run.ranks)
    found = {}
    for row in connection.execute(_OPEN).fetchall():
        rank, step, microbatch, backward, bucket, fqns, group, sequence, launched, root, module = (
            row
        )
        members = teams.get((rank, group), everyone)
        come = connection.execute(
            _COUNTERPARTS,
            {
                "rank": rank, "group": group, "seq": sequence, "step": step, "backward": backward, "bucket": bucket,
                "root": root, "module": module,
            },
        ).fetchall()  # fmt: skip
        same = {other for other, *_, theirs in come if theirs == fqns}
        odd = tuple(
            (other, at, index, tuple(theirs or ()))
            for other, at, index, theirs in come
            if theirs != fqns and other in members
        )
        absent = sorted({*members} - {rank} - same - {other for other, *_ in odd})
        found[rank] = Wait(
            rank, step, microbatch, backward, bucket, tuple(fqns or ()), group, sequence, launched,
            tuple(absent), odd,
        )  # fmt: skip
    return found


def _teams(connection: duckdb.DuckDBPyConnection) -> dict[tuple[int, str | None], Sequence[int]]:
    """The ranks of each group, by a rank of it and the group's name."""
    rows = connection.execute("SELECT DISTINCT rank, name, ranks FROM groups").fetchall()
    return {(rank, name): members for rank, name, text in rows if (members := ranks_in(text))}

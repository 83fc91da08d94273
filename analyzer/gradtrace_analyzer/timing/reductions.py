"""What the ranks reduced together, and when each came and left: the tables that the answers about buckets are made of.

Temporary tables, all times in nanoseconds on one time line (see `clocks`):
- `bucket_rows`: a row per recorded bucket and rank; `team` numbers the groups, `bucket` what a bucket is;
- `paired`: those of them that were reduced together with others, `pair` numbering the reductions;
- `launches`: a row of `paired` with its place on the time line, `lag_ns` behind the first rank to launch and
  `wait_ns` until the last one does; `pass` numbers the backward passes of a team, the same on all its ranks;
- `reductions`: a row per pair: who launched first and last, and when the ranks left;
- `passes`: a row per rank and pass: `computed_ns`, when its computing ended, and `begin_lag_ns`, by how much it
  entered the pass after the first rank.

A rank's backward pass ends only when the reductions do, so the end of its computing is when it launched its last
bucket of the pass: after that nothing is left that a reduction could hide behind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.numerics.hook_promises import chains_collectives
from gradtrace_analyzer.timing.clocks import MAKE_CLOCKS, HostClock, aligned_hosts
from gradtrace_analyzer.timing.slices import Steps
from gradtrace_analyzer.words.numbers import ranks_in, ranks_phrase

_LEFT_OUT = re.compile(r"\.\.\. and (\d+) more")


@dataclass(frozen=True)
class Bucket:
    """A bucket as it comes back in every step. Numbers are None where the recorder did not know them.

    `parameter_fqns` is in buffer order; of a bucket with very many parameters the recorder keeps the first.
    """

    number: int
    team: int
    group: str | None
    root: int | None
    module_fqn: str | None
    layout_index: int | None
    bucket_index: int
    parameter_fqns: tuple[str, ...]
    parameter_count: int
    size_bytes: int

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that own its parameters, each once, in the order of its buffer."""
        return tuple(dict.fromkeys(fqn.rpartition(".")[0] for fqn in self.parameter_fqns))


@dataclass(frozen=True)
class Team:
    """The ranks of a process group that reduce together. `ranks` is empty where nobody said which."""

    number: int
    group: str | None
    ranks: tuple[int, ...]
    recorded: tuple[int, ...]

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the group that left no row of a reduction."""
        return tuple(rank for rank in self.ranks if rank not in self.recorded)


@dataclass(frozen=True)
class Paired:
    """The reductions of a run, their launches paired over ranks.

    The connection holds the tables `launches`, `reductions` and `passes`, by the numbers of `teams` and `buckets`.
    """

    connection: duckdb.DuckDBPyConnection
    teams: tuple[Team, ...]
    buckets: dict[int, Bucket]
    clocks: tuple[HostClock, ...]
    notes: tuple[str, ...]


_BUCKET_ROWS = """
CREATE TEMP TABLE bucket_rows AS
WITH said AS (SELECT rank, name, min(ranks) AS ranks FROM groups WHERE ranks IS NOT NULL GROUP BY rank, name),
agreed AS (SELECT name, min(ranks) AS ranks FROM said GROUP BY name HAVING count(DISTINCT ranks) = 1),
known AS (
    SELECT b.rank, b.step, b.backward_index, b.record_index, b."group", b.root, b.module_fqn, b.layout_index,
        b.bucket_index, b.size_bytes, b.parameter_fqns, coalesce(b.kind, 'all_reduce') AS kind, b.hook_name,
        b.collective_seq, coalesce(s.ranks, a.ranks, '[]') AS team_ranks, c.host,
        b.ready_ns + c.began_ns AS ready_ns, b.launched_ns + c.began_ns AS launched_ns,
        b.done_ns + c.began_ns AS done_ns
    FROM buckets b LEFT JOIN clocks c ON c.rank = b.rank
        LEFT JOIN said s ON s.rank = b.rank AND s.name = b."group"
        LEFT JOIN agreed a ON a.name = b."group"
    WHERE {steps})
SELECT *, dense_rank() OVER (ORDER BY "group", team_ranks) AS team,
    dense_rank() OVER (
        ORDER BY "group", team_ranks, root, module_fqn, layout_index, kind = 'reduce_scatter', bucket_index) AS bucket
FROM known
"""

# A hook that launches nothing of its own leaves several buckets of a rank with one number.
_PAIRED = """
CREATE TEMP TABLE paired AS
WITH keyed AS (
    SELECT *, CASE WHEN list_contains($by_place, team)
        THEN concat_ws('/', step, backward_index, root, module_fqn, bucket_index)
        ELSE concat_ws('/', collective_seq, row_number() OVER (
            PARTITION BY team, rank, collective_seq ORDER BY record_index)) END AS pair_key
    FROM bucket_rows WHERE kind = 'all_reduce' AND host IS NOT NULL AND launched_ns IS NOT NULL
        AND (collective_seq IS NOT NULL OR list_contains($by_place, team))),
numbered AS (SELECT *, dense_rank() OVER (ORDER BY team, pair_key) AS pair FROM keyed)
SELECT *, count(*) OVER (PARTITION BY pair) AS rank_count FROM numbered
"""

_LAUNCHES = """
CREATE TEMP TABLE launches AS
WITH placed AS (
    SELECT p.pair, p.team, p.bucket, p.rank, p.step, p.backward_index, p.size_bytes,
        p.ready_ns - o.offset_ns AS ready_ns, p.launched_ns - o.offset_ns AS launched_ns,
        p.done_ns - o.offset_ns AS done_ns, o.offset_ns
    FROM paired p JOIN offsets o ON o.host = p.host WHERE p.rank_count > 1),
-- The steps and passes of ranks may differ; those of the lowest rank stand for all.
named AS (SELECT *,
    first_value(step) OVER w AS team_step, first_value(backward_index) OVER w AS team_backward_index,
    first_value(bucket) OVER w AS team_bucket
    FROM placed WINDOW w AS (PARTITION BY pair ORDER BY rank))
SELECT * EXCLUDE (bucket, team_bucket), team_bucket AS bucket,
    dense_rank() OVER (ORDER BY team, team_step, team_backward_index) AS pass,
    launched_ns - min(launched_ns) OVER (PARTITION BY pair) AS lag_ns,
    max(launched_ns) OVER (PARTITION BY pair) - launched_ns AS wait_ns
FROM named
"""

_REDUCTIONS = """
CREATE TEMP TABLE reductions AS
WITH grouped AS (
    SELECT pair, team, pass, bucket, min(team_step) AS step, min(launched_ns) AS first_ns,
        max(launched_ns) AS last_ns, arg_max(rank, (launched_ns, -rank)) AS last_rank,
        arg_max(done_ns - launched_ns, (launched_ns, -rank)) AS transport_ns,
        max(done_ns) - min(done_ns) AS leaving_ns
    FROM launches GROUP BY pair, team, pass, bucket)
SELECT *, last_ns - first_ns AS lag_ns,
    row_number() OVER (PARTITION BY pass ORDER BY first_ns, pair) AS position
FROM grouped
"""

_PASSES = """
CREATE TEMP TABLE passes AS
WITH ended AS (
    SELECT b.rank, b.step, b.backward_index, max(b.launched_ns) AS computed_ns
    FROM bucket_rows b WHERE b.kind <> 'shadow' GROUP BY b.rank, b.step, b.backward_index),
taken AS (
    SELECT DISTINCT pass, team, team_step, rank, step, backward_index, offset_ns FROM launches),
entered AS (
    SELECT t.*, e.computed_ns - t.offset_ns AS computed_ns, p.start_ns + c.began_ns - t.offset_ns AS begin_ns
    FROM taken t JOIN ended e USING (rank, step, backward_index)
        LEFT JOIN clocks c ON c.rank = t.rank
        LEFT JOIN backward_passes p ON p.rank = t.rank AND p.step = t.step
            AND p.backward_index = t.backward_index)
SELECT *, begin_ns - min(begin_ns) OVER (PARTITION BY pass) AS begin_lag_ns FROM entered
"""


# What is counted, and where its rows are.
_INCOMPLETE = {
    "launches whose end was never seen": "FROM bucket_rows WHERE kind <> 'shadow' AND done_ns IS NULL "
    "AND host IS NOT NULL",
    "launches without the number of their collective, not paired": (
        "FROM bucket_rows b ANTI JOIN paired p ON p.rank = b.rank AND p.record_index = b.record_index "
        "WHERE b.kind = 'all_reduce' AND b.collective_seq IS NULL AND b.host IS NOT NULL"
    ),
    "launches of ranks whose clock is not known, not paired": "FROM bucket_rows WHERE host IS NULL",
    "launches that no other recorded rank joined, not paired": "FROM paired WHERE rank_count = 1",
    "reductions that some recorded rank took no part in, judged without it": (
        "FROM (SELECT l.pair FROM launches l JOIN (SELECT team, count(DISTINCT rank) AS recorded "
        "FROM bucket_rows WHERE kind = 'all_reduce' GROUP BY team) t ON t.team = l.team "
        "GROUP BY l.pair HAVING count(*) < min(t.recorded))"
    ),
}


def paired_reductions(connection: duckdb.DuckDBPyConnection, steps: Steps) -> Paired:
    """The tables above for some steps of a run, made in the connection of that run."""
    connection.execute(MAKE_CLOCKS)
    connection.execute(_BUCKET_ROWS.format(steps=steps.condition("b.step")))
    by_place = _teams_by_place(connection)
    connection.execute(_PAIRED, {"by_place": sorted(by_place) or [-1]})
    clocks = aligned_hosts(connection)
    for query in (_LAUNCHES, _REDUCTIONS, _PASSES):
        connection.execute(query)
    teams = _teams(connection)
    notes = (*_notes(connection, teams), *_notes_on_pairing(teams, by_place))
    return Paired(connection, teams, _buckets(connection), clocks, notes)


def count(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    """The one number that a query gives, 0 where it gives no row."""
    row = connection.execute(query).fetchone()
    return 0 if row is None else int(row[0])


def _teams_by_place(connection: duckdb.DuckDBPyConnection) -> set[int]:
    """Teams with a hook that launches a collective from another's end: its numbers depend on chance."""
    rows = connection.execute(
        "SELECT DISTINCT team, hook_name FROM bucket_rows WHERE hook_name IS NOT NULL"
    ).fetchall()
    return {team for team, hook_name in rows if chains_collectives(hook_name)}


def _teams(connection: duckdb.DuckDBPyConnection) -> tuple[Team, ...]:
    rows = connection.execute(
        'SELECT team, min("group"), min(team_ranks), list(DISTINCT rank ORDER BY rank) '
        "FROM bucket_rows WHERE kind = 'all_reduce' GROUP BY team ORDER BY team"
    ).fetchall()
    return tuple(
        Team(number, group, ranks_in(ranks), tuple(recorded))
        for number, group, ranks, recorded in rows
    )


def _buckets(connection: duckdb.DuckDBPyConnection) -> dict[int, Bucket]:
    rows = connection.execute(
        'SELECT bucket, min(team), min("group"), min(root), min(module_fqn), min(layout_index), '
        "min(bucket_index), arg_min(parameter_fqns, rank), max(size_bytes) "
        "FROM bucket_rows GROUP BY bucket ORDER BY bucket"
    ).fetchall()
    found = {}
    for number, team, group, root, module_fqn, layout, index, fqns, size in rows:
        names, parameter_count = _parameters(fqns or [])
        found[number] = Bucket(
            number, team, group, root, module_fqn, layout, index, names, parameter_count, size
        )
    return found


def _parameters(fqns: list[str | None]) -> tuple[tuple[str, ...], int]:
    """Names and their count; the recorder ends a very long list with how many it left out."""
    names = ["(a parameter without a name)" if fqn is None else fqn for fqn in fqns]
    left_out = _LEFT_OUT.fullmatch(names[-1]) if names else None
    if left_out is None:
        return tuple(names), len(names)
    return tuple(names[:-1]), len(names) - 1 + int(left_out[1])


def _notes(connection: duckdb.DuckDBPyConnection, teams: tuple[Team, ...]) -> list[str]:
    """What is missing from the answer, a clause each: ranks without a reduction, launches without an end, ..."""
    said = []
    for team in teams:
        if team.missing_ranks:
            said.append(
                f"{ranks_phrase(team.missing_ranks)} of group {team.group} left no reduction"
            )
    for what, source in _INCOMPLETE.items():
        found = count(connection, f"SELECT count(*) {source}")
        if found:
            said.append(f"{what}: {found:,}")
    on_device = count(
        connection,
        "SELECT count(*) FROM ranks r WHERE device <> 'cpu' "
        "AND EXISTS (SELECT 1 FROM bucket_rows b WHERE b.rank = r.rank)",
    )
    if on_device:
        said.append("times are the host's: on a device a reduction ends later than its future says")
    return said


def _notes_on_pairing(teams: tuple[Team, ...], by_place: set[int]) -> list[str]:
    groups = sorted({str(team.group) for team in teams if team.number in by_place})
    if not groups:
        return []
    return [
        f"the reductions of group {', '.join(groups)} are paired by step and bucket: "
        "its hook starts collectives of which c10d's numbers depend on chance"
    ]

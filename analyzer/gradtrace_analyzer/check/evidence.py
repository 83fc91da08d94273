"""What the laws read: the connection with a run's views, the groups whose ranks must agree, and their buckets.

It makes these temporary tables beside the views of the run's own:
- `members` (replica, team, team_size, rank, "group", root, module_fqn): a row per replica and rank, `replica` numbering
  the modules that a group keeps equal, `team` the groups, each by its name and ranks;
- `managed` (replica, parameter_fqn, position): the parameters of each replica that are reduced, in the order of its
  buckets;
- `reductions`: a row per bucket and rank, with the columns of `buckets`, and replica, team, team_size, is_shadow,
  is_idle and pair. `pair` numbers what the ranks reduced together. `is_idle`: c10d had counted no collective of the
  group since the rank's bucket before. `is_shadow`: the rank had joined, and only took part;
- `seen_until` (rank, seen_ns): when each rank that was cut off gave its last sign of life;
- `moments` (team, rank, step, moment): a row per team, rank and step; what ranks did at the same `moment` is to be
  compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import duckdb

from gradtrace_analyzer.numerics.hook_promises import Promise, chains_collectives, promise_of
from gradtrace_analyzer.words.numbers import ranks_in

Rows = list[tuple[Any, ...]]
T = TypeVar("T")


@dataclass(frozen=True)
class Replica:
    """A module that the ranks of a data-parallel group hold copies of.

    `number` and `team` are those of `members`. `module_fqn` is None for a group of which no module is known.
    `ranks` are the group's, `recorded` those of them that said so. `hook_names` has None for DDP's own way.
    `unobserved` says why its reductions are not recorded. `is_sharded`: some of it is reduced to shards, as by FSDP2.
    """

    number: int
    team: int
    group: str
    ranks: tuple[int, ...]
    recorded: tuple[int, ...]
    root: int | None
    module_fqn: str | None
    hook_names: tuple[str | None, ...]
    unobserved: str | None
    is_sharded: bool

    @property
    def fields(self) -> dict[str, Any]:
        """What a violation says of it, as fields of `Violation`."""
        return {"group": self.group, "root": self.root, "module_fqn": self.module_fqn}

    def keeps_ranks_equal(self, compressing: Sequence[str]) -> bool:
        """Whether every hook it used leaves bit-equal values on all ranks. One that fits `compressing` is taken to."""
        return all(promise_of(name, compressing).keeps_ranks_equal for name in self.hook_names)


@dataclass(frozen=True)
class Evidence:
    """A run, ready to be judged.

    `connection` has a view for each table of the run, and the temporary tables named above. `replicas` are numbered
    by their place. `closed_ranks` ended their recording themselves: what they lack they did not do. Of
    `losing_ranks` rows were dropped or cannot be read: what they lack may have been. `compressing` are a person's globs
    on the names of hooks that lose precision on purpose.
    """

    connection: duckdb.DuckDBPyConnection
    replicas: tuple[Replica, ...]
    closed_ranks: frozenset[int]
    losing_ranks: frozenset[int]
    compressing: tuple[str, ...] = ()
    _known: dict[Callable[[Evidence], Any], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rows(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Rows:
        """All rows of a query over the run's tables, as tuples in the order of its columns; null is None.

        `parameters` stand for `?` or `$1` in their order, or for `$name`.
        """
        return self.connection.execute(query, parameters).fetchall()

    def once(self, read: Callable[[Evidence], T]) -> T:
        """What a function reads from this evidence, read when it is first asked for: for what several laws need."""
        if read not in self._known:
            self._known[read] = read(self)
        known: T = self._known[read]
        return known

    def promise(self, hook_name: str | None) -> Promise:
        """What a hook promises of a reduction; None is DDP's own way. One that fits `compressing` promises no mean."""
        return promise_of(hook_name, self.compressing)

    @property
    def modules(self) -> tuple[Replica, ...]:
        """The replicas whose ranks can be held against each other: of which the module is known, whole on each rank,
        and at least two ranks are recorded."""
        return tuple(
            r
            for r in self.replicas
            if r.module_fqn is not None and len(r.recorded) > 1 and not r.is_sharded
        )

    @property
    def lacking(self) -> str:
        """Why `modules` is empty, as it follows on `Not judged, since`."""
        if not self.replicas:
            return "no data-parallel group was recorded"
        if all(len(r.recorded) < 2 for r in self.replicas):
            return "of no data-parallel group more than one rank was recorded"
        if all(r.module_fqn is None for r in self.replicas):
            return "it is not known which module a data-parallel group reduces"
        return "no module was recorded that is whole on each rank of a data-parallel group"

    @cached_property
    def equal_modules(self) -> tuple[Replica, ...]:
        """Those of `modules` whose hooks leave bit-equal values on all ranks."""
        return tuple(r for r in self.modules if r.keeps_ranks_equal(self.compressing))

    def replica(self, number: int) -> Replica:
        """The replica of the number that `members`, `managed` and `reductions` know it by."""
        return self.replicas[number]

    def has_fingerprints(self, table: str, prefix: str = "") -> bool:
        """Whether any row of a table has a fingerprint (GRADTRACE_SUMMARY=full), not norms alone."""
        return bool(
            self.rows(f"SELECT 1 FROM {table} WHERE {prefix}fingerprint IS NOT NULL LIMIT 1")
        )


def gathered(
    connection: duckdb.DuckDBPyConnection,
    closed_ranks: frozenset[int],
    losing_ranks: frozenset[int],
    compressing: Sequence[str],
    seen_until_ns: Mapping[int, int],
) -> Evidence:
    """The evidence of a run, its temporary tables made.

    `seen_until_ns` is when each rank that was cut off gave its last sign of life, on its recording's clock.
    """
    replicas = _replicas(connection)
    _make_members(connection, replicas)
    _make_reductions(connection)
    connection.execute("CREATE TEMP TABLE seen_until (rank INTEGER, seen_ns BIGINT)")
    if seen_until_ns:
        connection.executemany(
            "INSERT INTO seen_until VALUES (?, ?)", [list(one) for one in seen_until_ns.items()]
        )
    connection.execute(_MOMENTS)
    connection.execute(_MANAGED)
    return Evidence(connection, replicas, closed_ranks, losing_ranks, tuple(compressing))


def _replicas(connection: duckdb.DuckDBPyConnection) -> tuple[Replica, ...]:
    rows = connection.execute(
        'SELECT g.name, g.ranks, g.root, g.module_fqn, list(DISTINCT g."rank" ORDER BY g."rank"), '
        "list(DISTINCT g.hook_name), max(g.unobserved), "
        "(SELECT list(DISTINCT coalesce(b.hook_name, '')) FROM buckets b "
        'WHERE b."group" = g.name AND b.root IS NOT DISTINCT FROM g.root '
        "AND b.module_fqn = g.module_fqn), "
        "EXISTS (SELECT 1 FROM buckets b WHERE b.kind = 'reduce_scatter' "
        "AND b.root IS NOT DISTINCT FROM g.root AND (g.module_fqn IN ('', b.module_fqn) "
        "OR starts_with(b.module_fqn, g.module_fqn || '.'))) "
        "FROM groups g WHERE g.role = 'dp' GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"
    ).fetchall()
    teams: dict[tuple[str, str], int] = {}
    found: list[Replica] = []
    for name, ranks, root, fqn, recorded, hooks, unobserved, used, sharded in rows:
        team = teams.setdefault((name, ranks), len(teams))
        names = {h for h in hooks} | {u or None for u in used or ()}
        found.append(
            Replica(
                number=len(found),
                team=team,
                group=name,
                ranks=ranks_in(ranks),
                recorded=tuple(recorded),
                root=root,
                module_fqn=fqn,
                hook_names=tuple(sorted(names, key=lambda n: n or "")),
                unobserved=unobserved,
                is_sharded=sharded,
            )
        )
    return tuple(found)


def _make_members(connection: duckdb.DuckDBPyConnection, replicas: Sequence[Replica]) -> None:
    connection.execute(
        "CREATE TEMP TABLE members (replica INTEGER, team INTEGER, team_size INTEGER, "
        'rank INTEGER, "group" VARCHAR, root INTEGER, module_fqn VARCHAR)'
    )
    rows = [
        (r.number, r.team, len(r.ranks), rank, r.group, r.root, r.module_fqn)
        for r in replicas
        for rank in r.recorded
    ]
    if rows:
        connection.executemany("INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


_KEYED_REDUCTIONS = """
CREATE TEMP TABLE keyed_reductions AS
SELECT b.*, m.replica, m.team, m.team_size, coalesce(b.kind = 'shadow', false) AS is_shadow,
    concat_ws('/', b.step, b.backward_index, b.root, b.module_fqn, b.bucket_index) AS place_key,
    -- A hook that launched nothing leaves several buckets with one number.
    concat_ws('/', b.collective_seq, row_number() OVER (
        PARTITION BY m.team, b.rank, b.collective_seq ORDER BY b.record_index)) AS seq_key,
    row_number() OVER (PARTITION BY m.team, b.rank ORDER BY b.record_index)::VARCHAR AS order_key,
    coalesce(b.collective_seq = lag(b.collective_seq) OVER (
        PARTITION BY m.team, b.rank ORDER BY b.record_index), false) AS is_idle
FROM buckets b JOIN members m ON m.rank = b.rank AND m."group" = b."group"
    AND m.root IS NOT DISTINCT FROM b.root AND m.module_fqn = b.module_fqn
WHERE coalesce(b.kind, 'all_reduce') <> 'reduce_scatter'
"""

_UNEVEN_TEAMS = """
SELECT team FROM (SELECT team, {key}, count(DISTINCT rank) AS present FROM keyed_reductions GROUP BY 1, 2)
JOIN (SELECT team, count(DISTINCT rank) AS rank_count FROM keyed_reductions GROUP BY 1) USING (team)
GROUP BY team HAVING min(present) < max(rank_count)
"""

_REDUCTIONS = """
CREATE TEMP TABLE reductions AS
SELECT * EXCLUDE (place_key, seq_key, order_key), dense_rank() OVER (
    ORDER BY team, CASE WHEN list_contains($by_place, team) THEN place_key
        WHEN list_contains($by_order, team) THEN order_key ELSE seq_key END) AS pair
FROM keyed_reductions
"""


def _make_reductions(connection: duckdb.DuckDBPyConnection) -> None:
    """What ranks reduced together has c10d's same number, where that can be relied on; else the same place; where
    ranks are at different steps (after `join`), the same place in the order of launches."""
    connection.execute(_KEYED_REDUCTIONS)

    def uneven(key: str) -> set[int]:
        return {team for (team,) in connection.execute(_UNEVEN_TEAMS.format(key=key)).fetchall()}

    hooks = connection.execute(
        "SELECT DISTINCT team, hook_name, collective_seq IS NULL FROM keyed_reductions"
    ).fetchall()
    unnumbered = {team for team, hook, absent in hooks if absent or chains_collectives(hook)}
    uneven_places = uneven("place_key")
    by_order = (unnumbered & uneven_places) - uneven("order_key")
    by_place = (unnumbered - by_order) | (uneven("seq_key") - uneven_places)
    chosen = {"by_place": sorted(by_place) or [-1], "by_order": sorted(by_order) or [-1]}
    connection.execute(_REDUCTIONS, chosen)
    connection.execute("DROP TABLE keyed_reductions")


# Steps are counted by each rank. Once a rank has joined, others make steps that it does not: what tells the same
# moment then is what was reduced together in the step.
_MOMENTS = """
CREATE TEMP TABLE moments AS
WITH uneven AS (SELECT DISTINCT team FROM reductions WHERE is_shadow),
shared AS (SELECT team, rank, step, max(pair) AS pair FROM reductions WHERE NOT is_shadow GROUP BY 1, 2, 3)
SELECT m.team, m.rank, p.step, CASE WHEN m.team IN (FROM uneven) THEN s.pair ELSE p.step END AS moment
FROM (SELECT DISTINCT team, rank FROM members) m
JOIN (SELECT DISTINCT rank, step FROM parameters UNION SELECT DISTINCT rank, step FROM gradients) p USING (rank)
LEFT JOIN shared s ON s.team = m.team AND s.rank = m.rank AND s.step = p.step
"""


_MANAGED = """
CREATE TEMP TABLE managed AS
WITH reduced AS (
    SELECT replica, parameter_fqn, min({'record': record_index, 'place': place}) AS position
    FROM (SELECT replica, record_index, unnest(parameter_fqns) AS parameter_fqn,
        generate_subscripts(parameter_fqns, 1) AS place FROM reductions)
    GROUP BY 1, 2)
SELECT * FROM reduced
UNION ALL
SELECT m.replica, p.parameter_fqn, min({'record': p.record_index, 'place': 0})
FROM parameters p JOIN members m ON m.rank = p.rank AND m.root = p.root
WHERE p.kind = 'parameter' AND p.requires_grad AND m.module_fqn IS NOT NULL
    AND (m.module_fqn = '' OR starts_with(p.parameter_fqn, m.module_fqn || '.'))
    AND m.replica NOT IN (SELECT replica FROM reduced)
GROUP BY 1, 2
"""

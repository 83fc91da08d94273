"""The SQL that pairs the rows of two runs and keeps the pairs that differ.

It runs on a connection with the schemas `baseline` and `candidate`. What it leaves are temporary tables:
`seen`, `common`, `opened`, `step_start`, and one `differing_<table>` for each link table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import duckdb

from gradtrace_analyzer.diff.links import LINK_TABLES, STATISTICS, LinkTable
from gradtrace_analyzer.numerics.sketches import relative_error_sql
from gradtrace_analyzer.numerics.tolerance import AS_ADDED_UP
from gradtrace_analyzer.words.nouns import SIDES

# Tables that have rows of every step that anything was recorded of.
_OF_EVERY_STEP = (
    "parameters",
    "inputs",
    "backward_passes",
    "module_calls",
    "node_events",
    "steps",
)

# Runs of steps that a query names one by one; of more, it reads all that lie between the first and the last.
_MOST_STRETCHES = 16


def seen(closed: Mapping[str, Sequence[int]], others: Mapping[str, Sequence[int]]) -> str:
    """The statements that make `seen` and `common`: of ranks that are `closed` the table `steps` names all steps."""
    selects = [
        f"SELECT '{side}' AS side, rank, step FROM {side}.{table} WHERE rank IN ({_numbers(ranks)})"
        for side in SIDES
        for ranks, tables in ((closed[side], ("steps",)), (others[side], _OF_EVERY_STEP))
        for table in tables
        if ranks
    ]
    union = " UNION ".join(["SELECT '' AS side, 0 AS rank, 0 AS step WHERE false", *selects])
    return f"""
        CREATE TEMP TABLE seen AS {union};
        CREATE TEMP TABLE common AS
        SELECT rank, step FROM seen WHERE side = 'baseline'
        INTERSECT SELECT rank, step FROM seen WHERE side = 'candidate';
    """


def opened(pairs: Collection[tuple[int, int]]) -> str:
    """The statements that make `step_start` of these (rank, step): where each begins in its rank's record."""
    selects = " UNION ALL ".join(
        f"SELECT '{side}' AS side, rank, step, record_index FROM {side}.{table} t WHERE {within(pairs)}"
        for side in SIDES
        for table in _OF_EVERY_STEP
    )
    return f"""
        CREATE OR REPLACE TEMP TABLE step_start AS
        SELECT side, rank, step, min(record_index) AS first
        FROM ({selects}) SEMI JOIN opened USING (rank, step) GROUP BY ALL;
    """


def within(pairs: Collection[tuple[int, int]], of: str = "t") -> str:
    """A condition on rows that these (rank, step) fulfil: with it, parts and row groups are not even opened."""
    if not pairs:
        return "false"
    ranks = _numbers(sorted({rank for rank, _ in pairs}))
    stretches: list[list[int]] = []
    for step in sorted({step for _, step in pairs}):
        if stretches and step == stretches[-1][1] + 1:
            stretches[-1][1] = step
        else:
            stretches.append([step, step])
    if len(stretches) > _MOST_STRETCHES:
        stretches = [[stretches[0][0], stretches[-1][1]]]
    steps = " OR ".join(f"{of}.step BETWEEN {first} AND {last}" for first, last in stretches)
    return f"{of}.rank IN ({ranks}) AND ({steps})"


def opened_places(connection: duckdb.DuckDBPyConnection) -> list[tuple[int, int]]:
    """The (rank, step) that the table `opened` holds, in no order."""
    return connection.execute("SELECT rank, step FROM opened").fetchall()


def other_values(table: LinkTable, only_step: int | None = None, *, with_names: bool = True) -> str:
    """The (rank, step) whose rows of a table do not have the same values on both sides, in whichever order.

    Fingerprints are in digests; a loss, a learning rate or a hook's name is not. The names of parameters may be left
    out: they are long, and are the same in every step. (Buckets of another size or order are no difference at all.)
    """
    key = [k for k in table.key if k != "parameter_fqns"]
    values = [v for v in table.values if v != "parameter_fqns" or with_names]
    columns = ", ".join(dict.fromkeys(["rank", "step", *key, *values]))
    where = "" if only_step is None else f" WHERE step = {only_step}"
    rows = " UNION ALL ".join(
        f"SELECT {columns}, {sign} AS sign FROM {side}.{table.table}{where}"
        for side, sign in zip(SIDES, (1, -1), strict=True)
    )
    # A third of the time of EXCEPT ALL, which numbers all rows.
    apart = f"SELECT rank, step FROM ({rows}) GROUP BY {columns} HAVING sum(sign) <> 0"
    return f"SELECT DISTINCT rank, step FROM ({apart}) SEMI JOIN common USING (rank, step)"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def differing(
    table: LinkTable, unread: str, pairs: Collection[tuple[int, int]], *, is_alike: bool = True
) -> str:
    """The statement that makes `differing_<table>`: pairs that differ, and rows without a partner.

    `unread` are the ranks to leave out, as a SQL list without brackets; `pairs` is what the table `opened` holds. Where
    both sides' norms and sums were not made alike (by one observer), the same tensor has them within 1e-6 of its norm.
    """
    name = table.table
    # A Node that was running when its rank was killed gave nothing yet that could differ.
    whole = "t.outcome IS DISTINCT FROM 'running'" if name == "node_events" else table.only
    key = ", ".join(table.key)

    def side(schema: str) -> str:
        return (
            f"SELECT t.*, s.first, row_number() OVER (PARTITION BY t.rank, t.step, {key} "
            f"ORDER BY t.record_index) AS nth FROM {schema}.{name} t "
            f"SEMI JOIN opened USING (rank, step) JOIN step_start s "
            f"ON s.side = '{schema}' AND s.rank = t.rank AND s.step = t.step"
            f" WHERE {within(pairs)} AND t.rank NOT IN ({unread or -1}) AND {whole}"
        )

    on = " AND ".join(f"b.{k} IS NOT DISTINCT FROM c.{k}" for k in table.key)
    columns = [
        "coalesce(b.rank, c.rank) AS rank",
        "coalesce(b.step, c.step) AS step",
        "coalesce(b.record_index - b.first, c.record_index - c.first)::DOUBLE AS place",
        "c.record_index - c.first AS place_c",
        f"{_STEPS} AS steps_before",
        "CASE WHEN b.rank IS NULL THEN 'candidate' WHEN c.rank IS NULL THEN 'baseline' END AS only_in",
        *(f"coalesce(b.{k}, c.{k}) AS key_{k}" for k in table.key),
        *(
            ["b.event_index AS event_index_b, c.event_index AS event_index_c"]
            * (name == "node_events")
        ),
        *(["coalesce(b.bucket_index, c.bucket_index) AS bucket_index"] * (name == "buckets")),
    ]
    differs, exceeds, errors = [], [], []
    for role, p in table.sides:
        columns += [
            f"{_summary_differs(p, is_alike)} AS {role}_differs",
            f"{relative_error_sql(f'b.{p}', f'c.{p}')} AS {role}_error",
            *(f"b.{p}{s} AS {role}_b_{s}, c.{p}{s} AS {role}_c_{s}" for s in STATISTICS),
        ]
        differs.append(_summary_differs(p, is_alike))
        errors.append(
            f"CASE WHEN {_summary_differs(p, is_alike)} THEN {relative_error_sql(f'b.{p}', f'c.{p}')} END"
        )
    for value in table.values:
        columns.append(f"b.{value} AS value_b_{value}, c.{value} AS value_c_{value}")
        # A pass has no `ddp_sync` without DDP, and in runs of schema 1: that is no difference.
        unequal = "<>" if value == "ddp_sync" else "IS DISTINCT FROM"
        differs.append(f"coalesce(b.{value} {unequal} c.{value}, false)")
        if value != "loss":
            exceeds.append(_counts(value, differs[-1]))
    if name == "backward_passes":
        errors.append("abs(b.loss - c.loss) / greatest(abs(b.loss), abs(c.loss))")
    columns += [
        f"(b.rank IS NULL OR c.rank IS NULL OR {' OR '.join([*exceeds, 'false'])}) AS exceeds",
        f"greatest({', '.join([*errors, 'NULL'])}) AS error",
    ]
    return (
        f"CREATE OR REPLACE TEMP TABLE differing_{name} AS WITH b AS ({side('baseline')}), "
        f"c AS ({side('candidate')}) SELECT {', '.join(columns)} FROM b FULL OUTER JOIN c "
        f"ON b.rank = c.rank AND b.step = c.step AND b.nth = c.nth AND {on} "
        f"WHERE b.rank IS NULL OR c.rank IS NULL OR {' OR '.join(differs)}"
    )


def place_among(connection: duckdb.DuckDBPyConnection) -> None:
    """Give rows of the candidate alone a place among the baseline's: in front of the next pair that differs.

    The places of a pair are the baseline's, and each row that one side alone has shifts all that follow it.
    """
    tables = [f"differing_{table.table}" for table in LINK_TABLES]
    lone = " UNION ALL ".join(
        f"SELECT '{name}' AS of_table, rank, step, place_c FROM {name} WHERE only_in = 'candidate'"
        for name in tables
    )
    if connection.execute(f"SELECT 1 FROM ({lone}) LIMIT 1").fetchone() is None:
        return
    pairs = " UNION ALL ".join(
        f"SELECT rank, step, place, place_c FROM {name} WHERE only_in IS NULL" for name in tables
    )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE among AS SELECT of_table, rank, step, place_c, place - 1 + "
        "row_number() OVER (PARTITION BY rank, step, place ORDER BY place_c) "
        "/ (count(*) OVER (PARTITION BY rank, step, place) + 1) AS place "
        f"FROM (SELECT l.*, p.place FROM ({lone}) l ASOF JOIN ({pairs}) p ON p.rank = l.rank AND p.step = l.step "
        "AND l.place_c < p.place_c)"
    )
    for name in tables:
        connection.execute(
            f"UPDATE {name} d SET place = a.place FROM among a WHERE a.of_table = '{name}' AND a.rank = d.rank "
            "AND a.step = d.step AND a.place_c = d.place_c AND d.only_in = 'candidate'"
        )


# Steps that both runs made before this one: a run's numbering may begin anywhere.
_STEPS = "(coalesce(b.step, c.step) - (SELECT min(step) FROM common))"

# Ways to compute the same update: they round otherwise, and are no other setting.
_SAME_UPDATE = r'"(fused|foreach|capturable|differentiable)": *(true|false|null),? *'


def _counts(value: str, differs: str) -> str:
    """Whether a value that differs is more than another way to compute the same."""
    if value != "hyperparameters":
        return differs
    sides = (f"regexp_replace({s}.hyperparameters, '{_SAME_UPDATE}', '', 'g')" for s in "bc")
    return " IS DISTINCT FROM ".join(sides)


# What comes to `AS_ADDED_UP` for a sum, whose terms may cancel: float32's unit for what they are at most without signs,
# sqrt(numel) times the norm.
_OF_TERMS = 1.2e-7


def _summary_differs(p: str, is_alike: bool) -> str:
    norms = " OR ".join(
        _apart(p, statistic, is_alike)
        for statistic in ("numel", "norm", "abs_max", "sum", "nan_count", "inf_count")
    )
    return (
        f"(CASE WHEN b.{p}fingerprint IS NOT NULL AND c.{p}fingerprint IS NOT NULL "
        f"THEN b.{p}fingerprint <> c.{p}fingerprint ELSE ({norms}) END)"
    )


def _apart(p: str, statistic: str, is_alike: bool) -> str:
    unequal = f"b.{p}{statistic} IS DISTINCT FROM c.{p}{statistic}"
    if is_alike or statistic not in ("norm", "sum"):
        return unequal
    share = str(AS_ADDED_UP)
    if statistic == "sum":
        share += f" + {_OF_TERMS} * sqrt(b.{p}numel)"
    distance = f"abs(b.{p}{statistic} - c.{p}{statistic})"
    near = f"{distance} <= ({share}) * greatest(b.{p}norm, c.{p}norm)"
    return f"({unequal} AND NOT coalesce({near}, false))"

"""The SQL that pairs the rows of two runs and keeps the pairs that differ.

It runs on a connection with the schemas `baseline` and `candidate`. What it leaves are temporary tables, each a .sql
file here that says what it holds: `seen`, `common`, `step_start`, and one `paired_<table>` for each link table.
`kept_<table>` is a view of what is not ignored (`ignored_rows`), with its row's number as `id`. The judgement makes
`judged_<table>` of it, by `make_judged`, and `differing_<table>` is a view of that, without what is `left_out`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import duckdb

from gradtrace_analyzer.diff.links import LINK_TABLES, STATISTICS, LinkTable
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.numerics.sketches import relative_error_sql
from gradtrace_analyzer.sql.derived import derived
from gradtrace_analyzer.words.nouns import SIDES

HERE = Path(__file__).parent

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
    return f"{derived(HERE, 'seen').create(rows=union)}; {derived(HERE, 'common').create()};"


def opened(pairs: Collection[tuple[int, int]]) -> str:
    """The statements that make `step_start` of these (rank, step): where each begins in its rank's record."""
    selects = " UNION ALL ".join(
        f"SELECT '{side}' AS side, rank, step, record_index FROM {side}.{table} t WHERE {within(pairs)}"
        for side in SIDES
        for table in _OF_EVERY_STEP
    )
    return f"{derived(HERE, 'step_start').create(rows=selects)};"


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


def pairing_of(
    table: LinkTable, unread: str, pairs: Collection[tuple[int, int]], *, is_alike: bool = True
) -> str:
    """Statements that make `paired_<table>`, pairs that differ and rows without partner; and the view `kept_` of it.

    `unread` are the ranks to leave out, as a SQL list without brackets; `pairs` is what the table `opened` holds. Where
    both sides' norms and sums were not made alike (by one observer), the same tensor has them within 1e-6 of its norm.
    """
    columns, counts, errors, differs = _columns(table, is_alike)
    made = derived(HERE, "paired").create(
        table=table.table,
        baseline=_side(table, "baseline", unread, pairs),
        candidate=_side(table, "candidate", unread, pairs),
        columns=", ".join(columns),
        counts=" OR ".join([*counts, "false"]),
        errors=", ".join(errors) or "NULL",
        same_key=" AND ".join(f"b.{k} IS NOT DISTINCT FROM c.{k}" for k in table.key),
        differs=" OR ".join(differs),
    )
    # What was judged of the steps that were open before is not held beside these.
    gone = f"DROP VIEW IF EXISTS differing_{table.table}; DROP TABLE IF EXISTS judged_{table.table}"
    return f"{gone}; {made}; {kept(table)};"


def kept(table: LinkTable, ignored: Collection[str] = ()) -> str:
    """The statement that makes the view `kept_<table>`: the pairs for which none of these conditions is true."""
    where = " AND ".join(f"({condition}) IS NOT TRUE" for condition in ignored) or "true"
    return (
        f"CREATE OR REPLACE TEMP VIEW kept_{table.table} AS "
        f"SELECT rowid AS id, * FROM paired_{table.table} d WHERE {where}"
    )


def make_judged(connection: duckdb.DuckDBPyConnection, table: LinkTable, rows: str) -> None:
    """Make `judged_<table>` of the query of its rows, and the view `differing_<table>` of it: what differs is what was
    judged, less what is `left_out`; a Node that is `excused` is neither beyond its tolerance nor exceeds it."""
    name = table.table
    connection.execute(f"CREATE OR REPLACE TEMP TABLE judged_{name} AS {rows}")
    shown, joined = "j.*", ""
    if name == "node_events":
        shown += (
            " REPLACE (j.beyond AND e.id IS NULL AS beyond, j.exceeds AND e.id IS NULL AS exceeds)"
        )
        joined = "LEFT JOIN excused e ON e.id = j.id"
    connection.execute(
        f"CREATE OR REPLACE TEMP VIEW differing_{name} AS SELECT {shown} FROM judged_{name} j {joined} "
        f"WHERE NOT EXISTS (SELECT 1 FROM left_out l WHERE l.link_table = '{name}' AND l.id = j.id)"
    )


def forget_left_out(connection: duckdb.DuckDBPyConnection) -> None:
    """Make `left_out` and `excused` anew, without rows."""
    for name in ("left_out", "excused"):
        derived(HERE, name).make(connection)


def leave_out(connection: duckdb.DuckDBPyConnection, table: str, why: str, condition: str) -> int:
    """Have `differing_<table>` go without the rows `d` for which a condition is true; how many these are."""
    [(count,)] = connection.execute(
        f"INSERT INTO left_out SELECT '{table}', d.id, ? FROM differing_{table} d WHERE {condition}",
        [why],
    ).fetchall()
    return int(count)


def leave_unjudged(connection: duckdb.DuckDBPyConnection) -> None:
    """Make each `differing_<table>` of what is kept, where nobody judges it: what counts as it is exceeds."""
    forget_left_out(connection)
    for table in LINK_TABLES:
        rows = f"SELECT *, given AS beyond, given AS exceeds FROM kept_{table.table}"
        make_judged(connection, table, rows)


def _side(table: LinkTable, schema: str, unread: str, pairs: Collection[tuple[int, int]]) -> str:
    """The query of one side's rows, numbered among those of one key, in the order of the record."""
    # A Node that was running when its rank was killed gave nothing yet that could differ.
    is_node = table.table == "node_events"
    whole = "t.outcome IS DISTINCT FROM 'running'" if is_node else table.only
    return (
        "SELECT t.*, s.first, row_number() OVER (PARTITION BY t.rank, t.step, "
        f"{', '.join(table.key)} ORDER BY t.record_index) AS nth FROM {schema}.{table.table} t "
        f"SEMI JOIN opened USING (rank, step) JOIN step_start s ON s.side = '{schema}' "
        "AND s.rank = t.rank AND s.step = t.step "
        f"WHERE {within(pairs)} AND t.rank NOT IN ({unread or -1}) AND {whole}"
    )


def _columns(table: LinkTable, is_alike: bool) -> tuple[list[str], list[str], list[str], list[str]]:
    """(columns that the table's own links have, conditions under which a pair counts as it is, errors, conditions
    under which it differs)."""
    columns = [f"coalesce(b.{k}, c.{k}) AS key_{k}" for k in table.key]
    if table.table == "node_events":
        columns.append("b.event_index AS event_index_b, c.event_index AS event_index_c")
    if table.table == "buckets":
        columns.append("coalesce(b.bucket_index, c.bucket_index) AS bucket_index")
    counts, errors, differs = [], [], []
    for role, p in table.sides:
        is_apart, error = _summary_differs(p, is_alike), relative_error_sql(f"b.{p}", f"c.{p}")
        columns += [
            f"{is_apart} AS {role}_differs",
            f"{error} AS {role}_error",
            *(f"b.{p}{s} AS {role}_b_{s}, c.{p}{s} AS {role}_c_{s}" for s in STATISTICS),
        ]
        differs.append(is_apart)
        errors.append(f"CASE WHEN {is_apart} THEN {error} END")
    for value in table.values:
        columns.append(f"b.{value} AS value_b_{value}, c.{value} AS value_c_{value}")
        # A pass has no `ddp_sync` without DDP, and in runs of schema 1: that is no difference.
        unequal = "<>" if value == "ddp_sync" else "IS DISTINCT FROM"
        differs.append(f"coalesce(b.{value} {unequal} c.{value}, false)")
        if value != "loss":
            counts.append(_counts(value, differs[-1]))
    if table.table == "backward_passes":
        errors.append("abs(b.loss - c.loss) / greatest(abs(b.loss), abs(c.loss))")
    return columns, counts, errors, differs


def place_among(connection: duckdb.DuckDBPyConnection) -> None:
    """Give rows of the candidate alone a place among the baseline's: in front of the next pair that differs.

    The places of a pair are the baseline's, and each row that one side alone has shifts all that follow it.
    """
    tables = [f"paired_{table.table}" for table in LINK_TABLES]
    lone = " UNION ALL ".join(
        f"SELECT '{name}' AS of_table, rank, step, place_c FROM {name} WHERE only_in = 'candidate'"
        for name in tables
    )
    if connection.execute(f"SELECT 1 FROM ({lone}) LIMIT 1").fetchone() is None:
        return
    pairs = " UNION ALL ".join(
        f"SELECT rank, step, place, place_c FROM {name} WHERE only_in IS NULL" for name in tables
    )
    derived(HERE, "among").make(connection, lone=lone, pairs=pairs)
    for name in tables:
        connection.execute(
            f"UPDATE {name} d SET place = a.place FROM among a WHERE a.of_table = '{name}' AND a.rank = d.rank "
            "AND a.step = d.step AND a.place_c = d.place_c AND d.only_in = 'candidate'"
        )


# Ways to compute the same update: they round otherwise, and are no other setting.
_SAME_UPDATE = r'"(fused|foreach|capturable|differentiable)": *(true|false|null),? *'


def _counts(value: str, differs: str) -> str:
    """Whether a value that differs is more than another way to compute the same."""
    if value != "hyperparameters":
        return differs
    sides = (f"regexp_replace({s}.hyperparameters, '{_SAME_UPDATE}', '', 'g')" for s in "bc")
    return " IS DISTINCT FROM ".join(sides)


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
    share = str(MODEL.as_added_up)
    if statistic == "sum":
        share += f" + {MODEL.of_terms} * sqrt(b.{p}numel)"
    distance = f"abs(b.{p}{statistic} - c.{p}{statistic})"
    near = f"{distance} <= ({share}) * greatest(b.{p}norm, c.{p}norm)"
    return f"({unequal} AND NOT coalesce({near}, false))"

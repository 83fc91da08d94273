"""What lies between the views of two runs and the answer of `diff`, made by hand: tables, differences, runs.

For tests of one stage alone: a handful of rows in DuckDB's memory, no files, no jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.explanations.explanation import Context
from gradtrace_analyzer.diff.judged_rows import JudgedRows
from gradtrace_analyzer.diff.judging import judged
from gradtrace_analyzer.diff.links import LINK_TABLES, TABLE_NAMES
from gradtrace_analyzer.diff.names.likely_renames import Naming
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.origins.step_reader import StepReader
from gradtrace_analyzer.diff.pairing.pairs import (
    kept,
    leave_unjudged,
    opened,
    opened_places,
    pairing_of,
    seen,
)
from gradtrace_analyzer.diff.pairing.run_pair import RunPair
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.scoping import Scope
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.runs.last_seen import Doing, RankPlace
from gradtrace_analyzer.runs.run import RankInfo, Run
from gradtrace_analyzer.sql.footers import table_counts
from gradtrace_analyzer.sql.views import macros
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_schemas import ALL_TABLES, SCHEMA_VERSION, TABLES
from gradtrace_schemas.table import SKETCH_LANES
from support.synthetic_runs.builder import facts_of, part_rows

Row = dict[str, Any]
Rows = Mapping[str, Sequence[Row]]

_SKETCH = [float(1 + (7 * n) % 5) * (-1) ** n for n in range(SKETCH_LANES)]


def changed(
    error: float | None = 0.5,
    *,
    tolerance: float = 1e-6,
    factor: float | None = None,
    norm: float = 1.0,
    lanes: int = SKETCH_LANES,
    numel: int = 8,
) -> Change:
    """A tensor that is another one on both sides: by this relative error or, with `factor`, so many times as large."""
    sketch = _SKETCH[:lanes]
    other = sketch[::-1] if factor is None else [factor * x for x in sketch]
    before = {"numel": numel, "dtype": "float32", "norm": norm, "sketch": sketch}
    after = {**before, "norm": norm * abs(factor or 1.0), "sketch": other}
    return Change(True, error if factor is None else abs(factor - 1), tolerance, before, after)


def unchanged(norm: float = 1.0) -> Change:
    """A tensor that is the same on both sides."""
    both = {"numel": 8, "dtype": "float32", "norm": norm, "sketch": _SKETCH}
    return Change(False, 0.0, 1e-6, both, both)


_KEYS = {table.table: table.key for table in LINK_TABLES}
_USUAL = {
    "microbatch": 0, "root": 0, "call_index": 0, "backward_index": 0, "occurrence": 0, "phase": "forward",
    "optimizer_index": 0, "group_index": 0, "kind": "backward", "node_name": "MmBackward0", "module_fqn": "",
}  # fmt: skip


def difference(
    table: str,
    order: float,
    *,
    rank: int = 0,
    step: int = 0,
    only_in: str | None = None,
    exceeds: bool = True,
    reads: Change | None = None,
    writes: Change | None = None,
    values: Mapping[str, tuple[Any, Any]] | None = None,
    event_indices: tuple[int | None, int | None] = (None, None),
    bucket_index: int | None = None,
    **key: Any,
) -> Difference:
    """A row of a link table that differs, or that one side alone has; what of its key is not said is as usual."""
    assert set(key) <= set(_KEYS[table]), (table, key)
    whole = {name: key.get(name, _USUAL.get(name)) for name in _KEYS[table]}
    return Difference(
        table, rank, step, order, only_in, whole, exceeds, event_indices, bucket_index, reads, writes, values or {}
    )  # fmt: skip


def call(module_fqn: str, order: float, **more: Any) -> Difference:
    """A module's forward that gave something else, from what was the same unless `reads` says otherwise."""
    more = {"reads": unchanged(), "writes": changed(), **more}
    return difference("module_calls", order, module_fqn=module_fqn, **more)


def node(module_fqn: str | None, order: float, **more: Any) -> Difference:
    """A Node that gave another gradient; its number in its pass is its place unless `event_indices` says otherwise."""
    at = (int(order), int(order))
    more = {"reads": unchanged(), "writes": changed(lanes=4), "event_indices": at, **more}
    return difference("node_events", order, module_fqn=module_fqn, **more)


def accumulating(parameter_fqn: str, order: float, **more: Any) -> Difference:
    """The Node that adds a gradient to a parameter's, to which another gradient came."""
    more = {"node_name": "AccumulateGrad", "reads": changed(lanes=4), "writes": None, **more}
    module_fqn = parameter_fqn.rpartition(".")[0]
    return node(module_fqn, order, parameter_fqn=parameter_fqn, **more)


def parameter(parameter_fqn: str, order: float, point: str = "before", **more: Any) -> Difference:
    """A parameter that differs before the step, or after it."""
    more = {"writes": changed(), **more}
    return difference("parameters", order, parameter_fqn=parameter_fqn, point=point, **more)


def gradient(parameter_fqn: str, order: float, point: str = "local", **more: Any) -> Difference:
    """A parameter's gradient that differs at one point of the step."""
    more = {"writes": changed(), **more}
    return difference("gradients", order, parameter_fqn=parameter_fqn, point=point, **more)


def given(order: float, name: str = "x", **more: Any) -> Difference:
    """An input of a root that differs."""
    more = {"writes": changed(), **more}
    return difference("inputs", order, name=name, **more)


def loss(
    order: float, before: float | None = 1.0, after: float | None = 2.0, **more: Any
) -> Difference:
    """A backward pass whose loss differs; its row comes when it is over."""
    more = {"values": {"loss": (before, after)}, **more}
    return difference("backward_passes", order, **more)


def bucket(parameter_fqns: Sequence[str], order: float, **more: Any) -> Difference:
    """A bucket of which something else came out, of what went in the same unless `reads` says otherwise."""
    more = {"reads": unchanged(), "writes": changed(), "kind": "all_reduce", **more}
    return difference("buckets", order, parameter_fqns=list(parameter_fqns), **more)


def action(
    stage_index: int, order: float, kind: str = "forward", microbatch: int = 0, **more: Any
) -> Difference:
    """An action of a pipeline's stage that sent something else."""
    more = {"writes": changed(), **more}
    return difference(
        "stage_events", order, stage_index=stage_index, kind=kind, microbatch=microbatch, **more
    )


def group(order: float, **values: tuple[Any, Any]) -> Difference:
    """An optimizer's group that is set otherwise."""
    return difference("optimizer_groups", order, values=values)


def sides(
    error: float = 0.0,
    prefix: str = "",
    *,
    times: float = 1.0,
    norm: float = 1.0,
    numel: int = 100,
    dtype: str = "float32",
    lanes: int = SKETCH_LANES,
) -> tuple[Row, Row]:
    """The columns of one tensor's summary in both runs, of which the sketches say that it is this far apart.

    The candidate's is turned by the error, which does not lengthen it, and then `times` as long.
    """
    rest = [0.0] * (lanes - 2)
    sketches = ([norm, 0.0, *rest], [times * norm, error * norm, *rest])
    found = []
    for n, sketch in enumerate(sketches):
        own = {
            "numel": numel,
            "dtype": dtype,
            "norm": norm * (times if n else 1.0),
            "sketch": sketch,
        }
        own |= {"abs_max": norm, "sum": 0.0, "nan_count": 0, "inf_count": 0}
        own["fingerprint"] = 1 + n * (error != 0 or times != 1)
        found.append({f"{prefix}{name}": value for name, value in own.items()})
    return found[0], found[1]


def _held(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a view holds them: a part's columns, and the rank, which is in the part's name alone."""
    held = part_rows(table, rows)
    if "rank" not in held.column_names:
        ranks = pa.array([row.get("rank", 0) for row in rows], pa.int32())
        held = held.append_column("rank", ranks)
    return held.select([column.name for column in TABLES[table].columns])


@cache
def _empty_views() -> str:
    """The statements that make every view of both sides, without rows."""
    made = ["CREATE SCHEMA held", *(f"CREATE SCHEMA {side}" for side in SIDES)]
    with contextlib.closing(duckdb.connect()) as connection:
        for table in ALL_TABLES:
            connection.register("arriving", _held(table.name, ()))
            types = connection.execute("DESCRIBE FROM arriving").fetchall()
            columns = ", ".join(f'CAST(NULL AS {type}) AS "{name}"' for name, type, *_ in types)
            made += [f"CREATE VIEW {s}.{table.name} AS SELECT {columns} WHERE false" for s in SIDES]
            connection.unregister("arriving")
    return "; ".join(made)


def views(baseline: Rows, candidate: Rows | None = None) -> duckdb.DuckDBPyConnection:
    """A connection with the views of both sides over these rows, as `connect_pair` gives them of two runs.

    What a row does not say is null, but `step` and `microbatch` are 0, `rank` too, and `record_index` counts the rows
    of a rank in the order in which they are given here. Without a candidate both sides have the same rows.
    """
    connection = duckdb.connect(config={"python_enable_replacements": "false"})
    connection.execute(macros())
    connection.execute(_empty_views())
    for side, rows in zip(
        SIDES, (baseline, baseline if candidate is None else candidate), strict=True
    ):
        assert set(rows) <= set(TABLES), rows.keys()
        counts: dict[int, int] = {}
        for name, of_table in rows.items():
            numbered = []
            for row in of_table:
                rank = row.get("rank", 0)
                counts[rank] = counts.get(rank, 0) + 1
                numbered.append({"record_index": counts[rank], **row})
            if numbered:
                connection.register("arriving", _held(name, numbered))
                connection.execute(
                    f"CREATE TABLE held.{side}_{name} AS FROM arriving;"
                    f"CREATE OR REPLACE VIEW {side}.{name} AS FROM held.{side}_{name}"
                )
                connection.unregister("arriving")
    return connection


def started(
    baseline: Rows,
    candidate: Rows | None = None,
    *,
    only: Collection[tuple[int, int]] | None = None,
) -> duckdb.DuckDBPyConnection:
    """The views, with `seen`, `common`, and `opened` and `step_start` of all common (rank, step) or `only` of these."""
    connection = views(baseline, candidate)
    ranks = sorted({row.get("rank", 0) for of_table in baseline.values() for row in of_table})
    nothing: Mapping[str, Sequence[int]] = {side: () for side in SIDES}
    connection.execute(seen(nothing, {side: ranks for side in SIDES}))
    connection.execute("CREATE TEMP TABLE opened AS FROM common")
    connection.execute("CREATE TEMP TABLE unjudged AS FROM common WHERE false")
    if only is not None:
        connection.execute("DELETE FROM opened")
        connection.executemany("INSERT INTO opened VALUES (?, ?)", [list(place) for place in only])
    connection.execute(opened(opened_places(connection)))
    return connection


def paired(
    baseline: Rows,
    candidate: Rows | None = None,
    *,
    only: Collection[tuple[int, int]] | None = None,
    is_alike: bool = True,
) -> duckdb.DuckDBPyConnection:
    """The same, with the tables of pairs of the steps that are open, and of differences, which nobody has judged."""
    connection = started(baseline, candidate, only=only)
    places = opened_places(connection)
    connection.execute(_empty_differences())
    held = {*baseline, *(baseline if candidate is None else candidate)}
    for table in LINK_TABLES:
        if table.table in held:  # the others are as empty as they are: that saves most of the time
            connection.execute(pairing_of(table, "", places, is_alike=is_alike))
    leave_unjudged(connection)
    return connection


@cache
def _empty_differences() -> str:
    """The statements that make every table of pairs, without rows."""
    made = []
    with contextlib.closing(started({})) as connection:
        for table in LINK_TABLES:
            connection.execute(pairing_of(table, "", []))
            types = connection.execute(f"DESCRIBE paired_{table.table}").fetchall()
            columns = ", ".join(f"{name} {type}" for name, type, *_ in types)
            made += [f"CREATE TEMP TABLE paired_{table.table} ({columns})", kept(table)]
    return "; ".join(made)


def three_calls(
    n: int, errors: dict[tuple[int, str], float], steps: range = range(3), **more: list[Row]
) -> Rows:
    """A call of three modules in each step; those named in `errors` (by step) give something else in the candidate."""
    calls = [
        {"step": s, "root": 0, "module_fqn": name, "module_class": "Linear", "phase": "forward", "call_index": 0,
         **sides(0.0, "input_")[n], **sides(errors.get((s, name), 0.0), "output_")[n]}
        for s in steps
        for name in "abc"
    ]  # fmt: skip
    return {"module_calls": calls, **more}


def judged_rows(
    connection: duckdb.DuckDBPyConnection,
    ranks: Sequence[int] = (0,),
    *,
    runs: Mapping[str, Run] | None = None,
    chosen: Selection | None = None,
    unread: Mapping[str, Collection[int]] | None = None,
) -> JudgedRows:
    """The rows of these views, paired and judged by the rule. Of `unread`, by table, ranks are left out."""
    both = runs or {side: run_of(ranks, name=side) for side in SIDES}
    counts = {side: table_counts(connection, side, TABLE_NAMES) for side in SIDES}
    left_out = {name: frozenset(own) for name, own in (unread or {}).items()}
    scope = Scope(
        Question(chosen or Selection()), both, RunPair(both, counts), tuple(ranks), Naming(), {}, left_out, {}, {}
    )  # fmt: skip
    return JudgedRows(connection, judged(connection, scope, Judgement(connection, both)))


def cover(**more: Any) -> Cover:
    """One rank and one step, of which both sides recorded all; `more` is what is otherwise."""
    whole: dict[str, Any] = {
        "ranks": (0,),
        "steps": {0: (0,)},
        "rows": dict.fromkeys(TABLE_NAMES, 1),
        "missing_ranks": {},
        "missing_steps": {},
        "incomplete_ranks": {},
        "dropped": {},
        "unsummarised": {},
        "filters": {},
        "unread": {},
        "problems": {},
    }
    return Cover(**{**whole, **more})


def context(*origins: Origin, **more: Any) -> Context:
    """What a plug-in is given that explains these origins; of ranks that pair, on no rows, unless `more` says else."""
    connection = more.get("connection") or views({})
    known: dict[str, Any] = {
        "connection": connection,
        "runs": {side: run_of() for side in SIDES},
        "cover": cover(),
        "reader": StepReader(connection, cover(), origins[0].step),
        "failures": (),
        "spread": (),
        "paired": "ranks",
        "may_differ": lambda _: True,
    }
    return Context(origins=origins, **known | more)


def each_step(steps: Iterable[int], rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """These rows in each of the steps."""
    return [{**row, "step": step} for step in steps for row in rows]


def run_of(
    ranks: Sequence[int] = (0,),
    *,
    world_size: int | None = None,
    unclosed: Collection[int] = (),
    schema_version: int = SCHEMA_VERSION,
    name: str = "run",
    settings: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Run:
    """A run as it is opened, without its rows; `facts` are those of all ranks, `settings` come to the usual ones."""
    size = max(ranks, default=0) + 1 if world_size is None else world_size
    infos = {}
    for rank in ranks:
        own = {**facts_of(rank, size), "complete": rank not in unclosed}
        own["settings"] = {**own["settings"], **(settings or {})}
        infos[rank] = RankInfo(rank, {**own, **facts})
    return Run(
        path=Path(name),
        name=name,
        attempt=0,
        attempts=(0,),
        run_info={},
        world_size=size,
        ranks=infos,
        parts={table.name: {} for table in ALL_TABLES},
        leftovers={},
        journals={},
        schema_version=schema_version,
    )


def seen_at(doing: Doing, step: int | None, **more: Any) -> RankPlace:
    """Where a rank was last seen."""
    return RankPlace(1, doing, 0, step=step, **more)

"""What one side alone has, grouped as a person would name it, and what of it is a change of the code.

A layer that was added is one entry, not its Nodes. What one side alone has in every step from the first on is a change
of the code: it is taken out of the differences, and the comparison goes on around it. What is missing in a later step,
or on some of the ranks that run a module, happened: it stays a difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import duckdb

from gradtrace_analyzer.chosen import Chosen
from gradtrace_analyzer.failures import Failure

SIDES = ("baseline", "candidate")
OTHER = {"baseline": "candidate", "candidate": "baseline"}

# Share of the steps in which a Node must be there alone to count as other code and not as something that happened.
_MOSTLY = 0.5


@dataclass(frozen=True)
class Lone:
    """Something that one side alone has. `count` are its rows; `holds` counts what a module contains.

    `is_code` is true of what the code brings into every step; `is_compiled` of what the other side's compiled code
    does inside one Node.
    """

    kind: str
    name: str
    only_in: str
    module_fqn: str | None = None
    module_class: str | None = None
    count: int | None = None
    ranks: tuple[int, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    phase: str | None = None
    holds: Mapping[str, int] = field(default_factory=dict)
    is_code: bool = False
    is_compiled: bool = False

    @property
    def is_of_the_model(self) -> bool:
        """Whether it is a module or parameter that is not merely hidden in compiled code."""
        return self.kind in ("module", "parameter") and not self.is_compiled

    @property
    def has_parameters(self) -> bool:
        """Whether it is, or holds, a parameter or buffer."""
        return self.kind == "parameter" or bool(self.holds.get("parameters"))


@dataclass(frozen=True)
class Structure:
    """All that one side alone has. `places` are, by rank and step, where the first row of changed code stands."""

    lone: tuple[Lone, ...] = ()
    places: Mapping[tuple[int, int], float] = field(default_factory=dict)
    touched: frozenset[str | None] = frozenset()
    compiled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def code(self) -> tuple[Lone, ...]:
        """The changes of the code, those of the model first."""
        return tuple(
            sorted((e for e in self.lone if e.is_code), key=lambda e: not e.is_of_the_model)
        )

    @property
    def has_parameters(self) -> bool:
        """Whether one side has parameters alone: it is another model. They take random numbers, and they train."""
        return any(e.has_parameters for e in self.lone)


class Parts:
    """What there is on each side over all common steps: it is asked for once, whichever steps are opened."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    @cached_property
    def names(self) -> dict[str, set[tuple[str, str]]]:
        """By side, (kind, name) of the modules and parameters."""
        return {side: _names(self._connection, side) for side in SIDES}

    @cached_property
    def compiled(self) -> dict[str, tuple[str, ...]]:
        """By side, the modules of which it runs compiled code."""
        return {side: _compiled(self._connection, side) for side in SIDES}

    @cached_property
    def classes(self) -> dict[str, dict[str, str]]:
        """By side, the class of each module."""
        query = "SELECT module_fqn, any_value(module_class) FROM {}.module_calls GROUP BY 1"
        return {
            side: dict(self._connection.execute(query.format(side)).fetchall()) for side in SIDES
        }

    def make_callers(self) -> None:
        """Make `callers`: the ranks that run each module, on either side."""
        union = " UNION ".join(
            f"SELECT DISTINCT module_fqn, rank FROM {side}.module_calls SEMI JOIN common USING (rank, step)"
            for side in SIDES
        )
        self._connection.execute(f"CREATE TEMP TABLE IF NOT EXISTS callers AS {union}")


def structure_of(
    connection: duckdb.DuckDBPyConnection, parts: Parts, failures: Collection[Failure] = ()
) -> Structure:
    """What one side alone has; the rows of changed code are taken out of `differing_node_events` and the like.

    Reads what `Opening` has made: `common`, `unjudged` and the tables of differences. Rows that one side alone has are
    known of the opened steps; those of modules and parameters of all.
    """
    names = parts.names
    if names["baseline"] == names["candidate"] and not _has_unmatched(connection):
        return Structure()
    compiled = parts.compiled
    parts.make_callers()
    found: list[Lone] = []
    for side in SIDES:
        found += _modules_and_parameters(side, parts, compiled[OTHER[side]])
    lone = {
        side: {
            kind: {n for k, n in names[side] if k == kind}
            - {n for k, n in names[OTHER[side]] if k == kind}
            for kind in ("module", "parameter")
        }
        for side in SIDES
    }
    _mark_code(connection, lone, failures)
    rest = _nodes_and_calls(connection, compiled)
    touched: set[str | None] = set()
    for entry in (*found, *rest):
        if entry.is_code:
            touched |= _around(
                entry.name if entry.kind in ("module", "parameter") else entry.module_fqn
            )
    places = {
        (rank, step): place
        for rank, step, place in connection.execute(
            "SELECT rank, step, min(place) FROM changed_code GROUP BY ALL"
        ).fetchall()
    }
    for table in ("node_events", "module_calls", "gradients", "parameters"):
        connection.execute(
            f"DELETE FROM differing_{table} d WHERE only_in IS NOT NULL AND EXISTS (SELECT 1 FROM changed_code c "
            f"WHERE c.of_table = '{table}' AND c.rank = d.rank AND c.step = d.step AND c.place = d.place "
            "AND c.only_in = d.only_in)"
        )
    _forget_lone_in_groups(connection)
    _excuse_inside(connection)
    return Structure(
        lone=(*found, *rest, *_happened(connection)),
        places=places,
        touched=frozenset(touched),
        compiled={side: own for side, own in compiled.items() if own},
    )


def wants_lone(chosen: Chosen, entry: Lone) -> bool:
    """Whether what one side alone has is among what a person asked for."""
    links = _LINKS.get(entry.kind, ())
    if chosen.links and not any(chosen.wants_link(link) for link in links):
        return False
    return entry.module_fqn is None or chosen.wants_module(entry.module_fqn)


_LINKS = {
    "pass": ("loss",),
    "input": ("inputs",),
    "call": ("forward",),
    "node": ("backward",),
    "gradient": ("carried_gradient", "local_gradient", "reduced_gradient", "clip"),
    "bucket": ("bucket",),
    "group": ("optimizer",),
}


def as_object(entry: Lone) -> dict[str, Any]:
    """The entry for a program."""
    return {
        "kind": entry.kind,
        "name": entry.name,
        "only_in": entry.only_in,
        "module_fqn": entry.module_fqn,
        "module_class": entry.module_class,
        "phase": entry.phase,
        "count": entry.count,
        "holds": dict(entry.holds) or None,
        "ranks": list(entry.ranks),
        "first_step": entry.first_step,
        "last_step": entry.last_step,
        "is_code": entry.is_code,
        "is_compiled": entry.is_compiled,
    }


def _has_unmatched(connection: duckdb.DuckDBPyConnection) -> bool:
    tables = ("node_events", "module_calls", "gradients", "buckets", "backward_passes", "inputs")
    union = " UNION ALL ".join(
        f"SELECT 1 FROM differing_{table} WHERE only_in IS NOT NULL" for table in tables
    )
    return connection.execute(f"SELECT 1 FROM ({union}) LIMIT 1").fetchone() is not None


def _names(connection: duckdb.DuckDBPyConnection, side: str) -> set[tuple[str, str]]:
    """(kind, name) of the modules and parameters of a side, over all common steps."""
    rows = connection.execute(
        f"SELECT DISTINCT 'module', module_fqn FROM {side}.module_calls SEMI JOIN common USING (rank, step) "
        f"UNION SELECT DISTINCT 'parameter', parameter_fqn FROM {side}.parameters "
        "SEMI JOIN common USING (rank, step)"
    ).fetchall()
    return {(kind, name) for kind, name in rows}


def _compiled(connection: duckdb.DuckDBPyConnection, side: str) -> tuple[str, ...]:
    """The modules of which a side runs compiled code: their backward is one Node."""
    rows = connection.execute(
        f"SELECT DISTINCT coalesce(module_fqn, '') FROM {side}.node_events SEMI JOIN common USING (rank, step) "
        "WHERE node_name LIKE 'CompiledFunction%' ORDER BY 1"
    ).fetchall()
    return tuple(fqn for (fqn,) in rows)


def _is_within(fqn: str | None, tops: Iterable[str]) -> bool:
    return any(not top or fqn == top or (fqn or "").startswith(f"{top}.") for top in tops)


def _around(fqn: str | None) -> set[str | None]:
    """A module and those around it."""
    if fqn is None:
        return {None}
    parts = fqn.split(".")
    return {".".join(parts[:n]) for n in range(len(parts) + 1)}


def _modules_and_parameters(side: str, parts: Parts, compiled: Sequence[str]) -> list[Lone]:
    """Modules and parameters that a side alone has, what is below a lone name with it."""
    own, others = parts.names[side], parts.names[OTHER[side]]
    there: set[str] = set()
    for _, name in others:
        steps = name.split(".")
        there |= {".".join(steps[:n]) for n in range(len(steps) + 1)}
    inside: dict[str, list[tuple[str, str]]] = {}
    for kind, name in sorted(own - others):
        steps = name.split(".")
        above = (".".join(steps[: n + 1]) for n in range(len(steps)))
        # A name that the other side uses too, for something else, stands for itself.
        inside.setdefault(next((a for a in above if a not in there), name), []).append((kind, name))
    found = []
    for top, held in inside.items():
        is_module = any(kind == "module" for kind, _ in held) or len(held) > 1
        counts = {
            "modules": sum(kind == "module" for kind, _ in held),
            "parameters": sum(kind == "parameter" for kind, _ in held),
        }
        found.append(
            Lone(
                kind="module" if is_module else "parameter",
                name=top,
                only_in=side,
                module_fqn=top if is_module else top.rpartition(".")[0],
                module_class=parts.classes[side].get(top),
                holds={k: n for k, n in counts.items() if n} if is_module else {},
                is_code=True,
                is_compiled=bool(compiled)
                and not counts["parameters"]
                and _is_within(top, compiled),
            )
        )
    return found


_CHANGED = """
CREATE OR REPLACE TEMP TABLE changed_code AS
WITH other_passes AS (
    -- Where one side makes another pass, its passes ask for other Nodes: that tells nothing of a module's code.
    SELECT DISTINCT rank, step FROM differing_backward_passes WHERE only_in IS NOT NULL
),
unmatched AS (
    SELECT 'node_events' AS of_table, rank, step, place, only_in, key_module_fqn AS module_fqn,
        key_node_name AS node_name, CAST(NULL AS VARCHAR) AS phase, key_parameter_fqn AS parameter_fqn
    FROM differing_node_events n WHERE only_in IS NOT NULL AND NOT EXISTS (
        -- Nodes of a pass that one side alone has are that pass's.
        FROM differing_backward_passes p WHERE p.only_in = n.only_in AND p.rank = n.rank AND p.step = n.step
        AND p.key_backward_index = n.key_backward_index)
    UNION ALL SELECT 'module_calls', rank, step, place, only_in, key_module_fqn, NULL, key_phase, NULL
    FROM differing_module_calls WHERE only_in IS NOT NULL
    UNION ALL SELECT 'gradients', rank, step, place, only_in, NULL, NULL, NULL, key_parameter_fqn
    FROM differing_gradients WHERE only_in IS NOT NULL
    UNION ALL SELECT 'parameters', rank, step, place, only_in, NULL, NULL, NULL, key_parameter_fqn
    FROM differing_parameters WHERE only_in IS NOT NULL
),
marked AS (
    SELECT u.*, coalesce(m.name IS NOT NULL, false) OR coalesce(p.name IS NOT NULL, false) AS is_lone
    FROM unmatched u
    LEFT JOIN lone_name m ON m.kind = 'module' AND m.side = u.only_in AND m.name = u.module_fqn
    LEFT JOIN lone_name p ON p.kind = 'parameter' AND p.side = u.only_in AND p.name = u.parameter_fqn
    ANTI JOIN failed f ON f.rank = u.rank AND f.step <= u.step
),
seen_steps AS (
    SELECT rank, min(step) AS first, count(*) - count(u.step) AS step_count
    FROM common LEFT JOIN unjudged u USING (rank, step) ANTI JOIN other_passes USING (rank, step) GROUP BY rank
),
by_rank AS (
    SELECT of_table, only_in, module_fqn, node_name, phase, m.rank,
        min(step) = any_value(first) AND count(DISTINCT step) > $mostly * any_value(step_count) AS is_constant
    FROM marked m ANTI JOIN other_passes USING (rank, step) JOIN seen_steps USING (rank)
    WHERE NOT is_lone AND of_table IN ('node_events', 'module_calls') AND parameter_fqn IS NULL GROUP BY ALL
),
everywhere AS (
    SELECT of_table, only_in, module_fqn, node_name, phase FROM by_rank b GROUP BY ALL
    HAVING bool_and(is_constant) AND count(*) >= coalesce(nullif(
        (SELECT count(*) FROM callers c WHERE c.module_fqn = any_value(b.module_fqn)), 0),
        (SELECT count(*) FROM seen_steps))
)
SELECT DISTINCT m.* FROM marked m LEFT JOIN everywhere e ON e.of_table = m.of_table AND e.only_in = m.only_in
    AND e.module_fqn IS NOT DISTINCT FROM m.module_fqn AND e.node_name IS NOT DISTINCT FROM m.node_name
    AND e.phase IS NOT DISTINCT FROM m.phase
WHERE m.is_lone OR (e.of_table IS NOT NULL AND m.parameter_fqn IS NULL)
"""


def _mark_code(
    connection: duckdb.DuckDBPyConnection,
    lone: Mapping[str, Mapping[str, Collection[str]]],
    failures: Collection[Failure],
) -> None:
    """Make `changed_code`: the unmatched rows of lone names, and those that are alone in all steps and ranks."""
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE lone_name (side VARCHAR, kind VARCHAR, name VARCHAR)"
    )
    connection.execute("CREATE OR REPLACE TEMP TABLE failed (rank INTEGER, step INTEGER)")
    names = [(s, kind, name) for s in SIDES for kind in lone[s] for name in lone[s][kind]]
    if names:
        connection.executemany("INSERT INTO lone_name VALUES (?, ?, ?)", names)
    if failures:
        rows = [(failure.rank, failure.step) for failure in failures]
        connection.executemany("INSERT INTO failed VALUES (?, ?)", rows)
    connection.execute(_CHANGED, {"mostly": _MOSTLY})


def _forget_lone_in_groups(connection: duckdb.DuckDBPyConnection) -> None:
    """That an optimizer holds the parameters which one side alone has is no setting of its own."""
    known = "[x FOR x IN value_{side}_parameter_fqns IF NOT list_contains(names, x)]"
    b, c = known.format(side="b"), known.format(side="c")
    connection.execute(
        "DELETE FROM differing_optimizer_groups WHERE only_in IS NULL AND (rank, step, place) IN (SELECT "
        "(rank, step, place) FROM differing_optimizer_groups, (SELECT coalesce(list(name), []) AS names FROM lone_name "
        f"WHERE kind = 'parameter') WHERE {b} = {c} AND value_b_parameter_fqns <> value_c_parameter_fqns "
        "AND value_b_optimizer_class IS NOT DISTINCT FROM value_c_optimizer_class "
        "AND value_b_learning_rate IS NOT DISTINCT FROM value_c_learning_rate "
        "AND value_b_hyperparameters IS NOT DISTINCT FROM value_c_hyperparameters)"
    )


def _excuse_inside(connection: duckdb.DuckDBPyConnection) -> None:
    """Judge no Node by tolerance that changed code has given another part of the work from the first step on.

    Where a product became a part of a sum, the sum's Node gives the product's gradient. That is so if at the first step
    all else agrees: what leaves the module, the loss, the gradients. Faults inside still show in what leaves it.
    """
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE changed_module AS SELECT DISTINCT module_fqn FROM changed_code "
        "WHERE NOT is_lone AND of_table = 'node_events'"
    )
    first = "step = (SELECT min(step) FROM common c WHERE c.rank = d.rank)"
    inside = "EXISTS (SELECT 1 FROM changed_module m WHERE m.module_fqn IS NOT DISTINCT FROM d.key_module_fqn)"
    outside = " UNION ALL ".join(
        f"SELECT 1 FROM differing_{table} d WHERE exceeds AND {first}"
        + (f" AND NOT {inside}" if table == "node_events" else "")
        for table in ("module_calls", "node_events", "gradients", "backward_passes")
    )
    if connection.execute(f"SELECT 1 FROM ({outside}) LIMIT 1").fetchone() is not None:
        return
    keys = ("key_root", "key_module_fqn", "key_call_index", "key_node_name", "key_occurrence")
    same = " AND ".join(f"f.{key} IS NOT DISTINCT FROM d.{key}" for key in keys)
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE other_work AS SELECT DISTINCT rank, {', '.join(keys)} "
        f"FROM differing_node_events d WHERE beyond AND only_in IS NULL AND {first} AND {inside}"
    )
    connection.execute(
        "UPDATE differing_node_events d SET exceeds = false, beyond = false WHERE only_in IS NULL AND EXISTS "
        f"(SELECT 1 FROM other_work f WHERE f.rank = d.rank AND {same})"
    )


def _nodes_and_calls(
    connection: duckdb.DuckDBPyConnection, compiled: Mapping[str, tuple[str, ...]]
) -> list[Lone]:
    """Changed code inside modules that both sides have."""
    rows = connection.execute(
        "SELECT of_table, only_in, module_fqn, node_name, phase, count(*), list(DISTINCT rank ORDER BY rank), "
        "min(step), max(step) FROM changed_code WHERE NOT is_lone GROUP BY ALL "
        "ORDER BY module_fqn, only_in, of_table, node_name"
    ).fetchall()
    return [
        Lone(
            kind="node" if table == "node_events" else "call",
            name=name if table == "node_events" else fqn,
            only_in=side,
            module_fqn=fqn,
            phase=phase,
            count=count,
            ranks=tuple(ranks),
            first_step=first,
            last_step=last,
            is_code=True,
            is_compiled=_is_within(fqn, (*compiled[side], *compiled[OTHER[side]])),
        )
        for table, side, fqn, name, phase, count, ranks, first, last in rows
    ]


_HAPPENED = (
    ("pass", "backward_passes", "key_kind || ' ' || key_backward_index", "NULL"),
    ("input", "inputs", "key_name", "NULL"),
    ("call", "module_calls", "key_module_fqn", "key_module_fqn"),
    ("node", "node_events", "key_node_name", "key_module_fqn"),
    ("gradient", "gradients", "key_point || ' ' || key_parameter_fqn", "NULL"),
    ("bucket", "buckets", "coalesce(key_parameter_fqns[1], '?')", "key_module_fqn"),
    ("group", "optimizer_groups", "key_optimizer_index || '.' || key_group_index", "NULL"),
)


def _happened(connection: duckdb.DuckDBPyConnection) -> list[Lone]:
    """What one side alone has besides, over all steps: it stays a difference too."""
    found = []
    for kind, table, name, module in _HAPPENED:
        phase = "key_phase" if table == "module_calls" else "NULL"
        rows = connection.execute(
            f"SELECT only_in, {name} AS name, {module} AS module, {phase} AS phase, count(*), "
            f"list(DISTINCT rank ORDER BY rank), min(step), max(step) FROM differing_{table} "
            "WHERE only_in IS NOT NULL GROUP BY ALL ORDER BY min(step), min(place)"
        ).fetchall()
        found += [
            Lone(kind, str(name), side, module, None, count, tuple(ranks), first, last, phase)
            for side, name, module, phase, count, ranks, first, last in rows
        ]
    return found

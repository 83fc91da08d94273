"""What one side alone has, grouped as a person would name it: a layer that was added is one entry, not its Nodes.

Which of it is a change of the code is told by `changed_code`: the comparison goes on around that. What is left besides
happened, and stays a difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import duckdb

from gradtrace_analyzer.diff.code.changed_code import mark_code, take_out
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.words.nouns import SIDES, other_side


@dataclass(frozen=True)
class OneSided:
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
    """All that one side alone has. `places` are, by rank and step, where the first row of changed code stands.

    `touched` are the modules inside which code was changed, `trained` those that hold what one side alone trains.
    """

    one_sided: tuple[OneSided, ...] = ()
    places: Mapping[tuple[int, int], float] = field(default_factory=dict)
    touched: frozenset[str | None] = frozenset()
    trained: frozenset[str | None] = frozenset()
    compiled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def code(self) -> tuple[OneSided, ...]:
        """The changes of the code, those of the model first."""
        return tuple(
            sorted((e for e in self.one_sided if e.is_code), key=lambda e: not e.is_of_the_model)
        )

    @property
    def has_parameters(self) -> bool:
        """Whether one side has parameters alone: it is another model. They take random numbers, and they train."""
        return any(e.has_parameters for e in self.one_sided)


class ModelNames:
    """What there is on each side over all common steps: it is asked for once, whichever steps are opened."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    @cached_property
    def names(self) -> dict[str, set[tuple[str, str]]]:
        """By side, (kind, name) of the modules and parameters. What one side has none of was not recorded there: of
        that kind no name is of one side alone."""
        names = {side: _names(self._connection, side) for side in SIDES}
        kinds = [{kind for kind, _ in own} for own in names.values()]
        both = kinds[0] & kinds[1]
        return {side: {name for name in own if name[0] in both} for side, own in names.items()}

    @cached_property
    def compiled(self) -> dict[str, tuple[str, ...]]:
        """By side, the modules of which it runs compiled code."""
        return {side: _compiled(self._connection, side) for side in SIDES}

    @cached_property
    def classes(self) -> dict[str, dict[str, str]]:
        """By side, module FQN to the class name of the module, over all steps of the run."""
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
    connection: duckdb.DuckDBPyConnection,
    parts: ModelNames,
    failures: Collection[OneSidedFailure] = (),
    *,
    proves_names: bool = False,
) -> Structure:
    """What one side alone has; the rows of changed code are taken out of `differing_node_events` and the like.

    Reads what `opening` has made: `common`, `unjudged` and the tables of differences. Rows that one side alone
    has are known of the opened steps; those of modules and parameters of all. Where all steps that may differ are open
    and no name is known to be of one side alone (`proves_names`), rows that all pair prove that there is none.
    """
    is_paired = not _has_unmatched(connection, _TELLING)
    if is_paired and proves_names and not _has_unmatched(connection, ("parameters",)):
        return Structure()
    names = parts.names
    if names["baseline"] == names["candidate"] and is_paired:
        return Structure()
    compiled = parts.compiled
    parts.make_callers()
    found: list[OneSided] = []
    for side in SIDES:
        found += _modules_and_parameters(side, parts, compiled[other_side(side)])
    lone = {
        side: {
            kind: {n for k, n in names[side] if k == kind}
            - {n for k, n in names[other_side(side)] if k == kind}
            for kind in ("module", "parameter")
        }
        for side in SIDES
    }
    mark_code(connection, lone, failures)
    rest = _nodes_and_calls(connection, compiled)
    touched: set[str | None] = set()
    trained: set[str | None] = set()
    for entry in (*found, *rest):
        if entry.is_code:
            is_named = entry.kind in ("module", "parameter")
            around = _around(entry.name if is_named else entry.module_fqn)
            touched |= around
            trained |= around if entry.has_parameters else set()
    places = {
        (rank, step): place
        for rank, step, place in connection.execute(
            "SELECT rank, step, min(place) FROM changed_code GROUP BY ALL"
        ).fetchall()
    }
    take_out(connection)
    return Structure(
        one_sided=(*found, *rest, *_happened(connection)),
        places=places,
        touched=frozenset(touched),
        trained=frozenset(trained),
        compiled={side: own for side, own in compiled.items() if own},
    )


def wants_one_sided(chosen: Selection, entry: OneSided) -> bool:
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


def as_object(entry: OneSided) -> dict[str, Any]:
    """The entry as the JSON of `analyzer diff` has it under `structure`; a key that does not apply is None."""
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


# Tables whose rows show that the code differs, or that something happened on one side alone.
_TELLING = ("node_events", "module_calls", "gradients", "buckets", "backward_passes", "inputs")


def _has_unmatched(connection: duckdb.DuckDBPyConnection, tables: Sequence[str]) -> bool:
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


def _modules_and_parameters(
    side: str, parts: ModelNames, compiled: Sequence[str]
) -> list[OneSided]:
    """Modules and parameters that a side alone has, what is below a lone name with it."""
    own, others = parts.names[side], parts.names[other_side(side)]
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
            OneSided(
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


def _nodes_and_calls(
    connection: duckdb.DuckDBPyConnection, compiled: Mapping[str, tuple[str, ...]]
) -> list[OneSided]:
    """Changed code inside modules that both sides have."""
    rows = connection.execute(
        "SELECT of_table, only_in, module_fqn, node_name, phase, count(*), list(DISTINCT rank ORDER BY rank), "
        "min(step), max(step) FROM changed_code WHERE NOT is_lone GROUP BY ALL "
        "ORDER BY module_fqn, only_in, of_table, node_name"
    ).fetchall()
    return [
        OneSided(
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
            is_compiled=_is_within(fqn, (*compiled[side], *compiled[other_side(side)])),
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


def _happened(connection: duckdb.DuckDBPyConnection) -> list[OneSided]:
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
            OneSided(kind, str(name), side, module, None, count, tuple(ranks), first, last, phase)
            for side, name, module, phase, count, ranks, first, last in rows
        ]
    return found

"""Exceptions that left a backward pass: in one run, and on one side of two, where they explain what it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from gradtrace_analyzer.words.nouns import SIDES, enumerated, module_phrase, other_side
from gradtrace_analyzer.words.numbers import verb

# So many parameters are named in a sentence.
_MOST_NAMED = 6


@dataclass(frozen=True)
class FailedPass:
    """A backward pass that ended with an exception.

    `backward_index` is the outermost pass; `row` is the row of `failures` of the innermost, with the
    `parameter_fqn` of its Node where it accumulates one. `around` is the Node of the outermost pass in which
    the innermost was called, if it was nested. `delivered` and `never_reached` are the parameters that had
    received a gradient in the pass when it failed, and those that had not; of these, the modules of the `unused`
    were not called in the step at all. They are empty where that was not asked for.
    """

    rank: int
    step: int
    backward_index: int
    row: Mapping[str, Any]
    around: str | None = None
    delivered: tuple[str, ...] = ()
    never_reached: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The exception as Python shows it, its first line cut at 200 characters: `RuntimeError: its first line`."""
        text = str(self.row["exception_text"] or "").strip()
        first = text.splitlines()[0] if text else ""
        first = first if len(first) <= 200 else f"{first[:200].rstrip()} ..."
        return f"{self.row['exception_type']}: {first}" if first else self.row["exception_type"]

    @property
    def told(self) -> str:
        """`in SigmoidBackward0 of 2: RuntimeError: its first line. Gradients delivered before: ...`"""
        name = self.row["node_name"]
        if self.row["parameter_fqn"] is not None:
            inside = f"in {name} of {self.row['parameter_fqn']}"
        elif name is not None:
            inside = f"in {name} of {module_phrase(self.row['module_fqn'])}"
        else:
            inside = "while no Node ran (in a reduction, a callback, or a check of the engine)"
        if self.around is not None:
            inside += f", in a pass of its own inside {self.around}"
        text = self.said.rstrip()
        end = "" if text.endswith((".", "...", "!", "?")) else "."
        told = f"{inside}: {text}{end}"
        if self.delivered:
            told += f" Gradients delivered before: {_named(self.delivered)}"
            told += f"; never reached: {_named(self.never_reached)}." if self.never_reached else "."
        if self.unused:
            told += (
                f" {_named(self.unused)} {verb(self.unused, 'belongs', 'belong')} to no module that was called in "
                "this step."
            )
        return told


@dataclass(frozen=True)
class OneSidedFailure(FailedPass):
    """A backward pass that ended with an exception on `side`, though the other side's did not."""

    side: str = "candidate"


def one_sided_failures(connection: duckdb.DuckDBPyConnection) -> list[OneSidedFailure]:
    """The failures of the steps that both sides recorded, in the order of steps and ranks.

    The connection must hold `baseline`, `candidate` and `common`, as a comparison makes them.
    """
    both = "SEMI JOIN common USING (rank, step)"
    by_side = {side: failed_passes(connection, f"{side}.", both) for side in SIDES}
    places = {side: {_place(f) for f in passes} for side, passes in by_side.items()}
    found = [
        OneSidedFailure(**vars(with_reach(connection, f, f"{side}.")), side=side)
        for side, passes in by_side.items()
        for f in passes
        if _place(f) not in places[other_side(side)]
    ]
    return sorted(found, key=lambda f: (f.step, f.rank, f.side))


def failed_passes(
    connection: duckdb.DuckDBPyConnection, schema: str = "", among: str = ""
) -> list[FailedPass]:
    """The passes that ended with an exception, nested ones within their outermost, in the order of their rows.

    `schema` is put in front of the views' names; `among` is a join that chooses rows of `failures f`.
    """
    rows = _dicts(
        connection,
        f"SELECT f.* REPLACE (coalesce(n.parameter_fqn, f.parameter_fqn) AS parameter_fqn) "
        f"FROM {schema}failures f {among} "
        f"LEFT JOIN {schema}node_events n USING (rank, step, backward_index, event_index) "
        "ORDER BY f.record_index, f.rank",
    )
    if not rows:
        return []
    parents = {
        (rank, step, index): parent
        for rank, step, index, parent in connection.execute(
            "SELECT rank, step, backward_index, parent_backward_index "
            f"FROM {schema}backward_passes SEMI JOIN {schema}failures USING (rank, step)"
        ).fetchall()
    }
    found: dict[tuple[int, int, int], FailedPass] = {}
    for row in rows:  # the innermost pass is left first
        place = row["rank"], row["step"]
        outermost = row["backward_index"]
        # A pass is entered after the one around it; a damaged row may say otherwise.
        while (parent := parents.get((*place, outermost))) is not None and parent < outermost:
            outermost = parent
        key = (*place, outermost)
        innermost = found.get(key)
        if innermost is None:
            found[key] = FailedPass(*key, row)
        else:
            found[key] = replace(innermost, around=row["node_name"])
    return list(found.values())


def _place(failed: FailedPass) -> tuple[int, int, int]:
    return failed.rank, failed.step, failed.backward_index


def with_reach(
    connection: duckdb.DuckDBPyConnection, failed: FailedPass, schema: str = ""
) -> FailedPass:
    """The same with the parameters that the pass had reached, had not, and could not, of the roots whose Nodes ran."""
    rank, step, outermost = _place(failed)
    passes = connection.execute(
        f"WITH RECURSIVE inside(i) AS (SELECT ? UNION SELECT p.backward_index FROM {schema}backward_passes p "
        "JOIN inside ON p.parent_backward_index = inside.i WHERE p.rank = ? AND p.step = ?) "
        "SELECT list(i) FROM inside",
        [outermost, rank, step],
    ).fetchone()
    place = [rank, step, *(passes or ())]
    delivered = connection.execute(
        f"SELECT DISTINCT root, parameter_fqn FROM {schema}node_events WHERE rank = ? AND step = ? "
        "AND list_contains(?, backward_index) AND parameter_fqn IS NOT NULL AND outcome = 'ok' "
        "ORDER BY ALL",
        place,
    ).fetchall()
    wanted = connection.execute(
        f"SELECT DISTINCT root, parameter_fqn FROM {schema}parameters p WHERE rank = ? AND step = ? "
        "AND point = 'before' AND kind = 'parameter' AND requires_grad AND root IN (SELECT root FROM "
        f"{schema}node_events n WHERE n.rank = p.rank AND n.step = p.step "
        "AND list_contains(?, n.backward_index)) ORDER BY ALL",
        place,
    ).fetchall()
    called = connection.execute(
        f"SELECT DISTINCT root, module_fqn FROM {schema}module_calls WHERE rank = ? AND step = ?",
        [rank, step],
    ).fetchall()
    missed = [place for place in wanted if place not in delivered]
    unused = [
        name for root, name in missed if called and (root, name.rpartition(".")[0]) not in called
    ]
    return replace(
        failed,
        delivered=tuple(name for _, name in delivered),
        never_reached=tuple(name for _, name in missed),
        unused=tuple(unused),
    )


def _named(names: Sequence[str]) -> str:
    """`a, b and 3 more`: the last of those that are named makes room for what is left."""
    return enumerated(names, _MOST_NAMED - (len(names) > _MOST_NAMED)) or "none"


def _dicts(
    connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    cursor = connection.execute(query, list(parameters))
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

"""What an origin's sentence rests on: of what it says was equal, the part that both sides recorded.

Each kind of origin reads something and follows something: a module's output its inputs and parameters, an updated
parameter its gradient, its value and the optimizer's settings. What of this is not in `Origin.rests_on` no sentence
may call equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.links import LINK_TABLE
from gradtrace_analyzer.diff.origin import Ground, NodeOrigin, Origin, ReceivedOrigin
from gradtrace_analyzer.diff.scope.recorded import Recorded, Rows
from gradtrace_analyzer.sql.views import text_literal


def with_grounds(recorded: Recorded, origin: Origin, *, are_sums: bool) -> Origin:
    """The origin with what its sentence rests on. Where sums over parts were compared (`are_sums`), it may lie on any
    rank and in any pass."""
    ranks = None if are_sums else origin.ranks
    key = {k: v for k, v in origin.difference.key.items() if not are_sums or v is not None}
    if are_sums:
        key = {k: v for k, v in key.items() if k not in ("backward_index", "microbatch", "root")}
    return replace(origin, rests_on=frozenset(_grounds(recorded, origin, key, ranks)))


def _grounds(
    recorded: Recorded, origin: Origin, key: Mapping[str, Any], ranks: Collection[int] | None
) -> Iterator[Ground]:
    d, step = origin.difference, origin.step
    at = {name: key[name] for name in ("root", "parameter_fqn") if name in key}
    table = LINK_TABLE.get(d.table)
    prefix = None if table is None else table.reads
    if prefix is not None and d.only_in is None:
        own = {k: v for k, v in key.items() if k != "parameter_fqns"}
        among = "true"
        if key.get("parameter_fqns"):
            among = f"parameter_fqns = {_list(key['parameter_fqns'])}"
        if d.table == "buckets":
            # What every rank put in: the origin's own and the others'.
            if recorded.both_all(Rows(d.table, step, None, prefix, own, among)):
                yield "reads"
        elif recorded.both(Rows(d.table, step, ranks, prefix, own, among)):
            yield "reads"
    if d.table == "module_calls":
        yield from _of_parameters(recorded, origin, ranks, key)
        if recorded.both(Rows(d.table, step, ranks, "output_", among=_in_front(d, key))):
            yield "outputs"
    if d.table == "backward_passes" and recorded.both(Rows("module_calls", step, ranks, "output_")):
        yield "outputs"
    if d.table == "node_events" and recorded.both(_nodes_in_front(d, key, step, ranks)):
        yield "nodes"
    if d.table in ("gradients", "buckets"):
        yield from _of_gradient(recorded, origin, key, ranks)
    if d.table == "parameters" and d.key.get("point") == "after":
        yield from _of_update(recorded, step, ranks, at)
    if d.table == "parameters" and d.key.get("point") == "before":
        left = Rows(d.table, step - 1, ranks, "", {**at, "point": "after"})
        if recorded.both(left):
            yield "left"
    if isinstance(origin, NodeOrigin) and origin.rewritten is not None:
        yield from _of_update(recorded, step, ranks, {**at, "parameter_fqn": origin.rewritten})
    if isinstance(origin, ReceivedOrigin) and origin.source is not None:
        rank, stage = origin.source
        sent = {"stage_index": stage, "microbatch": d.key["microbatch"]}
        if recorded.both(Rows(d.table, step, [rank], "sent_", sent)):
            yield "sender"


def _of_parameters(
    recorded: Recorded, origin: Origin, ranks: Collection[int] | None, key: Mapping[str, Any]
) -> Iterator[Ground]:
    """Whether the module's own parameters are known, or that its root was recorded and it has none."""
    root = {"root": key["root"]} if "root" in key else {}
    fqn = str(key["module_fqn"])
    before = Rows("parameters", origin.step, ranks, "", {**root, "point": "before"})
    inside = f"starts_with(parameter_fqn, {text_literal(f'{fqn}.')})" if fqn else "true"
    if recorded.both(replace(before, among=inside)):
        yield "parameters"
    elif recorded.both(before):
        yield "no parameters"


def _in_front(d: Difference, key: Mapping[str, Any]) -> str:
    """Calls that returned before this one: their rows come first, save those of the modules inside it."""
    names = ("microbatch", "root", "module_fqn", "phase", "call_index")
    same = " AND ".join(_is(f"o.{name}", key[name]) for name in names if name in key)
    fqn = str(d.key["module_fqn"])
    inside = text_literal(f"{fqn}." if fqn else "")
    return (
        f"NOT starts_with(module_fqn, {inside}) AND record_index < (SELECT max(o.record_index) FROM "
        f"{{side}}.module_calls o WHERE o.step = {d.step} AND o.rank = module_calls.rank AND {same or 'true'})"
    )


def _nodes_in_front(
    d: Difference, key: Mapping[str, Any], step: int, ranks: Collection[int] | None
) -> Rows:
    own = {"backward_index": key["backward_index"]} if key.get("backward_index") is not None else {}
    indices = [index for index in d.event_indices if index is not None]
    among = f"event_index < {min(indices)}" if indices and own else "true"
    return Rows("node_events", step, ranks, "grad_input_", own, among)


def _of_gradient(
    recorded: Recorded, origin: Origin, key: Mapping[str, Any], ranks: Collection[int] | None
) -> Iterator[Ground]:
    d, step = origin.difference, origin.step
    at: dict[str, Any] = {"root": key["root"]} if "root" in key else {}
    names = key.get("parameter_fqns") or [key.get("parameter_fqn")]
    of_these = f"list_contains({_list(names)}, parameter_fqn)"
    local = Rows("gradients", step, ranks, "", {**at, "point": "local"}, of_these)
    if recorded.both(local):
        yield "local"
    reduced = replace(local, equal={**at, "point": "reduced"})
    if recorded.both(local) or recorded.both(reduced):
        yield "after backward"
    seen = Rows("gradients", step, ranks, "", {"point": "final"})
    if recorded.both(seen):
        yield "final"
    in_pass = {"backward_index": key["backward_index"]} if "backward_index" in key else {}
    if d.table == "gradients" and recorded.both(
        Rows("node_events", step, ranks, "grad_input_", in_pass)
    ):
        yield "nodes"


def _of_update(
    recorded: Recorded, step: int, ranks: Collection[int] | None, at: Mapping[str, Any]
) -> Iterator[Ground]:
    if recorded.both(Rows("gradients", step, ranks, "", {**at, "point": "final"})):
        yield "final"
    if recorded.both(Rows("parameters", step, ranks, "", {**at, "point": "before"})):
        yield "before"
    if recorded.both_set(step, ranks, str(at["parameter_fqn"])):
        yield "settings"


def _is(column: str, value: Any) -> str:
    literal = "NULL" if value is None else text_literal(value) if isinstance(value, str) else value
    return f"{column} IS NOT DISTINCT FROM {literal}"


def _list(names: Collection[Any]) -> str:
    said = ", ".join("NULL" if name is None else text_literal(str(name)) for name in names)
    return f"[{said}]::VARCHAR[]"

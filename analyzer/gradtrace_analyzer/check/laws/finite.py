"""Where the first infinity and the first NaN were born, rank by rank, and how they reached the others.

Per rank and kind of value: the first step that shows it, then the first place of that step in program order. A place
whose inputs are finite gave birth to it; what reads it afterwards has inherited it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.check.law import Findings, Severity, Violation, law, outcome
from gradtrace_analyzer.check.laws.birthplaces import Birthplace, birth_sentence
from gradtrace_analyzer.check.laws.predecessors import is_fed
from gradtrace_analyzer.sql.pipelines import action_around
from gradtrace_analyzer.words.numbers import ranks_phrase

NonFinite = Literal["inf", "nan"]

_NOWHERE = "NULL AS {}"
_COLUMNS = (
    "microbatch",
    "backward_index",
    "root",
    "module_fqn",
    "node_name",
    "parameter_fqn",
    "bucket_index",
    "hook_name",
    "event_index",
    "name",
)


def _select(source: str, table: str, counts: Sequence[str], held: Iterable[str], where: str) -> str:
    """The rows of one kind of place with something not finite; `counts` are in_nan, in_inf, out_nan, out_inf."""
    kept = set(held)
    columns = ", ".join(c if c in kept else _NOWHERE.format(c) for c in _COLUMNS)
    numbers = ", ".join(
        f"CAST(coalesce({count}, 0) AS BIGINT) AS {name}"
        for count, name in zip(counts, ("in_nan", "in_inf", "out_nan", "out_inf"), strict=True)
    )
    return (
        f"SELECT '{source}' AS source, rank, step, record_index, {columns}, {numbers} "
        f"FROM {table} WHERE {where}"
    )


def _summary(prefix: str) -> tuple[str, str]:
    return f"{prefix}nan_count", f"{prefix}inf_count"


_BACKWARD = ("microbatch", "backward_index")
_SINGLE = ("0", "0", "nan_count", "inf_count")
_HAS = "nan_count + inf_count > 0"

_SOURCES = (
    _select(
        "before", "parameters", _SINGLE, ("root", "parameter_fqn"), f"point = 'before' AND {_HAS}"
    ),
    _select("input", "inputs", _SINGLE, ("microbatch", "root", "name"), _HAS),
    _select(
        "module",
        "module_calls",
        (*_summary("input_"), *_summary("output_")),
        ("microbatch", "root", "module_fqn"),
        "coalesce(input_nan_count + input_inf_count, 0) + coalesce(output_nan_count + output_inf_count, 0) > 0",
    ),
    _select(
        "loss",
        "backward_passes",
        ("0", "0", "CAST(isnan(loss) AS INTEGER)", "CAST(isinf(loss) AS INTEGER)"),
        _BACKWARD,
        "kind = 'backward' AND NOT isfinite(loss)",
    ),
    _select(
        "node",
        "node_events",
        (*_summary("grad_output_"), *_summary("grad_input_")),
        (*_BACKWARD, "root", "module_fqn", "node_name", "parameter_fqn", "event_index"),
        "coalesce(grad_output_nan_count + grad_output_inf_count, 0) "
        "+ coalesce(grad_input_nan_count + grad_input_inf_count, 0) > 0",
    ),
    *(
        _select(
            point,
            "gradients",
            _SINGLE,
            (*_BACKWARD, "root", "parameter_fqn"),
            f"point = '{point}' AND {_HAS}",
        )
        for point in ("local", "reduced", "final")
    ),
    _select(
        "bucket",
        "buckets",
        (*_summary("before_"), *_summary("after_")),
        (*_BACKWARD, "root", "module_fqn", "bucket_index", "hook_name"),
        "coalesce(before_nan_count + before_inf_count, 0) "
        "+ coalesce(after_nan_count + after_inf_count, 0) > 0",
    ),
    _select(
        "after", "parameters", _SINGLE, ("root", "parameter_fqn"), f"point = 'after' AND {_HAS}"
    ),
)

_FORWARD_SOURCES = "('input', 'module')"

# Per rank and step: which kinds are there, whether an infinity left the forward pass, whether GradScaler skipped it.
_STEPS = f"""
SELECT n.rank, n.step, sum(in_inf + out_inf) > 0 AS any_inf, sum(in_nan + out_nan) > 0 AS any_nan,
    coalesce(sum(in_inf + out_inf) FILTER (WHERE source NOT IN {_FORWARD_SOURCES}), 0) > 0 AS spread_inf,
    coalesce(bool_or(s.skipped), false) AS skipped
FROM nonfinite n LEFT JOIN steps s ON s.rank = n.rank AND s.step = n.step
GROUP BY 1, 2 ORDER BY 1, 2
"""

_FIRSTS = """
SELECT c.kind, c.severity, n.* FROM nonfinite n JOIN chosen c ON c.rank = n.rank AND c.step = n.step
WHERE CASE c.kind WHEN 'inf' THEN in_inf + out_inf ELSE in_nan + out_nan END > 0
    AND NOT (c.kind = 'inf' AND c.severity = 'error' AND n.source IN ('input', 'module')
        AND (n.rank, n.source, coalesce(n.module_fqn, n.name)) IN
            (SELECT (h.rank, h.source, h.place) FROM harmless h))
QUALIFY row_number() OVER (PARTITION BY c.rank, c.kind, c.severity, source ORDER BY record_index) = 1
"""


@dataclass(frozen=True)
class _Chosen:
    rank: int
    step: int
    kind: NonFinite
    severity: Severity


@law(
    "values_finite",
    "error",
    unit="tensor",
    doc="No value is born infinite or NaN. The first infinity and the first NaN are two findings. An infinity that "
    "stays in the forward pass (a mask), or in a step that GradScaler skipped, is a warning.",
    after=["data_differ"],
)
def values_finite(evidence: Evidence) -> Findings:
    """Report the births of the first infinity and the first NaN."""
    compared = sum(
        evidence.rows(f"SELECT count(*) FROM {table} WHERE {column} IS NOT NULL")[0][0]
        for table, column in (
            ("parameters", "norm"),
            ("inputs", "norm"),
            ("module_calls", "output_norm"),
            ("node_events", "grad_input_norm"),
            ("gradients", "norm"),
            ("buckets", "after_norm"),
            ("backward_passes", "loss"),
        )
    )
    reason = "nothing was recorded with values"
    if not compared:
        return outcome((), 0, reason)
    evidence.connection.execute(f"CREATE TEMP VIEW nonfinite AS {' UNION ALL '.join(_SOURCES)}")
    steps = evidence.rows(_STEPS)
    firsts = _first_places(evidence, _chosen(steps), steps) if steps else []
    return outcome(_births(evidence, firsts), compared, reason)


def _chosen(steps: Sequence[tuple[Any, ...]]) -> list[_Chosen]:
    """For each rank and kind the first step in which it is an error, and one before it in which it is a warning."""
    found: dict[tuple[int, NonFinite], dict[Severity, _Chosen]] = {}
    for rank, step, any_inf, any_nan, spread_inf, skipped in steps:
        judged: dict[NonFinite, Severity | None] = {
            "inf": ("error" if spread_inf and not skipped else "warning") if any_inf else None,
            # An overflow that GradScaler caught turns into NaN on its way.
            "nan": ("warning" if skipped and any_inf else "error") if any_nan else None,
        }
        for kind, severity in judged.items():
            known = found.setdefault((rank, kind), {})
            if severity is not None and severity not in known and "error" not in known:
                known[severity] = _Chosen(rank, step, kind, severity)
    return [chosen for known in found.values() for chosen in known.values()]


def _first_places(
    evidence: Evidence, chosen: Sequence[_Chosen], steps: Sequence[tuple[Any, ...]]
) -> list[tuple[_Chosen, Birthplace]]:
    """The first place of each chosen step. Forward places whose infinities are harmless in another step of the rank
    (masks) are passed over."""
    connection = evidence.connection
    connection.execute(
        "CREATE TEMP TABLE chosen (rank INTEGER, step INTEGER, kind VARCHAR, severity VARCHAR)"
    )
    connection.executemany(
        "INSERT INTO chosen VALUES (?, ?, ?, ?)",
        [(c.rank, c.step, c.kind, c.severity) for c in chosen],
    )
    connection.execute("CREATE TEMP TABLE harmless (rank INTEGER, source VARCHAR, place VARCHAR)")
    calm = {c.rank: c.step for c in chosen if c.kind == "inf" and c.severity == "warning"}
    calm = {
        r: s
        for r, s in calm.items()
        if (r, s, True, False) in {(x[0], x[1], x[2], x[4]) for x in steps}
    }
    for rank, step in calm.items():
        connection.execute(
            "INSERT INTO harmless SELECT DISTINCT rank, source, coalesce(module_fqn, name) FROM nonfinite "
            f"WHERE rank = ? AND step = ? AND source IN {_FORWARD_SOURCES} AND in_inf + out_inf > 0",
            [rank, step],
        )
    cursor = connection.execute(_FIRSTS)
    names = [column[0] for column in cursor.description or ()]
    by_choice: dict[tuple[int, NonFinite, Severity], list[Birthplace]] = {}
    for row in cursor.fetchall():
        fields = dict(zip(names, row, strict=True))
        kind, severity = fields.pop("kind"), fields.pop("severity")
        place = Birthplace(**fields)
        by_choice.setdefault((place.rank, kind, severity), []).append(place)
    return [
        (c, _earliest(by_choice[c.rank, c.kind, c.severity]))
        for c in chosen
        if (c.rank, c.kind, c.severity) in by_choice
    ]


def _earliest(places: Sequence[Birthplace]) -> Birthplace:
    """The first in program order, where rows written late are put where they belong: a loss in front of its pass,
    inputs in front of the call that read them, a bucket in front of the gradients it gave."""
    found = min(places, key=lambda place: _program_order(place, places))
    return replace(found, order=_program_order(found, places))


# Rows that are written after those that read what they hold: (the readers, what they share with it).
_LATE: Mapping[str, tuple[frozenset[str], str]] = {
    "loss": (frozenset({"node", "local", "bucket", "reduced"}), "backward_index"),
    "input": (frozenset({"module"}), "microbatch"),
    "bucket": (frozenset({"reduced"}), "backward_index"),
}


def _program_order(place: Birthplace, places: Sequence[Birthplace]) -> float:
    readers, shared = _LATE.get(place.source, (frozenset(), ""))
    following = [
        other.record_index - 0.5
        for other in places
        if other.source in readers and getattr(other, shared) == getattr(place, shared)
    ]
    return min([float(place.record_index), *following])


def _births(evidence: Evidence, firsts: Sequence[tuple[_Chosen, Birthplace]]) -> list[Violation]:
    """One violation per kind, severity and place, with all its ranks; ranks that a reduction gave it to are named with
    the first that is theirs."""
    groups: dict[tuple[Any, ...], list[tuple[_Chosen, Birthplace]]] = {}
    inherited: list[tuple[_Chosen, Birthplace, str]] = []
    for chosen, place in firsts:
        place, is_received = _in_stage(evidence, chosen, place)
        if _came_through_reduction(evidence, chosen, place, firsts):
            inherited.append((chosen, place, "the reduction"))
        elif is_received and any(o.rank != place.rank and c.kind == chosen.kind for c, o in firsts):
            inherited.append((chosen, place, "what its stages received"))
        else:
            key = (chosen.kind, chosen.severity, chosen.step, *place.identity)
            groups.setdefault(key, []).append((chosen, place))
    violations = [_birth(evidence, same) for same in groups.values()]
    return [
        _with_heirs(v, kind, inherited)
        for v, kind in zip(violations, [k[0] for k in groups], strict=True)
    ]


_IN_STAGES = frozenset({"input", "module", "loss", "node", "local"})


def _in_stage(evidence: Evidence, chosen: _Chosen, place: Birthplace) -> tuple[Birthplace, bool]:
    """The place with the pipeline stage it is in, and whether the stage had received such a value from another."""
    if place.source not in _IN_STAGES:
        return place, False
    around = action_around(
        evidence.connection, place.rank, place.step, place.record_index, place.microbatch
    )
    if around is None:
        return place, False
    stage, row = around
    neighbours = (row["stage_index"] > 0) if stage.phase == "forward" else True
    is_received = bool(neighbours and row[f"received_{chosen.kind}_count"])
    return replace(place, stage=stage), is_received


def _came_through_reduction(
    evidence: Evidence,
    chosen: _Chosen,
    place: Birthplace,
    firsts: Sequence[tuple[_Chosen, Birthplace]],
) -> bool:
    """Whether another rank brought it into a reduction that this rank took part in."""
    if (
        place.source == "bucket"
        and not place.arrived(chosen.kind)
        and place.in_inf + place.in_nan == 0
    ):
        [(paired, others)] = evidence.rows(
            "SELECT count(*), coalesce(sum(before_nan_count + before_inf_count), 0) FROM reductions WHERE pair IN "
            "(SELECT pair FROM reductions WHERE rank = ? AND record_index = ?)",
            [place.rank, place.record_index],
        )
        if paired:
            return bool(others)
    elif place.source != "reduced":
        return False
    # Where the reduction itself was not paired (FSDP2, no bucket rows), a birth elsewhere in the step explains it.
    through = ("bucket", "reduced", "final", "after")
    return any(
        other.rank != place.rank and c.step == chosen.step and other.source not in through
        for c, other in firsts
    )


def _birth(evidence: Evidence, same: Sequence[tuple[_Chosen, Birthplace]]) -> Violation:
    chosen, place = same[0]
    if place.source == "module":
        place = replace(place, infinite_parameter=_infinite_parameter(evidence, place))
    place = replace(place, is_fed=is_fed(evidence, place))
    ranks = tuple(sorted(p.rank for _, p in same))
    most = _largest_sum(evidence, place) if place.source == "bucket" else None
    return values_finite.violation(
        chosen.step,
        birth_sentence(chosen.kind, place, ranks, most) + _harmless(evidence, chosen),
        severity=chosen.severity,
        rank=ranks[0] if len(ranks) == 1 else None,
        ranks=ranks,
        microbatch=place.microbatch,
        backward_index=place.backward_index,
        bucket_index=place.bucket_index,
        root=place.root,
        module_fqn=place.module_fqn,
        node_name=place.node_name,
        parameter_fqn=place.parameter_fqn,
        hook_name=place.hook_name,
        event_index=place.event_index,
        stage_index=None if place.stage is None else place.stage.stage_index,
        phase=None if place.stage is None else place.stage.phase,
        count=place.count(chosen.kind),
        order=place.order + (0.25 if chosen.kind == "nan" else 0.0),
    )


def _infinite_parameter(evidence: Evidence, place: Birthplace) -> str | None:
    """The first parameter of a module, and of those in it, that holds an infinity before the step."""
    found = evidence.rows(
        "SELECT parameter_fqn FROM parameters WHERE rank = ? AND step = ? AND root = ? AND point = 'before' "
        "AND inf_count > 0 AND (? = '' OR starts_with(parameter_fqn, ? || '.')) ORDER BY record_index LIMIT 1",
        [place.rank, place.step, place.root, place.module_fqn, place.module_fqn],
    )
    return found[0][0] if found else None


def _largest_sum(evidence: Evidence, place: Birthplace) -> float | None:
    [(most,)] = evidence.rows(
        "SELECT sum(before_abs_max) FROM reductions WHERE pair IN "
        "(SELECT pair FROM reductions WHERE rank = ? AND record_index = ?)",
        [place.rank, place.record_index],
    )
    return None if most is None else float(most)


def _harmless(evidence: Evidence, chosen: _Chosen) -> str:
    if chosen.severity == "error":
        return ""
    skipped = evidence.rows(
        "SELECT 1 FROM steps WHERE rank = ? AND step = ? AND skipped", [chosen.rank, chosen.step]
    )
    if skipped:
        return " GradScaler left the optimizer out of that step."
    return " It stays in the forward pass: loss and gradients of that step are finite."


def _with_heirs(
    v: Violation, kind: NonFinite, inherited: Sequence[tuple[_Chosen, Birthplace, str]]
) -> Violation:
    """Name the ranks that got it in the same step, and through what."""
    said = ""
    for through in dict.fromkeys(how for _, _, how in inherited):
        heirs = {
            p.rank
            for c, p, how in inherited
            if c.step == v.step and c.kind == kind and p.rank not in v.ranks and how == through
        }
        if heirs:
            got = ranks_phrase(heirs)
            said += f" {got[:1].upper()}{got[1:]} got it through {through}."
    return replace(v, explanation=v.explanation + said) if said else v

"""Whether the ranks' buckets come out as their mean, by hook and group."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace_analyzer.check.evidence import Evidence, Replica
from gradtrace_analyzer.check.law import Compression, Findings, Violation, law, not_judged, outcome
from gradtrace_analyzer.check.laws.deviations import BucketPlace, cause_phrase, odd_rank
from gradtrace_analyzer.check.laws.mean import DeviationCause, Lanes, deviation_cause, means, scales
from gradtrace_analyzer.numerics.hook_promises import (
    Promise,
    allowed_error,
    hook_phrase,
    may_compress,
)
from gradtrace_analyzer.words.nouns import bucket_phrase
from gradtrace_analyzer.words.numbers import counted, ranks_phrase
from gradtrace_schemas.table import SKETCH_LANES

_NO_BUCKETS = "no bucket was recorded on all ranks of its group with values"

# The rows of reductions whose every rank is there with finite values, those of one reduction together. What a rank
# that has joined (a shadow) contributes is zeros, and what it gets nobody uses. Of sparse gradients only the rows that
# are there are summarised, which are other ones on each rank.
_COMPLETE = """
SELECT pair, rank, replica, team_size, step, backward_index, microbatch, bucket_index, hook_name, is_shadow,
    coalesce(divisor, team_size) AS divisor, coalesce(dtype, before_dtype) AS dtype,
    coalesce(before_numel, numel, 0) AS numel, coalesce(before_abs_max, 0) AS largest,
    coalesce(before_norm, 0) AS before_norm, coalesce(after_norm, 0) AS after_norm,
    coalesce(before_sum, 0) AS before_sum, coalesce(after_sum, 0) AS after_sum,
    before_sketch, after_sketch, after_norm IS NOT NULL AND NOT is_shadow AS came_out, after_fingerprint
FROM reductions
WHERE pair IN (
    SELECT pair FROM reductions GROUP BY pair
    HAVING count(*) = max(team_size) AND count(DISTINCT rank) = count(*)
        AND bool_and(is_shadow OR before_norm IS NOT NULL) AND count(DISTINCT coalesce(hook_name, '')) = 1
        AND bool_and(coalesce(before_numel = numel, true) AND coalesce(after_numel = numel, true))
        AND coalesce(sum(before_nan_count + before_inf_count + after_nan_count + after_inf_count), 0) = 0)
ORDER BY pair, rank
"""


@dataclass(frozen=True)
class _JudgedReductions:
    """The law's findings, and what came out of it that another law asks for."""

    findings: Findings
    deviating: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rows:
    """Rows of complete reductions as arrays. `first` and `count` of each reduction are by row."""

    columns: Mapping[str, npt.NDArray[Any]]
    before: Lanes
    after: Lanes
    mean: Lanes
    scale: Lanes
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]

    def value(self, name: str, row: int) -> Any:
        value = self.columns[name][row]
        return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True)
class _Deviation:
    row: int
    rank: int
    cause: DeviationCause


@law(
    "reduction_is_mean",
    "error",
    unit="bucket",
    doc="A reduced bucket is the mean of the ranks' buckets, within 4 eps sqrt(ranks) of the larger of the mean of "
    "their norms and its own, with eps of the bucket's dtype, at least 2^-23, and half the dtype's smallest "
    "number per rank and element. Torch's compressing hooks are held to what they promise: eps sqrt(ranks) of the "
    "dtype on the wire, two levels of a quantized range; PowerSGD, post-local SGD and hooks named by "
    "`--compressing` to nothing, and what they lose is told. It is read from sketches: their standard error of "
    "0.18 scales the size of a real deviation, and makes none where there is none. Buckets of sparse gradients "
    "are not judged.",
    after=["collectives_match"],
    explained_by=["collectives_match"],
    as_cause="the reduction is not the mean",
    names_culprit=True,
)
def reduction_is_mean(evidence: Evidence) -> Findings:
    """Judge each hook by what it promises."""
    return evidence.once(_judged_reductions).findings


def deviating_ranks(evidence: Evidence) -> Mapping[int, frozenset[int]]:
    """The ranks that came out of a reduction with something else than its mean, by the reduction's `pair`."""
    return evidence.once(_judged_reductions).deviating


def _judged_reductions(evidence: Evidence) -> _JudgedReductions:
    if not evidence.modules:
        return _JudgedReductions(not_judged(evidence.lacking))
    rows = _rows(evidence)
    if rows is None:
        return _JudgedReductions(not_judged(_NO_BUCKETS))
    sizes = np.linalg.norm(rows.after - rows.mean, axis=1)
    errors = np.divide(sizes, rows.scale, out=np.zeros_like(sizes), where=rows.scale > 0)
    places = _by_hook(rows)
    violations: list[Violation] = []
    compression: list[Compression] = []
    deviating: dict[int, set[int]] = {}
    judged = 0
    for (number, hook), mine in places.items():
        promise, replica = evidence.promise(hook), evidence.replica(number)
        allowed = _allowed(rows, mine, promise)
        if promise.is_compressing and hook is not None:
            compression.append(_compression(rows, mine, errors, allowed, hook, replica))
        if not promise.is_judged:
            continue
        pair_count = len(np.unique(rows.columns["pair"][mine]))
        judged += pair_count
        broken = mine[errors[mine] > allowed]
        for row in broken:
            deviating.setdefault(rows.value("pair", row), set()).add(rows.value("rank", row))
        slack = {int(row): float(a * rows.scale[row]) for row, a in zip(mine, allowed, strict=True)}
        deviations = [_explained(rows, int(row), slack[int(row)]) for row in broken]
        relative = {int(row): float(a) for row, a in zip(mine, allowed, strict=True)}
        violations += _violations(evidence, rows, deviations, relative, replica, hook, pair_count)
    findings = outcome(
        tuple(violations),
        judged,
        "the hooks in use promise no mean",
        compression=tuple(compression),
        notes=_notes(evidence),
    )
    return _JudgedReductions(
        findings, {pair: frozenset(ranks) for pair, ranks in deviating.items()}
    )


def _notes(evidence: Evidence) -> tuple[str, ...]:
    if evidence.has_fingerprints("reductions", "after_"):
        return ()
    return ("Without sketches (GRADTRACE_SUMMARY=norms) buckets are compared by their sums alone.",)


def _rows(evidence: Evidence) -> _Rows | None:
    table = evidence.connection.sql(_COMPLETE).to_arrow_table()
    if not len(table):
        return None
    held = {
        name: table.column(name).to_numpy(zero_copy_only=False)
        for name in table.column_names
        if not name.endswith("_sketch")
    }
    pairs, first, inverse, counts = np.unique(
        held["pair"], return_index=True, return_inverse=True, return_counts=True
    )
    del pairs
    divisors = held["divisor"].astype(np.float64)
    before, after = (_lanes(table, held, side) for side in ("before", "after"))
    return _Rows(
        columns=held,
        before=before,
        after=after,
        mean=means(before, divisors, counts),
        scale=scales(held["before_norm"], held["after_norm"], counts),
        first=first[inverse].astype(np.int64),
        count=counts[inverse].astype(np.int64),
    )


def _lanes(table: Any, held: Mapping[str, npt.NDArray[Any]], side: str) -> Lanes:
    """A line per row: the sketch, where all rows have one, and the sum as one lane more."""
    sums: Lanes = (
        held[f"{side}_sum"].astype(np.float64)
        / np.sqrt(np.maximum(held["numel"].astype(np.float64), 1))
    ).reshape(-1, 1)
    sketches = table.column(f"{side}_sketch").to_pylist()
    useless = ~held["came_out"].astype(bool) if side == "after" else held["is_shadow"].astype(bool)
    zeros = [0.0] * SKETCH_LANES
    if any(s is None and not skipped for s, skipped in zip(sketches, useless, strict=True)):
        return sums
    lanes = np.array([zeros if s is None else s for s in sketches], np.float64)
    return np.hstack((lanes, sums))


def _by_hook(rows: _Rows) -> dict[tuple[int, str | None], npt.NDArray[np.int64]]:
    """The rows of each replica and hook that say what came out."""
    found: dict[tuple[int, str | None], list[int]] = {}
    replicas, hooks = rows.columns["replica"], rows.columns["hook_name"]
    for row in np.flatnonzero(rows.columns["came_out"]):
        found.setdefault((int(replicas[row]), hooks[row]), []).append(int(row))
    return {key: np.array(mine, np.int64) for key, mine in found.items()}


def _allowed(rows: _Rows, mine: npt.NDArray[np.int64], promise: Promise) -> Lanes:
    """What each row may deviate by, relative to its scale."""
    largest = rows.columns["largest"].astype(np.float64)
    return np.array(
        [
            allowed_error(
                promise,
                rows.value("dtype", row),
                int(rows.count[row]),
                float(largest[rows.first[row] : rows.first[row] + rows.count[row]].max())
                if promise.bound == "level"
                else 0.0,
                rows.value("numel", row),
                float(rows.scale[row]),
            )
            for row in mine
        ]
    )


def _compression(
    rows: _Rows,
    mine: npt.NDArray[np.int64],
    errors: Lanes,
    allowed: Lanes,
    hook: str,
    replica: Replica,
) -> Compression:
    by_bucket: dict[int, float] = {}
    for row in mine:
        mean = float(np.linalg.norm(rows.mean[row]))
        error = float(errors[row] * rows.scale[row] / mean) if mean else 0.0
        pair = rows.value("pair", row)
        by_bucket[pair] = max(error, by_bucket.get(pair, 0.0))
    largest_allowed = float(allowed.max())
    return Compression(
        hook_name=hook,
        group=replica.group,
        bucket_count=len(by_bucket),
        median_error=statistics.median(by_bucket.values()),
        largest_error=max(by_bucket.values()),
        promised=largest_allowed if np.isfinite(largest_allowed) else None,
    )


def _explained(rows: _Rows, row: int, slack: float) -> _Deviation:
    first, count = int(rows.first[row]), int(rows.count[row])
    together = slice(first, first + count)
    differs = bool(
        (np.abs(rows.after[together] - rows.after[row]).max(axis=1) > slack)[
            rows.columns["came_out"][together].astype(bool)
        ].any()
    )
    found = deviation_cause(
        rows.before[together],
        rows.after[row],
        float(rows.value("divisor", row)),
        row - first,
        slack,
        differs,
    )
    return _Deviation(row, rows.value("rank", row), found)


def _parameters(evidence: Evidence, pair: int) -> list[str]:
    query = "SELECT parameter_fqns FROM reductions WHERE pair = ? AND NOT is_shadow LIMIT 1"
    names: list[str] = evidence.rows(query, [pair])[0][0]
    return names


def _stale_since(evidence: Evidence, rows: _Rows, deviation: _Deviation) -> int | None:
    """The latest earlier step in which the very same came out of the same bucket."""
    if deviation.cause.kind != "unexplained":
        return None
    [(step,)] = evidence.rows(
        "SELECT max(o.step) FROM reductions r JOIN reductions o ON o.replica = r.replica AND o.rank = r.rank "
        "AND o.parameter_fqns = r.parameter_fqns AND o.after_fingerprint = r.after_fingerprint "
        "AND o.step < r.step WHERE r.pair = ? AND r.rank = ? AND r.after_norm > 0",
        [rows.value("pair", deviation.row), deviation.rank],
    )
    return None if step is None else int(step)


def _violations(
    evidence: Evidence,
    rows: _Rows,
    deviations: list[_Deviation],
    allowed: Mapping[int, float],
    replica: Replica,
    hook: str | None,
    pair_count: int,
) -> Iterator[Violation]:
    """One per cause, at its first bucket."""
    same: dict[tuple[Any, ...], list[_Deviation]] = {}
    for deviation in sorted(deviations, key=lambda d: (rows.value("step", d.row), d.row)):
        cause = deviation.cause
        factor = None if cause.factor is None else round(cause.factor, 2)
        same.setdefault((cause.kind, factor, cause.contributor, cause.subset), []).append(deviation)
    for alike in same.values():
        first = alike[0]
        cause = first.cause
        ranks = tuple(sorted({d.rank for d in alike}))
        pairs = {rows.value("pair", d.row) for d in alike}
        judged_ranks = sum(
            rows.columns["came_out"][rows.first[first.row] :][: rows.count[first.row]]
        )
        where = "" if len(ranks) == judged_ranks else f" on {ranks_phrase(ranks)}"
        step, bucket = rows.value("step", first.row), rows.value("bucket_index", first.row)
        place = BucketPlace(replica.ranks, hook, ranks, _stale_since(evidence, rows, first))
        names = _parameters(evidence, rows.value("pair", first.row))
        largest = max(d.cause.relative_error for d in alike)
        is_everywhere = len(ranks) == judged_ranks and place.stale_since is None
        is_cast = (
            cause.kind == "unexplained"
            and is_everywhere
            and may_compress(hook, largest, len(replica.ranks))
        )
        perhaps = (
            f" A hook that casts to fewer bits loses as much: if it does, --compressing {hook!r}."
            if is_cast
            else ""
        )
        yield reduction_is_mean.violation(
            step,
            f"{bucket_phrase(step, bucket, names)}: after {hook_phrase(hook)} it is{where} "
            f"{cause_phrase(cause, place)}. So in {len(pairs):,} of {counted(pair_count, 'bucket')}.{perhaps}",
            severity="warning" if is_cast else reduction_is_mean.severity,
            rank=odd_rank(cause, place),
            ranks=ranks,
            microbatch=rows.value("microbatch", first.row),
            backward_index=rows.value("backward_index", first.row),
            bucket_index=bucket,
            **replica.fields,
            hook_name=hook,
            factor=cause.factor if cause.kind == "factor" else None,
            relative_error=cause.relative_error,
            tolerance=allowed[first.row],
            count=len(pairs),
            order=float(rows.value("pair", first.row)),
        )

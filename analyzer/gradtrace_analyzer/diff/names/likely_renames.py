"""Which names of the candidate stand for others of the baseline, by what they hold: classes, shapes, first values.

Pure, but for the question what names there are. A rename is *sure* where what lies below both names is the same, at the
same place in the order of calls, and no other pair would do as well; any other likeness is only proposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import duckdb

from gradtrace_analyzer.diff.names.renames import Rename, apply_renames, renamed
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_analyzer.words.numbers import verb

# Below this share of equal names and shapes two modules are not alike enough to be proposed.
_ALIKE = 0.6
_MOST_TOPS = 400
_ROUNDS = 3
_MOST_RANKS = 8
# Models of which a smaller share of names agrees are strangers; two or three names say nothing.
_UNRELATED = 0.1
_FEW = 4


@dataclass(frozen=True)
class Name:
    """A module or parameter of one side: its class or shape, its place in the order, the bits it began with."""

    fqn: str
    what: str
    order: int
    is_parameter: bool = False
    fingerprint: int | None = None


@dataclass(frozen=True)
class Likely:
    """Renames that are sure, and those that are only likely."""

    sure: tuple[Rename, ...] = ()
    proposed: tuple[Rename, ...] = ()


@dataclass
class _Subtree:
    """All that lies at or below a name, which one side alone has while the other has what is around it."""

    fqn: str
    names: list[Name] = field(default_factory=list)
    anchor: str = ""

    @property
    def exact(self) -> frozenset[tuple[str, str]]:
        return frozenset((n.fqn[len(self.fqn) :], n.what) for n in self.names)

    @property
    def shapes(self) -> frozenset[tuple[str, str]]:
        return frozenset((n.fqn[len(self.fqn) :], n.what) for n in self.names if n.is_parameter)

    @property
    def outline(self) -> tuple[tuple[int, str], ...]:
        """What it holds, whatever the names inside are."""
        return tuple((n.fqn[len(self.fqn) :].count("."), n.what) for n in self.names)

    @property
    def bits(self) -> frozenset[tuple[str, int]]:
        """The first values of its parameters, of those that are not all alike (zeros, ones)."""
        return frozenset(
            (n.fqn[len(self.fqn) :], n.fingerprint) for n in self.names if n.fingerprint is not None
        )


def names_of(connection: duckdb.DuckDBPyConnection, side: str, ranks: Sequence[int]) -> list[Name]:
    """The modules and parameters of the first recorded step of these ranks, in the order in which they came.

    Of many ranks a few are asked, the first and the last of them: the stages of a pipeline hold other modules.
    """
    some = sorted({ranks[n * (len(ranks) - 1) // (_MOST_RANKS - 1)] for n in range(_MOST_RANKS)})
    among = f"rank IN ({', '.join(map(str, some))})"

    def first(table: str) -> str:
        return f"{among} AND step = (SELECT min(step) FROM {side}.{table} WHERE {among})"

    modules = connection.execute(
        f"SELECT module_fqn, any_value(module_class), min(rank), arg_min(start_ns, rank) FROM {side}.module_calls "
        f"WHERE {first('module_calls')} GROUP BY 1 ORDER BY 3, 4, 1"
    ).fetchall()
    parameters = connection.execute(
        "SELECT parameter_fqn, any_value(kind || coalesce(shape::VARCHAR, '')), arg_min(fingerprint, rank), "
        f"arg_min(abs_max, rank), min(rank), arg_min(record_index, rank) FROM {side}.parameters "
        f"WHERE {first('parameters')} AND point = 'before' GROUP BY 1 ORDER BY 5, 6, 1"
    ).fetchall()
    found = [Name(fqn, of_class, place) for place, (fqn, of_class, *_) in enumerate(modules) if fqn]
    is_drawn = {
        fingerprint
        for fingerprint, rows in groupby(sorted(p[2] for p in parameters if p[2] is not None))
        if len(list(rows)) == 1
    }
    return found + [
        Name(
            fqn, what, place, True, bits if bits in is_drawn and largest not in (0.0, 1.0) else None
        )
        for place, (fqn, what, bits, largest, *_) in enumerate(parameters)
    ]


def likely_renames(baseline: Sequence[Name], candidate: Sequence[Name]) -> Likely:
    """What of the baseline's names the candidate's others may be. Nothing where each has all of the other's."""
    wrapped = _wrapping(baseline, candidate)
    if wrapped is not None:
        return Likely(sure=(wrapped,))
    old, new = _tops(baseline, candidate), _tops(candidate, baseline)
    if not old or not new or max(len(old), len(new)) > _MOST_TOPS:
        return Likely()
    sure: list[tuple[str, str]] = []
    proposed: list[tuple[str, str]] = []
    for likeness in ("bits", "exact", "shapes", "outline"):
        for before, after in _groups(old, new, likeness):
            pairs = list(zip(before, after, strict=False))
            is_sure = likeness == "bits" or (
                len(before) == len(after) == 1 and before[0].anchor == after[0].anchor
            )
            if len(before) != len(after) and not is_sure:
                continue
            (sure if is_sure else proposed).extend((a.fqn, b.fqn) for a, b in pairs)
            for a, b in pairs:
                old.remove(a)
                new.remove(b)
    for a in list(old):
        alike = sorted(((_share(a, b), b.fqn, b) for b in new), reverse=True, key=lambda p: p[:2])
        if alike and alike[0][0] >= _ALIKE and (len(alike) == 1 or alike[1][0] < alike[0][0]):
            share, _, best = alike[0]
            alone = all(_share(other, best) < share for other in old if other is not a)
            if alone:
                is_sure = share > 0.75 and a.anchor == best.anchor and bool(a.shapes)
                (sure if is_sure else proposed).append((a.fqn, best.fqn))
                old.remove(a)
                new.remove(best)
    everything = [name.fqn for name in baseline]
    return Likely(_compressed(sure, everything), _compressed(proposed, everything))


def _wrapping(baseline: Sequence[Name], candidate: Sequence[Name]) -> Rename | None:
    """That all of one side lies inside one module of the other."""
    for old, new, is_inside in ((baseline, candidate, True), (candidate, baseline, False)):
        known = {(n.fqn, n.what) for n in old}
        if not known or known & {(n.fqn, n.what) for n in new}:
            continue
        for top in sorted({n.fqn.split(".")[0] for n in new if "." in n.fqn}):
            inside = {(n.fqn[len(top) + 1 :], n.what) for n in new if n.fqn.startswith(f"{top}.")}
            if len(known & inside) > 0.9 * len(known):
                return Rename("*", f"{top}.*") if is_inside else Rename(f"{top}.*", "*")
    return None


def _tops(own: Sequence[Name], others: Sequence[Name]) -> list[_Subtree]:
    """The names that one side alone has, each with what is below it, in the order of the side."""
    there: set[str] = set()
    for name in others:
        parts = name.fqn.split(".")
        there |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    found: dict[str, _Subtree] = {}
    last = {True: "", False: ""}
    for name in own:
        parts = name.fqn.split(".")
        above = (".".join(parts[: n + 1]) for n in range(len(parts)))
        top = next((fqn for fqn in above if fqn not in there), None)
        if top is None:
            last[name.is_parameter] = name.fqn
            continue
        if top not in found:
            found[top] = _Subtree(top, anchor=last[name.is_parameter])
        found[top].names.append(name)
    return list(found.values())


def _groups(
    old: Sequence[_Subtree], new: Sequence[_Subtree], likeness: str
) -> list[tuple[list[_Subtree], list[_Subtree]]]:
    """Those of both sides that are alike, in order."""
    by_likeness: dict[object, tuple[list[_Subtree], list[_Subtree]]] = {}
    for place, side in enumerate((old, new)):
        for subtree in side:
            key = getattr(subtree, likeness)
            if key:
                by_likeness.setdefault(key, ([], []))[place].append(subtree)
    return [(before, after) for before, after in by_likeness.values() if before and after]


def _share(a: _Subtree, b: _Subtree) -> float:
    return len(a.exact & b.exact) / len(a.exact | b.exact)


def _compressed(pairs: Iterable[tuple[str, str]], names: Sequence[str]) -> tuple[Rename, ...]:
    """Renames that differ in a layer's number alone as one pattern, where that says the same."""
    by_pattern: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for old, new in pairs:
        by_pattern.setdefault((_starred(old), _starred(new)), []).append((old, new))
    found: list[Rename] = []
    for (old, new), of_pattern in by_pattern.items():
        each = [Rename(*pair) for pair in of_pattern]
        if len(each) > 1 and old.count("*") == new.count("*"):
            one = Rename(old, new)
            if all(renamed(name, [one]) == renamed(name, each) for name in names):
                each = [one]
        found += each
    return tuple(_with_stars(rename, names) for rename in found)


def _starred(fqn: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn)


def _with_stars(rename: Rename, names: Sequence[str]) -> Rename:
    """`encoder.*=backbone.*` where something is below: a person sees what is meant."""
    below = any(rename.of(name) is not None and name != rename.old for name in names)
    if not below or "*" in rename.old:
        return rename
    return Rename(f"{rename.old}.*", f"{rename.new}.*")


def applied(names: Sequence[Name], renames: Sequence[Rename]) -> list[Name]:
    """The baseline's names as they are called after renames."""
    new: Mapping[str, str] = {name.fqn: renamed(name.fqn, renames) for name in names}
    return [
        Name(new[n.fqn], n.what, n.order, n.is_parameter, n.fingerprint)
        for n in names
        if new[n.fqn]
    ]


@dataclass(frozen=True)
class Naming:
    """How the names of two runs go together: renames that were applied, those that were not but are likely, and, where
    the runs are of unrelated models, how one can tell. `is_same` is true where, with the renames, both sides have the
    same modules and parameters, as far as was looked."""

    renames: tuple[Rename, ...] = ()
    likely: tuple[Rename, ...] = ()
    unrelated: str | None = None
    is_same: bool = False


def settle_names(
    connection: duckdb.DuckDBPyConnection,
    ranks: Sequence[int],
    given: Sequence[Rename],
    *,
    may_guess: bool,
) -> Naming:
    """Apply the renames of a person, and what is sure besides, to the baseline's views.

    Raises BadRename for one of a person that does not fit.
    """
    own = [names_of(connection, side, ranks) for side in SIDES]
    baseline, candidate = applied(own[0], given), own[1]
    rounds: list[Sequence[Rename]] = [given]
    proposed: list[Rename] = []
    for _ in range(_ROUNDS if may_guess else 0):
        found = likely_renames(baseline, candidate)
        proposed = list(found.proposed)
        if not found.sure:
            break
        after = applied(baseline, found.sure)
        if len({n.fqn for n in after}) < len({n.fqn for n in baseline}):
            proposed += found.sure
            break
        rounds.append(found.sure)
        baseline = after
    renames = [rename for of_round in rounds for rename in of_round]
    if renames:
        apply_renames(connection, rounds)
    unrelated = _unrelated(baseline, candidate) if may_guess else None
    is_same = {(n.fqn, n.what) for n in baseline} == {(n.fqn, n.what) for n in candidate}
    return Naming(tuple(renames), tuple(proposed), unrelated, is_same)


def _unrelated(baseline: Sequence[Name], candidate: Sequence[Name]) -> str | None:
    """In words, that next to nothing of two models has the same name and is the same."""
    sides = [{(n.fqn, n.what) for n in side} for side in (baseline, candidate)]
    fewer = min(map(len, sides))
    common = len(sides[0] & sides[1])
    if fewer < _FEW or common > _UNRELATED * fewer:
        return None
    examples = [next(n.fqn for n in side) for side in (baseline, candidate)]
    return (
        f"the models have nothing to do with each other: of {len(sides[0])} modules and parameters in the baseline "
        f"({examples[0]!r} is one) and {len(sides[1])} in the candidate ({examples[1]!r}), "
        f"{common or 'none'} {verb(common, 'has', 'have')} the same name and class or shape; if it is one model "
        "with other names, say so with --rename OLD=NEW"
    )

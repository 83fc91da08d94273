"""The names of two runs read, and settled: what is applied, what is only likely, what are strangers."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.diff.names.likely_renames import (
    Name,
    Naming,
    names_of,
    settle_names,
)
from gradtrace_analyzer.diff.names.renames import rename_of
from support.synthetic_runs.differences import Row, Rows, views


def side(
    modules: dict[str, str], weights: dict[str, int] | None = None, step: int = 1, **more: Any
) -> Rows:
    """Modules with their classes, and parameters with the bits that they begin with."""
    calls: list[Row] = [
        {"step": step, "root": 0, "module_fqn": name, "module_class": of_class, "phase": "forward",
         "start_ns": 10 * n, **more}
        for n, (name, of_class) in enumerate(modules.items())
    ]  # fmt: skip
    values: list[Row] = [
        {"step": step, "root": 0, "parameter_fqn": name, "point": "before", "kind": "parameter", "shape": [2, 3],
         "fingerprint": bits, "abs_max": 0.5, **more}
        for name, bits in (weights or {}).items()
    ]  # fmt: skip
    return {"module_calls": calls, "parameters": values}


def test_names_come_in_the_order_of_calls_with_classes_shapes_and_first_values() -> None:
    rows = side({"": "Net", "b": "Linear", "a": "Norm"}, {"b.w": 7, "a.w": 9})
    assert names_of(views(rows), "baseline", [0]) == [
        Name("b", "Linear", 1),
        Name("a", "Norm", 2),
        Name("b.w", "parameter[2, 3]", 0, True, 7),
        Name("a.w", "parameter[2, 3]", 1, True, 9),
    ]


def test_values_that_several_begin_with_tell_nothing() -> None:
    rows = side({"a": "Linear"}, {"a.w": 7, "a.v": 7, "a.u": 8, "a.ones": 9})
    for row in rows["parameters"]:
        if row["parameter_fqn"] == "a.ones":
            row["abs_max"] = 1.0
    bits = {n.fqn: n.fingerprint for n in names_of(views(rows), "baseline", [0]) if n.is_parameter}
    assert bits == {"a.w": None, "a.v": None, "a.u": 8, "a.ones": None}


def test_only_the_first_step_is_read() -> None:
    first, later = side({"a": "Linear"}, {"a.w": 1}), side({"b": "Linear"}, {"b.w": 2}, step=2)
    rows = {table: [*first[table], *later[table]] for table in first}
    assert [n.fqn for n in names_of(views(rows), "baseline", [0])] == ["a", "a.w"]


def test_of_many_ranks_a_few_are_asked_the_first_and_the_last_among_them() -> None:
    sides = [side({f"of{rank}": "Block"}, rank=rank) for rank in range(40)]
    rows = {table: [row for s in sides for row in s[table]] for table in sides[0]}
    names = [n.fqn for n in names_of(views(rows), "baseline", list(range(40)))]
    assert len(names) == 8 and {"of0", "of39"} <= set(names)
    assert [n.fqn for n in names_of(views(rows), "baseline", [3, 5])] == ["of3", "of5"]


def settled(a: Rows, b: Rows, *given: str, may_guess: bool = True) -> Naming:
    connection = views(a, b)
    naming = settle_names(connection, [0], [rename_of(text) for text in given], may_guess=may_guess)
    names = [
        {name for (name,) in connection.execute(f"SELECT module_fqn FROM {s}.module_calls").fetchall()}
        for s in ("baseline", "candidate")
    ]  # fmt: skip
    assert naming.is_same == (names[0] == names[1]), names
    return naming


OLD = side({"in": "Linear", "enc.0": "Block", "enc.1": "Block"}, {"enc.0.w": 1, "enc.1.w": 2})
NEW = side({"in": "Linear", "dec.0": "Block", "dec.1": "Block"}, {"dec.0.w": 1, "dec.1.w": 2})


def test_rename_that_is_sure_is_applied() -> None:
    naming = settled(OLD, NEW)
    assert [str(r) for r in naming.renames] == ["enc.*=dec.*"]
    assert (naming.is_same, naming.likely, naming.unrelated) == (True, (), None)


def test_names_are_only_guessed_where_that_is_allowed() -> None:
    given = settled(OLD, NEW, "enc.*=dec.*")
    assert [str(r) for r in given.renames] == ["enc.*=dec.*"]
    unguessed = settled(OLD, NEW, may_guess=False)
    assert (unguessed.renames, unguessed.is_same) == ((), False)


def test_renames_that_follow_from_others_are_found_in_a_further_round() -> None:
    """Once the model around is known by its new name, what was renamed inside it is found."""
    same = {name: name.upper() for name in "abcdefghijklmn"}
    old = side({**same, "old": "Down"})
    new = side({f"net.{name}": of_class for name, of_class in {**same, "new": "Down"}.items()})
    assert [str(r) for r in settled(old, new).renames] == ["*=net.*", "net.old=net.new"]


def test_models_of_which_nothing_agrees_are_strangers() -> None:
    a = side({f"a{n}": "Linear" for n in range(6)})
    b = side({f"b{n}": "Conv" for n in range(5)})
    said = settled(a, b).unrelated
    assert said is not None
    assert (
        "of 6 modules and parameters in the baseline ('a0' is one) and 5 in the candidate" in said
    )
    assert "none have the same name and class or shape" in said
    few = {f"a{n}": "Linear" for n in range(3)}
    assert (
        settled(side(few), side({"b": "Conv"})).unrelated is None
    )  # two or three names say nothing
    shared = {"head": "Head"}
    assert (
        settled(
            side({**few, "c": "Mix", **shared}),
            side({"x": "Conv", "y": "Conv", "z": "Up", **shared}),
        ).unrelated
        is None
    )

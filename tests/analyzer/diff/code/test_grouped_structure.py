"""What one side alone has, grouped as a person would name it, and what of it was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.code.structure import (
    ModelNames,
    OneSided,
    Structure,
    as_object,
    structure_of,
    wants_one_sided,
)
from gradtrace_analyzer.diff.scope.selection import chosen
from support.synthetic_runs.differences import Row, Rows, paired

Names = dict[str, str]


def side(
    modules: Names, parameters: tuple[str, ...] = (), steps: int = 2, **more: list[Row]
) -> Rows:
    """Modules by name with their classes, and parameters, in some steps of one rank; each side has one of its own, so
    that its parameters were recorded."""
    calls = [
        {
            "step": s,
            "root": 0,
            "module_fqn": name,
            "module_class": of_class,
            "phase": "forward",
            "call_index": 0,
        }
        for s in range(steps)
        for name, of_class in modules.items()
    ]
    values = [
        {"step": s, "root": 0, "parameter_fqn": name, "point": "before"}
        for s in range(steps)
        for name in ("scale", *parameters)
    ]
    return {"module_calls": calls, "parameters": values, **more}


def structure(a: Rows, b: Rows, **options: Any) -> Structure:
    connection = paired(a, b)
    return structure_of(connection, ModelNames(connection), **options)


PLAIN = {"": "Net", "body": "Block", "body.fc": "Linear"}


def test_layer_that_was_added_is_one_entry_with_all_that_is_in_it() -> None:
    gate = {"body.gate": "Gate", "body.gate.fc": "Linear"}
    found = structure(side(PLAIN), side(PLAIN | gate, ("body.gate.fc.weight", "body.gate.fc.bias")))
    [entry] = found.one_sided
    assert (entry.kind, entry.name, entry.only_in, entry.module_class) == (
        "module",
        "body.gate",
        "candidate",
        "Gate",
    )
    assert entry.holds == {"modules": 2, "parameters": 2} and entry.is_code
    assert found.has_parameters
    # The code is inside it and inside all that is around it.
    assert found.touched == found.trained == {"", "body", "body.gate"}
    assert found.places == {(0, 0): 3.0, (0, 1): 3.0}


def test_parameter_by_itself_is_of_the_module_that_both_have() -> None:
    [entry] = structure(side(PLAIN, ("body.scale",)), side(PLAIN)).one_sided
    assert (entry.kind, entry.name, entry.only_in, entry.module_fqn) == (
        "parameter",
        "body.scale",
        "baseline",
        "body",
    )
    assert entry.has_parameters and entry.is_of_the_model and entry.holds == {}


def test_container_that_is_never_called_is_named_where_it_begins() -> None:
    """Its layers have names below one that the other side has not."""
    layers = {"layers.0": "Block", "layers.1": "Block"}
    [entry] = structure(side(PLAIN), side(PLAIN | layers)).one_sided
    assert (entry.name, entry.module_class, entry.holds) == ("layers", None, {"modules": 2})


def test_module_without_parameters_trains_nothing() -> None:
    found = structure(side(PLAIN), side(PLAIN | {"act": "GELU"}))
    assert not found.has_parameters and found.trained == frozenset()
    assert found.touched == {"", "act"}


def node(name: str, step: int, module: str = "body.fc", **more: Any) -> Row:
    return {
        "step": step,
        "root": 0,
        "module_fqn": module,
        "call_index": 0,
        "backward_index": 0,
        "node_name": name,
        "occurrence": 0,
        **more,
    }


def test_module_hidden_in_compiled_code_is_no_other_model() -> None:
    compiled = [node("CompiledFunctionBackward", s, "body") for s in (0, 1)]
    fewer = {"": "Net", "body": "Block"}
    found = structure(side(PLAIN), side(fewer, node_events=compiled))
    module, called = found.one_sided
    assert (module.name, module.is_compiled, module.is_of_the_model) == ("body.fc", True, False)
    assert (called.name, called.is_compiled) == ("CompiledFunctionBackward", True)
    assert found.compiled == {"candidate": ("body",)}
    # What holds parameters is none that a compiler hides.
    weights = structure(side(PLAIN, ("body.fc.w",)), side(fewer, node_events=compiled)).one_sided[0]
    assert not weights.is_compiled


def test_node_of_every_step_is_one_entry_that_counts_its_rows() -> None:
    nodes = [node("GeluBackward0", s) for s in (0, 1)]
    [entry] = structure(side(PLAIN), side(PLAIN, node_events=nodes)).one_sided
    assert (entry.kind, entry.name, entry.module_fqn, entry.count) == (
        "node",
        "GeluBackward0",
        "body.fc",
        2,
    )
    assert (entry.ranks, entry.first_step, entry.last_step, entry.is_code) == ((0,), 0, 1, True)


def test_what_happened_in_a_later_step_is_told_by_its_kind_and_is_no_code() -> None:
    happened = side(
        PLAIN,
        node_events=[node("A", 1)],
        backward_passes=[{"step": 1, "backward_index": 2, "kind": "grad"}],
        inputs=[{"step": 1, "root": 0, "call_index": 0, "name": "mask"}],
        gradients=[{"step": 1, "root": 0, "parameter_fqn": "w", "backward_index": 0, "point": "final"}],
        buckets=[{"step": 1, "root": 0, "backward_index": 0, "kind": "all_reduce", "parameter_fqns": ["w", "v"]}],
        optimizer_groups=[{"step": 1, "optimizer_index": 1, "group_index": 2}],
    )  # fmt: skip
    found = structure(side(PLAIN), happened)
    assert [(e.kind, e.name, e.module_fqn) for e in found.one_sided] == [
        ("pass", "grad 2", None),
        ("input", "mask", None),
        ("node", "A", "body.fc"),
        ("gradient", "final w", None),
        ("bucket", "w", None),
        ("group", "1.2", None),
    ]
    assert not any(e.is_code for e in found.one_sided) and found.code == ()
    assert found.touched == frozenset() and found.places == {}


def test_code_is_told_with_what_is_of_the_model_first() -> None:
    nodes = [node("GeluBackward0", s) for s in (0, 1)]
    found = structure(side(PLAIN), side(PLAIN | {"act": "GELU"}, node_events=nodes))
    assert [e.kind for e in found.code] == ["module", "node"]
    loss = Structure(
        (
            OneSided("node", "A", "candidate", is_code=True),
            OneSided("module", "m", "candidate", is_code=True),
        )
    )
    assert [e.kind for e in loss.code] == ["module", "node"]


def test_sides_with_the_same_names_and_pairs_have_the_same_structure() -> None:
    assert structure(side(PLAIN, ("w",)), side(PLAIN, ("w",))) == Structure()


def test_pairs_prove_the_names_where_no_name_is_known_to_be_alone() -> None:
    """Then the names are not asked for; of a parameter that has no partner they are."""
    assert structure(side(PLAIN, ("w",)), side(PLAIN, ("w",)), proves_names=True) == Structure()
    [entry] = structure(side(PLAIN, ("w",)), side(PLAIN), proves_names=True).one_sided
    assert entry.name == "w"


@pytest.mark.parametrize(
    ("entry", "asked", "is_wanted"),
    [
        (OneSided("node", "A", "candidate", "blocks.1.fc"), {"modules": ["blocks.1"]}, True),
        (OneSided("node", "A", "candidate", "blocks.2"), {"modules": ["blocks.1"]}, False),
        (OneSided("pass", "grad 1", "candidate"), {"modules": ["blocks.1"]}, True),  # it is of no module
        (OneSided("node", "A", "candidate", "m"), {"links": ["backward"]}, True),
        (OneSided("node", "A", "candidate", "m"), {"links": ["forward"]}, False),
        (OneSided("gradient", "final w", "candidate"), {"links": ["clip"]}, True),
        (OneSided("module", "m", "candidate", "m"), {"links": ["forward"]}, False),
        (OneSided("module", "m", "candidate", "m"), {}, True),
    ],
)  # fmt: skip
def test_what_was_not_asked_for_is_not_told(
    entry: OneSided, asked: dict[str, Any], is_wanted: bool
) -> None:
    assert wants_one_sided(chosen(**asked), entry) == is_wanted


def test_entry_is_told_to_programs_with_all_it_has() -> None:
    entry = OneSided(
        "module", "m", "candidate", "m", "Block", holds={"modules": 2}, ranks=(0, 3), is_code=True
    )
    told = as_object(entry)
    assert set(told) == set(vars(entry))
    assert (told["holds"], told["ranks"], told["is_code"]) == ({"modules": 2}, [0, 3], True)
    assert as_object(OneSided("pass", "p", "baseline"))["holds"] is None


def test_parameters_that_one_side_did_not_record_are_no_other_model() -> None:
    other = {**side(PLAIN), "parameters": []}
    for a, b in ((side(PLAIN, ("w",)), other), (other, side(PLAIN, ("w",)))):
        assert not structure(a, b).has_parameters

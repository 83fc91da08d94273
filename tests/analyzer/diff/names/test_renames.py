"""Names that changed between two runs: the patterns of a person, and what names and shapes say by themselves."""

from __future__ import annotations

import pytest

from gradtrace_analyzer.diff.names.likely_renames import Name, applied, likely_renames
from gradtrace_analyzer.diff.names.renames import rename_of, renamed
from gradtrace_analyzer.errors import BadRename


@pytest.mark.parametrize(
    ("pattern", "old", "new"),
    [
        ("encoder.*=backbone.*", "encoder.0.weight", "backbone.0.weight"),
        ("encoder.*=backbone.*", "encoder", "backbone"),
        ("encoder.*=backbone.*", "encoder2.weight", "encoder2.weight"),
        ("encoder=backbone", "encoder.0.weight", "backbone.0.weight"),
        ("blocks.*.attn.q=blocks.*.attn.wq", "blocks.3.attn.q.bias", "blocks.3.attn.wq.bias"),
        ("*.a.*.b=*.c.*.d", "x.a.y.b", "x.c.y.d"),
        ("*=net.*", "blocks.0", "net.blocks.0"),
        ("*=net.*", "", "net"),
        ("net.*=*", "net.blocks.0", "blocks.0"),
        ("net.*=*", "net", ""),
    ],
)
def test_pattern_stands_for_a_name_and_all_below_it(pattern: str, old: str, new: str) -> None:
    assert renamed(old, [rename_of(pattern)]) == new


@pytest.mark.parametrize(("text", "said"), [("a", "OLD=NEW"), ("a.*=b", "1 * on its left and 0")])
def test_pattern_that_cannot_be_read_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(BadRename, match=r".*") as raised:
        rename_of(text)
    assert said in str(raised.value)


def names(*modules: str, **parameters: tuple[str, int | None]) -> list[Name]:
    """Modules as `fqn:Class`; parameters by FQN (a double underscore is a dot) with shape and first bits."""
    words = [module.partition(":") for module in modules]
    found = [Name(fqn, of_class, place) for place, (fqn, _, of_class) in enumerate(words)]
    return found + [
        Name(fqn.replace("__", "."), shape, place, True, bits)
        for place, (fqn, (shape, bits)) in enumerate(parameters.items())
    ]


def test_container_that_is_never_called_is_renamed_with_all_below() -> None:
    old = names("in:Linear", "layers.0:Block", "layers.1:Block", "head:Linear")
    new = names("in:Linear", "blocks.0:Block", "blocks.1:Block", "head:Linear")
    found = likely_renames(old, new)
    assert [str(r) for r in found.sure] == ["layers.*=blocks.*"] and not found.proposed
    assert {n.fqn for n in applied(old, found.sure)} == {n.fqn for n in new}


def test_same_rename_in_every_block_is_one_pattern() -> None:
    old = names(*(f"blocks.{n}.{m}" for n in range(3) for m in ("q:Linear", "k:Norm")))
    new = names(*(f"blocks.{n}.{m}" for n in range(3) for m in ("wq:Linear", "k:Norm")))
    found = likely_renames(old, new)
    assert [str(r) for r in (*found.sure, *found.proposed)] == ["blocks.*.q=blocks.*.wq"]


def test_two_of_a_kind_are_told_apart_by_their_first_values_or_only_proposed() -> None:
    def side(a: str, b: str, first: int | None, second: int | None) -> list[Name]:
        weights = {f"{a}__weight": ("[4, 4]", first), f"{b}__weight": ("[4, 4]", second)}
        return names(f"{a}:Linear", f"{b}:Linear", **weights)

    crossed = likely_renames(side("q", "k", 1, 2), side("x", "y", 2, 1))
    assert sorted(map(str, crossed.sure)) == ["k.*=x.*", "q.*=y.*"]
    unknown = likely_renames(side("q", "k", None, None), side("x", "y", None, None))
    assert not unknown.sure and [str(r) for r in unknown.proposed] == ["q.*=x.*", "k.*=y.*"]


def test_layer_of_the_same_kind_at_another_place_is_not_taken_for_it() -> None:
    old = names("aux:Linear", "a:Linear", "b:Norm")
    new = names("a:Linear", "b:Norm", "gate:Linear")
    found = likely_renames(old, new)
    assert not found.sure and [str(r) for r in found.proposed] == ["aux=gate"]


def test_model_inside_another_module_is_found() -> None:
    old = names("a:Linear", "b:Norm", a__weight=("[2]", 1))
    new = names("net:Net", "net.a:Linear", "net.b:Norm", net__a__weight=("[2]", 1))
    assert [str(r) for r in likely_renames(old, new).sure] == ["*=net.*"]
    assert [str(r) for r in likely_renames(new, old).sure] == ["net.*=*"]


def test_unrelated_models_share_no_rename() -> None:
    old = names("conv:Conv2d", "norm:BatchNorm2d", conv__weight=("[3, 3]", 1))
    new = names("tok:Embedding", "mix:GRU", tok__weight=("[100, 8]", 2))
    assert likely_renames(old, new) == likely_renames(old, old)

"""Plug-ins that explain origins: each has a file, a test of the same name, and a line in the registry."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path

import pytest

from gradtrace_analyzer.diff.explanations import registry
from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.diff.origin import ForwardOrigin, NodeOrigin, Origin
from support.synthetic_runs.differences import call, context, node

FOLDER = Path(registry.__file__).parent
# Of the folder, what is no plug-in.
FRAME = {"__init__", "explanation", "registry"}


def modules() -> set[str]:
    return {path.stem for path in FOLDER.glob("*.py")} - FRAME


def test_each_file_is_one_plug_in_of_the_registry() -> None:
    named = [explainer.explain.__module__.rpartition(".")[2] for explainer in registry.EXPLAINERS]
    assert sorted(named) == sorted(modules())


def test_each_has_a_test_of_its_name() -> None:
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert modules() <= tests


def test_each_gives_a_frozen_value_of_its_own_type() -> None:
    kinds = [explainer.gives for explainer in registry.EXPLAINERS]
    assert len(set(kinds)) == len(kinds)
    assert all(is_dataclass(kind) and issubclass(kind, Explanation) for kind in kinds)
    assert all(kind.__dataclass_params__.frozen for kind in kinds)  # type: ignore[attr-defined]


def test_each_needs_links_that_there_are() -> None:
    assert all(e.links and e.links <= set(LINKS) for e in registry.EXPLAINERS)


@dataclass(frozen=True)
class Repeats(Explanation):
    """That the origin shows again."""

    def onto(self, origins: tuple[Origin, ...]) -> tuple[Origin, ...]:
        return tuple(replace(o, repeat_count=o.repeat_count + 1) for o in origins)


def found(context: Context) -> Repeats:
    return Repeats()


def test_plug_ins_are_asked_in_order_and_only_of_what_they_speak_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = (
        Explainer(Repeats, found),
        Explainer(Repeats, found, links=frozenset({"backward"})),
        Explainer(Repeats, found, paired=frozenset({"sums"})),
        Explainer(Repeats, lambda _: None),
    )
    monkeypatch.setattr(registry, "EXPLAINERS", asked)
    call_origin, node_origin = ForwardOrigin(call("m", 1), (0,)), NodeOrigin(node("m", 1), (0,))
    [origin], told = registry.explanations(context(call_origin))
    assert (origin.repeat_count, told) == (1, (Repeats(),))
    origins, told = registry.explanations(context(call_origin, node_origin))
    assert ([o.repeat_count for o in origins], len(told)) == ([2, 2], 2)

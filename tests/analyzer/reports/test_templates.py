"""Each kind of origin, of explanation and of note has one template, found by its type; a new one without fails here."""

from __future__ import annotations

import pytest

from gradtrace_analyzer.diff.explanations.registry import EXPLAINERS
from gradtrace_analyzer.diff.note import Note
from gradtrace_analyzer.diff.origin import KINDS, Origin
from gradtrace_analyzer.reports.diff.explanations import TEMPLATES
from gradtrace_analyzer.reports.diff.notes import note_sentence
from gradtrace_analyzer.reports.diff.origins import sentences  # noqa: F401 - registers all templates
from gradtrace_analyzer.reports.diff.origins.clause import clause
from gradtrace_analyzer.reports.diff.wording import Wording
from support.synthetic_runs.differences import call


def leaves(kind: type) -> set[type]:
    """The types that nothing is derived from."""
    below: list[type] = kind.__subclasses__()
    return {leaf for one in below for leaf in leaves(one)} if below else {kind}


def test_union_of_origins_names_every_kind() -> None:
    assert set(KINDS) == leaves(Origin)


def test_each_kind_of_origin_has_its_own_template() -> None:
    assert set(clause.registry) - {object} == set(KINDS)


def test_origin_of_no_kind_has_no_sentence() -> None:
    with pytest.raises(TypeError, match="no template tells of Origin"):
        clause(Origin(call("m", 1), (0,)), Wording())


def test_each_explanation_has_a_template_or_is_told_of_an_origin() -> None:
    assert set(TEMPLATES) == {explainer.gives for explainer in EXPLAINERS}


def test_each_note_has_a_template() -> None:
    assert set(note_sentence.registry) - {object, str} == leaves(Note)

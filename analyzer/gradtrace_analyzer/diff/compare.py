"""Compares two opened runs, stage by stage: `Scope -> Judged -> Comparison -> Outcome -> Answer`.

Each stage is a frozen value that the next one is made of; none is handed on before it is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.answering import answer_of
from gradtrace_analyzer.diff.comparison import comparison_of
from gradtrace_analyzer.diff.deciding import outcome_of
from gradtrace_analyzer.diff.judging import judged
from gradtrace_analyzer.diff.names.renames import Rename
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.scope.step_alignment import StepAlignment
from gradtrace_analyzer.diff.scoping import scope_of
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect_pair


def compare(
    baseline: Run,
    candidate: Run,
    *,
    exact: bool = False,
    renames: Sequence[Rename] = (),
    chosen: Selection | None = None,
    with_chain: bool = False,
    precision: str | None = None,
    repeats: Sequence[Run] = (),
    scale: float = 1.0,
    aligned: StepAlignment | None = None,
    without: Collection[str] = (),
) -> Answer:
    """The answer of `analyzer diff`. With `exact` any changed bit is a difference.

    `renames` take names of the baseline to those of the candidate. Raises BadRename for one that does not fit. What
    else can be asked for is told at `Question`. Tolerances do `without` these allowances (`Judgement`).
    """
    if aligned is not None:
        candidate = candidate.shifted(aligned.offset)
    runs = {"baseline": baseline, "candidate": candidate}
    question = Question(
        chosen or Selection(), exact, with_chain, precision, tuple(repeats), scale, aligned
    )
    with contextlib.closing(connect_pair(baseline, candidate)) as connection:
        scope = scope_of(connection, runs, question, renames)
        judgement = Judgement(
            connection,
            runs,
            precision=precision,
            repeats=repeats,
            exact=exact,
            scale=scale,
            is_step_alone=question.chosen.step is not None,
            without=without,
        )
        with contextlib.closing(judgement):
            judgement.pair_repeats(is_arranged=scope.stages is not None, new_names=scope.new_names)
            comparison = comparison_of(connection, scope, judged(connection, scope, judgement))
            return answer_of(comparison, outcome_of(comparison))

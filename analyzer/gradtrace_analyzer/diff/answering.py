"""The last stage: what an outcome is told with, and the answer that reports read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.code.legal_changes import aside_sentence
from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.diff.comparison import Comparison
from gradtrace_analyzer.diff.deciding import Outcome
from gradtrace_analyzer.diff.difference import Change
from gradtrace_analyzer.diff.explanations.explanation import Context, Explanation
from gradtrace_analyzer.diff.explanations.registry import explanations
from gradtrace_analyzer.diff.findings.annotations import equal_in_step, with_root
from gradtrace_analyzer.diff.findings.grounds import with_grounds
from gradtrace_analyzer.diff.findings.unseen import Unseen, unseen_before
from gradtrace_analyzer.diff.note import DividedOut, Note
from gradtrace_analyzer.diff.notes import (
    abandoned,
    compared_with_itself,
    counted_only,
    joined_attempts,
    other_steps,
    partly_followed,
    rng_notes,
)
from gradtrace_analyzer.diff.origin import FailureOrigin, NonfiniteOrigin, Origin
from gradtrace_analyzer.diff.origins.stage_edges import on_ranks
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.diff.scope.step_alignment import alignment_hint
from gradtrace_analyzer.words.nouns import other_side


def answer_of(c: Comparison, outcome: Outcome) -> Answer:
    """The answer of a comparison that came to this outcome."""
    return _Annotation(c, outcome).answer()


class _Annotation:
    """What is read beside the origins of one outcome; what of it several parts of the answer need is read once."""

    def __init__(self, c: Comparison, outcome: Outcome) -> None:
        self._c, self._outcome = c, outcome
        self._has_sums = outcome.sums is not None
        self._spread = c.rows.spread()
        step = outcome.origins[0].step if outcome.origins else None
        self._here = None if step is None else c.reader(step)
        self._differences = [] if step is None else c.rows.differences_at(step)
        self._roots = {} if self._here is None else self._here.roots()
        self._origins, self._explanations = self._explained()

    def answer(self) -> Answer:
        c, outcome, judged, scope = self._c, self._outcome, self._c.judged, self._c.scope
        origins = self._origins
        return Answer(
            verdict=outcome.decision.verdict,
            reason=outcome.decision.reason,
            origins=tuple(on_ranks(o, scope.stages) for o in origins),
            inherited=tuple(
                on_ranks(with_root(o, self._roots), scope.stages) for o in outcome.inherited
            ),
            cover=c.covered.cover,
            configuration=scope.configuration,
            structure=(*_lone_ranks(c.covered.cover), *c.lone),
            spread=self._told_spread(),
            notes=tuple(self._notes()),
            unseen=self._unseen(),
            first_bits=outcome.first_bits,
            failures=judged.failures,
            first_nonfinite=on_ranks(self._first_nonfinite(), scope.stages),
            renames=scope.naming.renames,
            likely_renames=scope.naming.likely,
            equal=self._equal(),
            chain=self._chain(),
            explanations=self._explanations,
            rule=judged.rule,
            noise=judged.noise,
            sums=outcome.sums,
            aside=judged.aside,
            scaled=judged.scaled,
        )

    def _explained(self) -> tuple[tuple[Origin, ...], tuple[Explanation, ...]]:
        """(the origins, each with what its sentence may rest on and what explains it; all that explains them)."""
        c, stages = self._c, self._c.scope.stages
        origins = tuple(
            with_grounds(
                c.covered.recorded, with_root(origin, self._roots), are_sums=self._has_sums
            )
            for origin in self._outcome.origins
        )
        if self._here is None:
            return origins, ()
        return explanations(
            Context(
                c.connection,
                c.scope.runs,
                c.covered.cover,
                origins,
                self._here,
                c.judged.failures,
                self._spread,
                "sums" if self._has_sums else "ranks" if stages is None else "stages",
                c.judged.index.may_differ,
            )
        )

    def _told_spread(self) -> tuple[Mapping[str, Any], ...]:
        # Rows that do not pair one to one spread over everything.
        if self._has_sums:
            return ()
        stages = self._c.scope.stages
        return tuple(self._spread if stages is None else stages.spread(self._spread))

    def _unseen(self) -> tuple[Unseen, ...]:
        c = self._c
        if not self._origins:
            return ()
        first = self._origins[0]
        links = c.covered.recorded.links(first.step)
        return tuple(unseen_before(c.scope.runs, c.covered.cover, first, c.covered.common, links))

    def _equal(self) -> Mapping[str, tuple[str, ...]]:
        here = self._here
        if here is None or self._outcome.decision.verdict != "different" or self._has_sums:
            return {}
        covered = self._c.covered
        return equal_in_step(
            self._differences,
            covered.cover,
            here.modules(),
            self._roots,
            covered.recorded.links(here.step),
        )

    def _chain(self) -> tuple[Any, ...]:
        if self._here is None or not self._c.scope.question.with_chain or self._has_sums:
            return ()
        return tuple(self._here.chain_rows(self._origins[0].difference, self._differences))

    def _first_nonfinite(self) -> NonfiniteOrigin | None:
        """The first value that is not finite on one side alone, where the origins do not say so themselves."""
        origins = self._origins
        d = self._c.rows.first_nonfinite() if origins else None
        if d is None or any(o.difference.key == d.key and o.step == d.step for o in origins):
            return None
        if any(isinstance(o, FailureOrigin) for o in origins) and d.only_in is not None:
            return None  # what a failed pass left undone
        reads = d.reads is not None and _finite_apart(d.reads)
        change = d.reads if reads else d.writes
        found = NonfiniteOrigin(d, (d.rank,), d.key.get("module_fqn"), change, arrives=reads)
        return with_root(found, self._roots)

    def _notes(self) -> Iterator[str | Note]:
        c, origins, scope = self._c, self._origins, self._c.scope
        yield from compared_with_itself(scope.runs)
        yield from joined_attempts(scope.runs, origins)
        if scope.question.aligned is None:
            yield from other_steps(scope.runs, c.covered.cover, origins)
        yield from self._of_the_verdict()
        yield from counted_only(c.judged.structure, c.judged.aside, c.judged.counted_steps)
        if scope.stages is not None:
            yield scope.stages.note()
        if not self._has_sums:
            yield from partly_followed(c.rows, origins)
        yield from abandoned(c.rows, origins)

    def _of_the_verdict(self) -> Iterator[str | Note]:
        """What goes with the verdict: of runs of which nothing can be said, how more could be."""
        c, judged, covered = self._c, self._c.judged, self._c.covered
        if self._outcome.decision.verdict == "incomparable":
            if c.scope.question.aligned is None and not covered.steps["both"]:
                hint = alignment_hint(c.scope.runs)
                yield from [] if hint is None else [hint]
            return
        if judged.scaled:
            yield DividedOut(tuple(judged.scaled))
        if judged.aside:
            saw = covered.recorded.both_in_any_step("gradients", "point = 'final'", "")
            yield aside_sentence(judged.aside, sees_optimizer=saw)
        is_of_rows = not self._outcome.origins and not self._has_sums
        if is_of_rows and covered.cover.has_fingerprints:
            yield from rng_notes(c.rows, covered.common)


def _finite_apart(change: Change) -> bool:
    sides = (change.baseline or {}, change.candidate or {})
    return any(
        bool(sides[0].get(count)) != bool(sides[1].get(count))
        for count in ("nan_count", "inf_count")
    )


def _lone_ranks(cover: Cover) -> Sequence[OneSided]:
    return [
        OneSided(kind="rank", name=str(rank), only_in=other_side(side), ranks=(rank,))
        for side, missing in cover.missing_ranks.items()
        for rank in missing
    ]

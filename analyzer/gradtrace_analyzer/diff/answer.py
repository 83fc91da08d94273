"""What a diff has found: the verdict, the places where two runs part, and what is told beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gradtrace_analyzer.diff.code.legal_changes import LossScale, SetAside
from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.diff.divided.part_sums import PartSums
from gradtrace_analyzer.diff.explanations.explanation import Explanation
from gradtrace_analyzer.diff.findings.unseen import Unseen
from gradtrace_analyzer.diff.names.renames import Rename
from gradtrace_analyzer.diff.note import Note
from gradtrace_analyzer.diff.origin import NonfiniteOrigin, Origin
from gradtrace_analyzer.diff.origins.chain_rows import ChainRow
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.diff.tolerances.noise import Noise
from gradtrace_analyzer.diff.verdict import Verdict
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.numerics.tolerance import Rule

_Explanation = TypeVar("_Explanation", bound=Explanation)


@dataclass(frozen=True)
class Answer:
    """What a diff has found: what `reports` make text and JSON of."""

    verdict: Verdict
    # Why nothing can be said, where it is `incomparable`; else empty.
    reason: str
    # Where the runs part, the first first; empty where they do not.
    origins: tuple[Origin, ...]
    # What ranks without an origin of their own first inherit.
    inherited: tuple[Origin, ...]
    cover: Cover
    # What is set otherwise, the most telling first: name, value on both sides, whether numbers may change by it.
    configuration: tuple[Mapping[str, Any], ...] = ()
    # What one side alone has.
    structure: tuple[OneSided, ...] = ()
    # For each rank and link the first step that differs and where, how many rows do, the largest error.
    spread: tuple[Mapping[str, Any], ...] = ()
    # What a person should know before they believe the answer: sentences, or what they are made of.
    notes: tuple[str | Note, ...] = ()
    # What lies in front of the first origin and was not compared.
    unseen: tuple[Unseen, ...] = ()
    # The first difference of all, where the first origin is only the first beyond tolerance.
    first_bits: Origin | None = None
    # Exceptions that left a backward pass on one side alone.
    failures: tuple[OneSidedFailure, ...] = ()
    # The first value that is finite on one side alone, where no origin says so.
    first_nonfinite: NonfiniteOrigin | None = None
    # What may explain the origins, in the order in which it is told.
    explanations: tuple[Explanation, ...] = ()
    # Renames that were applied, and what else names and shapes suggest.
    renames: tuple[Rename, ...] = ()
    likely_renames: tuple[Rename, ...] = ()
    # What of the origins' step differs nowhere: ranks, links, modules.
    equal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The rows around the first origin, where these were asked for.
    chain: tuple[ChainRow, ...] = ()
    # Where the tolerances come from: the rule, or the noise that was measured.
    rule: Rule | None = None
    noise: Noise | None = None
    # What was compared in place of rows, where the work is divided otherwise.
    sums: PartSums | None = None
    # Rows of one side alone that change nothing.
    aside: tuple[SetAside, ...] = ()
    # Loss scales that were divided out.
    scaled: tuple[LossScale, ...] = ()

    def explanation(self, kind: type[_Explanation]) -> _Explanation | None:
        """The explanation of that type, where there is one."""
        return next((one for one in self.explanations if isinstance(one, kind)), None)

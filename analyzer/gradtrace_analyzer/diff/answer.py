"""What a diff has found: the places where two runs part, what is inherited from them, and the verdict.

Ranks meet only where gradients are reduced: a rank that first differs there has inherited it from one that
differed before. Which rows are origins is told by `firsts` and `origins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradtrace_analyzer.diff.code.rewritten import Aside, Scaled
from gradtrace_analyzer.diff.code.structure import Lone
from gradtrace_analyzer.diff.divided.sums import Repartitioned
from gradtrace_analyzer.diff.findings.repeated import Repeated
from gradtrace_analyzer.diff.names.renames import Rename
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.origins.chain_rows import Passage
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.diff.tolerances.noise import Noise
from gradtrace_analyzer.failures.failed_passes import Failure
from gradtrace_analyzer.numerics.tolerance import Rule

Verdict = Literal["identical", "within_tolerance", "different", "incomparable"]


@dataclass(frozen=True)
class Answer:
    """What a diff has found. `equal` is what of the origins' step does not differ anywhere: ranks, links, modules;
    `chain` the rows around the first origin, where these were asked for. `causes` are counts that explain its factor,
    `deaths` sentences on what stopped a rank, where the first origin is what it did not come to do.

    `unseen` is what lies in front of the origin and was not compared. `first_bits` is the first difference of
    all, where the origin is only the first beyond tolerance. `failures` are the exceptions that left a backward
    pass on one side alone, `first_nonfinite` the first value that is finite on one side alone, `repeated` the
    Nodes that a pass of one side alone ran again, with a multiple of what arrived before. `renames` are those that
    were applied, `likely_renames` what else names and shapes suggest; `causes` may explain the first origin's factor.
    `rule` and `noise` are where the tolerances come from, `sums` what was compared where the work is divided
    otherwise, `aside` the rows of one side alone that change nothing, `scaled` the loss scales that were divided out.
    """

    verdict: Verdict
    reason: str
    origins: tuple[Origin, ...]
    inherited: tuple[Origin, ...]
    cover: Cover
    configuration: tuple[Mapping[str, Any], ...] = ()
    structure: tuple[Lone, ...] = ()
    spread: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    first_bits: Origin | None = None
    failures: tuple[Failure, ...] = ()
    first_nonfinite: Origin | None = None
    repeated: tuple[Repeated, ...] = ()
    renames: tuple[Rename, ...] = ()
    likely_renames: tuple[Rename, ...] = ()
    causes: tuple[str, ...] = ()
    equal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chain: tuple[Passage, ...] = ()
    deaths: tuple[str, ...] = ()
    rule: Rule | None = None
    noise: Noise | None = None
    sums: Repartitioned | None = None
    aside: tuple[Aside, ...] = ()
    scaled: tuple[Scaled, ...] = ()

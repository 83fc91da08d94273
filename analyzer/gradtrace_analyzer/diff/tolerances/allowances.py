"""What is allowed for beyond the rule of rounding, each with its rule, its reason, and what it pays for.

`expression` gives the SQL of each for a judged query; switched off, what stands `without` it: so an ablation is one
argument (`Judgement(without=...)`, `scripts/accuracy --ablation`). The aliases in a rule are those of judged_links.sql,
judged_parameters.sql and judged_inputs.sql; its numbers are in braces, of `numerics/model.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES

# Wider than any tolerance: where a limit is switched off, or has nothing to go by.
_NO_LIMIT = "1e9"


@dataclass(frozen=True)
class Allowance:
    """One of them: its `rule` in SQL and the expression that stands `without` it; `why`; and its `ablation`: what is
    lost without it, as docs/internals/accuracy.md ("Allowances, one at a time") has it, or the test that shows it."""

    name: str
    rule: str
    without: str
    why: str
    ablation: str


ALLOWANCES = (
    Allowance(
        "drift",
        "({growth} * ((1 + coalesce(g.weights, 0)) ** {layers} - 1))",
        "0",
        "Parameters that differ before the step change every output: (1 + d)^D - 1 for a change d in each of D layers.",
        "Without it a sound run in bf16 is a false alarm, and a fault is placed elsewhere.",
    ),
    Allowance(
        "drift_backward",
        "({growth} * coalesce(g.forward, 0))",
        "0",
        "Where parameters drifted, a gradient is taken at another place: as far off as the forward shows.",
        "Without it a fault in bf16 is placed elsewhere.",
    ),
    Allowance(
        "seen_noise",
        "coalesce(r.layer + {scale} * {seen} * w.change, 1e9)",
        _NO_LIMIT,
        "A limit: the forward of the step shows how large the noise of this model in this arithmetic is.",
        "It marks rows in the table and changes no answer; test_held_rows.py has its case.",
    ),
    Allowance(
        "normalisations",
        "coalesce(k.times, 1)",
        "1",
        "What a normalisation's backward leaves of a gradient carries the rounding of all that came in.",
        "No pair of the table asks for it; test_amplification.py has its case.",
    ),
    Allowance(
        "kinks",
        "coalesce(f.extra, 0)",
        "0",
        "Rounding carries elements over a kink, and with each a whole element of the gradient.",
        "Without it two faults in bf16 are placed elsewhere.",
    ),
    Allowance(
        "unsteady_nodes",
        "coalesce(u.extra, 0)",
        "0",
        "A Node that disagrees with itself when it is run again (atomic additions) does so between runs too.",
        "No pair of the table asks for it; test_amplification.py has its case.",
    ),
    Allowance(
        "noise_floor",
        "({noise_floor} * l.norm)",
        "0",
        "A gradient far below its step's largest may be what is left of a cancellation: it has no relative error.",
        "No pair of the table asks for it; test_judgement.py has its case.",
    ),
    Allowance(
        "flat_sums",
        "CASE WHEN s.is_flat THEN a.norm ELSE 0 END",
        "0",
        "A bias in front of a normalisation has no gradient but rounding: it is held against what it was summed from.",
        "Without it a sound run is a false alarm, and a fault is placed elsewhere.",
    ),
    Allowance(
        "decisive_estimates",
        f"CASE len(d.{{role}}_c_sketch) WHEN {NODE_SKETCH_LANES} THEN {{decisive_of_nodes}} "
        f"WHEN {SKETCH_LANES} THEN {{decisive_of_sketches}} ELSE 1 END",
        "1",
        "An error is estimated from a few lanes: a verdict rests on what is sure.",
        "It marks rows in the table and changes no answer; test_judgement.py has its case.",
    ),
    Allowance(
        "lengths",
        "(abs({role_gain}) * {writes_share} > {length})",
        "false",
        "Rounding turns a vector further than it lengthens it: a factor near one shows in a norm alone.",
        "It marks rows in the table and changes no answer; test_lengths.py has its case.",
    ),
    Allowance(
        "usual_gain",
        "coalesce({usual_times} * q.gain, 1e9)",
        _NO_LIMIT,
        "A limit: by how much the step's other Nodes, or modules, lengthen what they hand on.",
        "No pair of the table asks for it; test_lengths.py has its case.",
    ),
    Allowance(
        "steady_factors",
        "s.least",
        "NULL::DOUBLE",
        "The same lengthening time after time is no rounding, however small it is.",
        "No pair of the table asks for it; test_lengths.py has its case.",
    ),
    Allowance(
        "turned_signs",
        "share_of_signs(e.error)",
        "share_in_proportion(e.error)",
        "An adaptive optimizer makes a whole step of the sign of a gradient that is all rounding.",
        "Without it four sound runs of 12 are false alarms, and four faults are placed elsewhere.",
    ),
    Allowance(
        "flat_updates",
        "CASE WHEN s.is_flat THEN {unjudged} END",
        "NULL",
        "Of flat parameters (a bias in front of a softmax) any share of such an update may be rounding.",
        "Without it two sound runs are false alarms, and a fault is placed elsewhere.",
    ),
    Allowance(
        "carried_differences",
        "coalesce(before.was, 0)",
        "0",
        "What differed before the step is no new difference after it.",
        "It marks rows in the table and changes no answer; test_updates.py has its case.",
    ),
    Allowance(
        "rounded_once",
        "CASE WHEN d.writes_b_dtype <> d.writes_c_dtype "
        "THEN rounded_once(roundoff(d.writes_b_dtype), roundoff(d.writes_c_dtype)) ELSE 0 END",
        "0",
        "What is given in another dtype was rounded to it.",
        "No pair of the table asks for it; test_updates.py has its case.",
    ),
    Allowance(
        "wider_statistics",
        "({wider_statistics} * {rule_forward})",
        "{rule_forward}",
        "A running statistic averages what may cancel.",
        "No pair of the table asks for it; test_updates.py has its case.",
    ),
    Allowance(
        "drifted_statistics",
        "({statistics_growth} * coalesce(g.weights, 0))",
        "0",
        "A statistic of the last steps differs as the parameters of those steps did.",
        "No pair of the table asks for it; test_updates.py has its case.",
    ),
)
NAMES = tuple(allowance.name for allowance in ALLOWANCES)
_BY_NAME = {allowance.name: allowance for allowance in ALLOWANCES}


def expression(name: str, without: Collection[str] = (), **filled: object) -> str:
    """The SQL of one, or what stands in its place where it is among those to do `without`."""
    allowance = _BY_NAME[name]
    text = allowance.without if name in without else allowance.rule
    return text.format(**{**MODEL.as_text(), **filled})

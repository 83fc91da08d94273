"""The tolerance model: every number of the rule and of its allowances, each with where it comes from.

Nothing else in the analyzer writes one of them: Python takes `MODEL.growth`, a .sql file `{growth}` (`sql.derived`).
It lies here, below the rooms that judge, since pairing sieves large runs by the same numbers. What is no choice (the
unit roundoff of a format) stands in `tolerance.py`, with the rule that is made of both; which allowance uses which
number in `diff/tolerances/allowances.py`, with what each pays for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

SOURCE, MEASURED, REASONED = "source", "measured", "reasoned"


def _number(value: float, kind: str, why: str) -> Any:
    """A field of the model: its value, and what kind of ground it stands on."""
    return field(default=value, metadata={"kind": kind, "why": why})


@dataclass(frozen=True)
class Model:
    """All numbers. `grounds` says of each whether it is taken from a source, measured, or reasoned, and how.

    `measured` is said of numbers that were chosen on recordings of `scripts/accuracy` made with other seeds than those
    it publishes.
    """

    # The rule.
    confidence: float = _number(
        3.0,
        SOURCE,
        "Higham and Mary 2019, theorem 2.4: lambda sqrt(n) u fails with 2 exp(-lambda^2 / 2), 0.02 at 3",
    )
    norm_parts: float = _number(
        3.0,
        REASONED,
        "of a relative error r a norm of n independent parts sees r / sqrt(n); few parts are sure",
    )

    # How sure an estimate must be. A sketch of L lanes has the standard error sqrt(1 / (2 L)).
    decisive_of_nodes: float = _number(
        4.0, REASONED, "4 lanes err by 0.37: a quarter to four times is no evidence"
    )
    decisive_of_sketches: float = _number(
        1.5, REASONED, "16 lanes err by 0.18: 1.5 is over two standard errors"
    )
    decisive_of_sums: float = _number(
        3.0, MEASURED, "where norm and sum of a whole are all that there is"
    )
    fewest_numbers: int = _number(
        64, REASONED, "a norm of fewer numbers says little of what lengthens them"
    )

    # What is the same value, added up or rounded in another way.
    as_added_up: float = _number(
        1e-6, MEASURED, "two ways to add up one norm differ by at most this share"
    )
    of_terms: float = _number(
        1.2e-7, SOURCE, "float32's distance from 1 to the next number, for terms that cancel"
    )
    rounded_once: float = _number(
        1.01, REASONED, "rounding errs by one unit at most; a little for the estimate"
    )

    # What grows: by drift, or with the noise that the forward shows.
    growth: float = _number(
        4.0, MEASURED, "how much more one link shows of a relative change of the weights"
    )
    seen: float = _number(
        8.0, MEASURED, "how many times the forward's noise a backward pass may show"
    )
    noise_floor: float = _number(
        1e-3, MEASURED, "below this share of the step's largest a gradient may have cancelled"
    )

    # Where rounding is amplified.
    most_amplified: float = _number(
        1e4, REASONED, "a bound, so that a normalisation of zeros amplifies not all"
    )
    flipped: float = _number(
        0.64, REASONED, "of normal numbers with a relative error m about 0.64 m change their sign"
    )
    fewest_flipped: float = _number(
        0.01, REASONED, "where less of an element is to be expected, none is allowed for"
    )
    more_flipped: float = _number(
        2.0, REASONED, "elements above the expectation: the count is one of few"
    )
    kink_times: float = _number(2.0, MEASURED, "times the root of the share of elements that turn")
    replayed: float = _number(
        4.0, REASONED, "two replays are one draw each of the same scatter, from 4 lanes"
    )

    # Lengths.
    usual_of_nodes: float = _number(
        10.0,
        MEASURED,
        "13 at most in sound runs of six models, then within the rule",
    )
    usual_of_modules: float = _number(
        32.0, MEASURED, "38 medians at most there, then within the rule"
    )
    fewest_gains: int = _number(6, REASONED, "what is usual needs a few that show noise")
    steady_times: int = _number(4, REASONED, "four alike to a thousandth: once in 1e9 by chance")
    steady_alike: float = _number(1e-3, REASONED, "share of the factor by which they may differ")
    least_factor: float = _number(
        5e-4, REASONED, "what is given to 1e-7 is not the same to a thousandth below it"
    )
    as_constant: float = _number(
        2.0, REASONED, "a constant rounded to the dtype is off by up to a unit a side"
    )
    steady_rounded: float = _number(
        4.0, REASONED, "units by which a norm of n numbers is rounded, over sqrt(n)"
    )
    most_steady: float = _number(
        0.25, REASONED, "where more come back it is the same batch at every step"
    )

    # Updates.
    updated: float = _number(1e-3, MEASURED, "what of an update may be new without a cause")
    unjudged: float = _number(
        2.5, REASONED, "an update and its opposite are 2 apart, with the estimate's error"
    )
    update_roundings: float = _number(
        8.0, REASONED, "roundings of a parameter in one update, however small that is"
    )
    passed_on: float = _number(
        4.0, MEASURED, "an error's growth from a gradient to what plain SGD makes of it"
    )
    turned: float = _number(
        1.6,
        REASONED,
        "four times the share of normal numbers below a relative error",
    )
    turned_times: float = _number(
        6.0, MEASURED, "times the step that so turns around by expectation"
    )

    # What a step is given.
    wider_statistics: float = _number(
        64.0, MEASURED, "a running statistic averages what may cancel"
    )
    statistics_growth: float = _number(
        4.0, MEASURED, "how much more than the parameters a statistic may have drifted"
    )

    # Noise that was measured from repeats.
    scatter: float = _number(
        4.0, REASONED, "ratio of two draws of one noise: few parts, and both sketches' errors"
    )

    def grounds(self) -> dict[str, tuple[float, str, str]]:
        """Of each number its value, the kind of ground, and the ground."""
        return {
            f.name: (getattr(self, f.name), f.metadata["kind"], f.metadata["why"])
            for f in fields(self)
        }

    def as_text(self) -> dict[str, str]:
        """Each number as it is written in SQL."""
        return {f.name: str(getattr(self, f.name)) for f in fields(self)}


MODEL = Model()

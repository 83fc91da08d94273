"""What a plug-in is that explains origins: what it is given, and the frozen value that it gives.

What an explanation says in words is not told here: `reports/diff/explanations` has one template for each type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import duckdb

from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.origins.independent import Join
from gradtrace_analyzer.diff.origins.step_reader import StepReader
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.runs.run import Run

# What was paired: rows of the same rank, rows of the same stage, or sums over the parts of work that is divided
# otherwise.
Paired = Literal["ranks", "stages", "sums"]
EVERYTHING: frozenset[Paired] = frozenset({"ranks", "stages", "sums"})


@dataclass(frozen=True)
class Context:
    """What is known when the origins of a step have been found.

    On `connection` lie the views of both sides and the tables `differing_<table>`; `reader` reads what else the step
    of the origins holds. `spread` tells for each rank and link the first step that differs, `may_differ` of a table
    whether any row of it may differ at all.
    """

    connection: duckdb.DuckDBPyConnection
    runs: Mapping[str, Run]
    cover: Cover
    # The first is the answer's; there is at least one.
    origins: tuple[Origin, ...]
    reader: StepReader
    failures: Sequence[OneSidedFailure]
    spread: Sequence[Mapping[str, Any]]
    paired: Paired
    may_differ: Callable[[str], bool]


@dataclass(frozen=True)
class Explanation:
    """What a plug-in has found. Each has a type of its own, and holds no sentence."""

    def onto(self, origins: tuple[Origin, ...]) -> tuple[Origin, ...]:
        """The origins with what of it is told of one of them; all as they are where it is told beside them."""
        return origins


class Explain(Protocol):
    """What a plug-in does."""

    def __call__(self, context: Context, /) -> Explanation | None:
        """What explains the origins; None where nothing of that kind does."""


@dataclass(frozen=True)
class Explainer:
    """A plug-in: what type of explanation it `gives`, how, and when it is asked.

    It is asked only where an origin lies at one of `links`, and of what is `paired` so. One that `joins` has been asked
    before, while the origins were looked for, which of them are one.
    """

    gives: type[Explanation]
    explain: Explain
    links: frozenset[str] = frozenset(LINKS)
    paired: frozenset[Paired] = EVERYTHING
    joins: Join | None = None

    def is_asked(self, context: Context) -> bool:
        """Whether it can speak of these origins."""
        return context.paired in self.paired and any(o.link in self.links for o in context.origins)

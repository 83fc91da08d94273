"""What of two runs a person wants compared: one step, some ranks, modules or links; all of it where nothing is said."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gradtrace_analyzer.diff.links import LINKS, LinkTable
from gradtrace_analyzer.errors import GradtraceError
from gradtrace_analyzer.sql.views import text_literal
from gradtrace_analyzer.words.numbers import StepWords, noun, ranks_phrase, step_phrase

# Links that have rows of their own: the others are told from these.
CHOOSABLE = tuple(link for link in LINKS if link not in ("configuration", "rng", "structure"))

_RANKS = re.compile(r"(\d+)(?:-(\d+))?")


class BadSelection(GradtraceError):
    """What was asked for cannot be read."""


@dataclass(frozen=True)
class Selection:
    """What to compare. `ranks` is None for all; the others are empty for all."""

    step: int | None = None
    ranks: tuple[tuple[int, int], ...] | None = None
    modules: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def is_all(self) -> bool:
        """Whether nothing was asked for: all of both runs is compared."""
        return self == Selection()

    def wants_rank(self, rank: int) -> bool:
        """Whether this rank was asked for, or no ranks were named."""
        return self.ranks is None or any(first <= rank <= last for first, last in self.ranks)

    def wants_step(self, step: int) -> bool:
        """Whether this step was asked for, or no step was named."""
        return self.step is None or step == self.step

    def wants_link(self, link: str) -> bool:
        """Whether this link was asked for, or no links were named."""
        return not self.links or link in self.links

    def wants_module(self, fqn: str) -> bool:
        """Whether a module is compared: it, or one around it, matches."""
        return not self.modules or any(
            fnmatch.fnmatchcase(fqn, pattern) or fnmatch.fnmatchcase(fqn, f"{pattern}.*")
            for pattern in self.modules
        )

    @property
    def phrase(self) -> str:
        """`step 3; rank 1; modules blocks.1*; links backward, bucket`."""
        return self.told()

    def told(self, step_words: StepWords = step_phrase) -> str:
        """The same, in which `step_words` say the step."""
        parts = [] if self.step is None else [step_words(self.step)]
        if self.ranks is not None:
            parts.append(ranks_phrase(self.listed_ranks))
        for one, names in (("module", self.modules), ("link", self.links)):
            if names:
                parts.append(f"{noun(len(names), one)} {', '.join(names)}")
        return "; ".join(parts)

    @property
    def listed_ranks(self) -> list[int]:
        """The ranks that were asked for, ascending; empty where all are compared."""
        spans = self.ranks or ()
        return sorted({rank for first, last in spans for rank in range(first, last + 1)})

    def condition(self, table: LinkTable, prefix: str = "") -> str:
        """True, in SQL, for the rows of a table that are compared; `prefix` is that of its key's columns."""
        terms = [] if self.step is None else [f"step = {self.step}"]
        if self.ranks is not None:
            either = " OR ".join(f"rank BETWEEN {first} AND {last}" for first, last in self.ranks)
            terms.append(f"({either})")
        if self.links:
            terms.append(self._links(table, prefix))
        if self.modules:
            terms.append(self._modules(table, prefix))
        return " AND ".join(terms) or "true"

    def _links(self, table: LinkTable, prefix: str) -> str:
        if table.link is not None:
            return "true" if table.link in self.links else "false"
        points = [point for point, link in table.points.items() if link in self.links]
        return f"{prefix}point IN ({', '.join(map(text_literal, points))})" if points else "false"

    def _modules(self, table: LinkTable, prefix: str) -> str:
        if table.module is None:
            return "false"
        module = table.module.format(prefix)
        either = (
            f"{module} GLOB {text_literal(pattern)} OR {module} GLOB {text_literal(pattern + '.*')}"
            for pattern in self.modules
        )
        return f"coalesce({' OR '.join(either)}, false)"


def chosen(
    step: int | None = None,
    ranks: str | None = None,
    modules: Sequence[str] = (),
    links: Collection[str] = (),
) -> Selection:
    """What the options ask for. Raises BadSelection."""
    if any(not pattern for pattern in modules):
        raise BadSelection(
            "--module is empty; give a module's dotted name or a glob, such as 'blocks.1*'"
        )
    spans = (
        None if ranks is None else tuple(_span(part.strip(), ranks) for part in ranks.split(","))
    )
    return Selection(step, spans, tuple(modules), tuple(link for link in LINKS if link in links))


def _span(part: str, whole: str) -> tuple[int, int]:
    found = _RANKS.fullmatch(part)
    last = int(found[2] or found[1]) if found is not None else -1
    if found is None or last < int(found[1]):
        raise BadSelection(f"--rank is {whole!r}, of which {part!r} is no rank; write 3 or 0,4-7")
    if last - int(found[1]) > 1_000_000:
        raise BadSelection(f"--rank is {whole!r}, which are more ranks than any job has")
    return int(found[1]), last

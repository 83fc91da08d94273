"""Words that the laws' sentences share."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str | None], shown: int = 1) -> str:
    """`head.weight and 5 more`; a parameter that no root owned is null in the records."""
    said = [name or "a parameter without a name" for name in names]
    if len(names) <= shown:
        return " and ".join(said)
    return f"{', '.join(said[:shown])} and {len(names) - shown} more"


def bucket_phrase(step: int, bucket_index: int, parameter_fqns: Sequence[str | None]) -> str:
    """`Step 0, bucket 0 (head.weight and 5 more)`."""
    return f"Step {step}, bucket {bucket_index} ({listed(parameter_fqns)})"


def module_phrase(module_fqn: str | None) -> str:
    """A module's name in a sentence."""
    if module_fqn is None:
        return "code outside any module"
    return module_fqn or "the root module"


def upper_first(text: str) -> str:
    """The text with a capital in front, names after it left as they are."""
    return text[:1].upper() + text[1:]

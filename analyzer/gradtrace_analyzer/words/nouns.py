"""What things are called in a sentence: sides, modules, buckets, names in a row."""

from __future__ import annotations

from collections.abc import Sequence

from gradtrace_analyzer.words.numbers import and_more

# The two runs of a comparison. They are schemas of its connection, too.
BASELINE, CANDIDATE = SIDES = ("baseline", "candidate")

# What is run in no module's forward, such as the loss's own code.
OUTSIDE = "code outside any module"


def other_side(side: str) -> str:
    """`candidate` of `baseline`, and the other way round."""
    return BASELINE if side == CANDIDATE else CANDIDATE


def module_phrase(module_fqn: str | None, root_name: str | None = None) -> str:
    """`blocks.0`, or `blocks.0 of root 1 (Net)` where there are several roots and `root_name` tells which.

    A name of numbers alone, as an `nn.Sequential` gives them, is `module 0`.

    None is code outside any module, '' the root itself.
    """
    if module_fqn is None:
        return OUTSIDE
    if not module_fqn:
        return root_name or "the root module"
    name = f"module {module_fqn}" if module_fqn.replace(".", "").isdigit() else module_fqn
    return name if root_name is None else f"{name} of {root_name}"


def module_with_noun(module_fqn: str | None) -> str:
    """`module blocks.0`; else as `module_phrase`."""
    return f"module {module_fqn}" if module_fqn else module_phrase(module_fqn)


def listed(names: Sequence[str | None], shown: int = 1) -> str:
    """`head.weight and 5 more`; a parameter that no root owned is null in the records."""
    said = [name or "a parameter without a name" for name in names]
    if len(names) <= shown:
        return " and ".join(said)
    return ", ".join(said[:shown]) + and_more(len(names) - shown)


def enumerated(names: Sequence[str], shown: int) -> str:
    """`a`, `a, b and c`, or `a, b and 3 more` where two are `shown`; nothing where there are none."""
    said = [*names[:shown], *([f"{len(names) - shown} more"] if len(names) > shown else [])]
    return ", ".join((*said[:-2], " and ".join(said[-2:]))) if said else ""


def bucket_name(bucket_index: int | None, parameters: str) -> str:
    """`bucket 0 (head.weight and 5 more)`."""
    return f"bucket {bucket_index} ({parameters})"


def bucket_phrase(step: int, bucket_index: int, parameter_fqns: Sequence[str | None]) -> str:
    """`Step 0, bucket 0 (head.weight and 5 more)`."""
    return f"Step {step}, {bucket_name(bucket_index, listed(parameter_fqns))}"


def upper_first(text: str) -> str:
    """The text with a capital in front, names after it left as they are."""
    return text[:1].upper() + text[1:]

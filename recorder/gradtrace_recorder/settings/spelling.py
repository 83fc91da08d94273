"""What was probably meant by a name that there is not. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def near(name: str, known: Iterable[str], most: int = 1) -> Sequence[str]:
    """Of the known names those that are spelt like this one, large or small, the likeliest first."""
    import difflib

    as_known = {one.lower(): one for one in known}
    name = name.lower()
    found = difflib.get_close_matches(name, list(as_known), n=most, cutoff=0.6)
    if not found and name:  # shortened, or written out: DIRECTORY
        found = [one for one in as_known if one and (name.startswith(one) or one.startswith(name))]
    return [as_known[one] for one in found[:most]]


def meant(name: str, known: Sequence[str], prefix: str = "") -> str:
    """`is GRADTRACE_SUMMARY meant?`, or all that there are. `prefix` stands before every name, and is left out here."""
    found = near(name, known)
    if found:
        return f"is {prefix}{found[0]} meant?"
    return f"there are {', '.join(prefix + one for one in known)}"

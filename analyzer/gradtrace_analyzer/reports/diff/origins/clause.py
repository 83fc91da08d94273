"""What every template of an origin's sentence is: a clause for one kind, to follow `Step 3, rank 1: `."""

from __future__ import annotations

from functools import singledispatch

from gradtrace_analyzer.diff.origin import Origin, Rescaled
from gradtrace_analyzer.reports.diff.wording import Wording
from gradtrace_analyzer.words.numbers import and_more


@singledispatch
def clause(origin: Origin, say: Wording) -> str:
    """What differs, how much, what of all before it is equal, and so what is to blame: with its full stop.

    Dispatches on the origin's kind; a module of this package registers each. Raises TypeError for one without.
    """
    raise TypeError(f"no template tells of {type(origin).__name__}")


def factor_end(origin: Origin, rescaled: Rescaled | None) -> str:
    """What stands around a factor: the forward that it does not come from, and where it ends."""
    return _aside(origin) + _rescaled(origin, rescaled)


def _aside(origin: Origin) -> str:
    """That a forward before the origin differs, which no backward pass followed."""
    d = origin.aside
    if d is None:
        return ""
    return (
        f" (Call {d.key['call_index']} of the root module before it read other values; no backward() followed "
        "that call, and one factor explains the rest.)"
    )


def _rescaled(origin: Origin, found: Rescaled | None) -> str:
    """Where the origin's factor ends, because .grad was changed outside backward."""
    if found is None:
        return ""
    how = "changed" if found.times is None else f"multiplied by {found.times:.4g}"
    where = "one of the runs alone" if found.side is None else f"the {found.side} alone"
    what = (
        "microbatches" if origin.difference.key.get("backward_index") is None else "backward passes"
    )
    return (
        f" That factor ends between {what} {found.after} and {found.backward_index}: there the .grad "
        f"of {found.parameter_fqn}{and_more(found.others)} was {how} outside backward, in {where}."
    )

"""Record a few lines of torch in this process, and read the rows back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradtrace_recorder
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect


@contextlib.contextmanager
def recording(directory: Path, **settings: Any) -> Iterator[None]:
    """Record what the block does. Our own failures raise unless `strict=False`."""
    gradtrace_recorder.start(str(directory), **{"strict": True, "quiet": True, **settings})
    try:
        yield
    finally:
        gradtrace_recorder.stop()


def rows(directory: Path, query: str) -> list[tuple[Any, ...]]:
    """The answer of a query over the run's tables."""
    run = open_run(directory)
    assert run.notices == (), run.notices
    with contextlib.closing(connect([run])) as connection:
        return connection.execute(query).fetchall()


def rank_of(directory: Path) -> dict[str, Any]:
    """The json of the only rank of a run that was not started twice."""
    found: dict[str, Any] = json.loads((directory / "ranks" / "rank=00000-0.json").read_text())
    return found

"""The actions of a small pipeline as the recorder would write them, for tests to break in one place.

Two steps of three microbatches; what one stage receives is what its neighbour has sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.data_parallel import Rows

MICROBATCHES, STEPS = 3, 2


def handed(what: str, copy: int, stage: int, step: int, microbatch: int) -> Any:
    """What crosses the boundary behind a stage, one way or the other."""
    seed = [len(what), copy, stage, step, microbatch]
    return np.random.default_rng(seed).standard_normal(12).astype(np.float32)


def pipeline(
    copies: int = 1, stages: int = 2, *, equal_copies: bool = False, runs: int = 1
) -> Rows:
    """The actions of so many copies of a pipeline; stage s of copy c is on rank s * copies + c."""
    found = [
        {**row, "rank": stage * copies + copy}
        for copy in range(copies)
        for stage in range(stages)
        for row in actions(0 if equal_copies else copy, stage, stages, runs)
    ]
    passes = [
        {"rank": rank, "step": step, "backward_index": 0, "kind": "backward"}
        for rank in range(copies * stages)
        for step in range(STEPS)
    ]
    # That they exist says that the optimizer was reached.
    final = [{**row, "root": 0, "parameter_fqn": "weight", "point": "final"} for row in passes]
    for row in final:
        del row["kind"]
    return {"stage_events": found, "backward_passes": passes, "gradients": final}


def actions(copy: int, stage: int, stages: int, runs: int) -> Iterator[dict[str, Any]]:
    for step in range(STEPS):
        for run in range(runs):
            for microbatch in range(MICROBATCHES):
                place = (copy, stage, step, microbatch + 10 * run)
                before = (copy, stage - 1, *place[2:])
                same = {
                    "step": step,
                    "microbatch": microbatch,
                    "stage_index": stage,
                    "occurrence": run,
                    "start_ns": 100 * step + microbatch,
                    "end_ns": 100 * step + microbatch,
                }
                forward: dict[str, Any] = {**same, "kind": "forward"}
                backward: dict[str, Any] = {**same, "kind": "backward_full"}
                if stage > 0:
                    forward |= summary_columns(handed("forth", *before), "received_")
                    backward |= summary_columns(handed("back", *before), "sent_")
                if stage < stages - 1:
                    forward |= summary_columns(handed("forth", *place), "sent_")
                    backward |= summary_columns(handed("back", *place), "received_")
                yield forward
                yield backward


def row_of(rows: Rows, **place: Any) -> dict[str, Any]:
    """The only action that holds these values."""
    (row,) = [r for r in rows["stage_events"] if all(r[k] == v for k, v in place.items())]
    return row


def without(rows: Rows, **place: Any) -> Rows:
    """The rows but for the only action that holds these values."""
    gone = row_of(rows, **place)
    return {**rows, "stage_events": [row for row in rows["stage_events"] if row is not gone]}

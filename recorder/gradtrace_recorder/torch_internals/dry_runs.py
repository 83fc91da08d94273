"""Runs of the job's modules that are no training: a pipeline stage that finds out the shapes it will send.

Torch runs the stage once, forward and backward, on memory that nobody has written. What would be recorded of it
differs between equal runs.
"""

from __future__ import annotations

import sys
from typing import Any

from gradtrace_recorder.torch_internals.dynamo import never_compiled

_STAGE = "torch.distributed.pipelining.stage"

# 2.13 has the first two, older ones the third, of `_PipelineStageBase` and `PipelineStage`.
_INFERENCES = {"_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference"}


def is_dry_run() -> bool:
    """Whether the calling thread is inside such a run. One look-up where no pipeline was imported."""
    if _STAGE not in sys.modules:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _INFERENCES and frame.f_globals.get("__name__") == _STAGE:
            return True
        frame = frame.f_back
    return False


never_compiled(is_dry_run)

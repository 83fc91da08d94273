"""What a process that is not recorded says when it first calls the engine."""

from __future__ import annotations

import sys
from typing import Any

from gradtrace_recorder.guard import say
from gradtrace_recorder.torch_internals.standing import TOLD


def tell_at_first_backward(text: str) -> None:
    """Say this once, when the process calls the engine, and leave the engine alone from then on."""

    def pass_begins(args: Any, kwargs: Any) -> None:
        TOLD.forget()
        data = sys.modules.get("torch.utils.data")
        if data is None or data.get_worker_info() is None:
            say(text)

    TOLD.pass_begins = pass_begins

"""What a process that is not recorded says when it first calls the engine."""

from __future__ import annotations

import sys
from typing import Any

from torch.autograd import Variable

from gradtrace_recorder.call_sites import called_from
from gradtrace_recorder.dynamo import never_compiled
from gradtrace_recorder.guard import say


def tell_at_first_backward(text: str) -> None:
    """Say this once, when the process calls the engine, and leave the engine alone from then on."""
    original = Variable._execution_engine

    class TellingEngine(type(original)):  # type: ignore[misc]
        """The engine, of a process that is not recorded."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            Variable._execution_engine = original
            data = sys.modules.get("torch.utils.data")
            if data is None or data.get_worker_info() is None:
                say(text)
            return called_from(sys._getframe(1))(original.run_backward, args, kwargs)

    never_compiled(TellingEngine.run_backward, calls_the_job=True)
    Variable._execution_engine = TellingEngine()

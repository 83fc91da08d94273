"""What a call from outside any module was given: rows of `inputs`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.state.naming import ModuleName, unwrapped
from gradtrace_recorder.summaries.nested import named_tensors
from gradtrace_recorder.torch_internals.dynamo import never_compiled


class Inputs:
    """Knows the parameters of each class's `forward`. On the job's threads."""

    def __init__(self) -> None:
        self._signatures: dict[type, list[str]] = {}

    def record(
        self,
        recording: Recording,
        module: nn.Module,
        name: ModuleName,
        call_index: int,
        args: tuple[Any, ...],
    ) -> None:
        """Rows of the tensors that it was given by position, named by the parameters of its forward."""
        names = self._names_of(unwrapped(module))
        for position, argument in enumerate(args):
            own = names[position] if position < len(names) else f"args.{position}"
            for key, tensor in named_tensors(argument, own):
                summary = recording.summariser.of(tensor)
                recording.rows.input(name.root, call_index, key, tensor, summary)

    def record_named(
        self, recording: Recording, name: ModuleName, call_index: int, kwargs: dict[str, Any]
    ) -> None:
        """Rows of the tensors that it was given by name."""
        for key, tensor in named_tensors(kwargs):
            summary = recording.summariser.of(tensor)
            recording.rows.input(name.root, call_index, key, tensor, summary)

    def _names_of(self, module: nn.Module) -> list[str]:
        kind = type(module)
        names = self._signatures.get(kind)
        if names is None:
            try:
                parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
                positional = (
                    inspect.Parameter.POSITIONAL_ONLY,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                )
                names = [p.name for p in parameters if p.kind in positional]
            except (AttributeError, TypeError, ValueError):
                names = []
            self._signatures[kind] = names
        return names


never_compiled(Inputs)

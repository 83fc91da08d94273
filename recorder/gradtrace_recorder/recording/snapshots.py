"""Snapshots of a job's state at one point of a step: parameters, buffers, gradients, generators."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.state.naming import ParameterName
from gradtrace_recorder.summaries.values import FINGERPRINT, STATE
from gradtrace_recorder.torch_internals.modes import unseen
from gradtrace_schemas.summary import STATE_PENDING


def record_parameters_before(recording: Recording, root: int) -> None:
    """The root's parameters and buffers as its first forward of the step finds them."""
    _record_parameters(recording, "before", recording.names.tensors_of(root))


def record_parameters_after(
    recording: Recording, parameters: Iterable[tuple[ParameterName, torch.Tensor]]
) -> None:
    """Parameters as the optimizer left them."""
    _record_parameters(recording, "after", parameters)


def _record_parameters(
    recording: Recording, point: str, parameters: Iterable[tuple[ParameterName, torch.Tensor]]
) -> None:
    named = list(parameters)
    summaries = recording.summariser.of_each([tensor for _, tensor in named])
    for (name, tensor), summary in zip(named, summaries, strict=True):
        recording.rows.parameter(name, point, tensor, summary)


def record_gradients(
    recording: Recording,
    point: str,
    backward_index: int,
    microbatch: int,
    parameters: Iterable[tuple[ParameterName, torch.Tensor]],
) -> None:
    """What lies in `.grad` of these parameters now; those without a gradient leave no row."""
    held = [(name, tensor.grad) for name, tensor in parameters if tensor.is_leaf]
    named = [(name, gradient) for name, gradient in held if gradient is not None]
    summaries = recording.summariser.of_each([gradient for _, gradient in named])
    for (name, gradient), summary in zip(named, summaries, strict=True):
        recording.rows.gradient(name, point, backward_index, microbatch, gradient, summary)


def rng_fingerprint(recording: Recording) -> int | None:
    """Fingerprint of the states of the CPU's generator and, where CUDA is in use, of the current device's: both lie on
    the host, and reading changes neither."""
    with unseen():
        states = [torch.get_rng_state(), *_device_states()]
    summary = recording.summariser.of_all(states)
    if summary is None or summary[STATE] == STATE_PENDING:
        return None
    return int(summary[FINGERPRINT])


def _device_states() -> list[torch.Tensor]:
    try:
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return []
        return [torch.cuda.default_generators[torch.cuda.current_device()].get_state()]
    except RuntimeError:
        return []  # a generator that a graph holds, or a device that has failed

"""Constant tables on a device: sent without a wait, and waited for by streams alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class NoWorkspace(RuntimeError):
    """More streams than there are workspaces for."""


class Sent:
    """Tables that were sent to a device on one stream; another stream waits for them at its first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._kept: list[torch.Tensor] = []  # the copies read it, whenever the device comes to them
        self._event: Any = None
        self._waited: set[int] = set()

    def table(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """The table on the device, sent on the current stream."""
        host = torch.from_numpy(np.ascontiguousarray(values).copy())
        if not self._is_cuda:
            return host.to(self._device)
        host = host.pin_memory()
        self._kept.append(host)
        table = host.to(self._device, non_blocking=True)
        self._waited.add(torch.cuda.current_stream(self._device).cuda_stream)
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record()
        return table

    def wait(self) -> None:
        """Let the current stream wait until all tables are there. The thread waits for nothing."""
        if not self._is_cuda:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._waited:
            stream.wait_event(self._event)
            self._waited.add(stream.cuda_stream)

"""A small job for `analyzer doctor`: it trains for about a second, and says how long a step took.

Run as `python -m gradtrace_recorder.trial`, bare or with a GRADTRACE_DIR, as any script would be: it calls nothing of
the recorder's. Processor time of the thread, so that other work on the machine tells little.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import nn

_SECONDS = 0.6
_LEAST, _MOST = 8, 400
_WARM_UP = 3
_ROWS, _LENGTH, _WIDTH, _LAYERS = 8, 64, 128, 2
MODEL = f"a Transformer of {_LAYERS} layers, d={_WIDTH}, batch {_ROWS} x {_LENGTH}"


def trained() -> dict[str, object]:
    """Train it, and tell the median of the steps' processor time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, _LAYERS), nn.Linear(_WIDTH, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(_ROWS, _LENGTH, _WIDTH)
    labels = torch.randint(16, (_ROWS * _LENGTH,))
    times: list[int] = []
    began = time.monotonic()
    while len(times) < _LEAST + _WARM_UP or (
        time.monotonic() - began < _SECONDS and len(times) < _MOST
    ):
        start = time.thread_time_ns()
        optimizer.zero_grad()
        logits = model(inputs).flatten(0, 1)
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
        times.append(time.thread_time_ns() - start)
    counted = times[_WARM_UP:]
    return {
        "model": MODEL,
        "steps": len(counted),
        "step_ns": int(statistics.median(counted)),
        "least_ns": min(counted),
    }


if __name__ == "__main__":
    json.dump(trained(), sys.stdout)

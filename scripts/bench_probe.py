"""What mindstudio-probe's statistics cost a step of the example's GPT, for `scripts/bench peers`.

    GRADTRACE_BENCH_PROBE=/path/to/its/own/environment/bin/python scripts/bench peers

It pins other versions of what it needs than we do: hence an environment of its own, which has torch too.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train


def main(level: str, layers: int, width: int, heads: int, context: int, batch: int) -> None:
    """Print the ratio of a step under the probe to one under nothing: medians of alternated steps."""
    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context, "dropout": 0.0}
    model = train.GPT(train.Config(vocabulary=65, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens, labels = torch.randint(0, 65, (2, batch, context))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, labels.flatten()).backward()
        optimizer.step()

    with tempfile.TemporaryDirectory(prefix="gradtrace-bench-") as folder:
        chosen = {
            "task": "statistics", "dump_path": folder, "rank": [], "step": [], "level": level,
            "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        }  # fmt: skip
        path = Path(folder, "config.json")
        path.write_text(json.dumps(chosen))
        debugger = PrecisionDebugger(config_path=str(path))
        step()
        bare, seen = [], []
        for _ in range(5):
            began = time.perf_counter()
            step()
            between = time.perf_counter()
            debugger.start(model=model)
            step()
            debugger.stop()
            debugger.step()
            bare.append(between - began)
            seen.append(time.perf_counter() - between)
    print(f"ratio {statistics.median(seen) / statistics.median(bare):.3f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

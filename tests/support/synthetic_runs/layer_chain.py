"""Made-up runs of a chain of layers, of which it is known by how much any two of them differ, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace_schemas.summary import reference_summary
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES
from support.synthetic_runs.builder import build_run, summary_columns

Array = npt.NDArray[np.float32]
Place = tuple[int, str]  # step, module


def values(seed: int, count: int = 400) -> Array:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def noisy(array: Array, relative: float, seed: int, lanes: int = SKETCH_LANES) -> Array:
    """The array with an error in a random direction, of which sketches of so many lanes say that it is this large.

    It turns the array and does not lengthen it, but for the square of its own length.
    """
    if relative == 0:
        return array
    error = np.random.default_rng(1000 + seed).standard_normal(array.size)
    error -= array * (error @ array) / (array @ array)
    seen = np.asarray(reference_summary(error).sketch).reshape(-1, lanes).sum(axis=0)
    scale = relative * np.linalg.norm(array) / np.linalg.norm(seen)
    return np.asarray(array + error * scale, np.float32)


def layered_run(
    path: Path,
    *,
    steps: int = 3,
    layers: int = 4,
    shape: Sequence[int] = (20, 20),
    dtype: str | None = None,
    node_dtype: str | None = None,
    forward: float | Sequence[float] = 0.0,
    backward: float | Sequence[float] = 0.0,
    drift: float | Sequence[float] = 0.0,
    outputs: Mapping[Place, float] | None = None,
    at: Mapping[Place, float] | None = None,
    times: Mapping[Place, float] | None = None,
    same_noise: bool = False,
    exact_at: str | None = None,
    lengthens: float = 0.0,
    optimizer: str | None = None,
    seed: int = 0,
    prefix: str = "",
    **facts: Any,
) -> Path:
    """A chain of layers with a weight of this shape each.

    `forward`, `backward` and `drift` are relative errors of every output, gradient and parameter (of each step, where
    they are several); `outputs` and `at` those of one module's output, and of what leaves one Node; `times` multiplies
    what leaves a Node. With `same_noise` all steps err alike. Outputs and gradients claim to be kept in `dtype`,
    or the gradients alone in `node_dtype`.
    One Node, `exact_at`, hands on what it received; the others lengthen it by up to `lengthens`, at random.
    Of an `optimizer` the gradients that it saw are there too, as wrong as those of the Nodes.
    """
    forwards, backwards, drifts = (
        [x] * steps if isinstance(x, int | float) else list(x) for x in (forward, backward, drift)
    )
    rows: dict[str, list[dict[str, Any]]] = {
        "module_calls": [],
        "node_events": [],
        "parameters": [],
        "gradients": [],
        "optimizer_groups": [],
    }
    names = [f"{prefix}layer{n}" for n in range(layers)]
    record = 0

    def summarised(array: Array, name: str, lanes: int = 16) -> dict[str, Any]:
        columns = summary_columns(array, name, lanes)
        claimed = dtype or (node_dtype if name.startswith("grad") else None)
        return columns if claimed is None else {**columns, f"{name}dtype": claimed}

    def parameters(step: int, point: str, weights_of: int) -> None:
        nonlocal record
        for n, name in enumerate(names):
            record += 1
            error = drifts[min(weights_of, steps - 1)]
            weight = noisy(values(7000 + 50 * weights_of + n), error, 300 + seed + n)
            rows["parameters"].append(
                {"step": step, "record_index": record, "root": 0, "parameter_fqn": f"{name}.weight",
                 "point": point, "kind": "parameter", "shape": list(shape), **summary_columns(weight)}
            )  # fmt: skip

    for step in range(steps):
        drawn = seed + (0 if same_noise else 5000 * step)
        parameters(step, "before", step)
        for n, name in enumerate(names):
            record += 1
            out = (outputs or {}).get((step, name.removeprefix(prefix)), forwards[step])
            rows["module_calls"].append(
                {"step": step, "record_index": record, "root": 0, "module_fqn": name, "phase": "forward",
                 "call_index": 0, "module_class": "Linear", "depth": 1,
                 **summarised(noisy(values(100 + n), forwards[step] if n else 0.0, drawn + n), "input_"),
                 **summarised(noisy(values(101 + n), out, drawn + n + 1), "output_")}
            )  # fmt: skip
        for index, name in enumerate(reversed(names)):
            record += 1
            place = (step, name.removeprefix(prefix))
            error = (at or {}).get(place, backwards[step])
            arrived = noisy(values(200 + index), backwards[step], drawn + 20 + index, 4)
            left = noisy(values(201 + index), error, drawn + 21 + index, 4)
            if place[1] == exact_at:  # it hands on what it received, noise and all
                left = arrived
            factor = (times or {}).get(
                place, 1.0 + lengthens * np.random.default_rng(drawn + index).random()
            )
            left = left * np.float32(factor)
            rows["node_events"].append(
                {"step": step, "record_index": record, "backward_index": 0, "event_index": index, "root": 0,
                 "module_fqn": name, "call_index": 0, "node_name": "MmBackward0", "occurrence": 0,
                 "phase": "backward", "outcome": "ok",
                 **summarised(arrived, "grad_output_", NODE_SKETCH_LANES),
                 **summarised(left, "grad_input_", NODE_SKETCH_LANES)}
            )  # fmt: skip
        for n, name in enumerate(names if optimizer is not None else ()):
            record += 1
            gradient = noisy(values(400 + n), backwards[step], drawn + 40 + n)
            rows["gradients"].append(
                {"step": step, "record_index": record, "root": 0, "parameter_fqn": f"{name}.weight",
                 "backward_index": 0, "point": "final", "shape": list(shape), **summary_columns(gradient)}
            )  # fmt: skip
        parameters(step, "after", step + 1)
        if optimizer is not None:
            record += 1
            rows["optimizer_groups"].append(
                {"step": step, "record_index": record, "optimizer_index": 0, "group_index": 0,
                 "optimizer_class": optimizer, "learning_rate": 0.1}
            )  # fmt: skip
    return build_run(path, rows, rank_facts=facts or None)

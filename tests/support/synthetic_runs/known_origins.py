"""A data-parallel job with three heads on one trunk, computed here, with faults at any link: the rows that the
recorder would write, and which of the faults a reader of these rows can tell to be origins.

Every value carries the faults that it can have inherited from. A fault whose inputs carry none is an origin;
one behind another is not, since what it reads differs already.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from support.synthetic_runs.builder import summary_columns

Array = npt.NDArray[np.float32]
Rows = dict[str, list[dict[str, Any]]]

HEADS = ("left", "right", "spare")
BUCKETS = (("left.weight", "right.weight"), ("trunk.weight",), ("spare.weight",))
STEP = 1  # the step of all faults
SETTINGS = {"optimizer_class": "SGD", "hyperparameters": "{}"}

PLACES = (
    *(f"{kind} {name}" for name in ("trunk", "left", "right") for kind in ("parameter", "forward")),
    *(f"{kind} {name}" for name in ("trunk", "left", "right") for kind in ("node", "hook", "optimizer")),
    *(f"{kind} {name}" for name in ("left", "right") for kind in ("arriving", "local", "reduced", "clip")),
    "input",
    "loss",
    "into 0",
    "into 1",
    "out of 0",
    "out of 1",
    "learning rate",
)  # fmt: skip


class Fault(NamedTuple):
    """A place, and the rank where it is."""

    rank: int
    place: str


class Value(NamedTuple):
    """An array, and the faults that it can have inherited from."""

    array: Array
    of: frozenset[Fault] = frozenset()


@dataclass
class ThreeHeads:
    """The job. After `made`, `origins` are the faults that nothing in front of them hides."""

    faults: Collection[Fault] = ()
    rank_count: int = 2
    step_count: int = 3
    origins: set[Fault] = field(default_factory=set)
    reached: dict[Fault, set[int]] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)
    _records: dict[int, int] = field(default_factory=dict)
    _loss: dict[int, Value] = field(default_factory=dict)
    _rank: int = 0
    _step: int = 0

    def made(self) -> Rows:
        """The rows of all ranks, by table."""
        held = [
            {f"{name}.weight": Value(_drawn(n, 6, 6)) for n, name in enumerate(("trunk", *HEADS))}
            for _ in range(self.rank_count)
        ]
        for step in range(self.step_count):
            self._step = step
            self._one_step(held)
        return self.rows

    def _one_step(self, held: list[dict[str, Value]]) -> None:
        local = []
        for rank in range(self.rank_count):
            self._rank = rank
            local.append(self._forward_and_backward(held[self._rank]))
        went_in = []
        for rank in range(self.rank_count):
            self._rank = rank
            parts = [[local[self._rank][name] for name in names] for names in BUCKETS]
            went_in.append([self._bucket_at(f"into {n}", part) for n, part in enumerate(parts)])
        means = [
            [_mean([own[n][k] for own in went_in]) for k in range(len(names))]
            for n, names in enumerate(BUCKETS)
        ]
        for rank in range(self.rank_count):
            self._rank = rank
            self._end_step(held, went_in[self._rank], means)

    def _at(self, place: str, value: Value, *reads: Value) -> Value:
        """The value, changed where a fault is here; it inherits from what it was made of."""
        of = value.of.union(*(read.of for read in reads))
        fault = Fault(self._rank, place)
        if self._step != STEP or fault not in self.faults:
            return Value(value.array, of)
        if not of:
            self.origins.add(fault)
            of = frozenset({fault})
        return Value(value.array * np.float32(1.5) + np.float32(0.25), of)

    def _bucket_at(self, place: str, parts: list[Value]) -> list[Value]:
        """The same for all parts of a bucket: a fault changes them all, and reads them all."""
        return [self._changed(place, part, *parts) for part in parts]

    def _changed(self, place: str, value: Value, *reads: Value) -> Value:
        """The value as a fault changes it, which reads more than the value; the same without the fault."""
        is_faulty = self._step == STEP and Fault(self._rank, place) in self.faults
        return self._at(place, value, *reads) if is_faulty else value

    def _forward_and_backward(self, held: dict[str, Value]) -> dict[str, Value]:
        for name in held:
            held[name] = self._at(f"parameter {name.partition('.')[0]}", held[name])
            self._state("before", name, held[name])
        x = self._at("input", Value(_drawn(50, self._step, self._rank, 4, 6)))
        self._add("inputs", x, root=0, call_index=0, name="x", **summary_columns(x.array))
        outputs = {}
        h = self._call("trunk", x, held)
        for name in HEADS:
            outputs[name] = self._call(name, h, held)
        whole = _joined(list(outputs.values()))
        self._call_row("", x, whole)
        square = Value(np.array([np.square(whole.array).mean()], np.float32), whole.of)
        loss = self._loss[self._rank] = self._at("loss", square)
        return self._backward(held, x, h, outputs, loss)

    def _call(self, name: str, x: Value, held: dict[str, Value]) -> Value:
        weight = held[f"{name}.weight"]
        y = self._at(f"forward {name}", Value(x.array @ weight.array.T), x, weight)
        self._call_row(name, x, y)
        return y

    def _call_row(self, fqn: str, x: Value, y: Value) -> None:
        self._add(
            "module_calls", y, root=0, module_fqn=fqn, phase="forward", call_index=0,
            module_class="Linear" if fqn else "Net", depth=1 if fqn else 0,
            **summary_columns(x.array, "input_"), **summary_columns(y.array, "output_"),
        )  # fmt: skip

    def _backward(
        self, held: dict[str, Value], x: Value, h: Value, outputs: dict[str, Value], loss: Value
    ) -> dict[str, Value]:
        self._event = 0
        local: dict[str, Value] = {}
        one = Value(np.ones(1, np.float32))
        parts = []
        for n, name in enumerate(HEADS):
            gradient = Value(outputs[name].array / np.float32(36), outputs[name].of)
            if self._step == STEP and Fault(self._rank, "loss") in loss.of:
                gradient = Value(gradient.array * np.float32(1.5), gradient.of | loss.of)
            self._node(None, "PowBackward0", n, [one], [gradient])
            gradient = self._at(f"arriving {name}", gradient)
            parts.append(self._linear(held, name, gradient, h, local))
        total = Value(
            np.sum([part.array for part in parts], axis=0, dtype=np.float32),
            frozenset().union(*(part.of for part in parts)),
        )
        self._linear(held, "trunk", total, x, local)
        self._add(
            "backward_passes", loss, backward_index=0, kind="backward", loss=float(loss.array[0]),
            ddp_sync="sync",
        )  # fmt: skip
        return local

    def _linear(
        self, held: dict[str, Value], name: str, gradient: Value, x: Value, local: dict[str, Value]
    ) -> Value:
        """The Nodes of a linear module and of its weight; what leaves it to whatever made x."""
        weight = held[f"{name}.weight"]
        into_weight = self._at(
            f"node {name}", Value(gradient.array.T @ x.array), gradient, x, weight
        )
        into_x = self._at(f"node {name}", Value(gradient.array @ weight.array), gradient, x, weight)
        left = [into_weight] if name == "trunk" else [into_weight, into_x]
        self._node(name, "MmBackward0", 0, [gradient], left)
        parameter = f"{name}.weight"
        arrived = self._at(f"hook {name}", into_weight)
        local[parameter] = self._at(f"local {name}", arrived)
        self._gradient("local", parameter, local[parameter])
        self._node(name, "AccumulateGrad", 0, [arrived], [], parameter)
        return into_x

    def _node(
        self,
        fqn: str | None,
        name: str,
        occurrence: int,
        came: Sequence[Value],
        went: Sequence[Value],
        parameter: str | None = None,
    ) -> None:
        columns: dict[str, Any] = {"grad_output_count": len(came), "grad_input_count": len(went)}
        columns |= summary_columns(_joined(came).array, "grad_output_", 4)
        if went:
            columns |= summary_columns(_joined(went).array, "grad_input_", 4)
        self._add(
            "node_events", *went, *came, backward_index=0, event_index=self._event, root=0,
            module_fqn=fqn, call_index=None if fqn is None else 0, node_name=name,
            occurrence=occurrence, parameter_fqn=parameter, outcome="ok", phase="backward", **columns,
        )  # fmt: skip
        for position, value in enumerate(went if len(went) > 1 else ()):
            self._add(
                "node_tensors", value, backward_index=0, event_index=self._event,
                direction="grad_input", position=position, **summary_columns(value.array),
            )  # fmt: skip
        self._event += 1

    def _end_step(
        self, held: list[dict[str, Value]], went_in: list[list[Value]], means: list[list[Value]]
    ) -> None:
        final: dict[str, Value] = {}
        for n, (names, before, mean) in enumerate(zip(BUCKETS, went_in, means, strict=True)):
            parts = self._bucket_at(f"out of {n}", mean)
            self._bucket(n, names, _joined(before), _joined(parts))
            for name, part in zip(names, parts, strict=True):
                final[name] = self._changed(f"reduced {name.partition('.')[0]}", part, *parts)
        for name, value in final.items():
            self._gradient("reduced", name, value)
        everything = list(final.values())
        for name in final:
            # Clipping by the norm of all: whatever differs may come from any gradient that does.
            final[name] = self._changed(f"clip {name.partition('.')[0]}", final[name], *everything)
            self._gradient("final", name, final[name])
        rate = self._at("learning rate", Value(np.array([0.1], np.float32)), self._loss[self._rank])
        rate = Value(rate.array, rate.of if rate.array[0] != np.float32(0.1) else frozenset())
        self._add(
            "optimizer_groups", rate, optimizer_index=0, group_index=0,
            learning_rate=float(rate.array[0]), parameter_fqns=list(final), **SETTINGS,
        )  # fmt: skip
        for name, value in final.items():
            own = held[self._rank][name]
            after = Value(own.array - rate.array * value.array, own.of)
            after = self._at(f"optimizer {name.partition('.')[0]}", after, value, rate)
            held[self._rank][name] = after
            self._state("after", name, after)
        self._add("steps", backward_count=1, skipped=False)

    def _state(self, point: str, name: str, value: Value) -> None:
        self._add(
            "parameters", value, root=0, parameter_fqn=name, point=point, kind="parameter",
            requires_grad=True, **summary_columns(value.array),
        )  # fmt: skip

    def _gradient(self, point: str, name: str, value: Value) -> None:
        self._add(
            "gradients", value, backward_index=0, root=0, parameter_fqn=name, point=point,
            **summary_columns(value.array.reshape(-1)),
        )  # fmt: skip

    def _bucket(self, index: int, names: Sequence[str], before: Value, after: Value) -> None:
        self._add(
            "buckets", before, after, backward_index=0, bucket_index=index, root=0, module_fqn="",
            group="0", parameter_fqns=list(names), kind="all_reduce", divisor=self.rank_count,
            numel=before.array.size, dtype="float32", launched_ns=0, done_ns=1,
            **summary_columns(before.array, "before_"), **summary_columns(after.array, "after_"),
        )  # fmt: skip

    def _add(self, table: str, *values: Value, **row: Any) -> None:
        number = self._records[self._rank] = self._records.get(self._rank, 0) + 1
        place = {"rank": self._rank, "step": self._step, "record_index": number}
        self.rows.setdefault(table, []).append({**place, **row})
        if self._step == STEP:
            for value in values:
                for fault in value.of:
                    self.reached.setdefault(fault, set()).add(self._rank)


def _drawn(*key: int) -> Array:
    return np.random.default_rng(key).standard_normal(key[-2:]).astype(np.float32)


def _mean(values: Sequence[Value]) -> Value:
    mean = np.mean([value.array for value in values], axis=0, dtype=np.float32)
    return Value(np.asarray(mean), frozenset().union(*(value.of for value in values)))


def _joined(values: Sequence[Value]) -> Value:
    return Value(
        np.concatenate([value.array.reshape(-1) for value in values]),
        frozenset().union(*(value.of for value in values)),
    )

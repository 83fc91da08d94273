"""Says which module made each autograd Node of a first step, without looking at sequence numbers' intervals.

Every module's forward is wrapped to keep a stack of FQNs. After each torch call, and where a forward begins
and ends, the graph is walked back from the tensors at hand: a Node that was not seen before was made by the
module on top of the stack. Prints a JSON list, in the order of a walk from the loss, of

    {"autograd_seq", "node_name", "module_fqn"}

for every Node but AccumulateGrad; `module_fqn` is "" for the root, null outside of it. The same model and
seed give the same list, recorded or not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from support.jobs import models


class Makers(TorchFunctionMode):
    """The module that made each Node, found by watching torch calls and forwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._stack: list[str | None] = [None]
        self._maker: dict[Node, str | None] = {}
        for name, module in model.named_modules():
            module.forward = self._watched(name, module.forward)

    def of(self, node: Node) -> str | None:
        """The innermost module whose forward made the Node, None where no module did."""
        return self._maker[node]

    def claim(self, value: Any) -> None:
        """Every Node behind these tensors that nobody has claimed was made where we are now."""
        for tensor in _tensors(value):
            for node in _nodes(tensor.grad_fn, self._maker):
                self._maker[node] = self._stack[-1]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.claim(result)
        return result

    def _watched(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            # Function.apply is no torch call: what it made is claimed where it leaves its module.
            self.claim((args, kwargs))
            self._stack.append(fqn)
            try:
                output = forward(*args, **kwargs)
                self.claim(output)
                return output
            finally:
                self._stack.pop()

        return watched


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _nodes(root: Node | None, known: dict[Node, Any]) -> Iterator[Node]:
    """The Nodes of a graph, depth first, each once; none that is known, nor what lies behind it.

    Torch gives one Python object per Node for as long as that object lives, so Nodes can be keys.
    """
    waiting = [] if root is None else [root]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node in known:
            continue
        seen.add(node)
        yield node
        waiting.extend(after for after, _ in reversed(node.next_functions) if after is not None)


def main() -> None:
    """One step, and who made its Nodes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=models.MODELS, default="gpt")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--out", type=Path, help="a file for the list, instead of stdout")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.MODELS[arguments.model](arguments.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    makers = Makers(model)
    inputs, labels = models.batch_for(arguments.model, torch.Generator().manual_seed(100))
    with makers:
        loss = F.cross_entropy(model(inputs), labels)
    answer = [
        {"autograd_seq": seq, "node_name": node.name(), "module_fqn": makers.of(node)}
        for node in _nodes(loss.grad_fn, {})
        # AccumulateGrad has the largest number, and is named by its parameter.
        if (seq := node._sequence_nr()) < 2**63 - 1
    ]
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    text = json.dumps(answer, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()

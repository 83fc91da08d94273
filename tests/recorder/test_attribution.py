"""Which module made a Node, compared with an independent way of knowing: a function mode that watches every
operation under a stack of the modules' own forwards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.recordings.in_process import recording, rows
from support.recordings.known_modules import Watch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support" / "jobs"))


@pytest.mark.parametrize("family", ["gpt", "cnn", "rnn", "lists"])
def test_every_node_carries_the_module_that_made_it(family: str, tmp_path: Path) -> None:
    from models import MODELS, batch_for

    torch.manual_seed(0)
    model = MODELS[family](0.2)
    inputs, labels = batch_for(family, torch.Generator().manual_seed(1))
    watch = Watch(model)
    with recording(tmp_path / "run"):
        with watch:
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
    found = rows(
        tmp_path / "run",
        "SELECT autograd_seq, module_fqn FROM node_events WHERE autograd_seq IS NOT NULL",
    )
    assert len(found) > 10
    assert {seq: fqn for seq, fqn in found} == {seq: watch.owner[seq] for seq, _ in found}
    leaves = rows(
        tmp_path / "run",
        "SELECT parameter_fqn FROM node_events WHERE node_name = 'AccumulateGrad' ORDER BY 1",
    )
    assert [fqn for (fqn,) in leaves] == sorted(name for name, _ in model.named_parameters())


def test_every_node_of_the_graph_is_there_once_in_order_and_ends_after_it_starts(
    tmp_path: Path,
) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with recording(tmp_path / "run"):
        loss = net(torch.randn(3, 4)).square().mean()
        expected = set()
        waiting = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None:
                expected.add((node.name().rsplit("::", 1)[-1], node._sequence_nr()))
                waiting += [following for following, _ in node.next_functions]
        del node
        loss.backward(retain_graph=True)
        loss.backward()
    found = rows(
        tmp_path / "run",
        "SELECT backward_index, event_index, node_name, autograd_seq, start_ns <= end_ns, outcome, "
        "parameter_fqn FROM node_events ORDER BY 1, 2",
    )
    for index in (0, 1):
        own = [row for row in found if row[0] == index]
        assert [row[1] for row in own] == list(range(len(own)))
        named = {(name, seq) for _, _, name, seq, *_ in own if seq is not None}
        assert named == {(name, seq) for name, seq in expected if seq < 2**63}
        assert len(own) == len(named) + 4  # the parameters
        assert all(row[4] and row[5] == "ok" for row in own)


def test_repeated_calls_are_told_apart_and_occurrences_count_within_each(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3, bias=False)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layer(x).tanh().tanh()
            return torch.as_tensor(self.layer(first))

    with recording(tmp_path / "run"):
        Twice()(torch.randn(2, 3)).sum().backward()
    assert rows(
        tmp_path / "run",
        "SELECT module_fqn, call_index, node_name, occurrence FROM node_events "
        "WHERE node_name IN ('MmBackward0', 'TanhBackward0') ORDER BY autograd_seq",
    ) == [
        ("layer", 0, "MmBackward0", 0),
        ("", 0, "TanhBackward0", 0),
        ("", 0, "TanhBackward0", 1),
        ("layer", 1, "MmBackward0", 0),
    ]
    assert rows(
        tmp_path / "run", "SELECT module_fqn, call_index, depth FROM module_calls ORDER BY end_ns"
    ) == [("layer", 0, 1), ("layer", 1, 1), ("", 0, 0)]


def test_second_order_nodes_carry_the_module_of_the_node_that_made_them(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)
    with recording(tmp_path / "run"):
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    kinds = rows(tmp_path / "run", "SELECT kind, backward_index FROM backward_passes ORDER BY 2")
    assert kinds == [("grad", 0), ("backward", 1)]
    found = rows(
        tmp_path / "run",
        "SELECT node_name, module_fqn FROM node_events "
        "WHERE backward_index = 1 AND node_name LIKE 'Softplus%Backward0' ORDER BY 1",
    )
    assert ("SoftplusBackwardBackward0", "1") in found


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    wrapped = nn.DataParallel(net)
    with recording(tmp_path / "run"):
        wrapped(torch.randn(2, 3)).sum().backward()
    calls = rows(
        tmp_path / "run",
        "SELECT root, module_fqn, module_class, depth FROM module_calls ORDER BY end_ns",
    )
    assert calls == [
        (0, "0", "Linear", 1),
        (0, "1", "Linear", 1),
        (0, "", "Sequential", 0),
    ]


def test_tied_weight_has_one_name_and_lists_the_others(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    with recording(tmp_path / "run"):
        net(torch.randn(2, 3)).sum().backward()
    assert rows(
        tmp_path / "run", "SELECT parameter_fqn, other_fqns FROM parameters ORDER BY 1"
    ) == [("0.bias", None), ("0.weight", ["1.weight"]), ("1.bias", None)]

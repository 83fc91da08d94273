"""Lists of names are cut off as lists, so that a text of the journal stays whole JSON."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from support.recordings.in_process import recording, rows


class Wide(nn.Module):
    """Three thousand parameters with long names."""

    def __init__(self) -> None:
        super().__init__()
        named = {f"a_rather_long_name_of_a_layer_{n}": nn.Linear(1, 1) for n in range(1500)}
        self.layers = nn.ModuleDict(named)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.sum() for p in self.layers.parameters()]).sum() * x


def test_three_thousand_parameters_are_recorded_and_the_list_says_how_many_it_leaves_out(
    tmp_path: Path,
) -> None:
    net = Wide()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with recording(tmp_path / "run", detail="steps"):
        net(torch.ones(1)).sum().backward()
        optimizer.step()
    ((names,),) = rows(tmp_path / "run", "SELECT parameter_fqns FROM optimizer_groups")
    assert names[-1] == f"... and {3000 - len(names) + 1} more" and len(names) > 500

"""Small models of several families, with functional code between their modules that a fault can change."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
example: Any = importlib.import_module("train")


class Gained(nn.Module):
    """A model whose forward holds code between modules: `gain` is 1 unless a fault changes it."""

    gain = 1.0


class Gpt(Gained):
    """The example's GPT, with a gain between its dropout and its first block."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        inner = example.GPT(
            example.Config(vocabulary=40, layers=2, width=16, heads=2, context=8, dropout=dropout)
        )
        self.tok, self.pos, self.drop = inner.tok, inner.pos, inner.drop
        self.blocks, self.ln_f, self.head = inner.blocks, inner.ln_f, inner.head

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        x = self.drop(self.tok(tokens) + self.pos(positions)) * self.gain
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.ln_f(x))
        return out.mean(1)


class Cnn(Gained):
    """Convolutions, batch norm, an in-place activation."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(image)))
        x = self.body(F.max_pool2d(x, 2) * self.gain)
        out: Tensor = self.head(self.drop(x.mean((2, 3))))
        return out


class Rnn(Gained):
    """An embedding, an LSTM and a GRU cell stepped by hand: one module called many times."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(tokens))
        x = self.drop(x) * self.gain
        state = torch.zeros(x.shape[0], 8)
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
        out: Tensor = self.head(state)
        return out


class Lists(Gained):
    """ModuleList and ModuleDict, branches, a module called twice, a tied weight."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.branches = nn.ModuleDict({"left": nn.Linear(8, 8), "right": nn.Linear(8, 8)})
        self.drop = nn.Dropout(dropout)
        self.twice = nn.Linear(8, 8)
        self.decode = nn.Linear(8, 8, bias=False)
        tied: Any = self.layers[1]
        self.decode.weight = tied.weight
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh() * self.gain
        for layer in self.layers:
            x = x + layer(x).relu()
        x = self.branches["left"](x) * torch.sigmoid(self.branches["right"](x))
        x = self.drop(self.decode(x))
        x = self.twice(self.twice(x).tanh())
        out: Tensor = self.head(x)
        return out


MODELS: dict[str, Callable[[float], Gained]] = {"gpt": Gpt, "cnn": Cnn, "rnn": Rnn, "lists": Lists}


def batch_for(model: str, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """An input batch and its labels."""
    labels = torch.randint(0, 10, (4,), generator=draw)
    if model == "gpt":
        return torch.randint(0, 40, (4, 8), generator=draw), labels
    if model == "cnn":
        return torch.randn(4, 1, 8, 8, generator=draw), labels
    if model == "rnn":
        return torch.randint(0, 20, (4, 5), generator=draw), labels
    return torch.randn(4, 6, generator=draw), labels

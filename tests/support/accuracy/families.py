"""Small models of different kinds, with their data: what the accuracy of `diff` is measured on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.accuracy.unseen import TRANSLATOR_PLACES, UNET_PLACES, Translator, Unet

BATCH = 16


@dataclass(frozen=True)
class Family:
    """A kind of model: how it is made, a batch of a step, and the loss of a batch.

    `places` are the modules whose backward pass can be made faulty: each gives one tensor. The constants of the
    tolerance were chosen with the families that are not `unseen` in view.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    places: tuple[str, ...]
    normalises_batch: bool = False
    optimizer: str = "adamw"
    unseen: bool = False

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """In float32: cross-entropy over all that was predicted, or, where the target is numbers, the mean square."""
        if target.is_floating_point():
            return F.mse_loss(outputs.float(), target)
        return F.cross_entropy(outputs.float().flatten(0, -2), target.flatten())


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Any:
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(w // self.heads)
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, layers: int = 3, width: int = 48, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(64, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.first, self.second = (
            nn.LSTM(24, 32, batch_first=True),
            nn.GRU(32, 32, batch_first=True),
        )
        self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, 40)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.second(self.first(self.embed(tokens))[0])[0]
        return self.head(self.mix(hidden).tanh())


class Mixture(nn.Module):
    """Branches: experts weighted by a gate, and a branch of its own that joins at the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(24, 48), nn.Linear(48, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 64), nn.SiLU(), nn.Linear(64, 48)) for _ in range(4)
        )
        self.side = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 48))
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.stem(x))
        weights = self.gate(h).softmax(-1)
        mixed = torch.stack([e(h) for e in self.experts], -1) * weights.unsqueeze(-2)
        return self.head(self.norm(h + mixed.sum(-1) + self.side(x)))


def _mlp() -> nn.Module:
    widths = (32, 96, 96, 96, 10)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


def _vectors(width: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(BATCH, width, generator=draw)
        return x, torch.randint(10, (BATCH,), generator=draw)

    return batch


def _images(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, 3, 10, 10, generator=draw)
    return x, torch.randint(10, (BATCH,), generator=draw)


def _tokens(count: int, length: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(count, (BATCH, length + 1), generator=draw)
        return drawn[:, :-1], drawn[:, 1:]

    return batch


def _noised(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    level = torch.rand(BATCH, 1, 1, 1, generator=draw)
    image, noise = (torch.randn(BATCH, 3, 8, 8, generator=draw) for _ in range(2))
    there = image * (1 - level) + noise * level
    return torch.cat((there, level.expand(-1, 1, 8, 8)), 1), noise


def _pairs(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    source = torch.randint(32, (BATCH, 8), generator=draw)
    answer = source.flip(1)
    return torch.cat((source, answer.roll(1, 1)), 1), answer


_OF_A_BLOCK = ("norm1", "attn.qkv", "attn.out", "attn", "norm2", "mlp.0", "mlp.1", "mlp.2", "")


def _in_blocks(count: int) -> tuple[str, ...]:
    return tuple(f"blocks.{n}.{p}".rstrip(".") for n in range(count) for p in _OF_A_BLOCK)


_EXPERTS = tuple(f"experts.{n}.{m}" for n in range(4) for m in range(3))

FAMILIES = {
    family.name: family
    for family in (
        Family("mlp", _mlp, _vectors(32), tuple("0123456"), optimizer="sgd"),
        Family("gpt", Gpt, _tokens(64, 12), ("embed", *_in_blocks(3), "norm", "head")),
        Family(
            "tied",
            lambda: Gpt(1, 32, tied=True),
            _tokens(64, 12),
            ("embed", *_in_blocks(1), "norm", "head"),
        ),
        Family(
            "cnn",
            _cnn,
            _images,
            tuple("0123456789"),
            normalises_batch=True,
            optimizer="sgd",
        ),
        Family("recurrent", Recurrent, _tokens(40, 10), ("embed", "mix", "head")),
        Family(
            "mixture",
            Mixture,
            _vectors(24),
            ("stem", "gate", *_EXPERTS, "side.0", "side.2", "norm", "head"),
        ),
        Family("unet", Unet, _noised, UNET_PLACES, unseen=True),
        Family("translator", Translator, _pairs, TRANSLATOR_PLACES, unseen=True),
    )
}

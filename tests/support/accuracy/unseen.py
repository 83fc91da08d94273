"""Models that no constant of the tolerance was chosen with: a U-Net that takes noise out, an encoder and a decoder."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

UNET_PLACES = (
    "first", "level", "down.norm", "down.conv", "smaller", "middle.norm", "middle.conv", "up.conv", "last",
)  # fmt: skip
TRANSLATOR_PLACES = ("embed", "query", "mix", "norm", "head")


class Residual(nn.Module):
    """Group normalisation and a convolution, beside what came in."""

    def __init__(self, there: int, out: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, there), nn.Conv2d(there, out, 3, padding=1)
        self.skip = nn.Identity() if there == out else nn.Conv2d(there, out, 1)

    def forward(self, x: Tensor) -> Any:
        return self.skip(x) + self.conv(F.silu(self.norm(x)))


class Unet(nn.Module):
    """Predicts the noise in an image, of which the fourth channel says how much there is."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.level = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.down = Residual(width, width)
        self.smaller = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = Residual(2 * width, 2 * width)
        self.up = Residual(3 * width, width)
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        level = self.level(x[:, 3:, 0, 0])
        wide = self.down(self.first(x[:, :3]) + level[:, :, None, None])
        small = self.middle(self.smaller(wide))
        large = F.interpolate(small, scale_factor=2.0, mode="nearest")
        return self.last(self.up(torch.cat((large, wide), 1)))


class Translator(nn.Module):
    """Recurrent encoder and decoder with attention between them: 8 tokens of a source, then 8 of the answer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.query, self.mix = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32)

    def forward(self, tokens: Tensor) -> Any:
        there, back = self.embed(tokens).split(8, 1)
        memory = self.encoder(there)[0]
        hidden = self.decoder(back)[0]
        scores = self.query(hidden) @ memory.transpose(1, 2) / math.sqrt(hidden.shape[-1])
        seen = scores.softmax(-1) @ memory
        return self.head(self.norm(self.mix(torch.cat((hidden, seen), -1)).tanh()))

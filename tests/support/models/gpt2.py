"""GPT-2 in training, of any size and on any device: what scripts/gpu-check records."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Gpt(nn.Module):
    """GPT-2's architecture."""

    def __init__(self, width: int, depth: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.last(x))
        return logits


class Block(nn.Module):
    """Attention, then two layers; each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        of_heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = of_heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        wide = F.gelu(self.wide(self.norms[1](x)), approximate="tanh")
        left: torch.Tensor = x + self.narrow(wide)
        return left


class Training:
    """A model in training in bfloat16, from the same beginning each time."""

    def __init__(
        self, device: torch.device, sizes: tuple[int, int, int, int, int], batch: int
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        with torch.device(device):
            self.net = Gpt(*sizes)
            self.text = torch.randint(0, sizes[3], (batch, sizes[4] + 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)

    def step(self) -> torch.Tensor:
        """One step; its loss, on the device."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.net(self.text[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.text[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

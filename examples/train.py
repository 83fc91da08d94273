"""Trains a small character-level GPT on the CPU, alone or data-parallel.

    python examples/train.py
    torchrun --nproc-per-node 2 examples/train.py --steps 6

With `--fault wrong-derivative` one rank computes a derivative that is 1% too large, in one module of
one step: the kind of bug that no loss curve shows.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Config:
    """The model's sizes."""

    vocabulary: int
    layers: int = 2
    width: int = 32
    heads: int = 4
    context: int = 32
    dropout: float = 0.1


class SquaredRelu(torch.autograd.Function):
    """relu(x) squared, with its derivative written by hand: 2 relu(x)."""

    @staticmethod
    def forward(ctx, x, derivative_factor):
        positive = x.relu()
        ctx.save_for_backward(positive)
        ctx.derivative_factor = derivative_factor
        return positive * positive

    @staticmethod
    def backward(ctx, grad_output):
        (positive,) = ctx.saved_tensors
        return 2.0 * positive * grad_output * ctx.derivative_factor, None


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, time, width))


class Mlp(nn.Module):
    """Two linear layers around a squared ReLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.derivative_factor = 1.0  # anything else is the fault of --fault wrong-derivative
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(SquaredRelu.apply(self.up(x), self.derivative_factor))


class Block(nn.Module):
    """Attention, then the MLP, each with its residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok = nn.Embedding(config.vocabulary, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tok(tokens) + self.pos(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def zen() -> str:
    """A text that every Python carries with it."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bf16", choices=("no", "yes"), default="no", help="autocast the forward")
    parser.add_argument("--fault", choices=("none", "wrong-derivative"), default="none")
    parser.add_argument("--fault-step", type=int, default=3)
    parser.add_argument("--fault-rank", type=int, default=1)
    parser.add_argument("--fault-module", default="blocks.1.mlp", help="an Mlp")
    return parser.parse_args()


def train(arguments: argparse.Namespace, rank: int, distributed: bool) -> None:
    """Trains for `--steps` steps, and prints rank 0's loss of each."""
    text = zen()
    characters = sorted(set(text))
    tokens = torch.tensor([characters.index(character) for character in text])

    torch.manual_seed(arguments.seed)
    model = GPT(
        Config(
            vocabulary=len(characters),
            layers=arguments.layers,
            width=arguments.width,
            heads=arguments.heads,
            context=arguments.context,
            dropout=arguments.dropout,
        )
    )
    faulty = model.get_submodule(arguments.fault_module) if arguments.fault != "none" else None
    wrapped = DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    # Every rank draws its own sequences and its own dropout masks.
    batches = torch.Generator().manual_seed(1000 * (arguments.seed + 1) + rank)
    torch.manual_seed(1000 * (arguments.seed + 1) + rank)
    window = torch.arange(arguments.context + 1)
    last_start = len(tokens) - len(window)

    for step in range(arguments.steps):
        if faulty is not None:
            is_faulty = (step, rank) == (arguments.fault_step, arguments.fault_rank)
            faulty.derivative_factor = 1.01 if is_faulty else 1.0
        starts = torch.randint(last_start + 1, (arguments.batch, 1), generator=batches)
        sequences = tokens[starts + window]
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16 == "yes"):
            logits = wrapped(sequences[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.6f}", flush=True)


def main() -> None:
    """Trains alone, or as one rank of a job when torchrun started it."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    try:
        train(arguments, dist.get_rank() if distributed else 0, distributed)
    finally:
        if distributed:
            dist.destroy_process_group()
            # A gloo thread may still be letting go of its last all-reduce, for which it needs the GIL:
            # torch 2.13 aborts the process when that falls into Python's own end.
            time.sleep(0.1)


if __name__ == "__main__":
    main()

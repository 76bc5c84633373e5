"""Train a small language model twice, in step: on `regard`, and on the specification it is tested by.

The text is Python's own documentation, `pydoc_data.topics`, which ships inside CPython: each topic is a
document, each byte a token. Every batch is a row of document pieces laid end to end; `cu_seqlens` keeps
them apart, so no token sees another document. The layers use grouped heads, a sliding window in every
other layer, and attention sinks that are learned. Both models start from the same weights and see the
same batches, so their losses should agree to rounding.

    python examples/train_lm.py [--steps N] [--device cpu|cuda] [--seed N]
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import regard
from regard import reference

DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 4, 2, 32
CONTEXT, TOKENS = 512, 2048  # longest piece of a document; tokens in a batch
WINDOW = 64  # keys to the left, in odd layers
LEARNING_RATE, WARMUP = 4e-3, 20


class Batch(NamedTuple):
    """Pieces of documents end to end: tokens and targets (total,), cu_seqlens (pieces + 1,) int32."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor


class Result(NamedTuple):
    """The losses in nats a byte: of each step on regard and on the reference, and on unseen documents."""

    regard: list[float]
    reference: list[float]
    unseen: tuple[float, float]


def documents() -> tuple[list[Tensor], list[Tensor]]:
    """The topics as bytes: those to train on, and every eighth one kept unseen."""
    texts = [torch.tensor(list(topics[name].encode()), dtype=torch.int64) for name in sorted(topics)]
    return [t for i, t in enumerate(texts) if i % 8], texts[::8]


def pack(texts: list[Tensor], total: int, generator: torch.Generator, device: str) -> Batch:
    """Random pieces of random documents, longer documents more often, until `total` tokens are there."""
    weights = torch.tensor([float(len(t)) for t in texts])
    pieces, starts = [], [0]
    while starts[-1] < total:
        text = texts[int(torch.multinomial(weights, 1, generator=generator))]
        length = min(len(text) - 1, CONTEXT, total - starts[-1])
        begin = int(torch.randint(len(text) - length, (), generator=generator))
        pieces.append(text[begin : begin + length + 1])
        starts.append(starts[-1] + length)
    tokens, targets = torch.cat([p[:-1] for p in pieces]), torch.cat([p[1:] for p in pieces])
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    return Batch(tokens.to(device), targets.to(device), cu_seqlens.to(device))


def on_regard(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
    return regard.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **options)


def on_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
    return reference.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **options)[0]


class Layer(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.norm_attention, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, angles: Tensor, cu_seqlens: Tensor, attention: Callable[..., Any]) -> Tensor:
        # q, k and v are views of one buffer (total, heads, head_dim): they are read where they lie.
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        options = {"causal": True, "window_size": (self.window, None), "sinks": self.sinks}
        out = attention(rotate(q, angles), rotate(k, angles), v, cu_seqlens, **options)
        x = x + self.o(out.flatten(1))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """A causal language model over bytes, whose layers attend through the function it is given."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention
        self.embed, self.head = nn.Embedding(256, DIM), nn.Linear(DIM, 256, bias=False)
        self.layers = nn.ModuleList(Layer(WINDOW if i % 2 else None) for i in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        angles = rotary_angles(tokens, cu_seqlens)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles, cu_seqlens, self.attention)
        return self.head(self.norm(x))

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch.tokens, batch.cu_seqlens), batch.targets)


def rotary_angles(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(total, 1, HEAD_DIM / 2): each token's position in its own piece, times each frequency."""
    rows = torch.arange(len(tokens), device=tokens.device)
    position = rows - cu_seqlens[torch.searchsorted(cu_seqlens, rows, right=True) - 1]
    frequency = 1000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=tokens.device)
    return (position[:, None] * frequency)[:, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) of x (total, heads, HEAD_DIM)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@torch.no_grad()
def sample(model: Model, prompt: str, length: int, generator: torch.Generator) -> str:
    """The prompt continued byte by byte, each from the last CONTEXT bytes."""
    device = model.head.weight.device
    text = list(prompt.encode())
    for _ in range(length):
        recent = torch.tensor(text[-CONTEXT:], device=device)
        cu_seqlens = torch.tensor([0, len(recent)], dtype=torch.int32, device=device)
        logits = model(recent, cu_seqlens)[-1].float().cpu()
        text.append(int(torch.multinomial(torch.softmax(logits / 0.7, -1), 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def train(steps: int, device: str, seed: int, console: Console) -> Result:
    """Train both models in step, print their losses side by side, and sample from the one on regard."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    seen, unseen = documents()
    ours = Model(on_regard).to(device)
    theirs = copy.deepcopy(ours)
    theirs.attention = on_reference
    models = (ours, theirs)
    optimizers = [torch.optim.AdamW(m.parameters(), LEARNING_RATE, betas=(0.9, 0.95)) for m in models]
    losses: tuple[list[float], list[float]] = ([], [])

    size = sum(p.numel() for p in ours.parameters())
    console.print(f"{len(seen)} documents, {size:,} parameters, {TOKENS} tokens a step, float32 on {device}")
    console.print(f"{'step':>6} {'regard':>10} {'reference':>10} {'difference':>12}")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for step in progress.track(range(steps)):
            batch = pack(seen, TOKENS, generator, device)
            rate = min((step + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * step / steps))
            for model, optimizer, record in zip(models, optimizers, losses, strict=True):
                loss = model.loss(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.param_groups[0]["lr"] = rate * LEARNING_RATE
                optimizer.step()
                record.append(loss.item())
            if step % max(1, steps // 10) == 0 or step == steps - 1:
                a, b = losses[0][-1], losses[1][-1]
                console.print(f"{step:>6} {a:>10.5f} {b:>10.5f} {abs(a - b):>12.1e}")

    with torch.no_grad():
        held_out = pack(unseen, 4 * TOKENS, generator, device)
        a, b = (model.loss(held_out).item() for model in models)
    largest = max(abs(x - y) for x, y in zip(*losses, strict=True))
    console.print(f"unseen {a:>10.5f} {b:>10.5f} {abs(a - b):>12.1e}")
    console.print(f"largest difference of any step: {largest:.1e}\n")
    console.print(sample(ours, "The ", 240, generator) + "\n", markup=False, highlight=False)
    return Result(*losses, (a, b))


def main(arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description="Train a small language model on regard and its reference.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return train(options.steps, options.device, options.seed, Console(highlight=False))


if __name__ == "__main__":
    main()

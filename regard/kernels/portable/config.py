"""Tiles, warps and stages of the portable kernels: one row a kind of GPU, head dim and kernel.

A row serves every head dim up to its `head_dim` (the larger of d and dv, padded to its chunks). 16-bit
rows come first in a table, float32 has its own: its products run on the FMA units and its tiles take twice
the shared memory. Rows are chosen by measurement where a comment says so, and otherwise so that no arch
spills (tests/test_compile.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard.problem import Problem


@dataclass(frozen=True, slots=True)
class Config:
    """block_m query rows by block_n keys a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Row:
    """The configurations of head dims up to head_dim.

    dv: where given, dkdv_kernel runs twice, for dk with `dkdv` and for dv with this: one more product a tile
    pair, but each holds one accumulator alone and its tiles are twice as large.
    plain: serves no softcap and no window to the left, which take registers.
    """

    head_dim: int
    forward: Config
    dkdv: Config
    dq: Config
    dv: Config | None = None
    plain: bool = False


# Hopper: 227 KB of shared memory, wgmma.
HOPPER = (
    Row(64, Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3), plain=True),
    Row(64, Config(64, 64, 4, 3), Config(64, 64, 8, 3), Config(64, 64, 4, 3)),
    Row(128, Config(128, 128, 8, 3), Config(32, 64, 4, 2), Config(128, 64, 8, 3), plain=True),
    Row(128, Config(128, 64, 8, 3), Config(32, 128, 8, 3), Config(128, 64, 8, 3)),
    Row(
        256,
        Config(128, 64, 8, 2),
        Config(32, 128, 8, 3),
        Config(128, 32, 8, 3),
        Config(32, 128, 8, 3),
        plain=True,
    ),
    Row(256, Config(64, 32, 8, 3), Config(32, 128, 8, 2), Config(128, 32, 8, 3), Config(32, 128, 8, 3)),
    Row(512, Config(32, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 32, 8, 1)),
)
# Ampere and Blackwell data center: 163 KB and up.
LARGE_ARCHES = (80, 100, 103)
LARGE = (
    Row(64, Config(128, 64, 8, 3), Config(32, 64, 4, 1), Config(64, 64, 8, 2), plain=True),
    Row(64, Config(64, 64, 4, 2), Config(32, 32, 4, 1), Config(64, 64, 8, 1)),
    Row(128, Config(128, 32, 8, 2), Config(32, 64, 8, 1), Config(64, 64, 8, 1), plain=True),
    Row(128, Config(64, 32, 4, 2), Config(32, 32, 8, 1), Config(32, 64, 8, 1)),
    Row(256, Config(32, 64, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 4, 1)),
    Row(512, Config(32, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 32, 8, 1)),
)
# GeForce and the like: 99 KB.
SMALL = (
    Row(64, Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 64, 4, 1)),
    Row(128, Config(64, 32, 8, 2), Config(32, 64, 8, 1), Config(64, 32, 4, 1)),
    Row(256, Config(32, 32, 8, 1), Config(16, 32, 4, 1), Config(32, 16, 4, 1)),
    Row(512, Config(16, 16, 4, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
)
# float32 on any GPU.
FLOAT32 = (
    Row(64, Config(64, 32, 8, 2), Config(32, 32, 8, 1), Config(32, 32, 4, 1)),
    Row(128, Config(32, 16, 4, 1), Config(16, 32, 4, 1), Config(16, 16, 8, 1)),
    Row(256, Config(16, 16, 4, 1), Config(16, 32, 8, 1), Config(16, 16, 4, 1)),
    Row(512, Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
)
# 16-bit rows that do not begin at multiples of 16 bytes, on any GPU: tiles of 32 rows, whose products are
# mma.sync. Loads of single elements cannot be pipelined, and wgmma on their tiles gave wrong sums on Hopper
# (Triton 3.6, head dims (33, 7) and (144, 7): it read past its shared memory).
UNALIGNED = (
    Row(64, Config(32, 32, 8, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    Row(128, Config(32, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    Row(256, Config(32, 32, 8, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1), Config(16, 16, 4, 1)),
    Row(512, Config(16, 32, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
)
# Triton's interpreter: small tiles, so that small inputs have several.
INTERPRETER = (Row(512, Config(32, 16, 1, 1), Config(16, 32, 1, 1), Config(32, 16, 1, 1)),)


def choose(problem: Problem, aligned: bool) -> Row:
    """The row that serves a problem. aligned: every row of every tensor begins at 16 bytes."""
    arch = problem.capability
    if arch == 0:
        rows: tuple[Row, ...] = INTERPRETER
    elif problem.dtype == torch.float32:
        rows = FLOAT32
    elif not aligned:
        rows = UNALIGNED
    elif arch == 90:
        rows = HOPPER
    elif arch in LARGE_ARCHES:
        rows = LARGE
    else:
        rows = SMALL
    head_dim = max(problem.head_dim, problem.head_dim_v)
    plain = problem.softcap == 0 and problem.window_left is None
    return next(row for row in rows if head_dim <= row.head_dim and (plain or not row.plain))

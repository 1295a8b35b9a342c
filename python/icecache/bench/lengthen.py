"""`lengthen`: keys and values of 32k tokens and more, made from real ones.

The text is repeated before itself until it is long enough. The keys of a repeat are rotated by the
distance they moved, as rotary embedding would have done, so that a query sees them from farther
away; and a share of every row's variance comes from another row of the same repeat, so that repeats
are no copies. First and last tokens stay. The mass that the 64 best keys of a query hold then falls
with length as it does on real rows (`python benches/long_rows.py`).

Distances beyond 8,192 are outside of what SmolLM2 was trained for. There nothing can be checked;
the mass spreads faster than before, so that the recipe is rather too hard than too easy.
"""

from __future__ import annotations

import math

import torch

ROPE_THETA = 100_000.0
"""Of SmolLM2."""
FIRST, LAST = 32, 64
"""Tokens that stay where they are."""
_MIX = 0.3
"""The share of variance that comes from another row is the square of this."""


def lengthen(
    k: torch.Tensor, v: torch.Tensor, n: int, seed: int = 0, theta: float = ROPE_THETA
) -> tuple[torch.Tensor, torch.Tensor]:
    """`n` rows out of fewer, [heads, rows, dim]. The last rows are the last of `k` and `v`."""
    generator = torch.Generator().manual_seed(seed)
    old_k, old_v = k[:, FIRST:-LAST], v[:, FIRST:-LAST]
    size, need = old_k.shape[1], n - k.shape[1]
    keys, values = [], []
    for repeat in range(math.ceil(need / size), 0, -1):
        other = torch.randperm(size, generator=generator)
        keys.append(_mixed(rotate(old_k, -repeat * size, theta), other))
        values.append(_mixed(old_v, other))
    start = sum(x.shape[1] for x in keys) - need
    return (
        torch.cat([k[:, :FIRST], torch.cat([*keys, k[:, FIRST:]], 1)[:, start:]], 1),
        torch.cat([v[:, :FIRST], torch.cat([*values, v[:, FIRST:]], 1)[:, start:]], 1),
    )


def rotate(keys: torch.Tensor, distance: int, theta: float = ROPE_THETA) -> torch.Tensor:
    """`keys` [..., dim] as they would be `distance` positions later; rotary halves."""
    half = keys.shape[-1] // 2
    angle = distance * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().to(keys.dtype), angle.sin().to(keys.dtype)
    a, b = keys[..., :half], keys[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _mixed(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Rows with some of another row, of the same mean and variance."""
    mean = rows.mean(1, keepdim=True)
    away = rows - mean
    return mean + math.sqrt(1 - _MIX**2) * away + _MIX * away[:, other]

"""Keys and values of 32k to 128k tokens, made from real ones.

The recipe (`lengthen`): the text is repeated before itself until it is long enough. The keys of a
repeat are rotated by the distance they moved, as rotary embedding would have done, so that a query
sees them from farther away; and a share of every row's variance comes from another row of the same
repeat, so that repeats are no copies. First and last tokens stay. The mass that the 64 best keys of
a query hold then falls with length as it does on real rows:

    python benches/long_rows.py     # real curve, and that of 2,048 real tokens made long

Distances beyond 8,192 are outside of what SmolLM2 was trained for. There nothing can be checked;
the mass spreads faster than before, so that the recipe is rather too hard than too easy.
"""

from __future__ import annotations

import argparse
import math

import torch

ROPE_THETA = 100_000.0
"""Of SmolLM2."""
FIRST, LAST = 32, 64
"""Tokens that stay where they are."""
MIX = 0.3
"""The share of variance that comes from another row is the square of this."""
TOP = 64


def rotate(keys: torch.Tensor, distance: int, theta: float = ROPE_THETA) -> torch.Tensor:
    """`keys` [..., dim] as they would be `distance` positions later; rotary halves."""
    half = keys.shape[-1] // 2
    angle = distance * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().to(keys.dtype), angle.sin().to(keys.dtype)
    a, b = keys[..., :half], keys[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


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


def _mixed(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Rows with some of another row, of the same mean and variance."""
    mean = rows.mean(1, keepdim=True)
    away = rows - mean
    return mean + math.sqrt(1 - MIX**2) * away + MIX * away[:, other]


def top_mass(k: torch.Tensor, q: torch.Tensor, top: int = TOP) -> float:
    """Mean share of the softmax that the `top` best keys of a query hold. `k` [heads, n, dim]; `q`
    [heads, group, t, dim], scaled, the queries of the last positions."""
    n, t = k.shape[1], q.shape[2]
    logits = q @ k[:, None].mT
    later = torch.arange(n) >= torch.arange(n - t, n)[:, None] + 1
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)
    return float(weights.topk(min(top, n), -1).values.sum(-1).mean())


def curves(base: int, layers: list[int] | None = None) -> dict[int, tuple[list[float], ...]]:
    """For every longer length that is stored: per layer the real top mass, and that of the first
    `base` rows made long; means over heads and texts."""
    from real_rows import LENGTHS, TEXTS, load_rows

    real: dict[int, list[list[float]]] = {n: [] for n in LENGTHS if n > base}
    made: dict[int, list[list[float]]] = {n: [] for n in LENGTHS if n > base}
    for text in TEXTS:
        rows = load_rows(text)
        kv_heads = rows.k.shape[1]

        def queries(n: int, layer: int, rows=rows, kv_heads=kv_heads) -> torch.Tensor:
            return rows.scale * rows.q[n][layer].unflatten(0, (kv_heads, rows.group))

        for n in real:
            every = layers or range(len(rows.k))
            real[n].append([top_mass(rows.k[i, :, :n], queries(n, i)) for i in every])
            made[n].append(
                [
                    top_mass(
                        lengthen(rows.k[i, :, :base], rows.v[i, :, :base], n)[0], queries(base, i)
                    )
                    for i in every
                ]
            )
    return {n: (_mean(real[n]), _mean(made[n])) for n in real}


def _mean(texts: list[list[float]]) -> list[float]:
    return torch.tensor(texts).mean(0).tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=int, default=2048, help="real rows to start from")
    for n, (real, made) in curves(parser.parse_args().base).items():
        ratios = torch.tensor(made) / torch.tensor(real)
        print(
            f"{n} tokens: the top {TOP} hold {sum(real) / len(real):.3f}, made long "
            f"{sum(made) / len(made):.3f}; a layer is off by {(ratios - 1).abs().max():.1%} at most"
        )

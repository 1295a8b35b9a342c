"""The mass that the 64 best keys of a query hold: of real rows, and of fewer ones made as long.

python benches/long_rows.py     # real curve, and that of 2,048 real tokens made long
"""

from __future__ import annotations

import argparse

import torch

from icecache.bench.lengthen import lengthen
from icecache.bench.rows import LENGTHS, load_rows
from icecache.eval.texts import TEXTS

TOP = 64


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

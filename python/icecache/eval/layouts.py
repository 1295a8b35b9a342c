"""Ways to lay the tokens between sink and window out in pages.

A layout is the page of each of these tokens, in order of position: integers [tokens] from 0 on,
none left out.

Four are compared at one fill, that of the paper's pages, and three at that of the default options:

sequential    spans of positions, as many as the tree that they are compared with has pages
random        of any tokens
paper         the pages of `IceConfig.paper`: parents drawn at random, capacity 16
refined       those of the default options, but as large as the paper's
... small     at the size of the default options
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from icecache.config import IceConfig
from icecache.eval.errors import EvalError
from icecache.eval.runs import Run
from icecache.layer import LayerCache

Pages = npt.NDArray[np.int64]

LAYOUTS = (
    "sequential",
    "random",
    "paper",
    "refined",
    "sequential small",
    "random small",
    "refined small",
)
_FILL = 0.91
"""Tokens in a refined page, as a share of `page_size`, which is above: full pages split."""


def sequential(tokens: int, pages: int) -> Pages:
    """Spans of positions, as equal in length as can be."""
    return np.arange(tokens) * pages // tokens


def shuffled(pages: Pages, seed: int) -> Pages:
    """Pages of the same sizes, the tokens drawn at random."""
    return np.random.default_rng(seed).permutation(pages)


def of_tree(layer: LayerCache, head: int) -> Pages:
    """The pages of the tree of one KV head; `EvalError` if there is none yet."""
    nodes = layer._core.nodes(head)
    if nodes is None:
        raise EvalError(f"{layer.seq_len} tokens are too few: there is no tree yet")
    ids, counts = nodes["ids"].astype(np.int64), nodes["levels"][0]["count"]
    pages = np.empty(len(ids), np.int64)
    pages[ids - layer.stats().sink_tokens] = np.repeat(np.arange(len(counts)), counts)
    return pages


def build(
    k: torch.Tensor, v: torch.Tensor, q_heads: int, scale: float, layer: int, config: IceConfig
) -> LayerCache:
    """A cache of `k` and `v` [kv_heads, n, head_dim]."""
    cache = LayerCache(q_heads, len(k), k.shape[2], config, scale, layer_index=layer)
    cache.prefill(k, v)
    return cache


def lay_out(
    k: torch.Tensor, v: torch.Tensor, q_heads: int, scale: float, layer: int
) -> list[dict[str, Pages]]:
    """All of `LAYOUTS` by name, for each KV head of one layer."""

    def trees(config: IceConfig) -> list[Pages]:
        cache = build(k, v, q_heads, scale, layer, config)
        return [of_tree(cache, head) for head in range(len(k))]

    default = Run("icecache").config()
    paper, small = trees(Run("pages").config()), trees(default)
    fill = np.mean([len(pages) / count(pages) for pages in paper])
    refined = trees(default.replace(page_size=round(fill / _FILL)))
    layouts = []
    for head in range(len(k)):
        layout = {"paper": paper[head], "refined": refined[head], "refined small": small[head]}
        for size, like in ("", paper[head]), (" small", small[head]):
            layout[f"sequential{size}"] = spans = sequential(len(like), count(like))
            layout[f"random{size}"] = shuffled(spans, seed=layer * len(k) + head)
        layouts.append({name: layout[name] for name in LAYOUTS})
    return layouts


def count(pages: Pages) -> int:
    """How many pages there are."""
    return int(pages.max()) + 1

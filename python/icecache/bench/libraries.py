"""Approximate search by other libraries, each an HNSW graph per KV head, at the same recall.

Keys are f32 and compared by inner product. A step searches for the best keys of every query head
and attends to those alone. The breadth of the search is the smallest of `_BREADTHS` at which a step
finds as much of the true best as icecache; sink and window count as found for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from icecache.bench.heads import Layer
from icecache.bench.timing import clock, rest

Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
Search = Callable[[npt.NDArray[np.float32], int, int], Found]
"""From queries [group, head_dim], how many to find and the breadth: positions and products."""

_BREADTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_NEIGHBOURS, _BUILD_BREADTH = 16, 100


@dataclass(frozen=True)
class LibraryResult:
    """One library on one layer, whose rows the caches may hold."""

    ms: float
    """Median of a step."""
    recall: float
    """Share of the true best keys of a query that were found."""
    breadth: int


def installed() -> list[str]:
    """Those of the known libraries that are here."""
    return [name for name in _LIBRARIES if find_spec(name) is not None]


def measure_library(
    name: str,
    layer: Layer,
    always: npt.NDArray[np.int64],
    recall: float,
    budget: int,
    scale: float,
    threads: int,
) -> LibraryResult:
    """Times a library at a recall of at least `recall`, or at its largest breadth.

    `always`: the positions that are attended without a search.
    """
    searches = [_LIBRARIES[name](k.float().numpy(), threads) for k in layer.k]
    queries = layer.queries()
    truth = [best(layer, t, budget) for t in range(len(queries))]
    for breadth in _BREADTHS:
        shares = []
        for q, wanted in zip(queries, truth, strict=True):
            found = [ids for head, _ in _find(searches, q, budget, breadth) for ids in head]
            shares.append(recall_of([np.union1d(always, ids) for ids in found], wanted))
        reached = fmean(shares)
        if reached >= recall:
            break
    rest()
    step = partial(_step, searches, layer.v, budget, breadth, scale)
    times = [clock(partial(step, q))[0] for q in queries]
    return LibraryResult(median(times), reached, breadth)


def best(layer: Layer, t: int, budget: int) -> npt.NDArray[np.int64]:
    """The true best keys of the queries of position `t`, [q_heads, budget]."""
    group = len(layer.q) // len(layer.k)
    q = layer.q[:, t].float()
    logits = [q[i * group : (i + 1) * group] @ k.float().T for i, k in enumerate(layer.k)]
    return torch.cat(logits).topk(min(budget, layer.k.shape[1]), sorted=False).indices.numpy()


def recall_of(found: Sequence[npt.NDArray[np.int64]], wanted: npt.NDArray[np.int64]) -> float:
    """Share of `wanted` [q_heads, budget] that is in what each query head found."""
    return fmean(float(np.isin(b, a).mean()) for a, b in zip(found, wanted, strict=True))


def _find(searches: Sequence[Search], q: torch.Tensor, budget: int, breadth: int) -> list[Found]:
    grouped = q.float().reshape(len(searches), -1, q.shape[-1]).numpy()
    return [search(x, budget, breadth) for search, x in zip(searches, grouped, strict=True)]


def _step(
    searches: Sequence[Search],
    v: torch.Tensor,
    budget: int,
    breadth: int,
    scale: float,
    q: torch.Tensor,
) -> torch.Tensor:
    found = _find(searches, q, budget, breadth)
    ids = torch.from_numpy(np.stack([ids for ids, _ in found]))
    products = torch.from_numpy(np.stack([products for _, products in found]))
    weights = (scale * products).softmax(-1)
    rows = v[torch.arange(len(v))[:, None, None], ids].float()
    return (weights[:, :, None] @ rows).reshape(q.shape).to(q.dtype)


def _faiss(keys: npt.NDArray[np.float32], threads: int) -> Search:
    import faiss

    faiss.omp_set_num_threads(threads)
    index: Any = faiss.IndexHNSWFlat(keys.shape[1], _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _BUILD_BREADTH
    index.add(keys)

    def search(q: npt.NDArray[np.float32], budget: int, breadth: int) -> Found:
        index.hnsw.efSearch = breadth
        products, ids = index.search(q, budget)
        return ids, products

    return search


def _hnswlib(keys: npt.NDArray[np.float32], threads: int) -> Search:
    import hnswlib

    index: Any = hnswlib.Index("ip", keys.shape[1])
    index.init_index(len(keys), M=_NEIGHBOURS, ef_construction=_BUILD_BREADTH)
    index.add_items(keys, num_threads=threads)

    def search(q: npt.NDArray[np.float32], budget: int, breadth: int) -> Found:
        index.set_ef(breadth)
        ids, distances = index.knn_query(q, budget, num_threads=threads)
        return ids.astype(np.int64), 1 - distances

    return search


def _usearch(keys: npt.NDArray[np.float32], threads: int) -> Search:
    from usearch.index import Index

    index: Any = Index(
        ndim=keys.shape[1],
        metric="ip",
        dtype="f32",
        connectivity=_NEIGHBOURS,
        expansion_add=_BUILD_BREADTH,
    )
    index.add(np.arange(len(keys)), keys, threads=threads)

    def search(q: npt.NDArray[np.float32], budget: int, breadth: int) -> Found:
        index.expansion_search = breadth
        matches = index.search(q, budget, threads=threads)
        shape = (len(q), budget)  # one query gives plain arrays
        ids = matches.keys.reshape(shape).astype(np.int64)
        return ids, 1 - matches.distances.reshape(shape)

    return search


_LIBRARIES: dict[str, Callable[[npt.NDArray[np.float32], int], Search]] = {
    "faiss": _faiss,
    "hnswlib": _hnswlib,
    "usearch": _usearch,
}

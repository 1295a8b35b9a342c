"""`DciTree`: the index alone, for maximum inner product search over any vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from . import _icecache
from .arrays import Array, operand
from .config import require_int
from .stats import TreeStats

# Leaves and lowest upper nodes that a search opens: 0.95 of the true top 16 and more on clustered
# keys and on those of a model, 8,192 of either, for a tenth of the keys.
FIELD_OF_VIEW = (128, 96)


class DciTree:
    """A DCI-tree over vectors, numbered from 0 in order of insertion.

    Finds the keys of largest inner product with a query by a multi-level descent (paper section
    3.2: keys are centred and lifted so that inner product becomes nearness). The same seed and keys
    give the same tree and answers, whatever the number of threads. Up to 255 keys are simply
    scanned; the first 256 fix the transform.

    Args:
        dim: elements of a key.
        seed: of the random promotion.
        page_size: target mean of keys per page, a leaf.
        page_capacity: most keys of a page; None means twice `page_size`.
        fanout: target mean of children per node.
        refine_passes: times that a build moves nodes to their means and links anew; from 1 on it
            also regroups every family.
        scan_below: children up to which all of a node's are scored. Those of a larger family (a
            node has up to twice `fanout` children, the top eight times) are visited in the order
            of their random projections, Prioritized DCI, until an eighth is scored.
        summary_dtype: type of the stored means: "f32", "f16" or "bf16".
        num_threads: threads of one call; None means all that the process may use.
    """

    def __init__(
        self,
        dim: int,
        *,
        seed: int = 0,
        page_size: int = 6,
        page_capacity: int | None = None,
        fanout: int = 12,
        refine_passes: int = 2,
        scan_below: int = 16384,
        summary_dtype: str = "f16",
        num_threads: int | None = None,
    ) -> None:
        self.dim = require_int("dim", dim, 1)
        page_size = require_int("page_size", page_size, 1)
        self._core = _icecache.Index(
            self.dim,
            page_size,
            2 * page_size
            if page_capacity is None
            else require_int("page_capacity", page_capacity, page_size),
            require_int("fanout", fanout, 2),
            require_int("refine_passes", refine_passes, 0),
            require_int("scan_below", scan_below, 1),
            summary_dtype,
            require_int("seed", seed, 0),
            0 if num_threads is None else require_int("num_threads", num_threads, 1),
        )
        self._scored = (0.0, 0.0)

    def insert(self, keys: Array) -> None:
        """Adds keys, [n, dim] in float32, float16 or bfloat16 (one dtype for the whole tree)."""
        prepared = operand("keys", keys)
        self._core.insert(self._matrix("keys", prepared.array), prepared.dtype)

    def search(
        self, queries: Array, k: int, *, field_of_view: int | Sequence[int] = FIELD_OF_VIEW
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The `k` keys of (approximately) largest inner product with each query, [m, dim].

        `field_of_view` nodes are opened per level: more finds more and reads more. Several numbers
        are for the levels from the leaves up, the last for all above. Returns ids and inner
        products, [m, k], best first; where there are fewer keys, -1 and minus infinity.
        """
        return self._search(queries, k, field_of_view, exact=False)

    def exact_search(
        self, queries: Array, k: int, *, field_of_view: int | Sequence[int] = FIELD_OF_VIEW
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """As `search`, by scanning every key; `field_of_view` is ignored."""
        return self._search(queries, k, field_of_view, exact=True)

    def check(self) -> None:
        """Verifies every invariant; `RuntimeError` names the first that is broken."""
        self._core.check()

    def __len__(self) -> int:
        return len(self._core)

    def stats(self) -> TreeStats:
        """Sizes, and the effort of the last search."""
        key_bytes, all_bytes, pages, nodes = self._core.stats()
        return TreeStats(
            keys=len(self),
            pages=pages,
            mean_page_fill=len(self) / pages if pages else 0.0,
            nodes_per_level=tuple(nodes),
            key_bytes=key_bytes,
            index_bytes=all_bytes - key_bytes,
            overhead=(all_bytes - key_bytes) / key_bytes if key_bytes else 0.0,
            last_nodes_scored=self._scored[0],
            last_keys_scored=self._scored[1],
        )

    def _search(
        self, queries: Array, k: int, field_of_view: int | Sequence[int], exact: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        k = require_int("k", k, 1)
        counts = field_of_view if isinstance(field_of_view, Iterable) else (field_of_view,)
        view = [require_int("field_of_view", count, 1) for count in counts]
        if not view:
            raise ValueError("field_of_view must have a number for the leaves, got none")
        prepared = operand("queries", queries)
        matrix = self._matrix("queries", prepared.array)
        ids = np.empty((len(matrix), k), np.int64)
        scores = np.empty((len(matrix), k), np.float32)
        if len(matrix):
            nodes, keys = self._core.search(matrix, prepared.dtype, view, exact, ids, scores)
            self._scored = (nodes / len(matrix), keys / len(matrix))
        return ids, scores

    def _matrix(self, name: str, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        if array.ndim != 2 or array.shape[1] != self.dim:
            raise ValueError(f"{name} must have shape [n, {self.dim}], got {list(array.shape)}")
        return array

    def __reduce__(self) -> NoReturn:
        raise TypeError("a DciTree cannot be copied or pickled: insert its keys into another")

    def __repr__(self) -> str:
        return f"DciTree(dim={self.dim}, keys={len(self)})"

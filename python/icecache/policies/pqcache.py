"""PQCache (Zhang et al., arXiv 2407.12820): tokens by product-quantized keys."""

from __future__ import annotations

import torch
from torch.nn import functional

from icecache.policies.clusters import kmeans, nearest
from icecache.policies.dense import Choice, DenseLayer, Positions, best, group_share

PARTS = 2
BITS = 6
PASSES = 10


class PQCacheLayer(DenseLayer):
    """The `token_budget` best tokens by logits of their quantized keys.

    Keys are cut into 2 parts, each replaced by one of 64 centroids, from k-means of all tokens
    between sink and window when a position attends first. Later tokens get codes from these
    codebooks when they leave the window. A token's score is its share in a softmax (`group_share`).
    Published: one choice per query head. On a device: codes, codebooks and a cache of recently
    fetched blocks, which decides what is moved only and is left out. The quantized keys are stored
    here in full.
    """

    _books: list[torch.Tensor]
    _quantized: torch.Tensor

    def choose(self, at: Positions) -> Choice | None:
        sink = self.config.sink_tokens
        first, last = (sink + int(row.sum()) for row in (at.middle[0], at.middle[-1]))
        if not self._books:
            self._learn_books(at.k[:, sink : max(first, sink + 1)].float())
        known = sink + self._quantized.shape[1]
        if known < last:
            fresh = self._quantize(at.k[:, known:last].float())
            self._quantized = torch.cat([self._quantized, fresh], dim=1)
        logits = (at.q.flatten(1, 2) @ self._quantized[:, : last - sink].mT).view(
            *at.q.shape[:3], -1
        )
        share = group_share(at, logits.masked_fill(~at.middle[:, sink:last], -torch.inf))
        chosen = best(share, at.middle[:, sink:last], self.config.token_budget)
        codes = (last - sink) * PARTS * BITS / (8 * self.head_dim * at.k.element_size())
        exact = functional.pad(chosen, (sink, at.k.shape[1] - last))
        return Choice(exact, codes + 2**BITS)

    def _learn_books(self, keys: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(self.config.seed * 1000 + self.layer_index)
        count = min(2**BITS, keys.shape[1])
        self._books = [
            kmeans(part, count, passes=PASSES, spherical=False, generator=generator)[0]
            for part in keys.tensor_split(PARTS, dim=-1)
        ]

    def _quantize(self, keys: torch.Tensor) -> torch.Tensor:
        """Each key's centroids, f32, in the shape of `keys`."""
        parts = []
        for part, book in zip(keys.tensor_split(PARTS, dim=-1), self._books, strict=True):
            codes = nearest(part, book, spherical=False)
            parts.append(book.gather(1, codes[..., None].expand(-1, -1, book.shape[2])))
        return torch.cat(parts, dim=-1)

    def crop(self, n: int) -> None:
        super().crop(n)
        self._quantized = self._quantized[:, : max(0, n - self.config.sink_tokens)]

    def reset(self) -> None:
        super().reset()
        self._books = []
        self._quantized = torch.zeros((self.num_kv_heads, 0, self.head_dim))

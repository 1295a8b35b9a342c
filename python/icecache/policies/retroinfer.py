"""RetroInfer (Chen et al., arXiv 2505.02922): clusters of keys, the second best ones estimated."""

from __future__ import annotations

import torch
from torch.nn import functional

from icecache.policies.clusters import kmeans, means, sizes
from icecache.policies.dense import Choice, DenseLayer, Positions, group_share, whole

TOKENS = 16
SEGMENT = 2048
UPDATE = 1024
PASSES = 10
ESTIMATED = 0.23


class RetroInferLayer(DenseLayer):
    """Whole clusters of about 16 tokens attended exactly until the budget is full; the next 23 % of
    all clusters stand for their tokens by centroid, number and mean value; the rest is dropped.

    Clusters come from spherical k-means of centred keys within segments of 2,048 tokens (published:
    8,192, no closer on the text for tuning and four times the work). A cluster's score is the share
    of its centroid and number in a softmax (`group_share`). Tokens that left the window wait until
    they are 1,024, then become a segment; published, they are all attended to until then, here each
    counts as a cluster of its own. A budget below 16 makes smaller clusters. On a device:
    centroids, mean values and numbers, and a cache of recently fetched clusters, which decides what
    is moved only and is left out.
    """

    _labels: torch.Tensor
    _sizes: torch.Tensor
    _centroids: torch.Tensor
    _values: torch.Tensor

    def choose(self, at: Positions) -> Choice | None:
        sink, n = self.config.sink_tokens, at.k.shape[1]
        first, last = (sink + int(row.sum()) for row in (at.middle[0], at.middle[-1]))
        if sink + self._labels.shape[1] > first:  # the window moved back
            self._forget()
        while (waiting := first - sink - self._labels.shape[1]) >= UPDATE or (
            waiting > 0 and not self._labels.shape[1]
        ):
            start = first - waiting
            end = start + min(waiting, SEGMENT)
            self._cluster(at.k[:, start:end].float(), at.v[:, start:end].float())
        known, count = sink + self._labels.shape[1], self._centroids.shape[1]
        keys = torch.cat([self._centroids, at.k[:, known:last].float()], dim=1)
        values = torch.cat([self._values, at.v[:, known:last].float()], dim=1)
        number = functional.pad(self._sizes, (0, last - known), value=1.0)

        # One row per position: what it cannot see yet waits as well, and never wins.
        seen = functional.pad(at.middle[:, known:last], (count, 0), value=True)
        seen = seen & (number[:, None] > 0)
        logits = (at.q.flatten(1, 2) @ keys.mT).reshape(*at.q.shape[:3], -1)
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
        logits = logits + number.clamp(min=1).log()[:, None, None]
        score = group_share(at, logits).masked_fill(~seen, -torch.inf)
        taken = whole(score, number[:, None], self.config.token_budget) & seen
        rank = score.masked_fill(taken, -torch.inf).argsort(dim=-1, descending=True).argsort(dim=-1)
        estimated = (rank < (ESTIMATED * seen.sum(dim=-1)).round()[..., None]) & seen & ~taken

        labels = self._labels[:, None].expand(-1, len(seen[0]), -1)
        exact = torch.cat([taken.gather(2, labels), taken[..., count:]], dim=-1)
        rest = logits.masked_fill(~estimated[:, None], -torch.inf)
        return Choice(
            functional.pad(exact, (sink, n - last))[:, None],
            search_rows=float(keys.shape[1]),
            rest=(rest, values),
            rest_rows=float(estimated[:, -1].sum()) / self.num_kv_heads,
        )

    def _cluster(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Adds a segment behind those clustered."""
        generator = torch.Generator().manual_seed(self.config.seed * 1000 + self.layer_index)
        count = -(-k.shape[1] // min(TOKENS, self.config.token_budget))
        centred = k - k.mean(dim=1, keepdim=True)
        centred = functional.normalize(centred, dim=-1)
        labels = kmeans(centred, count, passes=PASSES, spherical=True, generator=generator)[1]
        self._labels = torch.cat([self._labels, labels + self._centroids.shape[1]], dim=1)
        self._sizes = torch.cat([self._sizes, sizes(labels, count)], dim=1)
        self._centroids = torch.cat([self._centroids, means(k, labels, count)], dim=1)
        self._values = torch.cat([self._values, means(v, labels, count)], dim=1)

    def crop(self, n: int) -> None:
        super().crop(n)
        if n < self.config.sink_tokens + self._labels.shape[1]:
            self._forget()

    def reset(self) -> None:
        super().reset()
        self._forget()

    def _forget(self) -> None:
        self._labels = torch.zeros((self.num_kv_heads, 0), dtype=torch.int64)
        self._sizes = torch.zeros((self.num_kv_heads, 0))
        self._centroids = torch.zeros((self.num_kv_heads, 0, self.head_dim))
        self._values = torch.zeros_like(self._centroids)

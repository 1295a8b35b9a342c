"""MagicPIG (Chen et al., arXiv 2410.16179): tokens sampled by hashing, weighted by their chance."""

from __future__ import annotations

import math

import torch

from icecache.policies.base import Prompt
from icecache.policies.dense import Choice, DenseLayer, Positions

BITS = 10
TABLES = 512
CALIBRATION = 64
EVERY = 8


class MagicPIGLayer(DenseLayer):
    """A query head samples the tokens whose key falls into its query's bucket in two or more of L
    hash tables; logits are lowered by the logarithm of the probability of that.

    A hash is 10 signs of random projections of the query and of the centred key. Sink and window
    are exact. Published: L = 150; here each KV head has as many tables (2 to 512) as let the group's
    query heads together sample `token_budget` tokens on the mean, by every 8th of the last 64
    positions of the prompt (where none was observed, the first that attends). Which tokens a step
    samples varies, so it may exceed the budget. As published, later tokens are not indexed: they
    are dropped when they leave the window, but for the first ones where the prompt does not fill
    the budget. On a device: sink and window; the host samples, attends and sends up its part.
    """

    def observe(self, prompt: Prompt) -> None:
        n, heads = prompt.k.shape[1], self.num_kv_heads
        q = prompt.q[:, max(0, n - CALIBRATION) :].flip(1)[:, ::EVERY].float()
        self._index(prompt.k[:, : self._window], q.unflatten(0, (heads, -1)))

    def choose(self, at: Positions) -> Choice | None:
        sink, n = self.config.sink_tokens, at.k.shape[1]
        if self._lengths is None:
            self._index(at.k[:, : sink + int(at.middle[0].sum())], at.q[:, :, :1])
        assert self._lengths is not None
        indexed = self._lengths.shape[1]
        if self._codes is None:
            exact = torch.arange(n) < sink + self.config.token_budget
            return Choice(exact, search_rows=0.0)

        q = at.q.flatten(1, 2)
        hits = torch.zeros(*q.shape[:2], indexed, dtype=torch.int16)
        for number, (planes, codes) in enumerate(zip(self._planes, self._codes, strict=True)):
            mine = _hash(q, planes)
            mine[self._tables <= number] = -1  # no bucket
            hits += mine[..., None] == codes[:, None]
        sampled = hits >= 2
        head, query, token = sampled.nonzero(as_tuple=True)
        logits = at.logits.flatten(1, 2)[head, query, sink + token].double()
        centred = logits - (q @ self._mean.mT)[head, query, 0]
        cosine = centred / (q.norm(dim=-1)[head, query] * self._lengths[head, token])
        chance = sampling_probability(cosine, self._tables[head].double())
        exact = torch.zeros(*q.shape[:2], n, dtype=torch.bool)
        exact[..., sink : sink + indexed] = sampled
        shift = torch.zeros(exact.shape)
        shift[head, query, sink + token] = -chance.log().float()
        ids = float(hits.view(*at.q.shape[:3], -1)[:, :, -1].sum()) / self.num_kv_heads
        return Choice(
            exact.view(at.logits.shape),
            # Projections are shared by all KV heads; an entry of a table is a number of 4 bytes.
            search_rows=BITS * len(self._planes) / self.num_kv_heads
            + 4 * ids / (self.head_dim * at.k.element_size()),
            shift=shift.view(at.logits.shape),
        )

    def _index(self, k: torch.Tensor, q: torch.Tensor) -> None:
        """Hashes all keys but the sink's. q: `[kv_heads, group, positions, head_dim]`."""
        keys = k[:, self.config.sink_tokens :].float()
        self._mean = keys.mean(dim=1, keepdim=True)
        keys = keys - self._mean
        self._lengths = keys.norm(dim=-1).clamp(min=1e-20)
        if keys.shape[1] <= self.config.token_budget:
            return
        generator = torch.Generator().manual_seed(self.config.seed * 1000 + self.layer_index)
        self._codes, self._planes = [], []
        self._tables = torch.full((self.num_kv_heads,), 2)
        hits = torch.zeros(*q.shape[:3], keys.shape[1], dtype=torch.int16)
        while len(self._codes) < TABLES:
            planes = torch.randn(BITS, self.head_dim, generator=generator)
            codes = _hash(keys, planes)
            hits += _hash(q, planes)[..., None] == codes[:, None, None]
            tokens = (hits >= 2).any(dim=1).sum(dim=-1).float().mean(dim=1)
            within = tokens <= self.config.token_budget
            if len(self._codes) >= 2 and not within.any():
                break
            self._codes.append(codes)
            self._planes.append(planes)
            self._tables[within] = len(self._codes)

    def crop(self, n: int) -> None:
        super().crop(n)
        if self._lengths is not None:
            indexed = max(0, n - self.config.sink_tokens)
            self._lengths = self._lengths[:, :indexed]
            self._codes = self._codes and [codes[:, :indexed] for codes in self._codes]

    def reset(self) -> None:
        super().reset()
        self._lengths: torch.Tensor | None = None
        self._codes: list[torch.Tensor] | None = None


def _hash(x: torch.Tensor, planes: torch.Tensor) -> torch.Tensor:
    """The signs of the projections as a number, int16; drops the last dimension of `x`."""
    return ((x @ planes.mT > 0) * (1 << torch.arange(len(planes)))).sum(dim=-1).short()


def sampling_probability(cosine: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """The chance of two collisions or more, f64: a sign differs with the angle over pi."""
    same = (1 - torch.acos(cosine.double().clamp(-1, 1)) / math.pi) ** BITS
    other = (1 - same) ** (tables - 1)
    return (1 - other * (1 - same) - tables * same * other).clamp(min=1e-30)

"""MagicPIG (Chen et al., arXiv 2410.16179): tokens sampled by hashing, weighted by their chance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from icecache.policies.base import Prompt
from icecache.policies.dense import Choice, DenseLayer, Positions

BITS = 10
TABLES = 512
CALIBRATION = 64
EVERY = 16


class MagicPIGLayer(DenseLayer):
    """A query head samples the tokens whose key falls into its query's bucket in two or more of L
    hash tables; logits are lowered by the logarithm of the probability of that.

    A hash is 10 signs of random projections of the query and of the centred key. Sink and window
    are exact. Published: L = 150; here each KV head has as many tables (2 to 512) as let the query
    heads of its group together sample `token_budget` tokens on the mean, by every 16th of the last
    64 positions of the prompt (where none was observed, the first that attends). Which tokens a
    step samples varies, so it may exceed the budget. As published, the whole prompt is indexed and
    no later token is: those are dropped when they leave the window, but for the first ones where
    the prompt does not fill the budget. On a device: sink and window; the host samples, attends and
    sends up its part.
    """

    _lengths: torch.Tensor | None
    _tables: Tables | None

    def observe(self, prompt: Prompt) -> None:
        n, heads = prompt.k.shape[1], self.num_kv_heads
        q = prompt.q[:, max(0, n - CALIBRATION) :].flip(1)[:, ::EVERY].float()
        self._index(prompt.k, q.reshape(heads, self.group, -1, self.head_dim), self._window)

    def choose(self, at: Positions) -> Choice | None:
        sink, n = self.config.sink_tokens, at.k.shape[1]
        if self._lengths is None:
            end = sink + int(at.middle[0].sum())
            self._index(at.k[:, :end], at.q[:, :, :1], end)
        assert self._lengths is not None
        indexed = self._lengths.shape[1]
        if self._tables is None:
            exact = torch.arange(n) < sink + self.config.token_budget
            return Choice(exact, search_rows=0.0)

        q = at.q.flatten(1, 2)
        hits = self._tables.hits(q, self._used)[..., :indexed]
        sampled = hits >= 2
        head, query, token = sampled.nonzero(as_tuple=True)
        logits = at.logits.flatten(1, 2)[head, query, sink + token].double()
        centred = logits - (q @ self._mean.mT)[head, query, 0]
        cosine = centred / (q.norm(dim=-1)[head, query] * self._lengths[head, token])
        chance = sampling_probability(cosine, self._used[head].double())
        exact = torch.zeros(*q.shape[:2], n, dtype=torch.bool)
        exact[..., sink : sink + indexed] = sampled
        shift = torch.zeros(exact.shape)
        shift[head, query, sink + token] = -chance.log().float()
        ids = float(hits.view(*at.q.shape[:3], -1)[:, :, -1].sum()) / self.num_kv_heads
        return Choice(
            exact.view(at.logits.shape),
            # Projections are shared by all KV heads; an entry of a table is a number of 4 bytes.
            search_rows=BITS * float(self._used.max()) / self.num_kv_heads
            + 4 * ids / (self.head_dim * at.k.element_size()),
            shift=shift.view(at.logits.shape),
        )

    def _index(self, k: torch.Tensor, q: torch.Tensor, end: int) -> None:
        """Hashes all keys but the sink's; the window begins at `end`.

        q: `[kv_heads, group, positions, head_dim]`.
        """
        keys = k[:, self.config.sink_tokens :].float()
        self._mean = keys.mean(dim=1, keepdim=True)
        keys = keys - self._mean
        self._lengths = keys.norm(dim=-1).clamp(min=1e-20)
        if keys.shape[1] <= self.config.token_budget:
            return
        generator = torch.Generator().manual_seed(self.config.seed * 1000 + self.layer_index)
        self._used = torch.full((self.num_kv_heads,), 2)
        hits = torch.zeros(*q.shape[:3], keys.shape[1], dtype=torch.int64)
        made: list[Tables] = []
        count = 0
        while count < TABLES:
            planes = torch.randn(max(1, count // 16), BITS, self.head_dim, generator=generator)
            made.append(Tables.of(keys, planes))
            count += len(planes)
            hits += made[-1].hits(q.flatten(1, 2)).view(hits.shape)
            tokens = (
                (hits.amax(dim=1) >= 2)[..., : end - self.config.sink_tokens]
                .sum(dim=-1)
                .float()
                .mean(dim=1)
            )
            within = tokens <= self.config.token_budget
            self._used[within] = count
            if count >= 2 and not within.any():
                break
        self._tables = Tables.joined(made)

    def crop(self, n: int) -> None:
        super().crop(n)
        if self._lengths is not None:
            self._lengths = self._lengths[:, : max(0, n - self.config.sink_tokens)]

    def reset(self) -> None:
        super().reset()
        self._lengths = None
        self._tables = None


@dataclass(frozen=True)
class Tables:
    """Hash tables of the keys of all KV heads."""

    planes: torch.Tensor
    """`[tables, BITS, head_dim]`."""
    tokens: torch.Tensor
    """Bucket by bucket, `[kv_heads, tables, n]`."""
    starts: torch.Tensor
    """Of the buckets in `tokens`, `[kv_heads, tables, 2**BITS + 1]`."""

    @classmethod
    def of(cls, keys: torch.Tensor, planes: torch.Tensor) -> Tables:
        codes, tokens = _hash(keys, planes).mT.contiguous().sort(dim=-1)
        buckets = torch.arange(2**BITS + 1).expand(*codes.shape[:2], -1).contiguous()
        return cls(planes, tokens.int(), torch.searchsorted(codes, buckets, out_int32=True))

    @classmethod
    def joined(cls, parts: list[Tables]) -> Tables:
        return cls(
            torch.cat([part.planes for part in parts]),
            torch.cat([part.tokens for part in parts], dim=1),
            torch.cat([part.starts for part in parts], dim=1),
        )

    def hits(self, q: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
        """In how many tables each key lies in its query's bucket.

        q: `[kv_heads, m, head_dim]`; used: the tables that count, `[kv_heads]`. Returns
        `[kv_heads, m, n]`.
        """
        heads, tables, n = self.tokens.shape
        codes = _hash(q, self.planes).mT
        low = self.starts.gather(2, codes)
        found = self.starts.gather(2, codes + 1) - low
        if used is not None:
            found[torch.arange(tables) >= used[:, None]] = 0
        found, m = found.flatten(), q.shape[1]
        bucket = torch.repeat_interleave(found)  # of each key found, counted [head, table, query]
        place = torch.arange(len(bucket)) - (found.cumsum(0) - found)[bucket]
        token = self.tokens.flatten()[bucket // m * n + low.flatten()[bucket] + place]
        query = bucket // (tables * m) * m + bucket % m
        return torch.bincount(query * n + token, minlength=heads * m * n).view(heads, m, n)


def _hash(x: torch.Tensor, planes: torch.Tensor) -> torch.Tensor:
    """The signs of each table's projections as a number. `[..., head_dim]` to `[..., tables]`."""
    signs = (x @ planes.flatten(0, 1).mT > 0).float().reshape(*x.shape[:-1], -1, BITS)
    return (signs @ (1 << torch.arange(BITS)).float()).long()


def sampling_probability(cosine: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """The chance of two collisions or more, f64: a sign differs with the angle over pi."""
    same = (1 - torch.acos(cosine.double().clamp(-1, 1)) / math.pi) ** BITS
    other = (1 - same) ** (tables - 1)
    return (1 - other * (1 - same) - tables * same * other).clamp(min=1e-30)

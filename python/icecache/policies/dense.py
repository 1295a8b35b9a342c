"""The common part of the policies that are re-made over plain torch tensors.

A policy is a `DenseLayer` with a method `choose`. Whatever it keeps where, all keys and values are
here, and logits of everything are computed: a policy is judged by what it attends to and by what it
would have read, not by its speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from icecache.config import IceConfig
from icecache.policies.base import Prompt
from icecache.stats import LayerStats

_QUERY_CHUNK = 512
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
WINDOW_SLACK = 32
"""Tokens that the window grows by after a prefill before it begins to move, as a `LayerCache`'s."""


@dataclass(frozen=True)
class Positions:
    """The last `t` of `n` stored positions, which are about to attend."""

    q: torch.Tensor
    """f32 `[kv_heads, group, t, head_dim]`, scaled: logits are `q @ k`."""
    k: torch.Tensor
    """`[kv_heads, n, head_dim]`."""
    v: torch.Tensor
    """`[kv_heads, n, head_dim]`."""
    logits: torch.Tensor
    """f32 `[kv_heads, group, t, n]`; -inf at what comes after a position."""
    middle: torch.Tensor
    """bool `[t, n]`: what is neither sink nor window of a position, nor after it. Of these it
    chooses; sink and window are always attended to."""


@dataclass(frozen=True)
class Choice:
    """What positions attend to beside sink and window."""

    exact: torch.Tensor
    """bool, broadcasts to `[kv_heads, group, t, n]`: attended exactly. Only what is in `middle`
    counts."""
    search_rows: float
    """Key rows read per KV head and position to choose, beyond those attended to. Bounds, codes and
    centroids count as the part of a key row that they take."""
    shift: torch.Tensor | None = None
    """f32, broadcasts like `exact`: added to the logits, such as minus the logarithm of the
    probability with which a token was sampled. Sink and window are not shifted."""
    rest: tuple[torch.Tensor, torch.Tensor] | None = None
    """What stands for tokens that are not attended to: logits f32 `[kv_heads, group, t, m]` (with
    the logarithm of their number added; -inf leaves one out) and values f32
    `[kv_heads, m, head_dim]`."""
    rest_rows: float = 0.0
    """Value rows of `rest` read per KV head and position."""


def best(score: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest of those allowed, or all of them.

    score: `[kv_heads, t, n]`; allowed: bool; the two broadcast to each other. Returns bool
    `[kv_heads, 1, t, n]`, as `Choice.exact`.
    """
    score = torch.where(allowed, score, -torch.inf)
    highest = score.topk(min(count, score.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, highest, True)
    return (chosen & allowed)[:, None]


def latest(middle: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` tokens of `Positions.middle`, as it."""
    number = middle.cumsum(dim=1)  # from 1
    return middle & (number > number[:, -1:] - count)


def whole(score: torch.Tensor, size: torch.Tensor, count: int) -> torch.Tensor:
    """Pages or clusters, the highest first, as long as their tokens are `count` at most together.

    score: `[kv_heads, t, pages]`; size: tokens in each, broadcasts to it. Returns bool, as `score`.
    """
    order = score.argsort(dim=-1, descending=True, stable=True)
    tokens = size.expand_as(score).gather(-1, order).cumsum(dim=-1)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, tokens <= count)


def group_share(at: Positions, logits: torch.Tensor) -> torch.Tensor:
    """Each candidate's share in the softmax over all candidates, sink and window, summed over the
    query heads of the group.

    logits: what is known of the candidates, f32 `[kv_heads, group, t, m]`, -inf for what is none.
    Returns `[kv_heads, t, m]`.
    """
    ends = (~at.middle[0]).nonzero()[:, 0]  # sink and window of every position, and more
    always = at.logits[..., ends].masked_fill(at.middle[:, ends], -torch.inf)
    total = torch.cat([always, logits], dim=-1).logsumexp(dim=-1, keepdim=True)
    return (logits - total).exp().sum(dim=1)


class DenseLayer:
    """Keys and values as two torch tensors; a subclass says which tokens a query attends to.

    Logits and weights are f32 whatever the storage. The softmax runs over the chosen tokens and
    what stands for the rest: what is neither is dropped.
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        config: IceConfig,
        scale: float | None = None,
        *,
        layer_index: int = 0,
        below: DenseLayer | None = None,
    ) -> None:
        """`below`: the layer before this one in the model, of the same sequence."""
        if num_kv_heads < 1 or num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads}, {num_kv_heads}"
            )
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_q_heads // num_kv_heads
        self.head_dim = head_dim
        self.config = config
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.layer_index = layer_index
        self.below = below
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None
        self._window = 0
        self.reset()

    def observe(self, prompt: Prompt) -> None:
        """Called once, after the prompt is stored: indexes it."""

    def choose(self, at: Positions) -> Choice | None:
        """What the positions attend to beside sink and window; None for all."""
        raise NotImplementedError

    def learn(self, at: Positions, weights: torch.Tensor) -> None:
        """Called after attention, with its weights `[kv_heads, group, t, n]`."""

    @property
    def seq_len(self) -> int:
        """Tokens stored."""
        return self._seq_len

    @property
    def dtype(self) -> str | None:
        return None if self._k is None else _DTYPES[self._k.dtype]

    def prefill(
        self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self.append(k, v)
        ends = self.config.sink_tokens, self._seq_len - self.config.window_tokens
        self._window = max(self._window, *ends)
        return None if q is None else self.attend_exact(q)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.append(k, v)
        return self.attend(q)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, rows in (("k", k), ("v", v)):
            if not isinstance(rows, torch.Tensor):
                raise TypeError(f"{name} must be a torch tensor, got {type(rows).__name__}")
            if rows.ndim != 3 or rows.shape[::2] != (self.num_kv_heads, self.head_dim):
                raise ValueError(
                    f"{name} must be [{self.num_kv_heads}, n, {self.head_dim}], "
                    f"got {list(rows.shape)}"
                )
        if k.shape != v.shape or k.dtype != v.dtype or k.dtype not in _DTYPES:
            raise ValueError(
                f"k and v must have one shape and one dtype out of f32, f16 and bf16, got "
                f"{list(k.shape)} {k.dtype} and {list(v.shape)} {v.dtype}"
            )
        if self._k is not None and self._k.dtype != k.dtype:
            raise ValueError(f"the layer stores {self._k.dtype}, got {k.dtype}")
        end = self.seq_len + k.shape[1]
        self._k = self._grown(self._k, end, k)
        self._v = self._grown(self._v, end, v)
        self._k[:, self.seq_len : end] = k
        self._v[:, self.seq_len : end] = v
        self._seq_len = end

    def _grown(self, stored: torch.Tensor | None, end: int, rows: torch.Tensor) -> torch.Tensor:
        """`stored` with room for `end` tokens. Growth is amortised, slack small."""
        if stored is not None and stored.shape[1] >= end:
            return stored
        capacity = end + max(64, end // 32)
        grown = rows.new_empty((self.num_kv_heads, capacity, self.head_dim))
        if stored is not None:
            grown[:, : self._seq_len] = stored[:, : self._seq_len]
        return grown

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        t = self._check_queries(q)
        k, v = self._stored()
        n = k.shape[1]
        grouped = (q.float() * self.scale).reshape(self.num_kv_heads, self.group, t, self.head_dim)
        position = torch.arange(n - t, n)[:, None]
        token = torch.arange(n)
        logits = (grouped.flatten(1, 2) @ k.float().mT).reshape(*grouped.shape[:3], n)
        logits.masked_fill_(token > position, -torch.inf)
        window = torch.tensor([[self._window_start(n - t + i + 1)] for i in range(t)])
        middle = (token >= self.config.sink_tokens) & (token < window) & (token <= position)
        at = Positions(grouped, k, v, logits, middle)
        out = self._attend(at).reshape(self.num_q_heads, t, self.head_dim).to(q.dtype)
        self._steps += t
        return out

    def _window_start(self, n: int) -> int:
        """Of the window of the last of `n` positions."""
        return max(self._window, n - self.config.window_tokens - WINDOW_SLACK)

    def _attend(self, at: Positions) -> torch.Tensor:
        """Outputs f32 `[kv_heads, group, t, head_dim]`, and the statistics of the last position."""
        n = at.k.shape[1]
        choice = self.choose(at) if at.middle.any() else None
        seen = at.logits > -torch.inf
        exact = seen if choice is None else seen & (choice.exact | ~at.middle)
        logits = at.logits
        if choice is not None and choice.shift is not None:
            logits = torch.where(at.middle, logits + choice.shift, logits)
        logits = logits.masked_fill(~exact, -torch.inf)
        values = at.v.float()
        if choice is not None and choice.rest is not None:
            logits = torch.cat([logits, choice.rest[0]], dim=-1)
            values = torch.cat([values, choice.rest[1]], dim=1)
        weights = torch.softmax(logits, dim=-1)
        self.learn(at, weights[..., :n])
        self._chosen = exact[:, :, -1].any(dim=1)
        attended = float(self._chosen.sum()) / self.num_kv_heads
        self._key_rows = attended + (0.0 if choice is None else choice.search_rows)
        self._value_rows = attended + (0.0 if choice is None else choice.rest_rows)
        return (weights.flatten(1, 2) @ values).reshape(at.q.shape)

    def attend_exact(self, q: torch.Tensor) -> torch.Tensor:
        first = self._seq_len - self._check_queries(q)
        k, v = self._stored()
        out = torch.empty_like(q)
        for start in range(0, q.shape[1], _QUERY_CHUNK):
            stop = min(start + _QUERY_CHUNK, q.shape[1])
            n = first + stop
            mask = torch.ones(stop - start, n, dtype=torch.bool).tril(first + start)
            out[:, start:stop] = functional.scaled_dot_product_attention(
                q[None, :, start:stop],
                k[None, :, :n].to(q.dtype),
                v[None, :, :n].to(q.dtype),
                attn_mask=mask,
                scale=self.scale,
                enable_gqa=True,
            )[0]
        return out

    def _check_queries(self, q: torch.Tensor) -> int:
        if not isinstance(q, torch.Tensor):
            raise TypeError(f"q must be a torch tensor, got {type(q).__name__}")
        if q.ndim != 3 or q.shape[::2] != (self.num_q_heads, self.head_dim):
            raise ValueError(
                f"q must be [{self.num_q_heads}, t, {self.head_dim}], got {list(q.shape)}"
            )
        if not 1 <= q.shape[1] <= self._seq_len:
            raise ValueError(
                f"q holds {q.shape[1]} positions, expected 1 to {self._seq_len}, those stored"
            )
        return int(q.shape[1])

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._k is None or self._v is None:
            raise ValueError("nothing is stored yet")
        return self._k[:, : self._seq_len], self._v[:, : self._seq_len]

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._stored()
        return k.clone(), v.clone()

    def crop(self, n: int) -> None:
        if not 0 <= n <= self._seq_len:
            raise ValueError(f"n must be between 0 and {self._seq_len}, got {n}")
        self._seq_len = n
        self._window = min(self._window, n)

    def reset(self) -> None:
        self._k = self._v = None
        self._seq_len = 0
        self._window = 0
        self._steps = 0
        self._chosen = torch.zeros((self.num_kv_heads, 0), dtype=torch.bool)
        self._key_rows = self._value_rows = 0.0

    def selected(self) -> list[np.ndarray]:
        return [row.nonzero()[:, 0].numpy() for row in self._chosen]

    def stats(self) -> LayerStats:
        """There is no tree, so the two estimates are NaN. Unused room counts as index bytes."""
        row_bytes = 0
        allocated = 0
        if self._k is not None:
            row_bytes = 2 * self.num_kv_heads * self.head_dim * self._k.element_size()
            allocated = row_bytes * self._k.shape[1]
        kv_bytes = row_bytes * self._seq_len
        sink = min(self.config.sink_tokens, self._seq_len)
        return LayerStats(
            seq_len=self._seq_len,
            sink_tokens=sink,
            window_tokens=self._seq_len - max(sink, self._window_start(self._seq_len)),
            tree_tokens=0,
            pages=0,
            mean_page_fill=0.0,
            nodes_per_level=(),
            kv_bytes=kv_bytes,
            index_bytes=allocated - kv_bytes,
            overhead=(allocated - kv_bytes) / kv_bytes if kv_bytes else 0.0,
            steps=self._steps,
            tokens_exact=float(self._chosen.sum()) / self.num_kv_heads,
            key_rows_read=self._key_rows,
            value_rows_read=self._value_rows,
            mass_exact=math.nan,
            error_estimate=math.nan,
            search_ms=0.0,
            select_ms=0.0,
            attend_ms=0.0,
            tail_ms=0.0,
        )

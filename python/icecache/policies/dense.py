"""The common part of the policies that keep all keys and values in plain torch tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from icecache.config import IceConfig
from icecache.stats import LayerStats

_QUERY_CHUNK = 512
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class DenseLayer:
    """Keys and values as two torch tensors; a subclass says which tokens a query attends to.

    Logits and weights are f32 whatever the storage. The softmax runs over the chosen tokens only:
    what is not chosen is dropped, and the weights of the rest are renormalised.
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
    ) -> None:
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
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None
        self._seq_len = 0
        self._steps = 0
        self._chosen = torch.empty((num_kv_heads, 0), dtype=torch.int64)
        self._key_rows = 0

    def choose(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        """The positions that one query position attends to.

        `q`: `[kv_heads, group, head_dim]`, scaled, f32. `k`: `[kv_heads, n, head_dim]`, the tokens
        it may see. Returns `[kv_heads, m]` (int64, sorted, distinct), or None for all.
        """
        raise NotImplementedError

    def key_rows_read(self, n: int, chosen: int) -> int:
        """Key rows read per KV head to choose and attend to `chosen` of `n` tokens."""
        return chosen

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
        first = self._seq_len - self._check_queries(q)
        k, v = self._stored()
        scaled = q.float() * self.scale
        grouped = scaled.reshape(self.num_kv_heads, self.group, -1, self.head_dim)
        out = torch.empty_like(q)
        for i in range(q.shape[1]):
            n = first + i + 1
            row = self._attend_one(grouped[:, :, i], k[:, :n], v[:, :n])
            out[:, i] = row.reshape(self.num_q_heads, self.head_dim)
        self._steps += q.shape[1]
        return out

    def _attend_one(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One position: `q` `[kv_heads, group, head_dim]`, scaled; output of the same shape."""
        n = k.shape[1]
        chosen = self.choose(q, k)
        if chosen is not None:
            index = chosen[:, :, None].expand(-1, -1, self.head_dim)
            k, v = k.gather(1, index), v.gather(1, index)
        self._chosen = torch.arange(n).expand(self.num_kv_heads, n) if chosen is None else chosen
        self._key_rows = self.key_rows_read(n, k.shape[1])
        weights = torch.softmax(q @ k.float().mT, dim=-1)
        return weights @ v.float()

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

    def reset(self) -> None:
        self._k = self._v = None
        self._seq_len = 0
        self._steps = 0
        self._chosen = torch.empty((self.num_kv_heads, 0), dtype=torch.int64)
        self._key_rows = 0

    def selected(self) -> list[np.ndarray]:
        return [np.asarray(row.numpy(), dtype=np.int64) for row in self._chosen]

    def stats(self) -> LayerStats:
        """There is no tree, so the two estimates are NaN. Unused room counts as index bytes."""
        row_bytes = 0
        allocated = 0
        if self._k is not None:
            row_bytes = 2 * self.num_kv_heads * self.head_dim * self._k.element_size()
            allocated = row_bytes * self._k.shape[1]
        kv_bytes = row_bytes * self._seq_len
        sink = min(self.config.sink_tokens, self._seq_len)
        chosen = self._chosen.shape[1]
        return LayerStats(
            seq_len=self._seq_len,
            sink_tokens=sink,
            window_tokens=min(self.config.window_tokens, self._seq_len - sink),
            tree_tokens=0,
            pages=0,
            mean_page_fill=0.0,
            nodes_per_level=(),
            kv_bytes=kv_bytes,
            index_bytes=allocated - kv_bytes,
            overhead=(allocated - kv_bytes) / kv_bytes if kv_bytes else 0.0,
            steps=self._steps,
            tokens_exact=float(chosen),
            key_rows_read=float(self._key_rows),
            value_rows_read=float(chosen),
            mass_exact=math.nan,
            error_estimate=math.nan,
            search_ms=0.0,
            select_ms=0.0,
            attend_ms=0.0,
            tail_ms=0.0,
        )

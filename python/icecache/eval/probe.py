"""Measures what a layer attends to against the full softmax over everything it stores."""

from __future__ import annotations

import math
from typing import Any

import torch

from icecache.policies import LayerLike


class Probe:
    """A `LayerLike` that passes everything on to another one and watches it decode.

    While `armed`, each `decode` is followed by full attention of its last position, with this query
    and all stored keys. Of every KV head, `[kv_heads]`: `mass`, the true share of the softmax on
    the tokens that were attended exactly, and `error`, |output - exact output| / |exact output|;
    both are means over the query heads of the group.
    """

    def __init__(
        self, layer: LayerLike, num_q_heads: int, scale: float | None, *, armed: bool = False
    ) -> None:
        self._layer = layer
        self._num_q_heads = num_q_heads
        self._scale = scale
        self.armed = armed
        self.mass = self.error = torch.tensor([math.nan])

    def decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, like: Probe | None = None
    ) -> torch.Tensor:
        others: dict[str, Any] = {} if like is None else {"like": like._layer}
        out: torch.Tensor = self._layer.decode(q, k, v, **others)
        if self.armed:
            self._measure(q[:, -1], out[:, -1])
        return out

    def _measure(self, q: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = (torch.as_tensor(rows).float() for rows in self._layer.gather())
        kv_heads, _, head_dim = keys.shape
        scale = 1.0 / math.sqrt(head_dim) if self._scale is None else self._scale
        grouped = q.float().reshape(kv_heads, self._num_q_heads // kv_heads, head_dim)
        probability = torch.softmax(grouped @ keys.mT * scale, dim=-1)
        self.mass = torch.stack(
            [
                probability[head][:, torch.as_tensor(positions)].sum(dim=-1).mean()
                for head, positions in enumerate(self._layer.selected())
            ]
        )
        exact = probability @ values
        error = (out.float().reshape(exact.shape) - exact).norm(dim=-1) / exact.norm(dim=-1)
        self.error = error.mean(dim=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

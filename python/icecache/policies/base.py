"""What every policy is: one layer of one sequence that stores keys and values and attends to them.

`icecache.layer.LayerCache` has this interface, and so have the layers it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from icecache.stats import LayerStats

_QUERY_CHUNK = 256


class LayerLike(Protocol):
    """One layer of one sequence.

    `k`, `v`: `[kv_heads, n, head_dim]`; `q` and every output: `[q_heads, t, head_dim]`. Query head
    `h` reads the KV head `h // (q_heads // kv_heads)`.
    """

    @property
    def seq_len(self) -> int:
        """Tokens stored."""

    @property
    def dtype(self) -> str | None:
        """The storage type, "f32", "f16" or "bf16"; None while nothing is stored."""

    def prefill(self, k: Any, v: Any, q: Any = None) -> Any:
        """Appends; with `q` returns exact attention over everything stored, causal bottom-right."""

    def decode(self, q: Any, k: Any, v: Any) -> Any:
        """Appends, and attends by the policy's rule."""

    def append(self, k: Any, v: Any) -> None:
        """Appends without attending."""

    def attend(self, q: Any) -> Any:
        """Attends by the policy's rule; `q` are the last `t` stored positions."""

    def attend_exact(self, q: Any) -> Any:
        """Attends to everything stored; `q` are the last `t` stored positions."""

    def gather(self) -> tuple[Any, Any]:
        """Copies of the stored keys and values, in position order."""

    def crop(self, n: int) -> None:
        """Keeps the first `n` tokens."""

    def reset(self) -> None:
        """Forgets everything."""

    def selected(self) -> list[np.ndarray]:
        """Per KV head, the sorted positions that the last attending position attended exactly."""

    def stats(self) -> LayerStats:
        """Sizes, and what the last step read."""


class LayerFactory(Protocol):
    """Makes the layers of one sequence."""

    def __call__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None,
        layer_index: int,
    ) -> LayerLike: ...


@dataclass(frozen=True)
class Prompt:
    """One layer of a prompt that was read with full attention, shared by all policies.

    k, v: `[kv_heads, n, head_dim]`; q: `[q_heads, n, head_dim]`, rotated, not scaled. Logits are
    `scale * q @ k`.
    """

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    scale: float

    def attention(self, start: int, stop: int) -> torch.Tensor:
        """The softmax of positions `start` to `stop`, `[kv_heads, group, stop - start, stop]`."""
        heads, _, dim = self.k.shape
        q = self.q[:, start:stop].float().reshape(heads, -1, dim) * self.scale
        logits = (q @ self.k[:, :stop].float().mT).reshape(heads, -1, stop - start, stop)
        later = torch.ones(stop - start, stop, dtype=torch.bool).triu(start + 1)
        return torch.softmax(logits.masked_fill_(later, -torch.inf), dim=-1)

    @cached_property
    def mass(self) -> torch.Tensor:
        """Attention that each token received from all positions of the prompt and all query heads
        of its group, `[kv_heads, n]`. Takes n^2 products, once."""
        n = self.k.shape[1]
        mass = torch.zeros(self.k.shape[:2])
        for start in range(0, n, _QUERY_CHUNK):
            stop = min(start + _QUERY_CHUNK, n)
            mass[:, :stop] += self.attention(start, stop).sum(dim=(1, 2))
        return mass

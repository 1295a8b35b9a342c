"""Exact attention of a prefill by torch: for many queries a matrix library is the fast path.

The core's own exact attention (rust/src/head.rs) serves NumPy and is the oracle of this one.
"""

from __future__ import annotations

from typing import Any

_BLOCK = 256
"""Positions attended at a time: a mask stays small, and Ctrl-C is seen in between."""


def attend_causal(q: Any, k: Any, v: Any, past: tuple[Any, Any] | None, scale: float) -> Any:
    """Attention of `n` new positions to all `past` ones, and causally to themselves.

    q: [q_heads, n, head_dim]; k, v: [kv_heads, n, head_dim]; past: keys and values
    [kv_heads, m, head_dim], or None; all CPU tensors of one dtype. Returns [q_heads, n, head_dim].
    """
    import torch

    if past is not None:
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
    n, m = q.shape[1], k.shape[1] - q.shape[1]
    out = torch.empty_like(q)
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        # Position i of the new ones is position m + i of all: the mask is bottom-right.
        mask = torch.ones(end - start, m + end, dtype=torch.bool).tril(m + start)
        out[:, start:end] = torch.nn.functional.scaled_dot_product_attention(
            q[None, :, start:end],
            k[None, :, : m + end],
            v[None, :, : m + end],
            attn_mask=mask,
            scale=scale,
            enable_gqa=q.shape[0] != k.shape[0],
        )[0]
    return out

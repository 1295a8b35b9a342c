"""Exact attention of a prefill by torch: for many queries a matrix library is the fast path.

The core's own exact attention (rust/src/head.rs) serves NumPy and is the oracle of this one.
"""

from __future__ import annotations

from typing import Any


def attend_causal(q: Any, k: Any, v: Any, past: tuple[Any, Any] | None, scale: float) -> Any:
    """Attention of `n` new positions to all `past` ones, and causally to themselves.

    q: [q_heads, n, head_dim]; k, v: [kv_heads, n, head_dim]; past: keys and values
    [kv_heads, m, head_dim], or None; all CPU tensors of one dtype. Returns [q_heads, n, head_dim].
    """
    import torch

    mask = None
    if past is not None:
        n, m = k.shape[1], past[0].shape[1]
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        # Position i of the new ones is position m + i of all: the mask is bottom-right.
        mask = torch.ones(n, m + n, dtype=torch.bool).tril(m)
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[0] != k.shape[0],
    )
    return out[0]

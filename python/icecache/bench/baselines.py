"""What a step is compared with, all in torch: exact attention in its forms, exact scan + top.

A baseline is prepared from `k` and `v` [kv_heads, n, head_dim] and then takes queries
[q_heads, 1, head_dim], of which it returns the attention in the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from icecache.bench.heads import Layer

Attend = Callable[[torch.Tensor], torch.Tensor]
Prepare = Callable[[torch.Tensor, torch.Tensor, int, float], Attend]
"""From `k`, `v`, the group (query heads per KV head) and the scale."""


def exact(layer: Layer, scale: float) -> torch.Tensor:
    """The truth: attention of every query to all keys, [q_heads, positions, head_dim], in f32."""
    group = len(layer.q) // len(layer.k)
    heads = []
    for i, (k, v) in enumerate(zip(layer.k, layer.v, strict=True)):
        q = layer.q[i * group : (i + 1) * group].float().flatten(0, 1)
        out = torch.softmax(scale * q @ k.float().T, dim=-1) @ v.float()
        heads.append(out.unflatten(0, (group, -1)))
    return torch.cat(heads)


def sdpa_gqa(k: torch.Tensor, v: torch.Tensor, group: int, scale: float) -> Attend:
    """As models call it: torch expands the KV heads at every step."""
    return lambda q: F.scaled_dot_product_attention(
        q[None], k[None], v[None], scale=scale, enable_gqa=True
    )[0]


def sdpa_expanded(k: torch.Tensor, v: torch.Tensor, group: int, scale: float) -> Attend:
    """The KV heads were expanded before."""
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return lambda q: F.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]


def sdpa_grouped(k: torch.Tensor, v: torch.Tensor, group: int, scale: float) -> Attend:
    """The queries of a group are taken for positions of one head: nothing is expanded."""

    def attend(q: torch.Tensor) -> torch.Tensor:
        grouped = q.view(len(k), group, -1)
        out = F.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)
        return out.reshape(q.shape)

    return attend


def sdpa_f32(k: torch.Tensor, v: torch.Tensor, group: int, scale: float) -> Attend:
    """The same, over rows converted before."""
    attend = sdpa_grouped(k.float(), v.float(), group, scale)
    return lambda q: attend(q.float())


SDPA: dict[str, Prepare] = {
    "enable_gqa": sdpa_gqa,
    "expanded": sdpa_expanded,
    "grouped": sdpa_grouped,
    "grouped, f32": sdpa_f32,
}


def scan(k: torch.Tensor, v: torch.Tensor, group: int, scale: float, budget: int) -> Attend:
    """The logits of all keys, and attention to the `budget` best of each query head alone."""
    heads = torch.arange(len(k))[:, None, None]

    def attend(q: torch.Tensor) -> torch.Tensor:
        logits = (q.view(len(k), group, -1) @ k.mT).float() * scale
        best = logits.topk(min(budget, k.shape[1]), sorted=False)
        rows = v[heads, best.indices].float()
        out = best.values.softmax(-1)[:, :, None] @ rows
        return out.reshape(q.shape).to(q.dtype)

    return attend


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Per query, of outputs [..., head_dim]."""
    truth = truth.float()
    error: torch.Tensor = (out.float() - truth).norm(dim=-1) / truth.norm(dim=-1)
    return error

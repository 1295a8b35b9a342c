"""The attention function "icecache": it lets a replaced layer attend.

Without a layer (another cache, or a layer that is not replaced) the function is plain sdpa.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .ice_layer import take_over
from .modes import not_compiled, refuse_gradients

ATTENTION_NAME = "icecache"
"""The name under which transformers knows the attention function."""


@not_compiled
def icecache_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' `AttentionInterface` calls it.

    query `[batch, q_heads, t, head_dim]`; key, value `[batch, kv_heads, n, head_dim]`, where a
    replaced layer gets only its `t` new rows. Returns `[batch, t, q_heads, head_dim]` and None.

    Raises `ValueError` for softcap, attention sinks (`s_aux`), a position bias, and
    `output_attentions`; and on a replaced layer for a sliding window, dropout, gradients, unequal
    key and value dimensions, and masks that `IceLayer.attend` refuses.
    """
    layer = take_over(key, value, kwargs)
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"icecache attention supports no {name}, got {kwargs[name]!r}")
    if kwargs.get("output_attentions"):
        raise ValueError("icecache attention has no weights to return: output_attentions is set")
    if layer is None:
        mask = attention_mask
        if mask is None and 1 < query.shape[2] < key.shape[2] and _is_causal(module, kwargs):
            mask = _causal(query, key.shape[2], kwargs.get("sliding_window"))  # sdpa's is top-left
        output, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None

    if (window := kwargs.get("sliding_window")) is not None:
        raise ValueError(f"expected full attention on a replaced layer, got a window of {window}")
    if attention_mask is None and query.shape[2] > 1 and not _is_causal(module, kwargs):
        raise ValueError(
            "expected causal attention or a mask on a replaced layer, got is_causal=False"
        )
    if dropout > 0:
        raise ValueError(f"expected no dropout, got {dropout}: call model.eval() first")
    if not query.shape[3] == key.shape[3] == value.shape[3]:
        dims = [tensor.shape[3] for tensor in (query, key, value)]
        raise ValueError(f"expected one dimension of queries, keys and values, got {dims}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"expected {key.shape[2]} queries, one per new token: {query.shape[2]}")
    groups = getattr(module, "num_key_value_groups", None)
    if groups is not None and query.shape[1] != groups * key.shape[1]:
        raise ValueError(
            f"expected {groups} query heads per KV head, got {query.shape[1]} and {key.shape[1]}: "
            "a tp_plan must split both or neither"
        )
    refuse_gradients(query)
    return layer.attend(query, key, value, scaling, attention_mask), None


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _causal(query: torch.Tensor, n: int, window: int | None = None) -> torch.Tensor:
    """The causal mask `[1, 1, t, n]`: the last of `t` queries sees all `n` keys (bottom-right)."""
    t = query.shape[2]
    mask = torch.ones(1, 1, t, n, dtype=torch.bool, device=query.device).tril(n - t)
    return mask if window is None else mask.triu(n - t - window + 1)


AttentionInterface.register(ATTENTION_NAME, icecache_attention_forward)
# A name missing here would silently lose the padding mask.
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

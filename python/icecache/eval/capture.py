"""Keys, values and queries of every layer of a model that reads a text with full attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from icecache.attention import icecache_attention_forward
from icecache.eval.decode import prefill

_NAME = "icecache_capture"


@dataclass(frozen=True)
class Captured:
    """What the layers of a model stored and asked for, rotary embedding applied."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values per layer, each [kv_heads, n, head_dim]."""
    queries: dict[int, list[torch.Tensor]]
    """Per length and layer: those of the last positions of so many tokens, not scaled,
    [q_heads, positions, head_dim]."""
    scales: list[float]
    """Factor of the logits, per layer."""


def capture(
    model: Any, ids: Sequence[int], lengths: Sequence[int], positions: int, progress: Progress
) -> Captured:
    """Prefills `ids`; keeps the queries of the last `positions` of each of the first `lengths`.

    `ValueError` for attention that is not plain softmax (softcap, sinks).
    """
    kept: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    scales: dict[int, float] = {}

    def watch(
        module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        layer, end = module.layer_idx, key.shape[2]
        start = end - query.shape[2]
        scale = kwargs.get("scaling")
        scales[layer] = float(query.shape[3] ** -0.5 if scale is None else scale)
        for length in lengths:
            first, last = max(length - positions, start), min(length, end)
            if first < last:
                rows = query[0, :, first - start : last - start]
                kept[length, layer].append(rows.clone())
        return icecache_attention_forward(module, query, key, *args, **kwargs)  # plain sdpa here

    AttentionInterface.register(_NAME, watch)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        layers = prefill(model, ids, progress).layers
    finally:
        model.set_attn_implementation(before)
    each = range(len(layers))
    queries = {n: [torch.cat(kept[n, layer], dim=1) for layer in each] for n in lengths}
    return Captured(layers, queries, [scales[layer] for layer in each])

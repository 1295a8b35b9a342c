"""What a policy would send to a device, and hold there, if the model were on one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from icecache.policies import POLICIES
from icecache.stats import LayerStats


class Traffic:
    """One layer. Every policy that fetches rows has the same slots for them: four times its budget
    per KV head (`device_tokens`), the most recently used stay."""

    def __init__(self, policy: str, layer: Any, num_q_heads: int, head_dim: int) -> None:
        """`layer`: a `LayerLike` with its options, `config`."""
        self._policy = POLICIES[policy]
        self._layer = layer
        self._answer_bytes = 4 * num_q_heads * (head_dim + 2)
        self._slots = layer.config.device_tokens or 4 * layer.config.token_budget
        self._resident: list[OrderedDict[int, None]] = []

    def step(self, selected: Sequence[np.ndarray], stats: LayerStats) -> tuple[float, float]:
        """Bytes moved and bytes held, of all KV heads, after a position that attended to
        `selected` (positions per KV head)."""
        pair = stats.kv_bytes / stats.seq_len / len(selected)
        kept = self._policy.keeps(stats.seq_len, self._layer)
        moved = 0.0
        if self._policy.fetches and kept < stats.seq_len:
            kept += min(self._slots, stats.seq_len)
            window = stats.seq_len - stats.window_tokens
            for head, positions in enumerate(selected):
                fetched = (positions >= stats.sink_tokens) & (positions < window)
                moved += pair * self._fetch(head, positions[fetched])
        if self._policy.answers:
            # An output, its weight and its largest logit, f32, per query head.
            moved += self._answer_bytes
        return moved, kept * pair * len(selected)

    def _fetch(self, head: int, wanted: np.ndarray) -> int:
        while len(self._resident) <= head:
            self._resident.append(OrderedDict())
        resident, misses = self._resident[head], 0
        for position in wanted.tolist():
            misses += position not in resident
            resident[position] = None
            resident.move_to_end(position)
        while len(resident) > self._slots:
            resident.popitem(last=False)
        return misses

"""StreamingLLM (Xiao et al., arXiv 2309.17453): sink tokens and the recent window, nothing else."""

from __future__ import annotations

import torch

from icecache.policies.dense import DenseLayer


class WindowLayer(DenseLayer):
    """The first `sink_tokens` and the last `window_tokens`; the budget plays no part.

    Keys keep the positions they were rotated with, as in every other policy here.
    """

    def choose(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        n = k.shape[1]
        sink, window = self.config.sink_tokens, self.config.window_tokens
        if n <= sink + window:
            return None
        kept = torch.cat([torch.arange(sink), torch.arange(n - window, n)])
        return kept.expand(self.num_kv_heads, -1)

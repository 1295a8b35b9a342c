"""Full attention: every token, at every step."""

from __future__ import annotations

import torch

from icecache.policies.dense import DenseLayer


class FullLayer(DenseLayer):
    """What the other policies are measured against."""

    def choose(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        return None

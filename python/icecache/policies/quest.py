"""Quest (Tang et al., arXiv 2406.10774): pages by the minimum and maximum of their keys."""

from __future__ import annotations

import torch

from icecache.policies.pages import PageLayer


class QuestLayer(PageLayer):
    """Pages of 16, bounded per channel.

    Published for models without grouped heads; the first two layers, full there, select here as
    with every policy. On a device: everything, and two rows of bounds a page.
    """

    PAGE = 16

    def digest(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.cat([keys.amin(dim=2), keys.amax(dim=2)], dim=-1)

    def bound(self, q: torch.Tensor, digest: torch.Tensor) -> torch.Tensor:
        low, high = digest.chunk(2, dim=-1)
        return q.clamp(max=0) @ low.mT + q.clamp(min=0) @ high.mT

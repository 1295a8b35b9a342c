"""ArkVale (Chen et al., NeurIPS 2024): pages by a bounding volume of their keys, recalled."""

from __future__ import annotations

import torch

from icecache.policies.pages import PageLayer


class ArkValeLayer(PageLayer):
    """Pages of 32, each in a ball around the mean of its keys.

    On a device: the balls, and pages that were recalled from the host. Which pages stay there
    decides what is moved, not what is attended to, and is left out.
    """

    PAGE = 32

    def digest(self, keys: torch.Tensor) -> torch.Tensor:
        centre = keys.mean(dim=2)
        radius = (keys - centre[:, :, None]).norm(dim=-1).amax(dim=-1, keepdim=True)
        return torch.cat([centre, radius], dim=-1)

    def bound(self, q: torch.Tensor, digest: torch.Tensor) -> torch.Tensor:
        centre, radius = digest[..., :-1], digest[..., -1]
        return q @ centre.mT + q.norm(dim=-1, keepdim=True) * radius[:, None]

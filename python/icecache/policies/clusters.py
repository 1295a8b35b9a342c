"""k-means, for the policies that cluster keys."""

from __future__ import annotations

import torch
from torch.nn import functional


def kmeans(
    x: torch.Tensor, count: int, *, passes: int, spherical: bool, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters of each batch element. x: f32 `[batch, n, dim]`, n >= `count`.

    Returns centroids `[batch, count, dim]` and the cluster of each row, `[batch, n]`. Starts from
    random rows; a cluster without rows keeps its centroid. Spherical: rows go by direction only.
    """
    batch, n, dim = x.shape
    start = torch.stack([torch.randperm(n, generator=generator)[:count] for _ in range(batch)])
    centroids = x.gather(1, start[..., None].expand(-1, -1, dim))
    for _ in range(passes):
        labels = nearest(x, centroids, spherical=spherical)
        centroids = torch.where(
            sizes(labels, count)[..., None] > 0, means(x, labels, count), centroids
        )
    return centroids, nearest(x, centroids, spherical=spherical)


def nearest(x: torch.Tensor, centroids: torch.Tensor, *, spherical: bool) -> torch.Tensor:
    """The centroid closest to each row, or closest in direction, `[batch, n]`."""
    if spherical:
        return (x @ functional.normalize(centroids, dim=-1).mT).argmax(dim=-1)
    half = centroids.square().sum(dim=-1, keepdim=True) / 2
    return torch.baddbmm(half.mT, x, centroids.mT, beta=-1).argmax(dim=-1)


def sizes(labels: torch.Tensor, count: int) -> torch.Tensor:
    """Rows in each cluster, f32 `[batch, count]`."""
    return torch.zeros(len(labels), count).scatter_add_(1, labels, torch.ones(labels.shape))


def means(x: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of each cluster's rows, `[batch, count, dim]`; 0 where it has none."""
    sums = torch.zeros(len(x), count, x.shape[2])
    sums.scatter_add_(1, labels[..., None].expand(-1, -1, x.shape[2]), x)
    return sums / sizes(labels, count).clamp(min=1)[..., None]

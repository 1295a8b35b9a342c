"""H2O (Zhang et al., arXiv 2306.14048): heavy hitters by accumulated attention, others evicted."""

from __future__ import annotations

import torch
from torch.nn import functional

from icecache.policies.base import Prompt
from icecache.policies.dense import Choice, DenseLayer, Positions, best, latest


class H2OLayer(DenseLayer):
    """Half of the budget are the tokens that received most attention so far, half a longer window.

    A token's score is the sum of the probabilities it received from all positions of the prompt and
    from every position since, over the query heads of the group. One that leaves the window
    competes with those kept; what loses is never attended to again. Half and half as published, of
    what sink and window of all policies leave. Positions that attend in one call all see the scores
    from before the call, so a call of several differs from single ones. On a device: what is kept,
    and a score each.
    """

    _score: torch.Tensor
    _evicted: torch.Tensor

    def observe(self, prompt: Prompt) -> None:
        self._score = prompt.mass.clone()

    def choose(self, at: Positions) -> Choice | None:
        self._follow(at.k.shape[1])
        heavy = self.config.token_budget // 2
        recent = latest(at.middle, self.config.token_budget - heavy)
        rivals = at.middle & ~recent & ~self._evicted[:, None]
        chosen = best(self._score[:, None], rivals, heavy) | recent
        self._evicted |= at.middle[-1] & ~chosen[:, 0, -1]
        return Choice(chosen, search_rows=0.0)

    def learn(self, at: Positions, weights: torch.Tensor) -> None:
        self._follow(at.k.shape[1])
        self._score += weights.sum(dim=(1, 2))

    def _follow(self, n: int) -> None:
        """New tokens come with score 0."""
        self._score = functional.pad(self._score, (0, n - self._score.shape[1]))
        self._evicted = functional.pad(self._evicted, (0, n - self._evicted.shape[1]))

    def crop(self, n: int) -> None:
        super().crop(n)
        self._score = self._score[:, :n]
        self._evicted = self._evicted[:, :n]

    def reset(self) -> None:
        super().reset()
        self._score = torch.zeros((self.num_kv_heads, 0))
        self._evicted = torch.zeros((self.num_kv_heads, 0), dtype=torch.bool)

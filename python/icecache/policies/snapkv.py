"""SnapKV (Li et al., arXiv 2404.14469): the end of the prompt votes once for what is kept."""

from __future__ import annotations

import torch
from torch.nn import functional

from icecache.policies.base import Prompt
from icecache.policies.dense import Choice, DenseLayer, Positions, best, latest

VOTERS = 64
KERNEL = 7
LATER = 0.5


class SnapKVLayer(DenseLayer):
    """Part of the budget are the tokens that the last 64 positions of the prompt attend to most.

    A vote is a probability, summed over these positions and the query heads of the group; votes
    are averaged over 7 neighbours. Where no prompt was observed, the first position to attend
    votes. Published: one choice per query head, and all later tokens are kept; here one per KV
    head, and the other half of the budget is a longer window for them. On a device: what is kept.
    """

    _kept: torch.Tensor | None

    def observe(self, prompt: Prompt) -> None:
        n = prompt.k.shape[1]
        self._kept = self._vote(prompt.attention(max(0, n - VOTERS), n), self._window)

    def choose(self, at: Positions) -> Choice | None:
        if self._kept is None:
            end = self.config.sink_tokens + int(at.middle[0].sum())
            self._kept = self._vote(torch.softmax(at.logits[:, :, :1], dim=-1), end)
        recent = latest(at.middle, self.config.token_budget - int(self._kept[0].sum()))
        kept = functional.pad(self._kept, (0, at.k.shape[1] - self._kept.shape[1]))
        return Choice((recent | kept[:, None])[:, None], search_rows=0.0)

    def _vote(self, attention: torch.Tensor, end: int) -> torch.Tensor:
        """What is kept of what is not recent where the window begins at `end`.

        attention: `[kv_heads, group, voters, n]`. Returns bool `[kv_heads, tokens]`.
        """
        later = int(LATER * self.config.token_budget)
        end = min(max(0, end - later), attention.shape[-1])
        votes = attention.sum(dim=(1, 2))
        votes = functional.avg_pool1d(votes, KERNEL, stride=1, padding=KERNEL // 2)[:, :end]
        allowed = torch.arange(end) >= self.config.sink_tokens
        return best(votes[:, None], allowed, self.config.token_budget - later)[:, 0, 0]

    def crop(self, n: int) -> None:
        super().crop(n)
        if self._kept is not None:
            self._kept = self._kept[:, :n]

    def reset(self) -> None:
        super().reset()
        self._kept = None

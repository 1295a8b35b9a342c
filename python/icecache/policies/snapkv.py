"""SnapKV (Li et al., arXiv 2404.14469): the end of the prompt votes once for what is kept."""

from __future__ import annotations

import torch
from torch.nn import functional

from icecache.policies.base import Prompt
from icecache.policies.dense import Choice, DenseLayer, Positions, best

VOTERS = 32
KERNEL = 7


class SnapKVLayer(DenseLayer):
    """Keeps the `token_budget` tokens that the last 32 positions of the prompt attend to most.

    A vote is a probability, summed over these positions and the query heads of the group; votes
    are max-pooled over 7 neighbours. Where no prompt was observed, the first position to attend
    votes. Published: one choice per query head, and all decoded tokens are kept; here one per KV
    head, and tokens that leave the window later are kept only where the prompt left room in the
    budget, the first ones. On a device: what is kept.
    """

    def observe(self, prompt: Prompt) -> None:
        n = prompt.k.shape[1]
        self._vote(prompt.attention(max(0, n - VOTERS), n), self._window)

    def choose(self, at: Positions) -> Choice | None:
        if self._kept is None:
            end = self.config.sink_tokens + int(at.middle[0].sum())
            self._vote(torch.softmax(at.logits[:, :, :1], dim=-1), end)
        kept = self._kept
        end = kept.shape[1]
        room = self.config.token_budget - int(kept[0].sum())
        later = torch.arange(end, at.k.shape[1]) < end + room
        exact = torch.cat([kept, later.expand(self.num_kv_heads, -1)], dim=1)
        return Choice(exact[:, None, None], search_rows=0.0)

    def _vote(self, attention: torch.Tensor, end: int) -> None:
        """The best tokens before `end`. attention: `[kv_heads, group, voters, n]`."""
        votes = attention.sum(dim=(1, 2))[:, :end]
        votes = functional.max_pool1d(votes, KERNEL, stride=1, padding=KERNEL // 2)
        allowed = torch.arange(end) >= self.config.sink_tokens
        self._kept = best(votes[:, None], allowed, self.config.token_budget)[:, 0, 0]

    def crop(self, n: int) -> None:
        super().crop(n)
        if self._kept is not None:
            self._kept = self._kept[:, :n]

    def reset(self) -> None:
        super().reset()
        self._kept: torch.Tensor | None = None

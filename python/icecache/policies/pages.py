"""What Quest and ArkVale share: pages of consecutive tokens, ranked by bounds of their logits."""

from __future__ import annotations

import torch
from torch.nn import functional

from icecache.policies.dense import Choice, DenseLayer, Positions, group_share, whole


class PageLayer(DenseLayer):
    """Whole pages, by their bounds, until the budget is full. Pages begin behind the sink.

    A page's score is the share of its bound in a softmax (`group_share`): one choice per KV head.
    A page that is not full yet when a position attends comes first. Of a page that reaches into the
    window only the rest spends budget.
    """

    PAGE: int
    """Published tokens of a page; a smaller budget makes smaller pages."""

    _digest: torch.Tensor

    def digest(self, keys: torch.Tensor) -> torch.Tensor:
        """Minimum and maximum of each channel: `[kv_heads, pages, tokens, head_dim]` to
        `[kv_heads, pages, 2 * head_dim]`."""
        return torch.cat([keys.amin(dim=2), keys.amax(dim=2)], dim=-1)

    def bound(self, q: torch.Tensor, digest: torch.Tensor) -> torch.Tensor:
        """At least the highest `q @ k` of each page; q: `[kv_heads, m, head_dim]`, returns
        `[kv_heads, m, pages]`."""
        low, high = digest.chunk(2, dim=-1)
        return q.clamp(max=0) @ low.mT + q.clamp(min=0) @ high.mT

    def choose(self, at: Positions) -> Choice | None:
        sink, n = self.config.sink_tokens, at.k.shape[1]
        size = min(self.PAGE, self.config.token_budget)
        pages = -(-int(at.middle[-1].sum()) // size)
        full = min(pages, (n - sink) // size)
        known = self._digest.shape[1]
        if known < full:
            keys = at.k[:, sink + known * size : sink + full * size].float()
            fresh = self.digest(keys.reshape(len(keys), -1, size, self.head_dim))
            self._digest = torch.cat([self._digest, fresh], dim=1)
        digest = self._digest[:, :full]
        bound = self.bound(at.q.flatten(1, 2), digest).reshape(*at.q.shape[:3], full)

        padded = functional.pad(at.middle[:, sink:], (0, size))[:, : pages * size]
        tokens = padded.reshape(-1, pages, size).sum(dim=-1)
        bound = bound.masked_fill(tokens[:, :full] == 0, -torch.inf)
        score = functional.pad(group_share(at, bound), (0, pages - full))
        position = torch.arange(n - at.q.shape[2], n)[:, None]
        ends = sink + size * torch.arange(1, pages + 1)
        score = score.masked_fill(ends > position + 1, torch.inf)
        score = score.masked_fill(tokens == 0, -torch.inf)

        chosen = whole(score, tokens, self.config.token_budget).repeat_interleave(size, dim=-1)
        chosen = functional.pad(chosen, (sink, max(0, n - sink - pages * size)))[..., :n]
        return Choice(chosen[:, None], 2.0 * full)

    def crop(self, n: int) -> None:
        super().crop(n)
        size = min(self.PAGE, self.config.token_budget)
        self._digest = self._digest[:, : max(0, n - self.config.sink_tokens) // size]

    def reset(self) -> None:
        super().reset()
        self._digest = self.digest(torch.zeros((self.num_kv_heads, 0, 1, self.head_dim)))

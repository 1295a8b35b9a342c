"""The oracle among the policies that drop tokens: the best ones by their true attention mass."""

from __future__ import annotations

import torch

from icecache.policies.dense import DenseLayer


class TopKLayer(DenseLayer):
    """Sink, window, and the `token_budget` other tokens that hold most of the group's mass.

    A token's mass is the sum, over the query heads of the group, of its probability under the
    softmax over all tokens. Every key is read to find them: not a deployable policy.
    """

    def choose(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        n = k.shape[1]
        sink, window = self.config.sink_tokens, self.config.window_tokens
        budget = self.config.token_budget
        if n <= sink + window + budget:
            return None
        mass = torch.softmax(q @ k.float().mT, dim=-1).sum(dim=1)
        mass[:, :sink] = torch.inf
        mass[:, n - window :] = torch.inf
        return mass.topk(sink + window + budget, dim=-1).indices.sort(dim=-1).values

    def key_rows_read(self, n: int, chosen: int) -> int:
        return n

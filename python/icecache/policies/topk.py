"""The oracle among the policies that drop tokens: the best ones by their true attention mass."""

from __future__ import annotations

import torch

from icecache.policies.dense import Choice, DenseLayer, Positions, best


class TopKLayer(DenseLayer):
    """Sink, window, and the `token_budget` other tokens that hold most of the group's mass.

    A token's mass is the sum, over the query heads of the group, of its probability under the
    softmax over all tokens. Every key is read to find them: not a deployable policy.
    """

    def choose(self, at: Positions) -> Choice | None:
        mass = torch.softmax(at.logits, dim=-1).sum(dim=1)
        unread = max(0, int(at.middle[-1].sum()) - self.config.token_budget)
        return Choice(best(mass, at.middle, self.config.token_budget), float(unread))

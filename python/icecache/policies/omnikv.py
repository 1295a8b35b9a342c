"""OmniKV (Hao et al., ICLR 2025): a few layers see everything and choose for those above them."""

from __future__ import annotations

import torch

from icecache.policies.dense import Choice, DenseLayer, Positions, best

FILTERS = (2, 8, 18)


class OmniKVLayer(DenseLayer):
    """Layers 2, 8 and 18, those published for 32 layers, are filters. They attend to everything, as
    do the layers below the first; each other layer attends to the `token_budget` tokens that the
    filter nearest below it gave most attention to.

    Heads of different layers do not correspond: a token's score is its probability, summed over all
    query heads of the filter, and all KV heads of a layer attend to the same tokens. On a device:
    layers that attend to everything; of the others, what is chosen is fetched.
    """

    _found: torch.Tensor | None

    def sees_everything(self) -> bool:
        return self.layer_index <= FILTERS[0] or self.layer_index in FILTERS

    def choose(self, at: Positions) -> Choice | None:
        self._found = None
        if self.layer_index in FILTERS:
            share = torch.softmax(at.logits, dim=-1).sum(dim=(0, 1))
            self._found = best(share[None], at.middle, self.config.token_budget)
            return None
        if isinstance(self.below, OmniKVLayer) and self.below._found is not None:
            self._found = self.below._found
            return Choice(self._found, search_rows=0.0)
        return None

    def reset(self) -> None:
        super().reset()
        self._found = None

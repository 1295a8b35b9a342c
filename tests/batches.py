"""Batches of rows of unequal length, and what a model says to one of them."""

from typing import Any

import torch
from test_cache import CACHE, forward
from tiny_models import tokens
from transformers import PreTrainedModel


def texts(*lengths: int) -> list[torch.Tensor]:
    """Token ids `[1, n]`, different ones for each row."""
    return [tokens(n, seed=10 + i) for i, n in enumerate(lengths)]


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask `[rows, longest]`, padded on the left or on the right."""
    n = max(row.shape[1] for row in rows)
    ids, mask = (torch.zeros(len(rows), n, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        where = slice(n - row.shape[1], n) if side == "left" else slice(row.shape[1])
        ids[i, where], mask[i, where] = row[0], 1
    return ids, mask


class Reader:
    """Reads one batch after another into a cache, with the positions that each row alone has."""

    def __init__(self, model: PreTrainedModel, cache: Any) -> None:
        self.model, self.cache = model, cache
        self.mask = torch.zeros(0, 0, dtype=torch.long)

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Logits `[tokens, vocabulary]`, by row."""
        mask = torch.ones_like(ids) if mask is None else mask
        whole = mask if self.mask.numel() == 0 else torch.cat([self.mask, mask], dim=1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = forward(self.model, ids, self.cache, attention_mask=whole, position_ids=positions)
        self.mask = whole
        return [row[kept.bool()] for row, kept in zip(logits, mask, strict=True)]


def divergence(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest KL divergence from the expected next-token distributions, in nats."""
    p, q = (torch.log_softmax(x.double(), -1) for x in (expected, got))
    return float((p.exp() * (p - q)).sum(-1).max())


def generated(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
    """New ids `[rows, new]`."""
    options = {"do_sample": False, "max_new_tokens": 16} | options
    return model.generate(ids, **{CACHE: cache}, **options)[:, ids.shape[1] :].tolist()

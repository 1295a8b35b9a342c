"""Far into decoding: does the index of tokens that came one by one stay as good as a new one?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from rich.progress import Progress

from icecache.eval.compare import CHUNK
from icecache.eval.comparison import DriftRow
from icecache.eval.decode import Decoder, prefill
from icecache.eval.kl import divergence, standard_error
from icecache.eval.ledger import Ledger
from icecache.eval.runs import FULL, Run
from icecache.layer import LayerCache
from icecache.policies.dense import WINDOW_SLACK

PREFILL = 1024
STRETCH = 1024
_REBUILD_EVERY = 256


class _Around:
    """A layer that passes everything on to another one."""

    def __init__(self, layer: LayerCache) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class Rebuilt(_Around):
    """A `LayerCache` whose index is built anew every 256 tokens."""

    def __init__(self, layer: LayerCache) -> None:
        super().__init__(layer)
        self._next = layer.seq_len + _REBUILD_EVERY

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if self._layer.seq_len >= self._next:
            self._next += _REBUILD_EVERY
            stored = self._layer.gather()
            self._layer.reset()
            self._layer.prefill(*stored)
        return self._layer.decode(q, k, v)


class NotInserted(_Around):
    """A `LayerCache` whose index stays that of the prompt: what leaves the window is lost.

    The window is as long as that of the layer.
    """

    def __init__(self, layer: LayerCache) -> None:
        super().__init__(layer)
        self._prompt = layer.seq_len
        self._window = layer.config.window_tokens + WINDOW_SLACK
        self._lost = 0

    @property
    def seq_len(self) -> int:
        return self._lost + int(self._layer.seq_len)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        # Until the window is full of new tokens, the last ones of the prompt move into the index.
        if self._layer.seq_len >= self._prompt + self._window:
            kept = self._window - k.shape[1]
            self._lost += self._layer.seq_len - self._prompt - kept
            recent = [rows[:, -kept:] for rows in self._layer.gather()]
            self._layer.crop(self._prompt)
            self._layer.append(*recent)
        return self._layer.decode(q, k, v)


VARIANTS: dict[str, Callable[[LayerCache], Any]] = {
    "inserted": lambda layer: layer,
    "not inserted": NotInserted,
    "rebuilt": Rebuilt,
}


def measure_drift(
    model: Any, name: str, ids: Sequence[int], run: Run, ledger: Ledger, progress: Progress
) -> None:
    """Reads the first 1,024 of `ids` with full attention, then decodes the others with `run`, one
    of icecache, in each variant.

    KL from full attention per stretch of 1,024 positions of the text, the last may be shorter.
    """
    assert run.budget is not None
    if ledger.has_drift(name, run.budget):
        return
    context = prefill(model, ids[:PREFILL], progress)
    full = Decoder(model, context, FULL)
    decoders = {name: Decoder(model, context, run, wrap=wrap) for name, wrap in VARIANTS.items()}
    divergences: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    task = progress.add_task(f"drift, {run.name}", total=len(ids) - PREFILL)
    for start in range(PREFILL, len(ids), CHUNK):
        tokens = ids[start : start + CHUNK]
        truth = full.read(tokens)
        for variant, decoder in decoders.items():
            mine = decoder.read(tokens)
            divergences[variant] += [divergence(p, q) for p, q in zip(truth, mine, strict=True)]
        progress.advance(task, len(tokens))
    progress.remove_task(task)
    ledger.add(
        drift=[
            _row(variant, run.budget, name, PREFILL + start, found[start : start + STRETCH])
            for variant, found in divergences.items()
            for start in range(0, len(found), STRETCH)
        ]
    )


def _row(variant: str, budget: int, text: str, start: int, found: Sequence[float]) -> DriftRow:
    return DriftRow(
        variant=variant,
        budget=budget,
        text=text,
        start=start,
        positions=len(found),
        kl=fmean(found),
        kl_stderr=standard_error(found),
    )

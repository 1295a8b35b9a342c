"""Keys, values and queries of SmolLM2-135M-Instruct on texts that every machine has.

Computed once per text, with full attention, and kept beside the model in the user's cache folder
(280 MB a text).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress

from icecache.eval.capture import capture
from icecache.eval.errors import EvalError
from icecache.eval.model import cache_dir, load_model
from icecache.eval.texts import built_in, first_tokens

CONTEXT = 7936
MORE = 65
"""Tokens kept after the context, for next-token distributions."""
LENGTHS = (2048, 4096, CONTEXT)
"""Positions whose last queries are kept."""
QUERIES = 32


@dataclass(frozen=True)
class Rows:
    """Rows of one text: `k`, `v` [layers, kv_heads, CONTEXT, head_dim], f32; rotary embedding is
    applied. `q[n]` [layers, q_heads, QUERIES, head_dim]: the queries, not scaled, of the last
    positions of the first `n`. `ids`: CONTEXT + MORE tokens."""

    name: str
    ids: list[int]
    k: torch.Tensor
    v: torch.Tensor
    q: dict[int, torch.Tensor]

    @property
    def group(self) -> int:
        return self.q[CONTEXT].shape[1] // self.k.shape[1]

    @property
    def scale(self) -> float:
        return float(self.k.shape[-1] ** -0.5)

    def queries(self, layer: int, head: int, n: int, step: int = 1) -> torch.Tensor:
        """Every `step`-th of the last queries of one KV head, scaled: [positions, group, dim]."""
        q = self.q[n][layer, head * self.group :][: self.group, step - 1 :: step]
        return q.transpose(0, 1) * self.scale


def load_rows(name: str) -> Rows:
    """The rows of one of `TEXTS`, computed where the cache folder has none."""
    path = cache_dir() / f"rows-{name}.pt"
    if not path.exists():
        rows = _capture(name)
        try:
            # Renamed when it is whole: another process may be looking.
            part = path.with_suffix(f".{os.getpid()}")
            torch.save(vars(rows), part)
            part.replace(path)
        except (OSError, RuntimeError) as error:
            raise EvalError(f"cannot write {path}: {error}") from error
    return Rows(**torch.load(path, mmap=True))


def _capture(name: str) -> Rows:
    model, tokenizer = load_model()
    ids = first_tokens(tokenizer, name, built_in(name), CONTEXT + MORE)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        captured = capture(model, ids[:CONTEXT], LENGTHS, QUERIES, progress)
    return Rows(
        name=name,
        ids=ids,
        k=torch.stack([k for k, _ in captured.layers]),
        v=torch.stack([v for _, v in captured.layers]),
        q={n: torch.stack(rows) for n, rows in captured.queries.items()},
    )

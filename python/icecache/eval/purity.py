"""How much of what a head looks for lies together in pages, for each way to lay pages out.

A page that is read brings all of its tokens: those that the query looks for, and others. For each
layout (`layouts`) and each way to rank pages this measures what as many tokens, read page by page,
are worth, and how well the means of pages stand for the tokens that are not read.

The tokens are those between sink and window, which are always attended. Whole pages are taken in
order of rank until they hold the budget; of the last one only the first tokens by position, so that
every layout spends the same. Means are in f32, where a cache rounds them to f16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.progress import Progress
from rich.table import Table

from icecache.eval.calibration import Calibration, calibration, estimates
from icecache.eval.capture import Captured
from icecache.eval.errors import EvalError
from icecache.eval.layouts import Pages, count, lay_out
from icecache.eval.runs import FORCED, Run

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

RULES = ("mass", "mean", "best token", "tokens")
"""What is taken. "mass": pages by their true mass, an oracle. "mean": by the mass that their mean
key promises, as icecache ranks them. "best token": by their likeliest token, the query heads in
turn, as the paper does; which token that is, is known exactly here. "tokens": the tokens of most
mass in whatever pages they are, the best choice there is."""


@dataclass(frozen=True, kw_only=True)
class PurityRow:
    """One KV head, mean over positions. Tokens are those between sink and window; a token's mass
    is its share of the softmax over all tokens, summed over the query heads of the group."""

    layer: int
    head: int
    layout: str
    rule: str
    fill: float
    """Tokens per page."""
    recall: float
    """Share of the tokens of most mass, as many as the budget, that were taken."""
    irrelevant: float
    """Share of the tokens taken that hold less mass than an even share among all tokens."""
    mass: float
    """Share of the mass of these tokens that was taken."""
    error_dropped: float
    """Relative error of the output, mean over the group, if what was not taken is dropped."""
    error_summarised: float
    """The same if the tokens of a page that were not taken weigh `count * exp(q . mean key)` and
    bring their mean value."""


@dataclass(frozen=True, kw_only=True)
class Purity:
    """Everything that one run of `icecache purity` measured; `config` says how to repeat it."""

    config: Mapping[str, Any]
    rows: list[PurityRow]
    calibration: list[Calibration]
    """Per layer, then of all together: a cache with default options."""

    def write(self, path: Path) -> None:
        """As JSON; `EvalError` if the file cannot be written."""
        try:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise EvalError(f"cannot write {path}: {error}") from error


def measure_purity(
    captured: Captured, length: int, budget: int, config: Mapping[str, Any], progress: Progress
) -> Purity:
    """All layouts and rules at the last positions of the `length` tokens that were captured.

    The pages are those of the tokens before these positions. `EvalError` if there are too few.
    """
    options = Run("icecache", budget).config()
    rows: list[PurityRow] = []
    series = []
    task = progress.add_task("layers", total=len(captured.layers))
    for layer, (k, v) in enumerate(captured.layers):
        q, scale = captured.queries[length][layer], captured.scales[layer]
        first = length - q.shape[1]
        if first <= FORCED["sink_tokens"] + FORCED["window_tokens"]:
            raise EvalError(f"{length} tokens are too few for {q.shape[1]} positions")
        layouts = lay_out(k[:, :first], v[:, :first], len(q), scale, layer)
        for number, head in enumerate(heads(k, v, q, scale)):
            for layout, pages in layouts[number].items():
                for rule in RULES:
                    figures = measure(head, pages, rule, budget)
                    rows.append(
                        PurityRow(layer=layer, head=number, layout=layout, rule=rule, **figures)
                    )
        series.append(estimates(k, v, q, scale, layer, options))
        progress.advance(task)
    progress.remove_task(task)
    compared = [calibration(*pair, layer) for layer, pair in enumerate(series)]
    estimated, errors = (np.concatenate(each) for each in zip(*series, strict=True))
    return Purity(
        config=config, rows=rows, calibration=[*compared, calibration(estimated, errors, None)]
    )


@dataclass(frozen=True)
class Head:
    """One KV head at some positions."""

    logits: Floats
    """[positions, group, n]; -inf for what a position does not see."""
    values: Floats
    """[n, head_dim]"""
    middle: slice
    """Tokens between sink and window, which every position sees."""

    @cached_property
    def share(self) -> Floats:
        """Of the softmax over all tokens, [positions, group, n]."""
        weights: Floats = np.exp(self.logits - self.logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return weights

    @cached_property
    def mass(self) -> Floats:
        """Of the tokens of the middle, [positions, tokens]."""
        mass: Floats = self.share[..., self.middle].sum(1)
        return mass

    @cached_property
    def out(self) -> Floats:
        """Full attention, [positions, group, head_dim]."""
        return _attend(self.logits.copy(), self.values)

    def error(self, middle: Floats) -> float:
        """Relative, if the tokens of the middle had the logits `middle` [positions, group, tokens];
        mean over positions and the group."""
        changed = self.logits.copy()
        changed[..., self.middle] = middle
        off = np.linalg.norm(_attend(changed, self.values) - self.out, axis=-1)
        return float((off / np.linalg.norm(self.out, axis=-1)).mean())


def heads(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, scale: float) -> Iterator[Head]:
    """The KV heads of a layer. k, v [kv_heads, n, head_dim]; q [q_heads, positions, head_dim], not
    scaled, of the last positions."""
    n, positions = k.shape[1], q.shape[1]
    first = n - positions
    hidden = torch.arange(n) > torch.arange(first, n)[:, None, None]
    middle = slice(FORCED["sink_tokens"], first - FORCED["window_tokens"])
    for keys, values, queries in zip(k, v, q.chunk(len(k)), strict=True):
        logits = queries.transpose(0, 1).float() * scale @ keys.T.float()
        logits.masked_fill_(hidden, -torch.inf)
        yield Head(logits.numpy(), values.float().numpy(), middle)


def measure(head: Head, pages: Pages, rule: str, budget: int) -> dict[str, float]:
    """The figures of a `PurityRow`."""
    taken = take(head, pages, rule, budget)
    best = take(head, pages, "tokens", budget)
    spent = best.sum(-1)
    group = head.logits.shape[1]
    seen = np.isfinite(head.logits[:, 0]).sum(-1, keepdims=True)
    irrelevant = taken & (head.mass < group / seen)
    held = (head.mass * taken).sum(-1) / head.mass.sum(-1)
    logits = head.logits[..., head.middle]
    left = ~taken[:, None]
    # The sum of `exp(q . mean key)` times each value is `count` times that of the mean value.
    means = page_sums(np.where(left, logits, 0), pages) / np.maximum(page_sums(left, pages), 1)
    return {
        "fill": len(pages) / count(pages),
        "recall": float(((taken & best).sum(-1) / spent).mean()),
        "irrelevant": float((irrelevant.sum(-1) / spent).mean()),
        "mass": float(held.mean()),
        "error_dropped": head.error(np.where(left, -np.inf, logits)),
        "error_summarised": head.error(np.where(left, means[..., pages], logits)),
    }


def take(head: Head, pages: Pages, rule: str, budget: int) -> Mask:
    """The tokens that are attended to exactly, [positions, tokens]; `rule` is one of `RULES`."""
    if rule == "tokens":
        return _first(-head.mass, budget)
    logits = head.logits[..., head.middle]
    if rule == "mass":
        cost = -page_sums(head.mass, pages)
    elif rule == "mean":
        high = head.logits.max(-1, keepdims=True)
        total = np.exp(head.logits - high).sum(-1, keepdims=True)
        sizes = np.bincount(pages)
        promised = sizes * np.exp(page_sums(logits, pages) / sizes - high) / total
        cost = -promised.sum(1)
    elif rule == "best token":
        best = _of_pages(np.maximum, logits, pages)
        group = best.shape[1]
        cost = (_ranks(-best) * group + np.arange(group)[:, None]).min(1)
    else:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    # Within a page by position: no two tokens cost the same.
    return _first(_ranks(cost)[:, pages] * len(pages) + np.arange(len(pages)), budget)


def page_sums(x: npt.NDArray[Any], pages: Pages) -> npt.NDArray[Any]:
    """Sums over the tokens of each page, [..., tokens] to [..., pages]."""
    return _of_pages(np.add, x, pages)


def _of_pages(combine: np.ufunc, x: npt.NDArray[Any], pages: Pages) -> npt.NDArray[Any]:
    order = np.argsort(pages, kind="stable")
    starts = np.searchsorted(pages[order], np.arange(count(pages)))
    result: npt.NDArray[Any] = combine.reduceat(x[..., order], starts, axis=-1, dtype=np.float32)
    return result


def _ranks(cost: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """0 for the lowest cost; the first of equals first."""
    ranks: npt.NDArray[Any] = np.argsort(np.argsort(cost, axis=-1, kind="stable"), axis=-1)
    return ranks


def _first(cost: npt.NDArray[Any], budget: int) -> Mask:
    """A mask of the `budget` entries of lowest cost, or all if there are fewer."""
    if budget >= cost.shape[-1]:
        return np.ones(cost.shape, bool)
    mask = np.zeros(cost.shape, bool)
    chosen = np.argpartition(cost, budget - 1, axis=-1)[..., :budget]
    np.put_along_axis(mask, chosen, True, axis=-1)
    return mask


def _attend(logits: Floats, values: Floats) -> Floats:
    """The output, [positions, group, head_dim]; overwrites `logits` [positions, group, n]."""
    logits -= logits.max(-1, keepdims=True)
    weights = np.exp(logits, out=logits).reshape(-1, len(values))
    out: Floats = weights @ values / weights.sum(-1, keepdims=True)
    return out.reshape(*logits.shape[:2], -1)


_BANDS = 3


def purity_tables(rows: Sequence[PurityRow]) -> Iterator[Table]:
    """Means over heads: of all layers by every rule, then of each third of them by true mass."""
    layers = sorted({row.layer for row in rows})
    yield _table(f"layers {layers[0]} to {layers[-1]}", rows, RULES)
    for band in np.array_split(layers, min(_BANDS, len(layers))):
        mine = [row for row in rows if row.layer in band.tolist()]
        yield _table(f"layers {band[0]} to {band[-1]}", mine, RULES[:1])


def _table(title: str, rows: Sequence[PurityRow], rules: Sequence[str]) -> Table:
    table = Table(
        title=title,
        caption="fill: tokens per page; recall: of the tokens of most mass; irrelevant: tokens "
        "below an even share; mass: taken; dropped, summarised: error if the rest is",
        box=box.SIMPLE,
        padding=(0, 0),
        pad_edge=False,
    )
    for heading in ("taken by", "layout"):
        table.add_column(heading, no_wrap=True)
    for heading in ("fill", "recall", "irrelevant", "mass", "dropped", "summarised"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rule in rules:
        for layout in dict.fromkeys(row.layout for row in rows):
            mine = [row for row in rows if (row.rule, row.layout) == (rule, layout)]
            table.add_row(
                rule,
                layout,
                f"{fmean(row.fill for row in mine):.1f}",
                f"{fmean(row.recall for row in mine):.1%}",
                f"{fmean(row.irrelevant for row in mine):.1%}",
                f"{fmean(row.mass for row in mine):.1%}",
                f"{fmean(row.error_dropped for row in mine):.3f}",
                f"{fmean(row.error_summarised for row in mine):.3f}",
            )
        table.add_section()
    return table

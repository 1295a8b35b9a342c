"""`icecache bench step`: one decode step of one layer, against attention to everything.

Several copies of a layer take turns, and so do their queries: caches are as cold as in a model,
where the other layers come in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress

from icecache.bench.baselines import SDPA, Prepare, exact, relative_error, scan
from icecache.bench.heads import DTYPES, Heads, Layer, Shape
from icecache.bench.libraries import LibraryResult, best, measure_library, recall_of
from icecache.bench.timing import COLD_BYTES, clock, rest
from icecache.config import IceConfig
from icecache.eval.errors import EvalError
from icecache.layer import LayerCache
from icecache.stats import LayerStats

_QUERIES = 64
"""Different ones, at least."""
_BLOCKS = 4
"""Steps and dense attention take turns in as many blocks."""
WRONG = 0.5
"""Mean relative error above which an answer is wrong, and nothing is timed."""
_ROUNDING = 0.05
"""The same for what should be exact: f16 and bf16 round."""


@dataclass(frozen=True)
class StepRow:
    """Medians, in milliseconds, of one layer of `tokens` tokens."""

    tokens: int
    step_ms: float
    search_ms: float | None
    """Nodes scored, summaries merged. This and the next three: from the statistics of the steps,
    where they have them."""
    select_ms: float | None
    attend_ms: float | None
    tail_ms: float | None
    dense_ms: float
    """Exact attention by the same kernels over rows in order."""
    sdpa_ms: float
    """The fastest of torch's forms."""
    scan_ms: float
    """Exact logits of all keys in torch, then attention to the best."""
    ratio: float
    """The faster of dense and sdpa over step."""
    key_rows_read: float
    """Node rows are rows; mean over KV heads and steps."""
    value_rows_read: float
    floor_ms: float
    """Time to read as many bytes in order."""
    output_error: float
    """Relative, against exact attention; mean over heads, queries and copies."""


@dataclass(frozen=True)
class StepSetting:
    """What is the same for every length."""

    shape: Shape
    dtype: str
    config: IceConfig
    copies: int | None
    """Of the layer; None means as many as cold caches need."""
    steps: int
    threads: int
    bandwidth: float
    """Bytes per second."""
    libraries: Sequence[str] = ()
    """Of approximate search, to compare with."""


@dataclass(frozen=True)
class StepDetails:
    """What a row leaves out."""

    copies: int
    sdpa_ms: dict[str, float]
    """Of each of torch's forms."""
    recall: float
    """Share of a query's true best keys, as many as the budget, that are attended exactly."""
    libraries: dict[str, LibraryResult]


def copies_needed(n: int, layer_bytes: int, positions: int) -> int:
    """At least 8 (4 beyond 64k), a gigabyte of keys and values, and 64 queries in all."""
    few = 8 if n <= 65536 else 4
    return max(few, math.ceil(COLD_BYTES / layer_bytes), math.ceil(_QUERIES / positions))


def measure_step(
    heads: Heads, n: int, setting: StepSetting, progress: Progress
) -> tuple[StepRow, StepDetails]:
    """One length; `EvalError` if an answer is wrong."""
    shape, config = setting.shape, setting.config
    row_bytes = shape.head_dim * DTYPES[setting.dtype].itemsize
    layer_bytes = 2 * n * shape.kv_heads * row_bytes
    copies = setting.copies or copies_needed(n, layer_bytes, heads.positions)
    if copies * heads.positions < 2:
        raise EvalError("one copy and one query: the same step would be timed again and again")
    task = progress.add_task(f"{n} tokens: indexing", total=copies)
    caches: list[LayerCache] = []
    denses: list[LayerCache] = []
    queries: list[list[torch.Tensor]] = []
    truths: list[torch.Tensor] = []
    kept: list[Layer] = []  # for torch: no more than cold caches need
    for copy in range(copies):
        layer = heads.layer(shape, n, setting.dtype, copy)
        caches.append(filled(shape, layer, config, copy))
        denses.append(filled(shape, layer, config.replace(window_tokens=n), copy))
        queries.append(layer.queries())
        truths.append(exact(layer, shape.scale))
        if len(kept) * layer_bytes < COLD_BYTES:
            kept.append(layer)
        progress.advance(task)
    progress.remove_task(task)

    task = progress.add_task(f"{n} tokens", total=3 + len(SDPA) + len(setting.libraries))
    error = check("icecache", [cache.attend for cache in caches], queries, truths, WRONG)
    few = [mine[:2] for mine in queries]
    check("dense", [cache.attend_exact for cache in denses], few, truths, _ROUNDING)
    progress.advance(task)

    steps, dense, stats = _alternate(caches, denses, queries, setting.steps)
    recall, always = _recall(caches[0], kept[0], config.token_budget, shape)
    del caches, denses
    progress.advance(task)

    def in_torch(name: str, prepare: Prepare, bound: float) -> float:
        attends = [prepare(layer.k, layer.v, shape.group, shape.scale) for layer in kept]
        check(name, attends, few, truths, bound)
        times = time_in_turns(attends, queries, max(len(attends), setting.steps // 16))
        progress.advance(task)
        return median(times)

    forms = {name: in_torch(f"sdpa, {name}", form, _ROUNDING) for name, form in SDPA.items()}
    scan_ms = in_torch("scan", partial(scan, budget=config.token_budget), math.inf)
    libraries = {}
    for name in setting.libraries:
        libraries[name] = measure_library(
            name, kept[0], always, recall, config.token_budget, shape.scale, setting.threads
        )
        progress.advance(task)
    progress.remove_task(task)

    step_ms, dense_ms, sdpa_ms = median(steps), median(dense), min(forms.values())
    key_rows = fmean(s.key_rows_read for s in stats)
    value_rows = fmean(s.value_rows_read for s in stats)

    def part(name: str) -> float | None:
        times = [getattr(s, name, math.nan) for s in stats]
        return None if math.isnan(sum(times)) else median(times) / setting.threads

    row = StepRow(
        tokens=n,
        step_ms=step_ms,
        search_ms=part("search_ms"),
        select_ms=part("select_ms"),
        attend_ms=part("attend_ms"),
        tail_ms=part("tail_ms"),
        dense_ms=dense_ms,
        sdpa_ms=sdpa_ms,
        scan_ms=scan_ms,
        ratio=min(dense_ms, sdpa_ms) / step_ms,
        key_rows_read=key_rows,
        value_rows_read=value_rows,
        floor_ms=1e3 * (key_rows + value_rows) * shape.kv_heads * row_bytes / setting.bandwidth,
        output_error=error,
    )
    return row, StepDetails(copies, forms, recall, libraries)


def _recall(
    cache: LayerCache, layer: Layer, budget: int, shape: Shape
) -> tuple[float, npt.NDArray[np.int64]]:
    """Share of the true best keys of a query head that a cache attends to, and the positions of
    sink and window."""
    shares = []
    for t, q in enumerate(layer.queries()):
        cache.attend(q)
        attended = [ids for ids in cache.selected() for _ in range(shape.group)]
        shares.append(recall_of(attended, best(layer, t, budget)))
    stats = cache.stats()
    sink = np.arange(stats.sink_tokens)
    window = np.arange(stats.seq_len - stats.window_tokens, stats.seq_len)
    return fmean(shares), np.concatenate([sink, window])


def filled(shape: Shape, layer: Layer, config: IceConfig, copy: int = 0) -> LayerCache:
    """A cache that holds the rows of a layer."""
    cache = LayerCache(
        shape.q_heads, shape.kv_heads, shape.head_dim, config, shape.scale, layer_index=copy
    )
    cache.prefill(layer.k, layer.v)
    return cache


def check(
    name: str,
    attends: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    queries: Sequence[Sequence[torch.Tensor]],
    truths: Sequence[torch.Tensor],
    bound: float,
) -> float:
    """The mean relative error over copies, queries and heads; `EvalError` above `bound`.

    `queries` of each copy are [q_heads, 1, head_dim], its truth is [q_heads, positions, head_dim]
    of as many or more.
    """
    errors = []
    for attend, mine, truth in zip(attends, queries, truths, strict=False):
        out = torch.cat([attend(q) for q in mine], dim=1)
        errors.append(relative_error(out, truth[:, : len(mine)]).mean())
    error = float(torch.stack(errors).mean())
    if not error <= bound:
        raise EvalError(
            f"the answer of {name} is wrong, nothing was timed: its relative error is {error:.3g}, "
            f"at most {bound} is allowed"
        )
    return error


def turn(number: int, queries: Sequence[Sequence[torch.Tensor]]) -> tuple[int, torch.Tensor]:
    """The copy and the query of a step; never the same pair twice in a row."""
    copy, round_ = number % len(queries), number // len(queries)
    return copy, queries[copy][round_ % len(queries[copy])]


def time_in_turns(
    attends: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    queries: Sequence[Sequence[torch.Tensor]],
    steps: int,
    start: int = 0,
    after: Callable[[int], None] = lambda copy: None,
) -> list[float]:
    """Milliseconds of every step; `after` is called, untimed, with its copy."""
    times = []
    for number in range(start, start + steps):
        copy, q = turn(number, queries[: len(attends)])
        times.append(clock(partial(attends[copy], q))[0])
        after(copy)
    return times


def _alternate(
    caches: list[LayerCache],
    denses: list[LayerCache],
    queries: list[list[torch.Tensor]],
    steps: int,
) -> tuple[list[float], list[float], list[LayerStats]]:
    """Times of steps and of dense attention, and the statistics of the steps."""
    rest()
    stats: list[LayerStats] = []
    sparse_times: list[float] = []
    dense_times: list[float] = []
    size = max(1, steps // _BLOCKS)
    dense_size = max(1, size // 8)
    attends = [cache.attend for cache in caches]
    exacts = [cache.attend_exact for cache in denses]
    for block in range(_BLOCKS):
        sparse_times += time_in_turns(
            attends, queries, size, block * size, lambda copy: stats.append(caches[copy].stats())
        )
        dense_times += time_in_turns(exacts, queries, dense_size, block * dense_size)
    return sparse_times, dense_times, stats

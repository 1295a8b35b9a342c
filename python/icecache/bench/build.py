"""`icecache bench build`: the time to index a layer, and a model's layers against its prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from rich.progress import Progress

from icecache.bench.baselines import exact
from icecache.bench.heads import DTYPES, Heads, Shape
from icecache.bench.step import WRONG, check, filled
from icecache.bench.timing import clock, rest
from icecache.config import IceConfig
from icecache.eval.decode import prefill
from icecache.layer import LayerCache


@dataclass(frozen=True)
class LayerBuildRow:
    """One layer; its rows are stored and indexed."""

    tokens: int
    seconds: float
    """Median."""
    serial_seconds_per_head: float
    """By one thread."""
    output_error: float
    """Of steps over it; relative, mean."""


@dataclass(frozen=True)
class ModelBuildRow:
    """All layers of a model, indexed after its prefill."""

    dtype: str
    tokens: int
    prefill_seconds: float
    index_seconds: float
    share: float
    """Index over prefill."""


def measure_layer_build(
    heads: Heads,
    shape: Shape,
    n: int,
    dtype: str,
    config: IceConfig,
    repeats: int,
    progress: Progress,
) -> LayerBuildRow:
    """`repeats` different layers of `n` tokens; `EvalError` if one answers wrongly."""
    task = progress.add_task(f"{n} tokens", total=repeats + 1)
    seconds, errors = [], []
    for copy in range(repeats):
        layer = heads.layer(shape, n, dtype, copy)
        rest()
        ms, cache = clock(partial(filled, shape, layer, config, copy))
        seconds.append(ms / 1e3)
        cache.check()
        truth = exact(layer, shape.scale)
        errors.append(check("icecache", [cache.attend], [layer.queries()], [truth], WRONG))
        progress.advance(task)
    layer = heads.layer(shape, n, dtype)
    serial, _ = clock(partial(filled, shape, layer, config.replace(num_threads=1)))
    progress.remove_task(task)
    return LayerBuildRow(
        tokens=n,
        seconds=median(seconds),
        serial_seconds_per_head=serial / 1e3 / shape.kv_heads,
        output_error=sum(errors) / len(errors),
    )


def measure_model_build(
    model: Any, ids: Sequence[int], config: IceConfig, progress: Progress
) -> Iterator[ModelBuildRow]:
    """Prefill in f32 and in bf16, and the index of the keys and values that came of it."""
    q_heads = model.config.get_text_config(decoder=True).num_attention_heads
    for dtype in ("f32", "bf16"):
        model.to(DTYPES[dtype])
        prefill_ms, context = clock(partial(prefill, model, ids, progress))
        rest()
        index_ms = 0.0
        for i, (k, v) in enumerate(context.layers):
            cache = LayerCache(q_heads, k.shape[0], k.shape[2], config, layer_index=i)
            index_ms += clock(partial(cache.prefill, k, v))[0]
        yield ModelBuildRow(
            dtype=dtype,
            tokens=len(ids),
            prefill_seconds=prefill_ms / 1e3,
            index_seconds=index_ms / 1e3,
            share=index_ms / prefill_ms,
        )

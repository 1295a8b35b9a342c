"""`icecache bench insert`: the time that tokens take which come one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

from rich.progress import Progress

from icecache.bench.baselines import exact
from icecache.bench.heads import Heads, Layer, Shape
from icecache.bench.step import WRONG, check, filled
from icecache.bench.timing import clock, quantile, rest
from icecache.config import IceConfig


@dataclass(frozen=True)
class InsertRow:
    """One layer of `tokens` tokens, to which tokens come one by one."""

    tokens: int
    append_us: float
    """Of one appended token, without attention: mean, so that regroupings count."""
    append_p50_us: float
    append_p99_us: float
    append_max_us: float
    decode_p50_ms: float
    """Of a step that appends and attends."""
    decode_p99_ms: float
    decode_max_ms: float
    output_error: float
    """Of steps after all of them; relative, mean."""


def measure_insert(
    heads: Heads,
    shape: Shape,
    n: int,
    dtype: str,
    config: IceConfig,
    steps: int,
    progress: Progress,
) -> InsertRow:
    """`steps` tokens are appended, then `steps` decoded; `EvalError` if the answer is wrong then.

    The layer's last tokens are those that come, so its queries are those of its end.
    """
    layer = heads.layer(shape, n + 2 * steps, dtype)
    first = replace(layer, k=layer.k[:, :n], v=layer.v[:, :n])
    cache = filled(shape, first, config)
    queries = layer.queries()
    task = progress.add_task(f"{n} tokens", total=2 * steps)

    def rows(i: int) -> Layer:
        """The token at position `i`."""
        return Layer(layer.k[:, i : i + 1], layer.v[:, i : i + 1], queries[i % len(queries)])

    rest()
    appended, decoded = [], []
    for i in range(n, n + steps):
        one = rows(i)
        appended.append(1e3 * clock(partial(cache.append, one.k, one.v))[0])
        progress.advance(task)
    for i in range(n + steps, n + 2 * steps):
        one = rows(i)
        decoded.append(clock(partial(cache.decode, one.q, one.k, one.v))[0])
        progress.advance(task)
    progress.remove_task(task)
    cache.check()
    error = check("icecache", [cache.attend], [queries], [exact(layer, shape.scale)], WRONG)
    return InsertRow(
        tokens=n,
        append_us=fmean(appended),
        append_p50_us=median(appended),
        append_p99_us=quantile(appended, 0.99),
        append_max_us=max(appended),
        decode_p50_ms=median(decoded),
        decode_p99_ms=quantile(decoded, 0.99),
        decode_max_ms=max(decoded),
        output_error=error,
    )

"""Whether a layer's estimate of its own error follows the true one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.table import Table

from icecache.config import IceConfig
from icecache.eval.layouts import build

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The estimated against the true relative error of head outputs, mean over query heads."""

    layer: int | None
    """None: all layers together."""
    steps: int
    """Positions compared, of one layer or of all."""
    correlation: float
    """Spearman's, of ranks; NaN if either is the same at every step."""
    ratio_10: float
    """Quantiles of estimate / error: a tenth of the steps has less."""
    ratio_50: float
    ratio_90: float
    estimate: float
    """Mean."""
    error: float
    """Mean."""


def estimates(
    k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, scale: float, layer: int, config: IceConfig
) -> tuple[Floats, Floats]:
    """What a cache estimates at each step, and what is true, both [positions].

    k, v [kv_heads, n, head_dim]; the last positions are those of q [q_heads, positions, head_dim].
    """
    positions = q.shape[1]
    first = k.shape[1] - positions
    cache = build(k[:, :first], v[:, :first], len(q), scale, layer, config)
    outs, estimated = [], []
    for i in range(positions):
        row = slice(first + i, first + i + 1)
        outs.append(cache.decode(q[:, i : i + 1], k[:, row], v[:, row]))
        estimated.append(cache.stats().error_estimate)
    exact = torch.as_tensor(cache.attend_exact(q))
    off = torch.cat([torch.as_tensor(out) for out in outs], dim=1) - exact
    errors = (off.norm(dim=-1) / exact.norm(dim=-1)).mean(dim=0)
    return np.array(estimated), errors.numpy()


def calibration(estimated: Floats, errors: Floats, layer: int | None) -> Calibration:
    """Compares the two, [steps] each. Steps without any error have no ratio."""
    wrong = errors > 0
    ratios = estimated[wrong] / errors[wrong]
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9)) if len(ratios) else [math.nan] * 3
    return Calibration(
        layer=layer,
        steps=len(errors),
        correlation=spearman(estimated, errors),
        ratio_10=float(low),
        ratio_50=float(middle),
        ratio_90=float(high),
        estimate=float(estimated.mean()),
        error=float(errors.mean()),
    )


def spearman(x: Floats, y: Floats) -> float:
    """Correlation of the ranks of two series, equal values sharing theirs; NaN if one is flat."""
    x_ranks, y_ranks = (_ranks(values) for values in (x, y))
    if np.ptp(x_ranks) == 0 or np.ptp(y_ranks) == 0:
        return math.nan
    return float(np.corrcoef(x_ranks, y_ranks)[0, 1])


def _ranks(values: Floats) -> Floats:
    """A tie gets the mean of the places that it takes."""
    _, same, sizes = np.unique(values, return_inverse=True, return_counts=True)
    mean: Floats = (np.cumsum(sizes) - (sizes + 1) / 2)[same]
    return mean


def calibration_table(rows: Sequence[Calibration]) -> Table:
    """One line per layer, and one of all."""
    table = Table(
        title="the error that icecache estimates against the true one",
        caption="correlation: of ranks; 10 %, 50 %, 90 %: quantiles of estimate / error",
        box=box.SIMPLE,
        padding=(0, 0),
        pad_edge=False,
    )
    for heading in ("layer", "correlation", "10 %", "50 %", "90 %", "estimate", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            "all" if row.layer is None else str(row.layer),
            f"{row.correlation:.2f}",
            *(f"{ratio:.2f}" for ratio in (row.ratio_10, row.ratio_50, row.ratio_90)),
            f"{row.estimate:.4f}",
            f"{row.error:.4f}",
        )
    return table

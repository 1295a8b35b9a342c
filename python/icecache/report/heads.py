"""Layers and heads: their heat maps and their table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from icecache.eval.comparison import Comparison, HeadRow
from icecache.report.numbers import NONE, number, percent, whole
from icecache.report.panels import Panel
from icecache.report.plots import Grid, colour_bar, heat_map, scale_of
from icecache.report.summary import FULL, ICECACHE, budgets, policies, shown_name
from icecache.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class HeatMaps:
    """Of all policies at one budget."""

    budget: str
    quantity: str
    bar: Markup
    panels: Sequence[Panel]


def heat_maps(comparison: Comparison) -> list[HeatMaps]:
    """Error and mass by layer and head, mean over texts, for every policy at every budget."""
    rows = comparison.heads
    names = [name for name in policies(comparison) if name != FULL]
    names.sort(key=lambda name: name != ICECACHE)
    shape = max(row.layer for row in rows) + 1, max(row.head for row in rows) + 1
    found = []
    at: list[int | None] = [*budgets(rows)]
    for budget in at or [None]:
        for quantity, log in (("error", True), ("mass", False)):
            maps = {}
            for name in names:
                own = [r for r in rows if r.policy == name and r.budget in (budget, None)]
                if own:
                    maps[name] = grid_of(own, quantity, shape)
            if not maps:
                continue
            norm = scale_of(
                [float(value) for grid in maps.values() for value in grid.flat], log=log
            )
            key = f"{quantity}-{budget}"
            found.append(
                HeatMaps(
                    budget=whole(budget),
                    quantity=quantity,
                    bar=colour_bar(f"bar-{key}", f"Colours of {quantity}", norm),
                    panels=[
                        Panel(
                            title=shown_name(comparison.config, name),
                            plot=heat_map(f"{key}-{i}", _label(name, quantity, grid), grid, norm),
                        )
                        for i, (name, grid) in enumerate(maps.items())
                    ],
                )
            )
    return found


def head_table(comparison: Comparison) -> Table:
    """Mean, worst layer and worst head of every policy and budget."""
    rows = comparison.heads
    shape = max(row.layer for row in rows) + 1, max(row.head for row in rows) + 1
    lines = []
    for policy in policies(comparison):
        own = [row for row in rows if row.policy == policy]
        for budget in sorted({row.budget for row in own}, key=lambda budget: budget or 0):
            here = [row for row in own if row.budget == budget]
            error, mass = grid_of(here, "error", shape), grid_of(here, "mass", shape)
            lines.append(
                [
                    shown_name(comparison.config, policy),
                    whole(budget),
                    number(_mean(error)),
                    number(_mean(error, np.median)),
                    _extreme(error, np.nanargmax),
                    percent(_mean(mass)),
                    _extreme(mass, np.nanargmin),
                ]
            )
    return Table(
        caption="Error and mass over layers and KV heads, mean over the texts",
        heads=[
            "policy",
            "budget",
            "mean error",
            "median error",
            "largest error",
            "mean mass",
            "least mass",
        ],
        rows=lines,
    )


def grid_of(rows: Sequence[HeadRow], quantity: str, shape: tuple[int, int]) -> Grid:
    total, count = np.zeros(shape), np.zeros(shape)
    for row in rows:
        total[row.layer, row.head] += getattr(row, quantity)
        count[row.layer, row.head] += 1
    with np.errstate(invalid="ignore"):
        return total / count


def _label(name: str, quantity: str, grid: Grid) -> str:
    return f"{name}: {quantity} by layer and KV head, {number(_mean(grid))} on average"


def _mean(grid: Grid, of: Callable[[Any], Any] = np.mean) -> float:
    found = grid[~np.isnan(grid)]
    return float(of(found)) if found.size else math.nan


def _extreme(grid: Grid, find: Callable[[Any], Any]) -> str:
    if np.isnan(grid).all():
        return NONE
    layer, head = np.unravel_index(find(grid), grid.shape)
    return f"{number(float(grid[layer, head]))} (layer {layer}, head {head})"

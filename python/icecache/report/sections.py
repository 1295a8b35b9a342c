"""Rows as the panels and tables of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from icecache.eval.comparison import Comparison, DriftRow, HeadRow, TaskRow, TextRow
from icecache.report.numbers import NONE, byte_count, listed, number, percent, with_error
from icecache.report.plots import (
    Axis,
    Curve,
    Style,
    colour_bar,
    curves,
    heat_map,
    scale_of,
    styles,
)
from icecache.report.summary import (
    FULL,
    ICECACHE,
    KEPT_KL,
    Mean,
    budgets,
    can_be_done,
    is_deployable,
    kept_from,
    loss,
    means,
    policies,
    task_means,
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot, and its title."""

    title: str
    plot: Markup


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as they are written; the first column names the row, `words` columns are no numbers."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True, kw_only=True)
class HeatMaps:
    """Of all policies at one budget."""

    budget: str
    quantity: str
    bar: Markup
    panels: Sequence[Panel]


def looks(comparison: Comparison) -> dict[str, Style]:
    """Of every policy but full attention, which has no distance from itself."""
    names = [name for name in policies(comparison) if name != FULL]
    not_deployable = [name for name in names if not is_deployable(comparison.config, name)]
    return styles(names, ICECACHE, not_deployable)


def _name(config: Mapping[str, Any], policy: str) -> str:
    return policy if policy == FULL or is_deployable(config, policy) else f"{policy} (not deployable)"


def _budget(budget: int | None) -> str:
    return NONE if budget is None else f"{budget:,}"


# Texts

_TEXT_HEADS = (
    "policy",
    "equal",
    "budget",
    "spent",
    "KL ± s.e.",
    "perplexity",
    "agreement",
    "exact tokens",
    "read",
    "moved",
    "held",
)


def summary_table(comparison: Comparison) -> Table | None:
    """One row per policy: KL at equal tokens, from where it keeps the answers, and its cost there."""
    found = [mean for mean in means(comparison.texts) if mean.equal == "tokens"]
    at = budgets(found)
    full = next((mean for mean in found if mean.policy == FULL), None)
    best = {
        budget: min(
            (m.kl for m in found if m.budget == budget and is_deployable(comparison.config, m.policy)),
            default=math.nan,
        )
        for budget in at
    }
    lines: list[tuple[Any, list[str]]] = []
    for policy in dict.fromkeys(mean.policy for mean in found):
        own = {mean.budget: mean for mean in found if mean.policy == policy}
        deployable = is_deployable(comparison.config, policy)
        kept = kept_from(list(own.values()))
        cost = kept or max(own.values(), key=lambda mean: mean.budget or 0)
        cells = [_name(comparison.config, policy)]
        for budget in at:
            mean = own.get(budget, own.get(None))
            cells.append(NONE if mean is None else _kl_cell(mean, best[budget], deployable))
        cells += [
            "never" if kept is None else "any" if kept.budget is None else f"{kept.budget:,}",
            percent(cost.agreement),
            byte_count(cost.read_bytes),
            percent(cost.read_bytes / full.read_bytes if full and full.read_bytes else None),
            byte_count(cost.moved_bytes),
            byte_count(cost.held_bytes),
        ]
        first = math.inf if kept is None else (kept.budget or 0)
        lines.append(((policy != FULL, not deployable, first, cost.kl), cells))
    if not lines:
        return None
    lines.sort(key=lambda line: line[0])
    return Table(
        caption="Mean KL from full attention over the texts at equal tokens, in nats (✓ keeps the "
        "answers; bold: the lowest of the deployable policies), the budget from which the answers "
        "are kept, and agreement and cost of a step at that budget, or at the largest one where "
        "they never are.",
        heads=[
            "policy",
            *(f"KL at {budget:,}" for budget in at),
            "kept from",
            "agreement",
            "read",
            "of full",
            "moved",
            "held",
        ],
        rows=[cells for _, cells in lines],
    )


def _kl_cell(mean: Mean, best: float, deployable: bool) -> str:
    text = number(mean.kl) + (" ✓" if mean.kept else "")
    lowest = deployable and mean.budget is not None and mean.kl == best
    return Markup("<strong>{}</strong>").format(text) if lowest else text


def text_tables(comparison: Comparison) -> list[tuple[str, Table]]:
    """All rows, a table per text: at equal tokens first, the best first at each budget."""
    tables = []
    for text in dict.fromkeys(row.text for row in comparison.texts):
        rows = [row for row in comparison.texts if row.text == text]
        rows.sort(key=lambda row: (row.equal != "tokens", row.budget or 0, row.kl))
        positions = listed([f"{count:,}" for count in sorted({row.positions for row in rows})])
        cells = [
            [
                _name(comparison.config, row.policy),
                row.equal,
                _budget(row.budget),
                _budget(row.spent),
                with_error(row.kl, row.kl_stderr),
                number(row.perplexity, 4),
                percent(row.agreement),
                number(row.exact_tokens),
                byte_count(row.read_bytes),
                byte_count(row.moved_bytes),
                byte_count(row.held_bytes),
            ]
            for row in rows
        ]
        caption = f"Against full attention, over {positions} positions"
        tables.append((text, Table(caption=caption, heads=_TEXT_HEADS, rows=cells, words=2)))
    return tables


def _each_text(comparison: Comparison) -> list[tuple[str, list[Any]]]:
    """The mean first, where there are several texts."""
    rows = comparison.texts
    texts = list(dict.fromkeys(row.text for row in rows))
    found: list[tuple[str, list[Any]]] = [(t, [r for r in rows if r.text == t]) for t in texts]
    if len(texts) > 1:
        found.insert(0, (f"Mean over {len(texts)} texts", means(rows)))
    return found


def budget_panels(comparison: Comparison, look: Mapping[str, Style]) -> list[Panel]:
    """KL against budget, at equal tokens."""
    x = Axis(label="budget (tokens per KV head)")
    y = Axis(label="KL (nats)", line=KEPT_KL)

    def lines(rows: Sequence[Any]) -> list[Curve]:
        rows = [row for row in rows if row.equal == "tokens"]
        return _over_budgets(rows, look, lambda row: row.kl, lambda row: row.kl_stderr)

    return _panels("budget", "KL against budget", _each_text(comparison), lines, x, y)


def bytes_panels(comparison: Comparison, look: Mapping[str, Style]) -> list[Panel]:
    """KL against bytes read by a step, rows of both kinds."""
    panels = []
    for i, (title, rows) in enumerate(_each_text(comparison)):
        full = next((row.read_bytes for row in rows if row.policy == FULL), 0)
        unit = full / 100 if full > 0 else 1e6
        found = []
        for policy, style in look.items():
            own = [row for row in rows if row.policy == policy]
            own.sort(key=lambda row: row.read_bytes)
            found.append(
                Curve(
                    style=style,
                    x=[row.read_bytes / unit for row in own],
                    y=[row.kl for row in own],
                    stderr=[row.kl_stderr for row in own],
                    tips=[_tip(row) for row in own],
                    labelled=False,
                )
            )
        x = Axis(
            label="read by a step (% of full attention)" if full > 0 else "read by a step (MB)",
            line=100 if full > 0 else None,
        )
        y = Axis(label="KL (nats)", line=KEPT_KL)
        plot = curves(f"bytes-{i}", f"KL against bytes read: {title}", found, x, y)
        panels += [Panel(title=title, plot=plot)] if plot else []
    return panels


def _tip(row: Any) -> str:
    at = "" if row.budget is None else f" at {row.budget:,} {row.equal}"
    return (
        f"{row.policy}{at}: KL {with_error(row.kl, row.kl_stderr)}, "
        f"reads {byte_count(row.read_bytes)}"
    )


def _over_budgets(
    rows: Sequence[Any],
    look: Mapping[str, Style],
    value: Callable[[Any], float],
    stderr: Callable[[Any], float] | None = None,
) -> list[Curve]:
    """A curve per policy; one without a budget has a line over all budgets."""
    at = budgets(rows)
    found = []
    for policy, style in look.items():
        own = [row for row in rows if row.policy == policy]
        some = sorted((row for row in own if row.budget is not None), key=lambda row: row.budget)
        points = [(row.budget, row) for row in some]
        if own and not some and at:
            points = [(budget, own[0]) for budget in dict.fromkeys((at[0], at[-1]))]
        found.append(
            Curve(
                style=style,
                x=[budget for budget, _ in points],
                y=[value(row) for _, row in points],
                stderr=[stderr(row) for _, row in points] if stderr else (),
                tips=[
                    f"{policy}{'' if row.budget is None else f' at {row.budget:,}'}: "
                    f"{number(value(row))}"
                    + (f" ± {number(stderr(row), 2)}" if stderr else "")
                    for _, row in points
                ],
            )
        )
    return found


def _panels(
    key: str,
    label: str,
    groups: Sequence[tuple[str, list[Any]]],
    lines: Callable[[Sequence[Any]], list[Curve]],
    x: Axis,
    y: Axis,
) -> list[Panel]:
    """One for each group that has a point to draw; ticks where the points are."""
    panels = []
    for i, (title, rows) in enumerate(groups):
        found = lines(rows)
        at = sorted({value for curve in found for value in curve.x})
        mine = Axis(label=x.label, scale=x.scale, ticks=_apart(at))
        plot = curves(f"{key}-{i}", f"{label}: {title}", found, mine, y)
        panels += [Panel(title=title, plot=plot)] if plot else []
    return panels


def _apart(values: Sequence[float], most: int = 5) -> list[float]:
    """At most `most` of them, evenly."""
    return list(values[:: math.ceil(len(values) / most)]) if values else []


# Tasks


def task_table(comparison: Comparison) -> Table:
    """One row per policy and budget, one column per task."""
    rows, able = comparison.tasks, can_be_done(comparison.tasks)
    tasks = list(dict.fromkeys(row.task for row in rows))
    average = {(mean.policy, mean.budget): mean for mean in task_means(rows)}
    lines = []
    for policy in policies(comparison):
        own = [row for row in rows if row.policy == policy]
        for budget in sorted({row.budget for row in own}, key=lambda budget: budget or 0):
            here = [row for row in own if row.budget == budget]
            mean = average.get((policy, budget))
            cells = [_name(comparison.config, policy), _budget(budget)]
            cells += [_task_cell([row for row in here if row.task == task]) for task in tasks]
            cells += [
                NONE if mean is None else percent(mean.right),
                NONE if mean is None else number(mean.loss, 2),
            ]
            lines.append(cells)
    return Table(
        caption="Right answers, and the log-probability lost on average, in nats, over the instances "
        "that full attention gets right; in brackets the other instances, which no average has.",
        heads=[
            "policy",
            "budget",
            *(task if task in able else f"{task} (full attention fails)" for task in tasks),
            "mean right",
            "mean loss",
        ],
        rows=lines,
    )


def _task_cell(rows: Sequence[TaskRow]) -> str:
    fair = [row for row in rows if row.full_right]
    rest = [row for row in rows if not row.full_right]
    parts = []
    if fair:
        lost = number(fmean(loss(row) for row in fair), 2)
        parts.append(f"{sum(row.right for row in fair)} of {len(fair)}, {lost}")
    if rest:
        lost = number(fmean(loss(row) for row in rest), 2)
        parts.append(f"({sum(row.right for row in rest)} of {len(rest)}, {lost})")
    return " ".join(parts) or NONE


def task_panels(comparison: Comparison, look: Mapping[str, Style]) -> list[Panel]:
    """Log-probability lost against budget: all tasks that can be done, then each."""
    rows = [row for row in comparison.tasks if row.full_right]
    groups: list[tuple[str, list[Any]]] = []
    able = can_be_done(rows)
    for task in able:
        groups.append((task, list(task_means([row for row in rows if row.task == task]))))
    if len(able) > 1:
        groups.insert(0, (f"Mean over {len(able)} tasks", list(task_means(rows))))
    x = Axis(label="budget (tokens per KV head)")
    y = Axis(
        label="log-probability lost (nats)",
        scale="symlog",
        ticks=(-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100),
        options={"linthresh": 0.1, "linscale": 0.5},
    )

    def lines(rows: Sequence[Any]) -> list[Curve]:
        return _over_budgets(rows, look, lambda mean: mean.loss)

    return _panels("tasks", "Log-probability lost", groups, lines, x, y)


# Drift


def drift_panels(rows: Sequence[DriftRow]) -> list[Panel]:
    """KL by stretch, a panel per text and budget."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    look = styles(variants, "inserted", [])
    groups: list[tuple[str, list[Any]]] = [
        (f"{text}, budget {budget:,}", [r for r in rows if (r.text, r.budget) == (text, budget)])
        for text, budget in dict.fromkeys((row.text, row.budget) for row in rows)
    ]

    def lines(rows: Sequence[Any]) -> list[Curve]:
        found = []
        for variant, style in look.items():
            own = sorted((r for r in rows if r.variant == variant), key=lambda row: row.start)
            found.append(
                Curve(
                    style=style,
                    x=[row.start for row in own],
                    y=[row.kl for row in own],
                    stderr=[row.kl_stderr for row in own],
                    tips=[
                        f"{variant}, from {row.start:,}: KL {with_error(row.kl, row.kl_stderr)}"
                        for row in own
                    ],
                )
            )
        return found

    x = Axis(label="first position of the stretch", scale="linear")
    return _panels("drift", "KL by stretch", groups, lines, x, Axis(label="KL (nats)"))


def drift_table(rows: Sequence[DriftRow]) -> Table:
    """One row per stretch, one column per variant."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    lines = []
    for text, budget, start in dict.fromkeys((row.text, row.budget, row.start) for row in rows):
        here = [row for row in rows if (row.text, row.budget, row.start) == (text, budget, start)]
        found = {row.variant: with_error(row.kl, row.kl_stderr) for row in here}
        cells = [text, _budget(budget), f"{start:,}", f"{here[0].positions:,}"]
        lines.append(cells + [found.get(variant, NONE) for variant in variants])
    return Table(
        caption="KL ± standard error, in nats, by stretch",
        heads=["text", "budget", "from position", "positions", *variants],
        rows=lines,
    )


# Layers and heads


def heat_maps(comparison: Comparison) -> list[HeatMaps]:
    """Error and mass by layer and head, mean over texts, for every policy at every budget."""
    rows = comparison.heads
    names = [name for name in policies(comparison) if name != FULL]
    names.sort(key=lambda name: name != ICECACHE)
    shape = max(row.layer for row in rows) + 1, max(row.head for row in rows) + 1
    found = []
    for budget in budgets(rows) or [None]:
        for quantity, log in (("error", True), ("mass", False)):
            maps = {}
            for name in names:
                own = [r for r in rows if r.policy == name and r.budget in (budget, None)]
                if own:
                    maps[name] = _grid(own, quantity, shape)
            if not maps:
                continue
            norm = scale_of([float(value) for grid in maps.values() for value in grid.flat], log=log)
            key = f"{quantity}-{budget}"
            found.append(
                HeatMaps(
                    budget=_budget(budget),
                    quantity=quantity,
                    bar=colour_bar(f"bar-{key}", f"Colours of {quantity}", norm),
                    panels=[
                        Panel(
                            title=_name(comparison.config, name),
                            plot=heat_map(f"{key}-{i}", _grid_label(name, quantity, grid), grid, norm),
                        )
                        for i, (name, grid) in enumerate(maps.items())
                    ],
                )
            )
    return found


def _grid(rows: Sequence[HeadRow], quantity: str, shape: tuple[int, int]) -> np.ndarray:
    total, count = np.zeros(shape), np.zeros(shape)
    for row in rows:
        total[row.layer, row.head] += getattr(row, quantity)
        count[row.layer, row.head] += 1
    with np.errstate(invalid="ignore"):
        return total / count


def _grid_label(name: str, quantity: str, grid: np.ndarray) -> str:
    return f"{name}: {quantity} by layer and KV head, {number(float(np.nanmean(grid)))} on average"


def head_table(comparison: Comparison) -> Table:
    """Mean, worst layer and worst head of every policy and budget."""
    rows = comparison.heads
    shape = max(row.layer for row in rows) + 1, max(row.head for row in rows) + 1
    lines = []
    for policy in policies(comparison):
        own = [row for row in rows if row.policy == policy]
        for budget in sorted({row.budget for row in own}, key=lambda budget: budget or 0):
            here = [row for row in own if row.budget == budget]
            error, mass = _grid(here, "error", shape), _grid(here, "mass", shape)
            lines.append(
                [
                    _name(comparison.config, policy),
                    _budget(budget),
                    number(float(np.nanmean(error))),
                    number(float(np.nanmedian(error))),
                    _extreme(error, np.nanargmax),
                    percent(float(np.nanmean(mass))),
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


def _extreme(grid: np.ndarray, find: Callable[[Any], Any]) -> str:
    if np.isnan(grid).all():
        return NONE
    layer, head = np.unravel_index(find(grid), grid.shape)
    return f"{number(float(grid[layer, head]))} (layer {layer}, head {head})"

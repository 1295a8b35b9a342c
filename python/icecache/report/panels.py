"""Rows as the panels of curves of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from icecache.eval.comparison import Comparison, DriftRow
from icecache.report.numbers import byte_count, number, with_error
from icecache.report.plots import Axis, Curve, Style, curves, styles
from icecache.report.summary import (
    FULL,
    ICECACHE,
    KEPT_KL,
    budgets,
    can_be_done,
    is_deployable,
    means,
    policies,
    task_means,
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot, and its title."""

    title: str
    plot: Markup


def looks(comparison: Comparison) -> dict[str, Style]:
    """Of every policy but full attention, which has no distance from itself."""
    names = [name for name in policies(comparison) if name != FULL]
    not_deployable = [name for name in names if not is_deployable(comparison.config, name)]
    return styles(names, ICECACHE, not_deployable)


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


def _each_text(comparison: Comparison) -> list[tuple[str, list[Any]]]:
    """The mean first, where there are several texts."""
    rows = comparison.texts
    texts = list(dict.fromkeys(row.text for row in rows))
    found: list[tuple[str, list[Any]]] = [(t, [r for r in rows if r.text == t]) for t in texts]
    if len(texts) > 1:
        found.insert(0, (f"Mean over {len(texts)} texts", means(rows)))
    return found


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
                    f"{number(value(row))}" + (f" ± {number(stderr(row), 2)}" if stderr else "")
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


def _tip(row: Any) -> str:
    at = "" if row.budget is None else f" at {row.budget:,} {row.equal}"
    return (
        f"{row.policy}{at}: KL {with_error(row.kl, row.kl_stderr)}, "
        f"reads {byte_count(row.read_bytes)}"
    )


def _apart(values: Sequence[float], most: int = 5) -> list[float]:
    """At most `most` of them, evenly."""
    return list(values[:: math.ceil(len(values) / most)]) if values else []

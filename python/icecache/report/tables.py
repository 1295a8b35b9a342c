"""Rows as the tables of the page: cells as they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from markupsafe import Markup

from icecache.eval.comparison import Comparison, DriftRow, TaskRow
from icecache.report.numbers import NONE, byte_count, listed, number, percent, whole, with_error
from icecache.report.summary import (
    FULL,
    Mean,
    budgets,
    can_be_done,
    contestants,
    is_deployable,
    kept_from,
    loss,
    means,
    policies,
    shown_name,
    task_means,
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as they are written; the first column names the row, `words` columns are no numbers."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


def summary_table(comparison: Comparison) -> Table | None:
    """One row per policy: KL at equal tokens, where it keeps the answers, and its cost there."""
    found = [mean for mean in means(comparison.texts) if mean.equal == "tokens"]
    at = budgets(found)
    full = next((mean for mean in found if mean.policy == FULL), None)
    best = {
        budget: ranked[0].kl
        for budget in at
        if (ranked := contestants(found, comparison.config, budget, "tokens"))
    }
    lines: list[tuple[Any, list[str]]] = []
    for policy in dict.fromkeys(mean.policy for mean in found):
        own = {mean.budget: mean for mean in found if mean.policy == policy}
        deployable = is_deployable(comparison.config, policy)
        kept = kept_from(list(own.values()))
        cost = kept or max(own.values(), key=lambda mean: mean.budget or 0)
        cells = [shown_name(comparison.config, policy)]
        for budget in at:
            mean = own.get(budget, own.get(None))
            cells.append(NONE if mean is None else _kl_cell(mean, best.get(budget), deployable))
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


def _kl_cell(mean: Mean, best: float | None, deployable: bool) -> str:
    text = number(mean.kl) + (" ✓" if mean.kept else "")
    lowest = deployable and mean.budget is not None and mean.kl == best
    return Markup("<strong>{}</strong>").format(text) if lowest else text


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


def text_tables(comparison: Comparison) -> list[tuple[str, Table]]:
    """All rows, a table per text: at equal tokens first, the best first at each budget."""
    tables = []
    for text in dict.fromkeys(row.text for row in comparison.texts):
        rows = [row for row in comparison.texts if row.text == text]
        rows.sort(key=lambda row: (row.equal != "tokens", row.budget or 0, row.kl))
        positions = listed([f"{count:,}" for count in sorted({row.positions for row in rows})])
        cells = [
            [
                shown_name(comparison.config, row.policy),
                row.equal,
                whole(row.budget),
                whole(row.spent),
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
            cells = [shown_name(comparison.config, policy), whole(budget)]
            cells += [_task_cell([row for row in here if row.task == task]) for task in tasks]
            cells += [
                NONE if mean is None else percent(mean.right),
                NONE if mean is None else number(mean.loss, 2),
            ]
            lines.append(cells)
    return Table(
        caption="Right answers, and the log-probability lost on average, in nats, over the "
        "instances that full attention gets right; in brackets the other instances, which no "
        "average has.",
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


def drift_table(rows: Sequence[DriftRow]) -> Table:
    """One row per stretch, one column per variant."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    lines = []
    for text, budget, start in dict.fromkeys((row.text, row.budget, row.start) for row in rows):
        here = [row for row in rows if (row.text, row.budget, row.start) == (text, budget, start)]
        found = {row.variant: with_error(row.kl, row.kl_stderr) for row in here}
        cells = [text, whole(budget), f"{start:,}", f"{here[0].positions:,}"]
        lines.append(cells + [found.get(variant, NONE) for variant in variants])
    return Table(
        caption="KL ± standard error, in nats, by stretch",
        heads=["text", "budget", "from position", "positions", *variants],
        rows=lines,
    )

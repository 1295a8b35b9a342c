"""Results as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from icecache.eval.comparison import Comparison
from icecache.eval.errors import EvalError
from icecache.eval.kl import Closeness
from icecache.eval.passkey import Retrieval
from icecache.eval.runs import Run


def describe(model: str, runs: Iterable[Run], **settings: Any) -> dict[str, Any]:
    """What is needed to repeat an evaluation."""
    import torch

    return {
        "model": model,
        **settings,
        "runs": [
            {"policy": run.policy, "budget": run.budget, "config": asdict(run.config())}
            for run in runs
        ],
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("icecache", "torch", "transformers")},
        },
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def to_json(config: dict[str, Any], rows: Iterable[Any]) -> str:
    """`{"config": ..., "rows": [...]}`; rows are dataclasses."""
    return json.dumps({"config": config, "rows": [asdict(row) for row in rows]}, indent=1)


def write_json(path: Path, config: dict[str, Any], rows: Iterable[Any]) -> None:
    """Writes `to_json`; `EvalError` if the file cannot be written."""
    try:
        path.write_text(to_json(config, rows) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvalError(f"cannot write {path}: {error}") from error


def closeness_table(rows: Sequence[Closeness]) -> Table:
    """One line per policy, budget and text."""
    table = Table(
        title=f"distance from full attention: {rows[0].text}",
        caption="KL in nats; exact: tokens attended exactly per KV head; mass: their true share of "
        "the softmax; keys, values: share of the stored rows read; ms: per token",
        box=box.SIMPLE,
        padding=(0, 0),
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for heading in (
        "budget",
        "KL",
        "s.e.",
        "top-1",
        "perpl.",
        "exact",
        "mass",
        "keys",
        "values",
        "ms",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy,
            _budget(row.budget),
            f"{row.kl:.4f}",
            f"{row.kl_stderr:.4f}",
            f"{row.agreement:.1%}",
            f"{row.perplexity:.2f}",
            f"{row.tokens_exact:.0f}",
            f"{row.mass_exact_true:.1%}",
            f"{row.key_rows_read:.1%}",
            f"{row.value_rows_read:.1%}",
            f"{row.ms_per_token:.0f}",
        )
    return table


def passkey_table(rows: Sequence[Retrieval]) -> Table:
    """One line per policy and budget, one column per length, over all depths and seeds."""
    lengths = sorted({row.length for row in rows})
    table = Table(title="pass keys found, and mean log-probability of the right answer")
    table.add_column("policy")
    table.add_column("budget", justify="right")
    for length in lengths:
        table.add_column(f"{length} tokens", justify="right")
    for policy, budget in dict.fromkeys((row.policy, row.budget) for row in rows):
        cells = []
        for length in lengths:
            mine = [
                row
                for row in rows
                if (row.policy, row.budget, row.length) == (policy, budget, length)
            ]
            found = sum(row.found for row in mine)
            cells.append(f"{found} of {len(mine)}, {fmean(row.logprob for row in mine):.2f}")
        table.add_row(policy, _budget(budget), *cells)
    return table


def comparison_tables(comparison: Comparison) -> list[Table]:
    """What `icecache compare` measured, in short: means over texts, tasks and stretches."""
    tables = []
    for equal, what in (("tokens", "exact tokens"), ("bytes", "bytes read as icecache")):
        rows = [row for row in comparison.texts if row.equal == equal]
        if rows:
            tables.append(
                _mean_table(
                    f"KL from full attention in nats, at equal {what}",
                    [(row.policy, _budget(row.budget), row.kl) for row in rows],
                    "{:.4f}",
                )
            )
    able = [row for row in comparison.tasks if row.full_right]
    if able:
        lost = [
            (r.policy, f"{r.task}, {_budget(r.budget)}", r.full_logprob - r.logprob) for r in able
        ]
        tables.append(
            _mean_table("log-probability lost where full attention is right", lost, "{:.2f}")
        )
    if comparison.drift:
        drift = [(row.variant, f"from {row.start}", row.kl) for row in comparison.drift]
        tables.append(_mean_table("KL by stretch of decoded tokens", drift, "{:.4f}"))
    return tables


def _mean_table(title: str, cells: Sequence[tuple[str, str, float]], shown: str) -> Table:
    """Means of `(line, column, value)`."""
    columns = list(dict.fromkeys(column for _, column, _ in cells))
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, min_width=len(title))
    for heading in ("", *columns):
        table.add_column(heading, justify="right" if heading else "left")
    for line in dict.fromkeys(line for line, _, _ in cells):
        mine = [[v for at, c, v in cells if (at, c) == (line, column)] for column in columns]
        table.add_row(line, *(shown.format(fmean(values)) if values else "" for values in mine))
    return table


def _budget(budget: int | None) -> str:
    return "-" if budget is None else str(budget)

"""Tables, the plot of steps, and what is needed to repeat a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from icecache.bench.step import StepRow
from icecache.config import IceConfig
from icecache.eval.errors import EvalError

_WIDE = 8
"""Fields that fit on a line."""
_LINES = {
    "step_ms": "icecache",
    "dense_ms": "exact, same kernels",
    "sdpa_ms": "exact, torch",
    "scan_ms": "scan + top, torch",
    "floor_ms": "reading what a step reads",
}


def describe(config: IceConfig, **settings: Any) -> dict[str, Any]:
    """What is needed to repeat a run."""
    from icecache import _icecache

    return {
        **settings,
        "config": asdict(config),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("icecache", "torch", "transformers")},
        },
        "cpus": os.cpu_count(),
        "simd": _icecache.simd_name(),
    }


def table(title: str, rows: Sequence[Any]) -> Table:
    """Of dataclasses: one line per row or, where there are many fields, one column per row."""
    names = [field.name.replace("_", " ") for field in fields(rows[0])]
    lines = [names, *([_cell(value) for value in asdict(row).values()] for row in rows)]
    if len(names) > _WIDE:
        lines = [list(line) for line in zip(*lines, strict=True)]
    table = Table(title=title, min_width=len(title), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for i, heading in enumerate(lines[0]):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


def plot_steps(path: Path, rows: Sequence[StepRow]) -> None:
    """Milliseconds against tokens, both logarithmic; `EvalError` if it cannot be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EvalError(f"{error}; install icecache[bench]") from error
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    tokens = [row.tokens for row in rows]
    for field, label in _LINES.items():
        axes.loglog(tokens, [getattr(row, field) for row in rows], "o-", label=label, ms=4)
    axes.set_xlabel("tokens")
    axes.set_ylabel("milliseconds per layer and step")
    axes.set_xticks(tokens, [str(n) for n in tokens], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise EvalError(f"cannot write {path}: {error}") from error

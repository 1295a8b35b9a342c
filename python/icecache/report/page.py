"""A comparison as one HTML page that needs nothing but itself."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from icecache.eval import comparison as rows
from icecache.eval.comparison import Comparison
from icecache.eval.errors import EvalError
from icecache.report import heads, panels, summary, tables
from icecache.report.plots import swatch


def write_report(comparison: Comparison, path: Path) -> None:
    """Writes the page; `EvalError` if the file cannot be written."""
    page = render(comparison)
    try:
        path.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise EvalError(f"cannot write {path}: {error}") from error


def render(comparison: Comparison) -> str:
    """The page, as HTML."""
    environment = Environment(
        loader=PackageLoader("icecache", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(_facts(comparison))


def _facts(comparison: Comparison) -> dict[str, Any]:
    """All that the template shows."""
    config, texts = comparison.config, comparison.texts
    means = summary.means(texts)
    look = panels.looks(comparison)
    contests = {
        equal: [
            (
                f"{budget:,}",
                summary.standing(ranked),
                summary.left_out(means, config, budget, equal),
            )
            for budget in summary.budgets(texts)
            if (ranked := summary.contestants(means, config, budget, equal))
        ]
        for equal in ("tokens", "bytes")
    }
    task_means = summary.task_means(comparison.tasks)
    return {
        "config": config,
        "shown_config": "\n".join(
            f"{key}: {json.dumps(value, ensure_ascii=False, default=str)}"
            for key, value in config.items()
            if key not in ("policies", "command", "versions")
        ),
        "full_read": any(row.policy == summary.FULL and row.read_bytes > 0 for row in texts),
        "texts": {row.text: row.positions for row in texts},
        "kept_kl": f"{summary.KEPT_KL:g}",
        "missing": summary.missing(comparison),
        "keepers": summary.keepers(comparison, means),
        "costs": summary.costs(means),
        "contests": contests,
        "pairs": {equal: summary.pairs(comparison, equal) for equal in contests},
        "task_lines": [
            (f"{budget:,}", line)
            for budget in summary.budgets(comparison.tasks)
            if (line := summary.task_standing(task_means, config, budget))
        ],
        "drift_lines": summary.drift_standing(comparison.drift),
        "summary_table": tables.summary_table(comparison),
        "looks": list(look.values()),
        "swatch": swatch,
        "budget_panels": panels.budget_panels(comparison, look),
        "bytes_panels": panels.bytes_panels(comparison, look),
        "text_tables": tables.text_tables(comparison),
        "task_table": tables.task_table(comparison) if comparison.tasks else None,
        "task_panels": panels.task_panels(comparison, look),
        "drift_table": tables.drift_table(comparison.drift) if comparison.drift else None,
        "drift_panels": panels.drift_panels(comparison.drift),
        "heat_maps": heads.heat_maps(comparison) if comparison.heads else [],
        "head_table": heads.head_table(comparison) if comparison.heads else None,
        "policies": [
            (name, config.get("policies", {}).get(name, {}).get("what", ""))
            for name in summary.policies(comparison)
        ],
        "not_deployable": [
            name for name in summary.policies(comparison) if not summary.is_deployable(config, name)
        ],
        "definitions": list(_definitions(comparison)),
        "preface": _prose(inspect.getdoc(rows) or ""),
    }


def _definitions(comparison: Comparison) -> Iterator[tuple[str, Markup, list[tuple[str, Markup]]]]:
    """Of what was measured: title, sentence, and (name, sentence) of each quantity.

    They are the docstrings of the rows, so that page and code say the same.
    """
    for title, kind, measured in (
        ("Texts", rows.TextRow, comparison.texts),
        ("Tasks", rows.TaskRow, comparison.tasks),
        ("Drift", rows.DriftRow, comparison.drift),
        ("Layers and heads", rows.HeadRow, comparison.heads),
    ):
        if not measured:
            continue
        body = ast.parse(inspect.getsource(kind)).body[0]
        assert isinstance(body, ast.ClassDef)
        fields = [
            (before.target.id, _prose(inspect.cleandoc(after.value.value)))
            for before, after in zip(body.body, body.body[1:], strict=False)
            if isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ]
        yield title, _prose(inspect.getdoc(kind) or ""), fields


def _prose(text: str) -> Markup:
    """Escaped, with code in backticks."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))

"""The HTML page that shows a comparison of policies.

numbers   how numbers are written
summary   what the rows say: means over texts, who keeps the answers, who is best
svg       a matplotlib figure as SVG inside the page
plots     curves, heat maps and their legends
panels    rows as curves
tables    rows as tables
heads     layers and heads, as heat maps and as a table
page      `write_report`: the page, from the template page.html and page.css

Needs the extra `eval` (matplotlib, jinja2).
"""

from icecache.eval.errors import EvalError

try:
    from icecache.report.page import write_report
except ImportError as error:
    raise EvalError(f"{error}; install icecache[eval]") from error

__all__ = ["write_report"]

"""How the page writes numbers: rounded, aligned, with units."""

from __future__ import annotations

import math

NONE = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 3) -> str:
    """With `digits` significant digits; whole from 1,000 on; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else f"{_MINUS}∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if size >= digits:
        text = f"{value:,.0f}"
    elif size >= -5:
        text = f"{value:.{digits - 1 - size}f}"
    else:
        text = f"{value / 10.0**size:.1f} {TIMES} 10{str(size).translate(_SUPERSCRIPT)}"
    return text.replace("-", _MINUS, 1) if value < 0 else text


def whole(value: int | None) -> str:
    """With commas; a dash for None."""
    return NONE if value is None else f"{value:,}"


def with_error(value: float, stderr: float) -> str:
    """`value ± stderr`, the error with two significant digits, the value to its last one."""
    if not (math.isfinite(value) and math.isfinite(stderr)) or stderr <= 0:
        return number(value)
    last = 1 - math.floor(math.log10(float(f"{stderr:.1e}")))
    if last > 6:
        return f"{number(value)}{_SPACE}±{_SPACE}{number(stderr, 2)}"
    last = max(last, 0)
    return f"{value:,.{last}f}{_SPACE}±{_SPACE}{stderr:,.{last}f}".replace("-", _MINUS)


def percent(share: float | None) -> str:
    """`12.3 %`; a share of None or NaN is a dash."""
    if share is None or not math.isfinite(share):
        return NONE
    text = "100" if share == 1 else f"{100 * share:.1f}"
    return f"{text}{_SPACE}%".replace("-", _MINUS)


def byte_count(value: float | None) -> str:
    """In B, kB, MB (10**6) and so on."""
    if value is None or not math.isfinite(value):
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{number(value)}{_SPACE}{unit}"
        value /= 1000
    return f"{number(value)}{_SPACE}TB"


def times(ratio: float) -> str:
    """`5.6 times`."""
    return f"{number(ratio, 2 if ratio < 99.5 else 3)} times"


def listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

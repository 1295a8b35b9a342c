"""Curves, heat maps and their legends, drawn by matplotlib at the size of a phone's screen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from icecache.report.numbers import TIMES, number
from icecache.report.svg import FAINT, INK, PAPER, SERIES, STYLE, inline

Grid = np.ndarray[Any, np.dtype[np.float64]]
"""Values [layers, heads]; NaN where there is none."""
_MARKERS = "os^vDPX<>phd*H8"
_SIZES = {"*": 7.0, "P": 5.5, "X": 5.5, "D": 4.2, "d": 5.5}
_HEAT = "cividis"


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a policy looks: colour and marker together are its own."""

    name: str
    key: str
    """Class of its lines in the page."""
    colour: str
    marker: str
    dashed: bool
    """Not deployable."""
    bold: bool


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of one policy; those that are not finite are left out."""

    style: Style
    x: Sequence[float]
    y: Sequence[float]
    stderr: Sequence[float] = ()
    tips: Sequence[str] = ()
    hollow: bool = False
    labelled: bool = True


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis shows, and how."""

    label: str
    scale: str = "log"
    ticks: Sequence[float] = ()
    suffix: str = ""
    line: float | None = None
    """A value to mark."""
    options: dict[str, float] = field(default_factory=dict)


def styles(names: Sequence[str], bold: str, dashed: Sequence[str]) -> dict[str, Style]:
    """Of each name; `bold` has the first colour for itself."""
    looks = zip(itertools.cycle(SERIES[1:]), itertools.cycle(_MARKERS[1:]), strict=False)
    found = {}
    for i, name in enumerate(names):
        colour, marker = (SERIES[0], _MARKERS[0]) if name == bold else next(looks)
        printable = "".join(c if c.isprintable() else "�" for c in name)
        found[name] = Style(
            name=printable,
            key=f"line-{i}",
            colour=colour,
            marker=marker,
            dashed=name in dashed,
            bold=name == bold,
        )
    return found


def curves(name: str, label: str, found: Sequence[Curve], x: Axis, y: Axis) -> Markup | None:
    """One panel, labelled at the right; None if there is no point to draw."""
    with rc_context(STYLE):
        labelled = any(curve.labelled for curve in found)
        figure = Figure(figsize=(3.6, 3.0))
        axes = figure.add_axes((0.125, 0.14, 0.6 if labelled else 0.84, 0.78))
        tips: dict[str, list[str]] = {}
        ends = []
        for i, curve in enumerate(found):
            points = [p for p in range(len(curve.x)) if _can_be_drawn(curve, p, x, y)]
            if not points:
                continue
            xs, ys = [curve.x[p] for p in points], [curve.y[p] for p in points]
            style, gid = curve.style, f"{curve.style.key} curve-{i}"
            axes.plot(
                xs,
                ys,
                color=style.colour,
                marker=style.marker,
                markersize=_SIZES.get(style.marker, 4.8) + style.bold,
                markerfacecolor=PAPER if curve.hollow else style.colour,
                markeredgecolor=style.colour if curve.hollow else PAPER,
                markeredgewidth=1.0 if curve.hollow else 0.5,
                linestyle="--" if style.dashed else "-",
                linewidth=2.4 if style.bold else 1.1,
                zorder=4 if style.bold else 3,
                gid=gid,
                clip_on=False,
            )
            tips[gid] = [curve.tips[p] for p in points] if curve.tips else []
            for p in points if curve.stderr else ():
                low, high = curve.y[p] - curve.stderr[p], curve.y[p] + curve.stderr[p]
                if math.isfinite(high) and (low > 0 or y.scale != "log"):
                    axes.plot(
                        [curve.x[p]] * 2,
                        [low, high],
                        color=style.colour,
                        linewidth=1,
                        gid=style.key,
                    )
            if curve.labelled:
                ends.append((style, xs[-1], ys[-1]))
            elif style.bold or style.dashed:
                _name(axes, style, (xs[-1], ys[-1]))
        if not tips:
            return None
        _set_scale(axes, x, "x")
        _set_scale(axes, y, "y")
        axes.grid(visible=True)
        axes.set_axisbelow(True)
        _mark(axes, x, y)
        _label(axes, ends)
        return inline(figure, name, label, tips)


def _can_be_drawn(curve: Curve, point: int, x: Axis, y: Axis) -> bool:
    return all(
        math.isfinite(value) and (value > 0 or axis.scale != "log")
        for value, axis in ((curve.x[point], x), (curve.y[point], y))
    )


def _set_scale(axes: Axes, axis: Axis, side: str) -> None:
    line = axes.xaxis if side == "x" else axes.yaxis
    set_scale = axes.set_xscale if side == "x" else axes.set_yscale
    set_scale(axis.scale, **axis.options)
    limits = axes.set_xlim if side == "x" else axes.set_ylim
    low, high = axes.get_xlim() if side == "x" else axes.get_ylim()
    if axis.scale == "log" and high / low < 10:  # a decade at least, so that a tick is in sight
        middle = math.sqrt(low * high)
        half = math.sqrt(10) if not axis.ticks else max(1.3, math.sqrt(high / low))
        low, high = middle / half, middle * half
    if side == "x" and axis.line is not None:
        low, high = min(low, axis.line / 1.2), max(high, axis.line * 1.2)
    limits(low, high)  # from here on nothing moves them
    if axis.ticks:
        line.set_major_locator(FixedLocator(list(axis.ticks)))
    elif axis.scale == "log":
        few = math.log10(high / low) < 2
        line.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=9))
    line.set_minor_locator(NullLocator())
    line.set_major_formatter(FuncFormatter(lambda value, _: _plain(value) + axis.suffix))
    line.set_tick_params(length=2.5, labelsize=7.5)
    if side == "x":
        axes.set_xlabel(axis.label, labelpad=3)
    else:  # above the axis, where it is read as it stands
        axes.annotate(axis.label, (0.005, 0.99), xycoords="figure fraction", va="top")


def _plain(value: float) -> str:
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text and TIMES not in text else text


def _mark(axes: Axes, x: Axis, y: Axis) -> None:
    """The values that the axes mark, where they are in sight."""
    if y.line is not None and axes.get_ylim()[0] < y.line < axes.get_ylim()[1]:
        axes.axhline(y.line, color=INK, linewidth=0.8, linestyle=":")
    if x.line is not None:
        axes.axvline(x.line, color=INK, linewidth=0.8, linestyle=":")


def _label(axes: Axes, ends: Sequence[tuple[Style, float, float]]) -> None:
    """Names beside the axes, each near the end of its curve, none over another."""
    to_axes = axes.transData + axes.transAxes.inverted()
    placed = sorted(((*to_axes.transform((x, y)), style) for style, x, y in ends), key=_height)
    heights = spread([y for _, y, _ in placed], gap=min(0.054, 1 / max(len(placed), 1)))
    for (x, y, style), height in zip(placed, heights, strict=True):
        axes.plot(
            [x, 1.03, 1.055],
            [y, height, height],
            transform=axes.transAxes,
            color=style.colour,
            linewidth=0.5,
            clip_on=False,
            gid=style.key,
        )
        _name(axes, style, (1.04, height), xycoords=axes.transAxes)


def _name(axes: Axes, style: Style, at: tuple[float, float], **options: Any) -> None:
    axes.annotate(
        style.name if len(style.name) <= 15 else f"{style.name[:14]}…",
        at,
        (5, 0),
        textcoords="offset points",
        va="center_baseline",
        color=style.colour,
        fontsize=7.5,
        fontweight="bold" if style.bold else "normal",
        fontstyle="italic" if style.dashed else "normal",
        parse_math=False,
        annotation_clip=False,
        gid=style.key,
        **options,
    )


def _height(placed: tuple[float, float, Style]) -> float:
    return placed[1]


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Sorted heights in [0, 1], moved apart to at least `gap`, each as little as need be."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(min(height, 1.0), moved[-1] + gap if moved else 0.0))
    top = 1.0
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], top)
        top = moved[i] - gap
    return moved


def swatch(name: str, style: Style) -> Markup:
    """The line of a policy, for a legend; `name` is unique in the page."""
    with rc_context(STYLE):
        figure = Figure(figsize=(0.36, 0.14))
        axes = figure.add_axes((0, 0, 1, 1), frameon=False, xlim=(0, 2), ylim=(-1, 1))
        axes.set_axis_off()
        axes.plot(
            [0.1, 1, 1.9],
            [0, 0, 0],
            color=style.colour,
            marker=style.marker,
            markevery=[1],
            markersize=_SIZES.get(style.marker, 4.8),
            linestyle="--" if style.dashed else "-",
            linewidth=2.4 if style.bold else 1.1,
            dashes=(2.5, 1.5) if style.dashed else (None, None),
        )
        return inline(figure, name, style.name)


def scale_of(values: Sequence[float], *, log: bool) -> Normalize:
    """Colours for `values`: of the shares from 0 to 1, or logarithmic over what there is."""
    fit = [value for value in values if math.isfinite(value) and value > 0]
    if not log or not fit:
        return Normalize(0, 1)
    return LogNorm(max(min(fit), max(fit) / 1000), max(max(fit), min(fit) * 1.01))


def heat_map(name: str, label: str, values: Grid, norm: Normalize) -> Markup:
    """`values` [layers, heads] as colours; NaN is left blank."""
    layers, heads = values.shape
    with rc_context(STYLE):
        figure = Figure(figsize=(1.5, 2.4))
        axes = figure.add_axes((0.15, 0.14, 0.83, 0.79))
        shown = np.ma.masked_invalid(np.maximum(values, norm.vmin or 0))
        axes.imshow(shown, cmap=_HEAT, norm=norm, aspect="auto")
        axes.set_xlabel("KV head", labelpad=2)
        axes.annotate("layer", (0.01, 0.995), xycoords="figure fraction", va="top")
        axes.set_xticks(_whole(heads, 4))
        axes.set_yticks(_whole(layers, 7))
        axes.tick_params(length=2, labelsize=7.5)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        return inline(figure, name, label)


def _whole(count: int, most: int) -> list[int]:
    return list(range(0, count, max(1, math.ceil(count / most))))


def colour_bar(name: str, label: str, norm: Normalize) -> Markup:
    """The legend of heat maps."""
    with rc_context(STYLE):
        figure = Figure(figsize=(3.4, 0.42))
        axes = figure.add_axes((0.04, 0.62, 0.92, 0.3))
        steps = np.linspace(0, 1, 128)[None]
        axes.imshow(steps, cmap=_HEAT, aspect="auto", extent=(0, 1, 0, 1))
        marks = _marks(norm)
        axes.set_xticks([float(norm(mark)) for mark in marks], [_plain(mark) for mark in marks])
        axes.set_yticks([])
        axes.tick_params(length=2, labelsize=7.5, color=FAINT)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return inline(figure, name, label)


def _marks(norm: Normalize) -> list[float]:
    if not isinstance(norm, LogNorm):
        return [0, 0.25, 0.5, 0.75, 1]
    low, high = float(norm.vmin or 1), float(norm.vmax or 1)
    for steps in ((1.0,), (1.0, 2.0, 5.0)):
        tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [step * 10.0**ten for ten in tens for step in steps]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) >= 3:
            return marks
    return [low, high]

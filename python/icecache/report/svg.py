"""A matplotlib figure as SVG inside a page: its colours are the page's, its ids are its own."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

# Stand-ins, which CSS variables replace: light, dark and paper are then the page's business.
INK, FAINT, PAPER = "#ab0001", "#ab0002", "#ab0003"
SERIES = [f"#ab01{i:02x}" for i in range(8)]
_VARIABLES = {INK: "ink", FAINT: "faint", PAPER: "paper"}
_VARIABLES |= {colour: f"series-{i}" for i, colour in enumerate(SERIES)}

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "icecache",
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.45,
    "figure.facecolor": "none",
    "image.interpolation": "none",
}


def inline(
    figure: Figure, name: str, label: str, tips: Mapping[str, Sequence[str]] | None = None
) -> Markup:
    """The figure, drawn under `STYLE`, as one `<svg>` element.

    `name` is unique in the page; `label` says what a reader who does not see it should know. An
    artist with a gid becomes a group of that class; `tips[gid]` are the titles of its markers.
    """
    with rc_context(STYLE), io.StringIO() as file:
        figure.savefig(file, format="svg")
        text = file.getvalue()
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    root = ElementTree.fromstring(re.sub(r"(url\(|href=\")#", rf"\1#{name}-", text))
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: v for key, v in element.attrib.items()}
        found = element.attrib.pop("id", None)
        if found in used:
            element.set("id", f"{name}-{found}")
        elif found and not re.search(r"_\d+$", found):  # not one of matplotlib's own
            element.set("class", found)
            titles = (tips or {}).get(found, ())
            for marker, title in zip(element.findall(".//{*}use"), titles, strict=False):
                ElementTree.SubElement(marker, "title").text = title
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return Markup(ElementTree.tostring(root, encoding="unicode"))

"""The options of a cache: one frozen, validated dataclass, with the names that Rust uses too.

PARAMETERS.md has a paragraph on each option: what it does, when to change it, what it costs.
"""

from __future__ import annotations

import numbers
import operator
from dataclasses import dataclass, fields, replace
from typing import Any

_SELECTIONS = ("tokens", "pages")
_TAILS = ("summary", "drop")
_SUMMARY_DTYPES = ("f32", "f16", "bf16")


def require_int(name: str, value: Any, low: int) -> int:
    """`value` as an int of at least `low` (and below 2^31); the errors name it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not low <= number < 2**31:
        raise ValueError(f"{name} must be between {low} and {2**31 - 1}, got {number}")
    return number


def require_real(name: str, value: Any) -> float:
    """`value`, any real number but a bool, as a float; the error names it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class IceConfig:
    """How many tokens are attended exactly, how the index is built, and when it is used.

    Counts are tokens per KV head. `token_budget` comes on top of `sink_tokens` and the window;
    the statistics always count all three.

    Raises `ValueError` (or `TypeError` for a wrong type) that names the option, what was expected
    and what came.
    """

    token_budget: int = 64
    """Tokens found by the index that each KV head attends to exactly, at each step."""
    sink_tokens: int = 32
    """First tokens of the sequence, always attended exactly."""
    window_tokens: int = 64
    """Most recent tokens, always attended exactly (at least 32, so that a crop stays cheap)."""
    candidate_factor: int | None = None
    """Keys scored exactly per head and step, as a multiple of `token_budget` (at least 256); None
    means 8 up to 8,192 tokens, and more beyond (PARAMETERS.md)."""
    page_size: int = 6
    """Target mean of tokens per page, a leaf of the tree."""
    page_capacity: int | None = None
    """Most tokens a page holds before it splits; None means twice `page_size`."""
    fanout: int = 12
    """Target mean of children per upper node; a node splits above twice as many."""
    refine_passes: int = 2
    """Times that the build moves the nodes to their means and links everything anew."""
    open_fraction: float | None = None
    """Share of the lowest upper nodes whose leaves are scored; they and the levels above are scored
    whole. None means 0.75 up to 8,192 tokens, less beyond, and from 131,072 tokens on a part of the
    lowest upper nodes is scored (PARAMETERS.md)."""
    field_of_view: int = 32
    """Nodes opened per level by an M-DCI search (selection "pages")."""
    selection: str = "tokens"
    """"tokens": the best tokens of the candidate pages. "pages": the paper's whole pages."""
    tail: str = "summary"
    """"summary": what is not selected counts through node means. "drop": it is left out."""
    summary_dtype: str = "f16"
    """Storage type of the node means that a step reads: "f32", "f16" or "bf16"."""
    dense_layers: int = 0
    """First layers of a model whose attention stays full."""
    reuse_layers: int = 1
    """Of so many layers of a model only the first searches; the others attend to the tokens that it
    selected. 1: every layer searches."""
    dense_below: int = 1024
    """Sequence length under which attention is simply full."""
    device_tokens: int | None = None
    """Tokens per KV head, besides sink and window, that stay on a GPU; None means four times what a
    step selects at most (`token_budget`; a page, if that is more, with selection "pages")."""
    sparse_max_queries: int = 32
    """Longest forward (in positions) that a model's adapter takes for decoding, not prefill."""
    seed: int = 0
    """Seed of the tree: the same seed and keys give the same tree and the same answers."""
    num_threads: int | None = None
    """Threads of one call; None means all that this process may use (ICECACHE_NUM_THREADS)."""

    def __post_init__(self) -> None:
        for name, low in (
            ("token_budget", 1),
            ("sink_tokens", 0),
            ("window_tokens", 1),
            ("page_size", 1),
            ("fanout", 2),
            ("field_of_view", 1),
            ("refine_passes", 0),
            ("dense_layers", 0),
            ("dense_below", 0),
            ("reuse_layers", 1),
            ("sparse_max_queries", 1),
            ("seed", 0),
        ):
            self._require_int(name, low)
        if self.candidate_factor is not None:
            self._require_int("candidate_factor", 1)
        if self.page_capacity is not None:
            self._require_int("page_capacity", self.page_size)
        if self.device_tokens is not None:
            self._require_int("device_tokens", self._most_selected())
        if self.num_threads is not None:
            self._require_int("num_threads", 1)
        if self.open_fraction is not None:
            fraction = require_real("open_fraction", self.open_fraction)
            object.__setattr__(self, "open_fraction", fraction)
            if not 0.0 < fraction <= 1.0:
                raise ValueError(f"open_fraction must be above 0 and at most 1, got {fraction}")
        for name, allowed in (
            ("selection", _SELECTIONS),
            ("tail", _TAILS),
            ("summary_dtype", _SUMMARY_DTYPES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
        if self.selection == "pages" and self.tail == "summary":
            raise ValueError('selection "pages" attends to whole pages only: tail must be "drop"')

    def _most_selected(self) -> int:
        page = 2 * self.page_size if self.page_capacity is None else self.page_capacity
        return self.token_budget if self.selection == "tokens" else max(self.token_budget, page)

    def _require_int(self, name: str, low: int) -> None:
        object.__setattr__(self, name, require_int(name, getattr(self, name), low))

    @classmethod
    def paper(cls, token_budget: int = 64, **options: Any) -> IceConfig:
        """The behaviour of the paper IceCache (arXiv 2604.10539, sections 3 and 4).

        Random parents, pages of 16, pages ranked by their best token through the M-DCI search of
        each query head, whole pages attended, the rest dropped.
        """
        paper: dict[str, Any] = dict(
            page_size=16, page_capacity=16, refine_passes=0, selection="pages", tail="drop"
        )
        paper["field_of_view"] = 64
        return cls(token_budget=token_budget, **{**paper, **options})

    def replace(self, **options: Any) -> IceConfig:
        """A copy with some options changed; an unknown name raises `TypeError`."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; options are {sorted(known)}")
        return replace(self, **options)

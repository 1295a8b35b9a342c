"""What a cache holds and what its last step did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from statistics import fmean
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """One layer of one sequence. Counts of tokens are per KV head; bytes are of all heads."""

    seq_len: int
    """Tokens stored."""
    sink_tokens: int
    """First tokens, attended exactly at every step."""
    window_tokens: int
    """Most recent tokens, attended exactly at every step."""
    tree_tokens: int
    """Tokens in the index: all that are in neither sink nor window."""
    pages: int
    """Pages (leaves of the trees) of all heads."""
    mean_page_fill: float
    """Tokens per page."""
    nodes_per_level: tuple[int, ...]
    """Nodes of all heads by level, leaves first."""
    kv_bytes: int
    """Bytes of the raw keys and values."""
    index_bytes: int
    """Every byte held beyond them: summaries, links, ids, slack."""
    shared_bytes: int = 0
    """Of both, what forks of the layer hold too."""
    overhead: float
    """`index_bytes / kv_bytes`."""
    steps: int
    """Positions decoded since the start or the last reset."""
    tokens_exact: float
    """Last step: tokens attended exactly (sink, window and selected), mean over KV heads."""
    key_rows_read: float
    """Last step: keys and mean keys read, mean over KV heads."""
    value_rows_read: float
    """Last step: values and mean values read (by the CPU), mean over KV heads."""
    mass_exact: float
    """Last step: share of the estimated softmax attended exactly, mean over query heads."""
    error_estimate: float
    """Last step: estimated relative output error, mean over query heads. Single outliers inside
    nodes that were not opened are invisible to it. NaN where a device attends."""
    search_ms: float = field(compare=False)
    """Last step, sum over KV heads, which run on `num_threads` threads: the descent."""
    select_ms: float = field(compare=False)
    """Last step, sum over KV heads: scoring candidates, and choosing among them."""
    attend_ms: float = field(compare=False)
    """Last step, sum over KV heads: exact attention to sink, window and selected tokens."""
    tail_ms: float = field(compare=False)
    """Last step, sum over KV heads: the summary of the rest."""
    slots: int = 0
    """Slots per KV head on a device; 0 where attention runs on the CPU."""
    slot_hits: int = 0
    """Tokens, over all steps and KV heads, that a step wanted and the device already had."""
    slot_misses: int = 0
    """The same of those that had to be sent: a key and a value each."""
    slot_evictions: int = 0
    """Tokens that lost their slot to another."""
    last_slot_hits: int = 0
    """`slot_hits` of the last call."""
    last_slot_misses: int = 0
    """`slot_misses` of the last call."""
    last_row_bytes: int = 0
    """Bytes of keys and values that the last call sent."""
    device_bytes: int = 0
    """Bytes of the slots of this layer, whatever its length."""
    pack_ms: float = field(default=0.0, compare=False)
    """Last call: gathering what was sent."""
    down_ms: float = field(default=0.0, compare=False)
    """Last decode on a device: copying its queries, keys and values to the host."""
    stage_ms: float = field(default=0.0, compare=False)
    """Its last batch of positions: the host's part, by the clock: append, search, pack."""
    transfer_ms: float = field(default=0.0, compare=False)
    """The same batch: copying to the device."""
    scatter_ms: float = field(default=0.0, compare=False)
    """The same batch: writing the rows to their slots."""
    device_attend_ms: float = field(default=0.0, compare=False)
    """The same batch: attention on the device, and the merge with the summary of the rest."""

    @classmethod
    def combined(cls, rows: Sequence[LayerStats]) -> LayerStats:
        """Of the rows of a batch, one or more: bytes, hits, misses and evictions are summed,
        everything else is the mean, of whole numbers a whole one."""
        if len(rows) == 1:
            return rows[0]

        def both(name: str, values: list[Any]) -> Any:
            if name == "nodes_per_level":
                return tuple(round(fmean(level)) for level in zip_longest(*values, fillvalue=0))
            if name.endswith(("_bytes", "_hits", "_misses", "_evictions")):
                return sum(values)
            mean = fmean(values)
            return round(mean) if isinstance(values[0], int) else mean

        names = [field.name for field in fields(cls)]
        stats = cls(**{name: both(name, [getattr(row, name) for row in rows]) for name in names})
        return replace(
            stats, overhead=stats.index_bytes / stats.kv_bytes if stats.kv_bytes else 0.0
        )


@dataclass(frozen=True, kw_only=True)
class TreeStats:
    """A `DciTree`."""

    keys: int
    """Keys stored."""
    pages: int
    """Leaves."""
    mean_page_fill: float
    """Keys per page."""
    nodes_per_level: tuple[int, ...]
    """Nodes by level, leaves first."""
    key_bytes: int
    """Bytes of the raw keys."""
    index_bytes: int
    """Every byte held beyond them."""
    overhead: float
    """`index_bytes / key_bytes`."""
    last_nodes_scored: float
    """Last search: nodes scored per query."""
    last_keys_scored: float
    """Last search: keys scored per query."""

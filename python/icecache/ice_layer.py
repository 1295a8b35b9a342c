"""`IceLayer`: a replaced layer, which stores a batch of sequences and attends to them.

A transformers model calls `update(key, value)` before the query is seen, and then an attention
function that never receives the cache. So `update` only remembers the new rows, returns just them,
and hands its layer over to the attention function (`take_over`), which lets it store and attend.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .layer import LayerCache
from .masks import RowMask, Runs, attends, count, cut, outside, read_mask, within
from .rows import LayerStore, Row, StoreFactory, repeated, row_indices, select
from .sdpa import attend_masked

_KEYWORD = "icecache_layer"
_ALL = slice(None)

TAKEN_OVER = (
    "expected one forward at a time on this cache, got one of another thread in between: "
    "give each sequence a cache of its own"
)
"""What a forward is told whose cache another thread has used meanwhile."""


class Reading:
    """What the masks of one forward say: its layers share them, and each is read once."""

    def __init__(self) -> None:
        self._read: list[tuple[weakref.ref[torch.Tensor], list[RowMask]]] = []

    def read(self, mask: torch.Tensor, batch: int, t: int, n: int) -> list[RowMask]:
        """As `read_mask`."""
        for other, says in self._read:
            if other() is mask:
                return says
        says = read_mask(mask, batch, t, n)
        self._read.append((weakref.ref(mask), says))
        return says


@dataclass(frozen=True, slots=True)
class _Waiting:
    """New columns whose query has not been seen: `[rows, kv_heads, t, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor
    exact: bool
    reading: Reading


@dataclass(frozen=True, slots=True)
class _New:
    """The new tokens of one row, without padding."""

    columns: slice | torch.Tensor
    """Where they are among the new columns, as an index."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    """`[1 or q_heads, t, tokens]`, where it is not the causal one."""

    def equals(self, other: _New) -> bool:
        if (self.mask is None) != (other.mask is None):
            return False
        pairs = [(self.k, other.k), (self.v, other.v), (self.q, other.q)]
        if self.mask is not None and other.mask is not None:
            pairs.append((self.mask, other.mask))
        return all(torch.equal(a, b) for a, b in pairs)


class IceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One full-attention layer of a batch of sequences, in host memory.

    Lengths and positions are in columns, which count tokens and padding alike; see `masks`.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        layer_index: int,
        factory: StoreFactory,
        lock: AbstractContextManager[Any],
        anchor: IceLayer | None = None,
    ) -> None:
        """`anchor`: the layer whose selected tokens this one takes, instead of searching."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = layer_index
        self.rows: list[Row] = []
        self._columns = 0
        self._factory = factory
        self._lock = lock  # the cache's
        self.anchor = anchor
        self._scale: float | None = None
        self._waiting: _Waiting | None = None
        # If the last forward hid tokens that were stored: the columns and the rows before it.
        self._shown: tuple[int, list[Row]] | None = None

    @property
    def store(self) -> LayerStore | None:
        """The store of the first row."""
        return self.rows[0].store if self.rows else None

    @property
    def stored(self) -> int:
        """Columns stored, without those that wait for their query."""
        return min((row.held(self._columns) for row in self.rows), default=0)

    @property
    def is_waiting(self) -> bool:
        """Whether the rows of the last `update` have not been attended yet."""
        return self._waiting is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates nothing: the stores are made when the first query is seen."""
        self.is_initialized = True

    def require_batch(self, batch: int) -> None:
        """Raises `ValueError` unless the batch has as many rows as are stored, if any are."""
        if self._columns and batch != len(self.rows):
            raise ValueError(
                f"expected a batch of {len(self.rows)}, as many rows as the cache holds, got "
                f"{batch}: reset() it, or call batch_repeat_interleave or batch_select_indices"
            )

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        exact: bool = False,
        reading: Reading | None = None,
        kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remembers the new columns until their query comes, and returns just them.

        key_states, value_states: `[rows, kv_heads, t, head_dim]`. `kwargs` are those that the model
        is about to call the attention function with; it shows them from transformers 5.24.
        `reading`: that of the forward.
        """
        self.require_batch(key_states.shape[0])
        self.lazy_initialization(key_states, value_states)
        self._shown = None
        self._waiting = _Waiting(key_states, value_states, exact, reading or Reading())
        if kwargs is None:
            _thread.layer = self
        else:
            kwargs[_KEYWORD] = self
        return key_states, value_states

    def waits_for(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these are the very tensors that the last `update` returned, not yet attended."""
        waiting = self._waiting
        return waiting is not None and key is waiting.keys and value is waiting.values

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the waiting columns and attends, a row exactly if told so or if it was empty.

        query: `[rows, q_heads, t, head_dim]`; key, value: what `update` returned; mask: as
        `read_mask` takes it, None hides nothing. Returns `[rows, t, q_heads, head_dim]`, 0 for
        padding that attends to nothing. If it fails, nothing is stored.

        A mask that is not causal is followed exactly. The last tokens of a row may be hidden later:
        they are dropped. Raises `ValueError` for a mask that hides other tokens, shows padding, or
        adds a bias to a single position that attends sparsely.
        """
        with self._lock:
            if self._waiting is None or not self.waits_for(key, value):
                raise RuntimeError(TAKEN_OVER)
            waiting, self._waiting = self._waiting, None
            self._open_rows(query, key, scale)
            before = self._columns
            seen = self._read(waiting.reading, mask, *query.shape[::2])
            try:
                self._hide(seen)
                new = [
                    self._new_tokens(i, seen[i], query, key, value, mask)
                    for i in range(len(self.rows))
                ]
                outputs = self._attend_exactly(new, waiting.exact)
                outputs |= self._attend_sparsely(
                    {i: row for i, row in enumerate(new) if i not in outputs and row.k.shape[1]}
                )
                attended = _joined(outputs, new, query)
                if mask is not None:
                    self._attend_padding(seen, query, mask, attended)
                for row, says in zip(self.rows, seen, strict=True):
                    row.padding = says.padding
                self._columns = before + query.shape[2]
            except BaseException:
                self.undo(before)
                raise
        return attended

    def _read(
        self, reading: Reading, mask: torch.Tensor | None, batch: int, t: int
    ) -> list[RowMask]:
        """What the mask says, by row; `ValueError` where it contradicts what it said before."""
        before = self._columns
        if mask is None:
            seen, has_new = [RowMask((), True)] * batch, True
        else:
            seen = reading.read(mask, batch, t, before + t)
            has_new = any(outside(says.padding, before, before + t) for says in seen)
        for i, (row, says) in enumerate(zip(self.rows if before else [], seen, strict=False)):
            hidden = cut(says.padding, before)
            if hidden == row.padding:
                continue
            if mask is None:
                raise ValueError(
                    f"expected a mask that hides the padding of row {i}, columns "
                    f"{_listed(row.padding)}, got none: pass the attention_mask of everything in "
                    "the cache with every forward"
                )
            if not (has_new and row.begins_with(hidden, before)):
                raise ValueError(
                    f"expected a mask that hides of row {i} what was padding before, columns "
                    f"{_listed(row.padding)}, and at most the row's last tokens besides, got one "
                    f"that hides {_listed(hidden)}: a cache serves one generate at a time"
                )
        return seen

    def _hide(self, seen: list[RowMask]) -> None:
        """Drops last tokens that are hidden from now on, so that it can be undone."""
        before = self._columns
        hidden = [cut(says.padding, before) for says in seen]
        if all(row.padding == runs for row, runs in zip(self.rows, hidden, strict=True)):
            return
        rows = [
            row if row.padding == runs else row.fork()
            for row, runs in zip(self.rows, hidden, strict=True)
        ]
        self._shown, self.rows = (before, self.rows), rows
        for row, runs in zip(rows, hidden, strict=True):
            row.padding = runs
            row.keep(before)

    def _open_rows(self, query: torch.Tensor, key: torch.Tensor, scale: float | None) -> None:
        if self._columns:
            if scale != self._scale:
                raise ValueError(f"expected the layer's softmax scale {self._scale}, got {scale}")
            return
        batch = query.shape[0]
        if scale != self._scale:
            self.rows, self._scale = [], scale
        self.rows = self.rows[:batch] + [Row() for _ in range(batch - len(self.rows))]
        if (first := self.rows[0]).store is None:
            # A factory may have filled it.
            store = self._open_store(query[0], key[0])
            if store.seq_len and batch > 1:
                raise ValueError(
                    f"expected empty stores for {batch} rows, got one of {store.seq_len} tokens"
                )
            first.store, self._columns = store, store.seq_len

    def _new_tokens(
        self,
        i: int,
        says: RowMask,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> _New:
        before, n = self._columns, self._columns + query.shape[2]
        q, k, v = query[i], key[i], value[i]
        columns: slice | torch.Tensor = _ALL
        if count(says.padding, n) > count(says.padding, before):
            columns = _index(outside(says.padding, before, n), before, query.device)
            q, k, v = q[:, columns], k[:, columns], v[:, columns]
        if says.causal or mask is None:
            return _New(columns, q, k, v, None)
        tokens = _index(outside(says.padding, 0, n), 0, query.device)
        return _New(columns, q, k, v, mask[i % len(mask)][:, columns][:, :, tokens])

    def _attend_exactly(self, new: list[_New], exact: bool) -> dict[int, torch.Tensor]:
        """Outputs `[q_heads, tokens, head_dim]` of the rows with new tokens that attend exactly."""
        outputs: dict[int, torch.Tensor] = {}
        empty = [row.tokens == 0 for row in self.rows]
        for i, (row, tokens) in enumerate(zip(self.rows, new, strict=True)):
            if tokens.k.shape[1] == 0:
                continue
            if not (exact or empty[i]):
                if tokens.mask is None:
                    continue
                if tokens.k.shape[1] == 1:
                    raise ValueError(
                        "expected a mask without a bias in a sparse forward of one position, got "
                        f"one for row {i}: with cache.exact() it can be used"
                    )
            # What was generated from one prompt, several sequences or beams, starts from one index.
            if i and empty[i] and empty[i - 1] and tokens.equals(new[i - 1]):
                row.store, outputs[i] = self.rows[i - 1].fork().store, outputs[i - 1]
                continue
            if row.store is None:
                row.store = self._open_store(tokens.q, tokens.k)
            outputs[i] = self._prefill(row.store, tokens)
        return outputs

    def _prefill(self, store: LayerStore, new: _New) -> torch.Tensor:
        if new.mask is None:
            output: torch.Tensor = store.prefill(new.k, new.v, new.q)
            return output
        past = store.gather() if store.seq_len else None
        output = attend_masked(new.q, new.k, new.v, past, self._scale, new.mask)
        store.prefill(new.k, new.v)
        return output

    def _attend_padding(
        self, seen: list[RowMask], query: torch.Tensor, mask: torch.Tensor, out: torch.Tensor
    ) -> None:
        """What padding attends to, exactly: `generate` takes the next token of a row that is padded
        on the right from there."""
        before, n = self._columns, self._columns + query.shape[2]
        for i, (row, says) in enumerate(zip(self.rows, seen, strict=True)):
            if row.tokens == 0 or not (padding := within(says.padding, before, n)):
                continue
            columns = _index(padding, before, query.device)
            tokens = _index(outside(says.padding, 0, n), 0, query.device)
            shown = mask[i % len(mask)][:, columns][:, :, tokens]
            sees = attends(shown).any(2).all(0)
            if row.store is not None and sees.any():
                k, v = row.store.gather()
                q, shown = query[i, :, columns][:, sees], shown[:, sees]
                output = attend_masked(q, k, v, None, self._scale, shown)
                out[i, columns] = out[i, columns].index_put((sees,), output.transpose(0, 1))

    def _attend_sparsely(self, new: dict[int, _New]) -> dict[int, torch.Tensor]:
        """Outputs `[q_heads, tokens, head_dim]` of these rows, which have tokens."""
        rows = list(new.values())
        stores: list[Any] = [self.rows[i].store for i in new]
        like: list[Any] = [] if self.anchor is None else [self.anchor.rows[i].store for i in new]
        alike = len({row.k.shape[1] for row in rows}) == 1 < len(rows)
        if alike and all(type(store) is LayerCache for store in stores):
            q, k, v = (torch.stack([getattr(row, x) for row in rows]) for x in "qkv")
            outputs = LayerCache.decode_batch(stores, q, k, v, like or None)
        else:
            follow: list[Any] = [{"like": other} for other in like] or [{}] * len(rows)
            outputs = [
                store.decode(row.q, row.k, row.v, **other)
                for store, row, other in zip(stores, rows, follow, strict=True)
            ]
        return dict(zip(new, outputs, strict=True))

    def _open_store(self, q: torch.Tensor, k: torch.Tensor) -> LayerStore:
        return self._factory(
            num_q_heads=q.shape[0],
            num_kv_heads=k.shape[0],
            head_dim=k.shape[2],
            scale=self._scale,
            layer_index=self.index,
            device=q.device,
        )

    def keep(self, columns: int) -> None:
        """Forgets the columns that wait, and all but the first `columns`."""
        self._waiting = self._shown = None
        self._columns = min(self._columns, columns)
        for row in self.rows:
            row.keep(self._columns)

    def exceeds(self, columns: int) -> bool:
        """Whether it holds anything of a forward before which there were so many columns."""
        return (
            self._waiting is not None
            or self._columns > columns
            or any(row.tokens > columns - count(row.padding, columns) for row in self.rows)
        )

    def undo(self, columns: int) -> None:
        """Takes back the last forward, before which there were so many columns."""
        if self._shown is not None and self._shown[0] == columns:
            self.rows = self._shown[1]
        self.keep(columns)

    def restore(self, columns: int) -> None:
        """Keeps the first `columns` columns, and forgets that others could not be stored."""
        self._waiting = self._shown = None
        self._columns = columns
        for row in self.rows:
            row.keep(columns, always=True)

    def crop(self, tokens: int) -> None:
        """Removes `-tokens` columns if negative, nothing if 0; keeps the first `tokens` if not."""
        tokens = int(tokens)  # transformers 5.14 to 5.17 pass a tensor
        if tokens != 0:
            self.keep(tokens if tokens > 0 else max(0, self.get_seq_length() + tokens))

    def reset(self) -> None:
        """Forgets everything, the number of rows too."""
        self.restore(0)
        self.is_initialized = False

    def fork(self, lock: AbstractContextManager[Any], anchor: IceLayer | None) -> IceLayer:
        """An independent layer with the same columns, for another cache."""
        twin = IceLayer(self.index, self._factory, lock, anchor)
        twin.rows = [row.fork() for row in self.rows]
        twin._columns, twin._scale = self._columns, self._scale
        if self._shown is not None:
            twin._shown = self._shown[0], [row.fork() for row in self._shown[1]]
        twin.is_initialized = self.is_initialized
        return twin

    def get_seq_length(self) -> int:
        """Columns stored, those that wait for their query included."""
        return self.stored + (0 if self._waiting is None else self._waiting.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next mask is about: everything, from 0."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: no limit (the name before transformers 5.14)."""
        return -1

    def offload(self) -> None:
        """Nothing to do: the layer is in host memory."""

    def prefetch(self) -> None:
        """Nothing to do: what a step needs is known only when its query is seen."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was, or a fork of it where that is used twice."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows at `indices`, in that order, or those that a bool mask names."""
        if self._columns:
            self.rows = select(self.rows, row_indices(indices, len(self.rows)))
            self._shown = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, as forks."""
        if self._columns:
            self.rows = select(self.rows, repeated(len(self.rows), repeats))
            self._shown = None


class _Thread(threading.local):
    """What one thread carries from `update` to attention."""

    layer: IceLayer | None = None


_thread = _Thread()


def take_over(key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]) -> IceLayer | None:
    """The layer that `update` handed over for these rows, if any; no later call gets it again."""
    left, _thread.layer = _thread.layer, None
    shown: IceLayer | None = kwargs.pop(_KEYWORD, None)
    if shown is None:
        # What was left may come from a forward that failed before its attention.
        return left if left is not None and left.waits_for(key, value) else None
    if not shown.waits_for(key, value):
        raise RuntimeError(
            "expected attention over the very keys and values that the cache's update returned, "
            "once, got others: this model changes or reuses them, which icecache does not support, "
            "or another thread uses this cache too"
        )
    return shown


def _index(runs: Runs, first: int, device: torch.device) -> slice | torch.Tensor:
    """The columns of these runs as an index from `first` on: a slice, which copies nothing, if they
    are one run."""
    if len(runs) < 2:
        start, stop = runs[0] if runs else (first, first)
        return slice(start - first, stop - first)
    return torch.cat([torch.arange(a - first, b - first, device=device) for a, b in runs])


def _joined(outputs: dict[int, torch.Tensor], new: list[_New], query: torch.Tensor) -> torch.Tensor:
    """The outputs of all rows `[rows, t, q_heads, head_dim]`; 0 where there is padding."""
    if len(new) == 1 and new[0].columns is _ALL:
        return outputs[0].transpose(0, 1).contiguous()[None]
    rows, q_heads, t, dim = query.shape
    joined = query.new_zeros(rows, t, q_heads, dim)
    for i, output in outputs.items():
        joined[i, new[i].columns] = output.transpose(0, 1)
    return joined


def _listed(runs: Runs) -> str:
    return ", ".join(f"{a} to {b - 1}" for a, b in runs) or "none"

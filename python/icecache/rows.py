"""One sequence of a batch in one layer: its store, and the columns that are padding."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .masks import Runs, count, cut, outside
from .stats import LayerStats


class LayerStore(Protocol):
    """What a replaced layer needs of the object that stores and attends; `LayerCache` is one.

    k, v: `[kv_heads, t, head_dim]`; q and outputs: `[q_heads, t, head_dim]`. With `reuse_layers`
    above 1, `decode` must also take `like`, the store of another layer, as that of `LayerCache`.
    Only masks other than a causal one need `gather`, and only copies `fork`.
    """

    @property
    def seq_len(self) -> int: ...

    def prefill(self, k: Any, v: Any, q: Any = None) -> Any: ...

    def decode(self, q: Any, k: Any, v: Any) -> Any: ...

    def gather(self) -> tuple[Any, Any]: ...

    def fork(self) -> LayerStore: ...

    def crop(self, n: int) -> None: ...

    def reset(self) -> None: ...

    def stats(self) -> LayerStats: ...


class StoreFactory(Protocol):
    """Makes the store of one row of a layer, when its first query shows the shapes.

    device: where the queries are, and what is attended.
    """

    def __call__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None,
        layer_index: int,
        device: torch.device,
    ) -> LayerStore: ...


@dataclass(slots=True)
class Row:
    """The store holds the tokens of the columns that are not padding, in their order.

    The columns themselves are counted by the layer, since all rows have as many.
    """

    store: LayerStore | None = None
    """None until the first token."""
    padding: Runs = ()

    @property
    def tokens(self) -> int:
        """Tokens stored."""
        return 0 if self.store is None else self.store.seq_len

    def held(self, columns: int) -> int:
        """Of `columns` columns the first ones whose tokens are all stored: a device notices late
        that it cannot store some."""
        tokens = self.tokens
        if tokens >= columns - count(self.padding, columns):
            return columns
        for start, stop in outside(self.padding, 0, columns):
            if tokens < stop - start:
                return start + tokens
            tokens -= stop - start
        return columns

    def keep(self, columns: int, always: bool = False) -> None:
        """Keeps the tokens among the first `columns` columns. The store is told so where it has
        more, or `always`: it then forgets that others could not be stored."""
        self.padding = cut(self.padding, columns)
        tokens = columns - count(self.padding, columns)
        if self.store is not None and (always or tokens < self.store.seq_len):
            self.store.crop(tokens) if tokens else self.store.reset()

    def begins_with(self, hidden: Runs, columns: int) -> bool:
        """Whether hiding these of `columns` columns hides nothing but padding and last tokens."""
        shown = outside(hidden, 0, columns)
        end = shown[-1][1] if shown else 0
        return cut(hidden, end) == cut(self.padding, end)

    def fork(self) -> Row:
        """An independent row with the same tokens; `TypeError` if its store cannot be forked."""
        if self.store is None:
            return Row(None, self.padding)
        if not hasattr(self.store, "fork"):
            raise TypeError(
                f"expected a store with a method fork, got {type(self.store).__name__}: "
                "rows and caches with such stores cannot be copied"
            )
        return Row(self.store.fork(), self.padding)


def select(rows: list[Row], indices: list[int]) -> list[Row]:
    """The rows at these indices: the very ones where first used, forks where used again."""
    used: set[int] = set()
    selected = []
    for i in indices:
        selected.append(rows[i].fork() if i in used else rows[i])
        used.add(i)
    return selected


def row_indices(indices: Any, rows: int) -> list[int]:
    """Indices of rows, or a bool mask over them, as a list.

    Raises `IndexError` for an index out of range, `ValueError` for no row, a mask of another
    length, or anything but a list of whole numbers.
    """
    given = torch.as_tensor(indices)
    if given.ndim != 1 or given.is_floating_point() or given.is_complex():
        raise ValueError(f"expected a list of rows, got {given.dtype} of shape {list(given.shape)}")
    if given.dtype == torch.bool:
        if given.shape != (rows,):
            raise ValueError(f"expected a mask over {rows} rows, got shape {list(given.shape)}")
        given = given.nonzero().flatten()
    wanted: list[int] = given.tolist()
    if not wanted:
        raise ValueError(f"expected at least one of {rows} rows, got none")
    for i in wanted:
        if not 0 <= i < rows:
            raise IndexError(f"expected rows from 0 to {rows - 1}, got {i}")
    return wanted


def repeated(rows: int, repeats: int) -> list[int]:
    """The indices of rows that are repeated `repeats` times each; `ValueError` below 1."""
    if operator.index(repeats) < 1:
        raise ValueError(f"expected to repeat rows at least once, got {repeats}")
    return [i for i in range(rows) for _ in range(repeats)]

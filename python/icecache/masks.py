"""What the attention mask of a forward says: which columns of each row are padding, and whether
every token attends to all tokens up to itself and to nothing else.

Columns count tokens and padding alike, and are the same for all rows of a batch: transformers'
lengths, masks and crops are in columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Runs = tuple[tuple[int, int], ...]
"""Columns, as runs `(start, stop)`: ascending, none empty, no two touching."""


def count(runs: Runs, columns: int) -> int:
    """How many of the first `columns` columns are in the runs."""
    return sum(min(stop, columns) - start for start, stop in runs if start < columns)


def cut(runs: Runs, columns: int) -> Runs:
    """The runs within the first `columns` columns."""
    return tuple((start, min(stop, columns)) for start, stop in runs if start < columns)


def within(runs: Runs, first: int, last: int) -> Runs:
    """The runs from column `first` up to `last`."""
    return tuple((max(a, first), min(b, last)) for a, b in runs if a < last and b > first)


def outside(runs: Runs, first: int, last: int) -> Runs:
    """The columns from `first` up to `last` that are in no run."""
    inside = [run for run in runs if run[1] > first and run[0] < last]
    starts = [first, *(stop for _, stop in inside)]
    stops = [*(start for start, _ in inside), last]
    return tuple((a, b) for a, b in zip(starts, stops, strict=True) if a < b)


@dataclass(frozen=True, slots=True)
class RowMask:
    """What a mask says of one row, over all columns up to the last new one."""

    padding: Runs
    """The columns that hold no token."""
    causal: bool
    """Whether each new token attends to all tokens up to itself, to nothing else, without bias."""


def read_mask(mask: torch.Tensor, batch: int, t: int, n: int) -> list[RowMask]:
    """Reads the mask of `t` new positions over `n` columns, themselves included.

    mask: `[1 or batch, heads, t, n]`, bool (True attends) or added to the logits. A column is
    padding if the last position does not attend to it, and it does not to itself. What padding
    attends to is of no interest.

    Raises `ValueError` for another shape or dtype, and where the last position does not attend to a
    new token that attends to itself: sequences packed into one row.
    """
    if mask.ndim != 4 or mask.shape[0] not in (1, batch) or tuple(mask.shape[2:]) != (t, n):
        raise ValueError(
            f"expected an attention mask [{batch}, heads, {t}, {n}] over everything in the cache, "
            f"got {list(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"expected a mask of bools or of what is added to logits, got {mask.dtype}"
        )
    if mask.stride(0) == 0:  # one row, expanded
        mask = mask[:1]
    last = mask[:, :, -1]
    hidden = ~attends(last).any(1)
    plain = _is_plain(last, ~hidden[:, None]).all(-1).all(-1).tolist()
    runs = _runs(hidden)
    if t == 1:
        rows = [RowMask(*row) for row in zip(runs, plain, strict=True)]
    else:
        causal = torch.ones(t, n, dtype=torch.bool, device=mask.device).tril(n - t)
        rows = []
        for i, (row, padding) in enumerate(zip(mask, runs, strict=True)):
            token = ~hidden[i, n - t :]
            _require_padding(row, token, i)
            same = _is_plain(row, causal & ~hidden[i]).all(-1).all(0)
            plain_row = bool((same | ~token).all())
            if not plain_row:
                _require_hidden(row, token, hidden[i], i)
            rows.append(RowMask(padding, plain_row))
    return rows * (batch // len(rows))


def attends(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask, of bools or added to the logits, shows something."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _is_plain(mask: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Where the mask says what `attended` says, and adds nothing."""
    if mask.dtype == torch.bool:
        return mask == attended
    return torch.where(attended, mask == 0, mask <= torch.finfo(mask.dtype).min / 2)


def _runs(hidden: torch.Tensor) -> list[Runs]:
    """By row, the runs of True in `[rows, n]`."""
    edge = hidden.new_zeros(len(hidden), 1)
    padded = torch.cat([edge, hidden, edge], dim=1)
    edges = (padded[:, 1:] != padded[:, :-1]).nonzero().tolist()
    runs: list[list[tuple[int, int]]] = [[] for _ in hidden]
    for (row, start), (_, stop) in zip(edges[::2], edges[1::2], strict=True):
        runs[row].append((start, stop))
    return [tuple(row) for row in runs]


def _require_padding(mask: torch.Tensor, token: torch.Tensor, index: int) -> None:
    """Raises `ValueError` if what the last of `t` positions does not attend to is no padding.

    mask: `[heads, t, n]`; token: `[t]`. Older versions let a position that may attend to nothing
    attend to everything.
    """
    attended = attends(mask)
    t, n = mask.shape[1:]
    odd = attended.diagonal(n - t, -2, -1).any(0) & ~token
    if odd.any() and not attended[:, odd].all():
        column = n - t + int(odd.nonzero()[0])
        raise ValueError(
            f"expected the last position of row {index} to attend to every token, or the mask to "
            f"hide a column from all, got one that column {column} attends to itself alone: "
            "icecache supports no sequences packed into one row"
        )


def _require_hidden(
    mask: torch.Tensor, token: torch.Tensor, hidden: torch.Tensor, index: int
) -> None:
    """Raises `ValueError` if a token attends to a column that the last position does not."""
    shown = attends(mask)[:, token][:, :, hidden].any(1).any(0)
    if shown.any():
        column = int(hidden.nonzero()[int(shown.nonzero()[0])])
        raise ValueError(
            f"expected the last position of row {index} to attend to every token, got a mask that "
            f"shows it no column {column}, and others do"
        )

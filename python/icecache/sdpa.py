"""Exact attention by torch: for many queries, and on a device, a matrix library is the fast path.

Three ways: `attend_causal` at once; `RunningAttention` block by block, so that the keys need not be
in one place; `attend_partial` to some keys per position, to be merged with the rest.
The core's own exact attention (rust/src/head.rs) serves NumPy and is the oracle of these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_BLOCK = 256
"""Positions attended at a time: a mask stays small, and Ctrl-C is seen in between."""

_KEYS = 4096
"""Keys attended at a time by `RunningAttention`: logits stay small."""

_LARGEST_QUERY = 1e30
"""Largest element of a scaled query, as in rust/src/layer.rs: its products do not overflow."""


def _as_given(attend: Callable[..., T]) -> Callable[..., T]:
    """Attention whose first argument has a device, in the dtypes that it is given: autocast would
    take others."""

    @functools.wraps(attend)
    def plain(first: Any, *args: Any, **options: Any) -> T:
        import torch

        kind = first.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return attend(first, *args, **options)
        with torch.autocast(kind, enabled=False):
            return attend(first, *args, **options)

    return plain


@_as_given
def attend_causal(q: Any, k: Any, v: Any, past: tuple[Any, Any] | None, scale: float) -> Any:
    """Attention of `n` new positions to all `past` ones, and causally to themselves.

    q: [q_heads, n, head_dim]; k, v: [kv_heads, n, head_dim]; past: keys and values
    [kv_heads, m, head_dim], or None; all tensors of one dtype on one device. Returns
    [q_heads, n, head_dim].
    """
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = q.shape[0] != k.shape[0]
    if past is None and q.device.type != "cpu":
        # A GPU has kernels for this, which need no memory for logits. All but the one for half
        # precision since Ampere take no groups, and all take rows without gaps and a scale above 0.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if grouped and not _takes_groups(q, k, v):
            group, grouped = q.shape[0] // k.shape[0], False
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        if scale <= 0:
            q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        whole = attend(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=grouped)
        return whole[0]
    if past is not None:
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
    n, m = q.shape[1], k.shape[1] - q.shape[1]
    out = torch.empty_like(q)
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        # Position i of the new ones is position m + i of all: the mask is bottom-right.
        mask = torch.ones(end - start, m + end, dtype=torch.bool, device=q.device).tril(m + start)
        out[:, start:end] = attend(
            q[None, :, start:end],
            k[None, :, : m + end],
            v[None, :, : m + end],
            attn_mask=mask,
            scale=scale,
            enable_gqa=grouped,
        )[0]
    return out


@_as_given
def attend_masked(
    q: Any, k: Any, v: Any, past: tuple[Any, Any] | None, scale: float | None, mask: Any
) -> Any:
    """Attention of `n` new positions to what a mask names of `m` past ones and of themselves.

    As `attend_causal`; mask: [1 or q_heads, n, m + n], bool (True attends) or added to the logits;
    scale None means `head_dim ** -0.5`.
    """
    import torch

    if past is not None:
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
    mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = q.shape[0] != k.shape[0]
    return attend(q[None], k[None], v[None], mask[None], scale=scale, enable_gqa=grouped)[0]


def _takes_groups(q: Any, k: Any, v: Any) -> bool:
    """Whether torch's flash attention serves these, the one kernel that takes groups."""
    from torch.backends import cuda

    if q.device.type != "cuda":
        return False
    params = cuda.SDPAParams(q[None], k[None], v[None], None, 0.0, True, True)
    return bool(cuda.can_use_flash_attention(params))


class Partial(NamedTuple):
    """Attention to a part of the keys, in float32.

    With no key at all `max` is minus infinity, `sum` and `values` are 0.
    """

    max: Any
    """[q_heads, n]: the largest logit, under which the weights `exp(logit - max)` were taken."""
    sum: Any
    """[q_heads, n]: the sum of the weights."""
    values: Any
    """[q_heads, n, head_dim]: the sum of weight times value."""


@_as_given
def attend_partial(q: Any, keys: Any, values: Any, scale: float, mask: Any = None) -> Partial:
    """Attention of `n` positions to `m` keys, all of them or those that the mask names.

    q: [q_heads, n, head_dim]; keys, values: [kv_heads, m, head_dim], finite even where no position
    attends; mask: bool [kv_heads, n, m] or [1, n, m], True attends. Products and sums are float32.
    """
    import torch

    kv_heads, m, dim = keys.shape
    q_heads, n, _ = q.shape
    group = q_heads // kv_heads
    queries = _scaled(q, scale).reshape(kv_heads, group * n, dim)
    logits = torch.matmul(queries, keys.float().transpose(1, 2)).view(kv_heads, group, n, m)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
    top = logits.amax(-1)
    weights = torch.exp(logits - _finite(top)[..., None])
    weighted = torch.matmul(weights.view(kv_heads, group * n, m), values.float())
    return Partial(
        top.view(q_heads, n), weights.sum(-1).view(q_heads, n), weighted.view(q_heads, n, dim)
    )


def merge(a: Partial, b: Partial) -> Partial:
    """Attention to the keys of both, which have none in common."""
    import torch

    top = torch.maximum(a.max, b.max)
    under = _finite(top)
    of_a, of_b = torch.exp(a.max - under), torch.exp(b.max - under)
    values = a.values * of_a[..., None] + b.values * of_b[..., None]
    return Partial(top, a.sum * of_a + b.sum * of_b, values)


def finish(partial: Partial, out: Any) -> None:
    """Writes the attention output, `values / sum`, to `out` [q_heads, n, head_dim] in its dtype.

    Where there was no key it is 0.
    """
    import torch

    least = torch.finfo(torch.float32).tiny
    out.copy_(partial.values / partial.sum.clamp(min=least)[..., None])


class RunningAttention:
    """Exact attention of `n` new positions, to keys that come block by block.

    Holds float32 sums of the size of `q`; whatever the number of keys, each `add` needs memory for
    the logits of a few hundred positions and a few thousand keys at a time.

    Args:
        q: [q_heads, n, head_dim].
        scale: factor of the logits.
    """

    def __init__(self, q: Any, scale: float) -> None:
        import torch

        self._q, self._scale = q, scale
        shape, on = q.shape, dict(dtype=torch.float32, device=q.device)
        self._sofar = Partial(
            torch.full(shape[:2], -torch.inf, **on), torch.zeros(shape[:2], **on),
            torch.zeros(shape, **on),
        )  # fmt: skip

    def add(self, keys: Any, values: Any, causal: bool = False) -> None:
        """Attends to keys and values [kv_heads, m, head_dim].

        causal: these are the new positions themselves, each of which sees those up to its own.
        """
        import torch

        n, m = self._q.shape[1], keys.shape[1]
        for first in range(0, m, _KEYS):
            last = min(first + _KEYS, m)
            some_keys, some_values = keys[:, first:last].float(), values[:, first:last].float()
            for start in range(first // _BLOCK * _BLOCK if causal else 0, n, _BLOCK):
                end = min(start + _BLOCK, n)
                mask = None
                if causal and last > start + 1:
                    size = (1, end - start, last - first)
                    mask = torch.ones(size, dtype=torch.bool, device=keys.device)
                    mask = mask.tril(start - first)
                q = self._q[:, start:end]
                more = attend_partial(q, some_keys, some_values, self._scale, mask)
                part = Partial(*(sofar[:, start:end] for sofar in self._sofar))
                for sofar, merged in zip(part, merge(part, more), strict=True):
                    sofar.copy_(merged)

    def finish(self, out: Any) -> None:
        """Writes the output to `out`, [q_heads, n, head_dim] in its dtype."""
        finish(self._sofar, out)


def _scaled(q: Any, scale: float) -> Any:
    """The queries in float32, times the scale; one beyond `_LARGEST_QUERY` shrinks to it."""
    import torch

    q = q.float()
    largest = torch.linalg.vector_norm(q, math.inf, dim=-1, keepdim=True)
    factor = (_LARGEST_QUERY / largest).clamp(max=abs(scale))
    return q * (factor if scale >= 0 else -factor)


def _finite(maximum: Any) -> Any:
    """A maximum that may be subtracted: minus infinity would make NaN."""
    import torch

    return maximum.clamp(min=torch.finfo(torch.float32).min)

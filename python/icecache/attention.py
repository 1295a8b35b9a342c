"""A replaced layer, and the attention function "icecache" that lets it attend.

A transformers model calls `update(key, value)` before the query is seen, and then an attention
function that never receives the cache. So `update` only remembers the new rows, returns just them,
and hands its layer over to the attention function, where the layer stores them and attends.

Without a layer (another cache, or a layer that is not replaced) the function is plain sdpa.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .stats import LayerStats

ATTENTION_NAME = "icecache"
"""The name under which transformers knows the attention function."""

_KEYWORD = "icecache_layer"

TAKEN_OVER = (
    "expected one forward at a time on this cache, got one of another thread in between: "
    "give each sequence a cache of its own"
)
"""What a forward is told whose cache another thread has used meanwhile."""


_F = TypeVar("_F", bound=Callable[..., Any])


def not_compiled(function: _F) -> _F:
    """Makes `torch.compile` call a function as it is, between what it compiles.

    The cache is in host memory and in Rust: tracing it would compile every step anew.
    """
    why = "icecache attends outside of torch: compile without fullgraph=True"
    disable: Any = torch.compiler.disable
    takes_reason = "reason" in inspect.signature(disable).parameters  # from torch 2.7
    plain: _F = disable(function, reason=why) if takes_reason else disable(function)
    return plain


class LayerStore(Protocol):
    """What a replaced layer needs of the object that stores and attends; `LayerCache` is one.

    k, v: `[kv_heads, t, head_dim]`; q and outputs: `[q_heads, t, head_dim]`. With `reuse_layers`
    above 1, `decode` must also take `like`, the store of another layer, as that of `LayerCache`.
    """

    @property
    def seq_len(self) -> int: ...

    def prefill(self, k: Any, v: Any, q: Any = None) -> Any: ...

    def decode(self, q: Any, k: Any, v: Any) -> Any: ...

    def crop(self, n: int) -> None: ...

    def reset(self) -> None: ...

    def stats(self) -> LayerStats: ...


class StoreFactory(Protocol):
    """Makes the store of one layer, when its first query shows the shapes.

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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """New rows whose query has not been seen: `[1, kv_heads, t, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor
    exact: bool


class IceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One full-attention layer of one sequence, in host memory."""

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
        self.store: LayerStore | None = None
        self.index = layer_index
        self._factory = factory
        self._lock = lock  # the cache's
        self._anchor = anchor
        self._scale: float | None = None
        self._waiting: _Waiting | None = None

    @property
    def stored(self) -> int:
        """Tokens stored, without those that wait for their query."""
        return 0 if self.store is None else self.store.seq_len

    @property
    def is_waiting(self) -> bool:
        """Whether the rows of the last `update` have not been attended yet."""
        return self._waiting is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates nothing: the store is made when the first query is seen."""
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        exact: bool = False,
        kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remembers the new rows until their query comes, and returns just them.

        key_states, value_states: `[1, kv_heads, t, head_dim]`. `kwargs` are those that the model
        is about to call the attention function with; it shows them from transformers 5.24.
        """
        self.lazy_initialization(key_states, value_states)
        self._waiting = _Waiting(key_states, value_states, exact)
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
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Stores the waiting rows and attends: exactly if told so or if nothing was stored.

        query and output: `[1, q_heads, t, head_dim]`; key, value: what `update` returned. If it
        fails, nothing is stored.
        """
        with self._lock:
            if self._waiting is None or not self.waits_for(key, value):
                raise RuntimeError(TAKEN_OVER)
            exact, self._waiting = self._waiting.exact, None
            q, k, v = query[0], key[0], value[0]
            store, before = self._open_store(q, k, scale), self.stored
            try:
                dense = exact or before == 0
                like: dict[str, Any] = {} if self._anchor is None else {"like": self._anchor.store}
                output = store.prefill(k, v, q) if dense else store.decode(q, k, v, **like)
            except BaseException:
                self.keep(before)
                raise
        attended: torch.Tensor = output.unsqueeze(0)
        return attended

    def _open_store(self, q: torch.Tensor, k: torch.Tensor, scale: float | None) -> LayerStore:
        if self.store is None:
            self.store = self._factory(
                num_q_heads=q.shape[0],
                num_kv_heads=k.shape[0],
                head_dim=k.shape[2],
                scale=scale,
                layer_index=self.index,
                device=q.device,
            )
            self._scale = scale
        elif scale != self._scale:
            raise ValueError(f"expected the layer's softmax scale {self._scale}, got {scale}")
        return self.store

    def keep(self, length: int) -> None:
        """Forgets the rows that wait, and all but the first `length` tokens."""
        self._waiting = None
        if self.store is not None and length < self.store.seq_len:
            if length == 0:
                self.store.reset()
            else:
                self.store.crop(length)

    def restore(self, length: int) -> None:
        """Keeps the first `length` tokens, and forgets that others could not be stored."""
        self._waiting = None
        if self.store is not None:
            self.store.crop(length) if length else self.store.reset()

    def crop(self, tokens: int) -> None:
        """Removes `-tokens` tokens if negative, nothing if 0; keeps the first `tokens` if not."""
        tokens = int(tokens)  # transformers 5.14 to 5.17 pass a tensor
        if tokens != 0:
            self.keep(tokens if tokens > 0 else max(0, self.get_seq_length() + tokens))

    def reset(self) -> None:
        """Forgets everything."""
        self.restore(0)
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Tokens stored, those that wait for their query included."""
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
        """Accepts the one order of one sequence; anything else is a `ValueError`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Accepts the one row, as an index or a mask; anything else is a `ValueError`."""
        row = [True] if indices.dtype == torch.bool else [0]
        if indices.tolist() != row:
            raise ValueError(f"icecache holds one sequence: expected {row}, got {indices.tolist()}")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Accepts 1; anything else is a `ValueError`."""
        if repeats != 1:
            raise ValueError(f"icecache holds one sequence: expected 1 repeat, got {repeats}")


class _Thread(threading.local):
    """What one thread carries from `update` to attention, and from one layer to the next."""

    layer: IceLayer | None = None
    causal_mask: weakref.ref[torch.Tensor] | None = None


_thread = _Thread()


@not_compiled
def icecache_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' `AttentionInterface` calls it.

    query `[batch, q_heads, t, head_dim]`; key, value `[batch, kv_heads, n, head_dim]`, where a
    replaced layer gets only its `t` new rows. Returns `[batch, t, q_heads, head_dim]` and None.

    Raises `ValueError` for softcap, attention sinks (`s_aux`), a position bias, and
    `output_attentions`; and on a replaced layer for a sliding window, dropout, gradients, unequal
    key and value dimensions, and any mask other than the causal one.
    """
    layer = _take_over(key, value, kwargs)
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"icecache attention supports no {name}, got {kwargs[name]!r}")
    if kwargs.get("output_attentions"):
        raise ValueError("icecache attention has no weights to return: output_attentions is set")
    if layer is None:
        mask = attention_mask
        if mask is None and 1 < query.shape[2] < key.shape[2] and _is_causal(module, kwargs):
            mask = _causal(query, key.shape[2], kwargs.get("sliding_window"))  # sdpa's is top-left
        output, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None

    if (window := kwargs.get("sliding_window")) is not None:
        raise ValueError(f"expected full attention on a replaced layer, got a window of {window}")
    if not _is_causal(module, kwargs):
        raise ValueError("expected causal attention on a replaced layer, got is_causal=False")
    if dropout > 0:
        raise ValueError(f"expected no dropout, got {dropout}: call model.eval() first")
    if not query.shape[3] == key.shape[3] == value.shape[3]:
        dims = [tensor.shape[3] for tensor in (query, key, value)]
        raise ValueError(f"expected one dimension of queries, keys and values, got {dims}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"expected {key.shape[2]} queries, one per new token: {query.shape[2]}")
    groups = getattr(module, "num_key_value_groups", None)
    if groups is not None and query.shape[1] != groups * key.shape[1]:
        raise ValueError(
            f"expected {groups} query heads per KV head, got {query.shape[1]} and {key.shape[1]}: "
            "a tp_plan must split both or neither"
        )
    refuse_gradients(query)
    if attention_mask is not None:
        _require_causal(attention_mask, query, layer.get_seq_length())
    return layer.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


def refuse_gradients(*tensors: torch.Tensor) -> None:
    """Raises `ValueError` if a gradient would have to flow through the cache."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "icecache computes no gradients: run the model under torch.no_grad() or "
            "torch.inference_mode() (model.generate does)"
        )


def _take_over(key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]) -> IceLayer | None:
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


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _causal(query: torch.Tensor, n: int, window: int | None = None) -> torch.Tensor:
    """The causal mask `[1, 1, t, n]`: the last of `t` queries sees all `n` keys (bottom-right)."""
    t = query.shape[2]
    mask = torch.ones(1, 1, t, n, dtype=torch.bool, device=query.device).tril(n - t)
    return mask if window is None else mask.triu(n - t - window + 1)


def _require_causal(mask: torch.Tensor, query: torch.Tensor, n: int) -> None:
    """Raises `ValueError` unless the mask says what a layer does anyway: causal, nothing hidden.

    mask: bool (True attends) or additive, `[1, 1 or heads, t, n]`.
    """
    t = query.shape[2]
    if mask.ndim != 4 or mask.shape[0] != 1 or tuple(mask.shape[2:]) != (t, n):
        raise ValueError(
            f"expected an attention mask [1, heads, {t}, {n}] over everything in the cache, "
            f"got {list(mask.shape)}"
        )
    # The layers of one forward share their mask: compare it once.
    if _thread.causal_mask is not None and _thread.causal_mask() is mask:
        return
    causal = _causal(query, n)
    if mask.dtype == torch.bool:
        plain = bool((mask == causal).all())
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        plain = bool((torch.where(causal, mask == 0, hidden)).all())
    if not plain:
        raise ValueError(
            "expected a causal attention mask that hides no token, got one that hides some or "
            "adds a bias: icecache does not support padding; pass one sequence without padding, "
            "and use a cache in one generate at a time"
        )
    _thread.causal_mask = weakref.ref(mask)


AttentionInterface.register(ATTENTION_NAME, icecache_attention_forward)
# A name missing here would silently lose the padding mask.
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

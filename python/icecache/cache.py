"""A transformers `Cache` whose full-attention layers are icecache layers.

    cache = IceCache(model, token_budget=64)
    model.generate(**inputs, past_key_values=cache)  # `cache=cache` from transformers 5.24

    with icecache.attach(model, token_budget=64) as cache:  # restores the model afterwards
        model.generate(**inputs, past_key_values=cache)

A forward goes through the layers in order. Each replaced layer first gets its new keys and values
(`update`, which only remembers them), then their query through the attention function, and only
then stores them. So the last layer's length is the length after the last forward that was
complete, and whatever an earlier layer holds beyond it comes from a forward that failed.
"""

from __future__ import annotations

import copy
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .attention import ATTENTION_NAME
from .config import IceConfig
from .ice_layer import TAKEN_OVER, IceLayer, Reading
from .modes import not_compiled, refuse_gradients
from .rows import StoreFactory, repeated, row_indices
from .stats import LayerStats
from .stores import Stores

_logger = logging.getLogger(__name__)
_FULL = "full_attention"
_GROWN = (DynamicLayer, DynamicSlidingWindowLayer)
_ATTENDING = (_FULL, "sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class CacheStats:
    """What an `IceCache` holds, and what its last step read.

    The byte counts are sums over the replaced layers, the others means over them (0 while nothing
    is stored); `dense_kv_bytes` belongs to the layers that are left as they are.
    """

    layers: dict[int, LayerStats]
    """By layer of the model: the replaced layers that have stored something, as
    `LayerStats.combined` makes it of their rows."""
    rows: int
    """Rows of the batch, or 1 if one was asked for."""
    seq_len: int
    """Columns: tokens and padding."""
    kv_bytes: int
    index_bytes: int
    shared_bytes: int
    """Of both, what another row or a fork of this cache holds too."""
    overhead: float
    dense_kv_bytes: int
    device_bytes: int
    """Of slots; each device has staging buffers beside them."""
    tokens_exact: float
    key_rows_read: float
    value_rows_read: float
    mass_exact: float
    error_estimate: float


class IceCache(Cache):
    """The cache of a batch of sequences: `model.generate(**inputs, past_key_values=cache)`.

    Full-attention layers attend exactly to sink, window and the `token_budget` tokens per KV head
    that the index finds, and to a summary of all the rest. Layers of other types, and the first
    `dense_layers`, stay as transformers' `DynamicCache` makes them.

    A forward over more than `sparse_max_queries` positions is taken for prefill and attends
    exactly, a shorter one sparsely; a layer's first forward is always exact. `exact()` and
    `sparse()` override this.

    The first forward decides how many rows the batch has, until `reset()`. What the attention mask
    hides is padding, left, right or between two turns: it is not stored, and every later mask must
    hide it too. A later mask may also hide the last tokens of a row, such as those after its end:
    they are dropped. Lengths and crops count columns, tokens and padding alike. Rows that begin
    with the same tokens, as several answers or beams do, share an index until they differ.

    Sets the model's attention implementation to "icecache"; `attach` restores it afterwards.
    Several caches may share a model, and a model may run with other caches meanwhile.

    Args:
        model: a transformers model whose attention goes through `AttentionInterface`.
        token_budget: 64 unless given.
        config: all options as one `IceConfig`, instead of `token_budget` and `options`.
        layer_factory: makes each layer's store, instead of a `LayerCache` with the options.
        options: the other options of `IceConfig`.

    Raises `ValueError` if the model cannot be used: no full-attention layer is left to replace,
    layers share keys and values, or the attention function cannot be set. Later, at a forward,
    `ValueError` for another number of rows, a mask that hides other tokens than before, gradients,
    or attention features that it lacks, and `RuntimeError` if the model's attention implementation
    is not "icecache" any more. A forward that another thread's forward interrupts raises
    `RuntimeError` too, and stores nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        token_budget: int | None = None,
        *,
        config: IceConfig | None = None,
        layer_factory: StoreFactory | None = None,
        **options: Any,
    ) -> None:
        if token_budget is not None:
            options["token_budget"] = token_budget
        if config is not None and options:
            raise TypeError(f"expected either config or options, got config and {sorted(options)}")
        if config is not None and not isinstance(config, IceConfig):
            raise TypeError(f"config must be an IceConfig, got {config!r}")
        model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model)}")
        self.config = config if config is not None else IceConfig(**options)
        owner = _attention_owner(model)
        self._text_config: PreTrainedConfig = owner.config
        layers, kinds = _plain_layers(owner)
        self._lock = threading.RLock()
        factory = layer_factory or Stores(
            self.config,
            tp_rank=_tensor_parallel_rank(model),
            model_q_heads=getattr(owner.config, "num_attention_heads", 0),
        )
        replaced: list[IceLayer] = []
        for index, kind in kinds.items():
            if kind == _FULL and index >= self.config.dense_layers:
                since = len(replaced) % self.config.reuse_layers
                anchor = replaced[-since] if since else None
                replaced.append(IceLayer(index, factory, self._lock, anchor))
                layers[index] = replaced[-1]
        super().__init__(layers=layers)
        self.layers: list[Any]
        self._replaced = replaced
        self._first_index, self._last_index = min(kinds, default=0), max(kinds, default=0)
        # Of the last forward: its thread, by how much its positions were ahead of the columns that
        # were stored (None: unknown), and whether it was undone.
        self._thread: int | None = None
        self._ahead: int | None = None
        self._undone = False
        self._force_exact: bool | None = None
        self._last_updated: IceLayer | None = None
        self._before: dict[int, dict[str, Any]] = {}
        self._reading = Reading()  # of the masks of the last forward
        self._unfinished: Callable[[], None] | None = None  # see `_apply`
        if not replaced:
            raise ValueError(
                f"expected at least one layer of type {_FULL!r} at or after dense_layers="
                f"{self.config.dense_layers} to replace, got {list(kinds.values())} "
                "(a sliding_window in the model's config makes layers sliding)"
            )
        owner.set_attn_implementation(ATTENTION_NAME)
        if owner.config._attn_implementation != ATTENTION_NAME:
            raise ValueError(
                f"expected a model whose attention goes through transformers' AttentionInterface, "
                f"got {type(owner).__name__}, which does not let it be set"
            )

    @property
    def replaced_layers(self) -> tuple[int, ...]:
        """The layers of the model whose attention is icecache's."""
        return tuple(layer.index for layer in self._replaced)

    def exact(self) -> AbstractContextManager[None]:
        """Within it, every forward attends exactly, however short."""
        return self._forced(True)

    def sparse(self) -> AbstractContextManager[None]:
        """Within it, every forward attends sparsely, however long; a layer's first stays exact."""
        return self._forced(False)

    @contextmanager
    def _forced(self, exact: bool) -> Iterator[None]:
        before, self._force_exact = self._force_exact, exact
        try:
            yield
        finally:
            self._force_exact = before

    @not_compiled
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model: gives a layer its new columns, `[rows, kv_heads, t, head_dim]`.

        Returns what the attention function is to be given: the new ones alone on a replaced layer.
        """
        implementation = self._text_config._attn_implementation
        if implementation != ATTENTION_NAME:
            raise RuntimeError(
                f"expected the model's attention implementation to be {ATTENTION_NAME!r}, got "
                f"{implementation!r}: use the cache inside `with icecache.attach(model)`, make it "
                f"with IceCache(model), or call model.set_attn_implementation({ATTENTION_NAME!r})"
            )
        refuse_gradients(key_states, value_states)
        with self._lock:
            self._enter(layer_idx, (kwargs.get("kwargs") or {}).get("position_ids"))
            if self._last_updated is not None and self._last_updated.is_waiting:
                raise RuntimeError(
                    f"expected attention on layer {self._last_updated.index} before layer "
                    f"{layer_idx}, got none: this model's attention does not go through "
                    "AttentionInterface"
                )
            self._replaced[0].require_batch(key_states.shape[0])
            layer = self.layers[layer_idx]
            if isinstance(layer, IceLayer):
                t = key_states.shape[2]
                exact = t > self.config.sparse_max_queries
                kwargs["exact"] = exact if self._force_exact is None else self._force_exact
                kwargs["reading"] = self._reading
                self._last_updated = layer
                return super().update(key_states, value_states, layer_idx, *args, **kwargs)
            before = _state(layer)
            if _is_sliding(layer):
                # It drops what leaves its window, so only a copy of its state can undo a failure.
                self._before[layer_idx] = before
            try:
                return super().update(key_states, value_states, layer_idx, *args, **kwargs)
            except BaseException:
                _set_state(layer, before)  # it may have counted tokens that it did not store
                raise

    def _enter(self, layer_idx: int, positions: torch.Tensor | None) -> None:
        """Lets a forward of this thread go on to a layer, if no other thread has come between.

        positions: those of the new columns, `[rows, t]`, where the model shows them. After a change
        of threads they must go on where the last forward ended: a `generate` counts them by itself,
        and so notices that it is not alone. With padding they are not those of the columns.
        """
        self._roll_back(layer_idx)
        thread, ahead = threading.get_ident(), None
        if layer_idx == self._first_index:
            length = self.get_seq_length()
            padded = any(row.padding for row in self._replaced[0].rows)
            if positions is not None and positions.ndim == 2 and not padded:
                first, last = positions[0, [0, -1]].tolist()
                if last - first == positions.shape[1] - 1:
                    ahead = first - length
            known = None not in (ahead, self._ahead)
            if length and known and ahead != self._ahead and thread != self._thread:
                raise RuntimeError(TAKEN_OVER)
            self._thread, self._ahead, self._undone = thread, ahead, False
            self._reading = Reading()
        elif self._undone or thread != self._thread:
            raise RuntimeError(TAKEN_OVER)

    @not_compiled
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in the cache: what the last complete forward left, the same for every layer."""
        if self._unfinished is not None:
            with self._lock:
                self._finish()
        last = self.layers[self._last_index]
        return last.stored if isinstance(last, IceLayer) else int(last.get_seq_length())

    @not_compiled
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that the next mask of a layer is about."""
        with self._lock:
            self._roll_back(layer_idx)
            length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, offset

    def crop(self, tokens: int) -> None:
        """Removes `-tokens` columns if negative, nothing if 0; keeps the first `tokens` if not.

        Raises what transformers raises where a sliding layer has dropped what it would need, and
        `RuntimeError` where a layer has fewer tokens because a prefill failed: fewer may be kept.
        """
        tokens = operator.index(tokens)  # transformers 5.14 to 5.17 pass a tensor
        with self._lock:
            self._roll_back()
            length = self.get_seq_length()
            removed = min(-tokens, length) if tokens <= 0 else max(length - tokens, 0)
            for layer in self._replaced:
                if layer.stored < length - removed:
                    raise RuntimeError(
                        f"expected {length - removed} tokens in layer {layer.index}, got "
                        f"{layer.stored}, since a prefill failed: crop to as many or reset()"
                    )
            if removed == length:
                self.reset()  # which sliding layers never refuse
                return
            plain = [(x, _state(x)) for x in self.layers if not isinstance(x, IceLayer)]

            def take_back() -> None:
                for layer, before in plain:
                    _set_state(layer, before)

            def crop_replaced() -> None:
                for layer in self._replaced:
                    layer.restore(length - removed)

            # Sliding layers may refuse, so they come first. Until all agree, it is taken back.
            self._unfinished = take_back
            try:
                for layer, _ in plain:
                    # `crop(0)` empties one of transformers 5.4, and trims a recorded past.
                    if removed or getattr(layer, "record_past", False):
                        layer.crop(-removed)
            except Exception:
                self._finish()
                raise
            self._apply(crop_replaced)

    def reset(self) -> None:
        """Forgets everything; the layers stay."""
        with self._lock:
            self._apply(self._reset_layers)

    def activate_past_recording(self, *args: Any, **kwargs: Any) -> Any:
        """Tells sliding layers to keep what a crop may need (transformers 5.17 and later)."""
        with self._lock:
            self._finish()
            return super().activate_past_recording(*args, **kwargs)  # type: ignore[misc,no-untyped-call,unused-ignore]

    def _reset_layers(self) -> None:
        self._undone = True
        self._before.clear()
        for layer in self.layers:
            _reset(layer)

    def _apply(self, change: Callable[[], None]) -> None:
        """Changes all layers. What interrupts it, Ctrl-C or a lack of memory, may leave some as
        they were: then the next call on the cache makes the change anew, before anything else."""
        self._unfinished = change
        change()
        self._unfinished = None

    def _finish(self) -> None:
        if self._unfinished is not None:
            self._apply(self._unfinished)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was: moved, or a fork where that is used twice.

        Raises `IndexError` for a row that is not there, before anything is changed.
        """
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows at `indices`, in that order, or those that a bool mask names.

        Raises `IndexError` for a row that is not there, `ValueError` for no row or a mask over
        another number of them, before anything is changed.
        """
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, as forks: many answers to one prompt."""
        with self._lock:
            self._roll_back()
            indices = repeated(len(self._replaced[0].rows), repeats)
            if self.get_seq_length():
                self._select(torch.tensor(indices))

    def _select(self, indices: torch.Tensor) -> None:
        with self._lock:
            self._roll_back()
            if not self.get_seq_length():
                return
            wanted = torch.tensor(row_indices(indices, len(self._replaced[0].rows)))
            before = [(layer, _state(layer)) for layer in self.layers]

            def take_back() -> None:
                for layer, state in before:
                    _set_state(layer, state)

            # Taken back, not finished, by the next call if it is interrupted.
            self._unfinished = take_back
            try:
                for layer in self.layers:
                    layer.reorder_cache(wanted)
            except BaseException:
                self._finish()
                raise
            self._unfinished = None
            self._ahead = None

    def fork(self) -> Self:
        """An independent cache with the same tokens, for the same model.

        What is stored or cropped in one is not seen by the other, and either may be dropped first.
        They share memory until they change it. `copy.copy` and `copy.deepcopy` do the same.

        Raises `TypeError` if a `layer_factory` made stores without a method `fork`.
        """
        with self._lock:
            self._finish()
            twin = object.__new__(type(self))
            vars(twin).update(vars(self))
            twin._lock = threading.RLock()
            twin._thread = twin._ahead = twin._force_exact = twin._last_updated = None
            twin._before = dict(self._before)
            forks: dict[IceLayer | None, IceLayer | None] = {None: None}

            def fork(layer: Any) -> Any:
                if isinstance(layer, IceLayer):
                    forks[layer] = layer.fork(twin._lock, forks[layer.anchor])
                    return forks[layer]
                # Layers that grow by concatenation never write to the tensors they hold.
                return copy.copy(layer) if type(layer) in _GROWN else copy.deepcopy(layer)

            twin.layers = [fork(layer) for layer in self.layers]
            twin._replaced = [layer for layer in twin.layers if isinstance(layer, IceLayer)]
        # A forward here may have failed, or be under way in another thread: that is not disturbed.
        twin._roll_back()
        return twin

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def stats(self, row: int | None = None) -> CacheStats:
        """Sizes, and what the last step read, per layer and for the whole cache; of one row of the
        batch, or of all together. Raises `IndexError` for a row that is not there."""
        rows = len(self._replaced[0].rows) if self.get_seq_length() else 0
        if row is not None and not 0 <= row < rows:
            raise IndexError(f"expected a row below {rows}, got {row}")
        layers = {}
        for layer in self._replaced:
            chosen = layer.rows if row is None else layer.rows[row : row + 1]
            if of_rows := [r.store.stats() for r in chosen if r.store is not None]:
                layers[layer.index] = LayerStats.combined(of_rows)
        kv_bytes = sum(stats.kv_bytes for stats in layers.values())
        index_bytes = sum(stats.index_bytes for stats in layers.values())

        def mean(value: Callable[[LayerStats], float]) -> float:
            return sum(map(value, layers.values())) / max(1, len(layers))

        return CacheStats(
            layers=layers,
            rows=rows if row is None else 1,
            seq_len=self.get_seq_length(),
            kv_bytes=kv_bytes,
            index_bytes=index_bytes,
            shared_bytes=sum(stats.shared_bytes for stats in layers.values()),
            overhead=index_bytes / kv_bytes if kv_bytes else 0.0,
            dense_kv_bytes=sum(
                rows.nbytes
                for layer in self.layers
                for rows in (getattr(layer, "keys", None), getattr(layer, "values", None))
                if isinstance(rows, torch.Tensor)
            ),
            device_bytes=sum(stats.device_bytes for stats in layers.values()),
            tokens_exact=mean(lambda stats: stats.tokens_exact),
            key_rows_read=mean(lambda stats: stats.key_rows_read),
            value_rows_read=mean(lambda stats: stats.value_rows_read),
            mass_exact=mean(lambda stats: stats.mass_exact),
            error_estimate=mean(lambda stats: stats.error_estimate),
        )

    def _roll_back(self, layer_idx: int | None = None) -> None:
        """Undoes a forward that failed midway.

        With `layer_idx`, the layer that is about to be used: in a running forward it is as long as
        the last layer; if it is longer, that forward has failed and this is a new one.
        """
        self._finish()
        length = self.get_seq_length()

        def is_ahead(layer: Any) -> bool:
            if isinstance(layer, IceLayer):
                return layer.exceeds(length)
            return isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > length

        if layer_idx is not None and not is_ahead(self.layers[layer_idx]):
            return
        ahead = {index: layer for index, layer in enumerate(self.layers) if is_ahead(layer)}
        if not ahead:
            return
        self._undone = True
        _logger.warning(
            "the last forward failed before its last layer: %d layers go back to %d tokens",
            len(ahead),
            length,
        )

        def take_back() -> None:
            for index, layer in ahead.items():
                if isinstance(layer, IceLayer):
                    layer.undo(length)
                elif type(layer) is DynamicLayer and length == 0:
                    _reset(layer)
                elif type(layer) is DynamicLayer:
                    layer.crop(length - layer.get_seq_length())
                elif type(layer) is DynamicSlidingWindowLayer:
                    _set_state(layer, self._before[index])

        self._apply(take_back)
        for index, layer in ahead.items():
            if layer.get_seq_length() != length:
                raise RuntimeError(
                    f"expected layer {index} to go back to {length} tokens after a failed forward, "
                    f"got {layer.get_seq_length()} ({layer!r}): call cache.reset() and start over"
                )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an IceCache cannot be pickled: it belongs to a model's config (fork() copies it)"
        )


@contextmanager
def attach(
    model: PreTrainedModel, token_budget: int | None = None, **options: Any
) -> Iterator[IceCache]:
    """`with attach(model, token_budget=64) as cache:` makes an `IceCache` of a model.

    Takes what `IceCache` takes. At the end, however it comes, the model has its own attention
    implementation again.
    """
    owner = _attention_owner(model)
    before = owner.config._attn_implementation
    try:
        yield IceCache(model, token_budget, **options)
    finally:
        owner.set_attn_implementation(before)


def _state(layer: Any) -> dict[str, Any]:
    """What a layer is now: it never writes to its tensors."""
    return _copied(vars(layer))


def _set_state(layer: Any, state: dict[str, Any]) -> None:
    vars(layer).clear()
    vars(layer).update(_copied(state))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: copy.copy(v) if isinstance(v, (list, dict)) else v for k, v in state.items()}


def _reset(layer: Any) -> None:
    """Empties a layer, which may then have another number of rows."""
    if type(layer) in _GROWN:
        # Versions before 5.24 would write zeros into tensors, which forks may hold too.
        layer.is_initialized = False
        layer.keys = layer.values = None
    layer.reset()


def _is_sliding(layer: Any) -> bool:
    return getattr(layer, "is_sliding", False)


def _attention_owner(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model whose config its decoder's attention reads: the text model."""
    text_config = model.config.get_text_config(decoder=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config is text_config:
            return module
    raise ValueError(f"expected a transformers model with a decoder, got {type(model).__name__}")


def _plain_layers(owner: PreTrainedModel) -> tuple[list[Any], dict[int, str]]:
    """The layers as `DynamicCache` makes them, and the types of those that attend, by index."""
    config = owner.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"expected a decoder-only model, got {type(owner).__name__}")
    sharing = getattr(config, "kv_sharing_modes", None) or ()
    if getattr(config, "num_kv_shared_layers", 0) or "reuse" in sharing:
        raise ValueError(f"{type(owner).__name__} shares keys between layers: not supported")
    layers: list[Any] = DynamicCache(config=config).layers
    types = getattr(config, "layer_types", None) or [
        _FULL if type(layer) is DynamicLayer else "sliding_attention" for layer in layers
    ]
    # A config may count layers that the model does not have: they would never grow.
    present = {getattr(module, "layer_idx", None) for module in owner.modules()}
    kinds = {
        index: kind
        for index, (kind, layer) in enumerate(zip(types, layers, strict=False))
        if kind in _ATTENDING and isinstance(layer, DynamicLayer) and index in present
    }
    return layers, kinds


def _tensor_parallel_rank(model: PreTrainedModel) -> int:
    """The rank of this process among those that a `tp_plan` splits the model over, or 0."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return 0
    return int((mesh if mesh.ndim == 1 else mesh["tp"]).get_local_rank())

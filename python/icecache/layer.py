"""`LayerCache`: one layer of one sequence, the two flows on the CPU.

prefill: store, attend exactly, index what is beyond sink and window.
decode:  store, attend to sink, window and the tokens that the index finds, merge the summary of
         the rest. One call into the core per step; see rust/src/layer.rs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from . import _icecache
from .arrays import ELEMENTS, Array, Operand, given_back, is_tensor, operand, same_dtype
from .config import IceConfig, require_int, require_real
from .sdpa import attend_causal
from .stats import LayerStats


class LayerCache:
    """The keys and values of one attention layer of one sequence, in host memory.

    Arrays are NumPy arrays or CPU torch tensors of float32, float16 or bfloat16 (`ml_dtypes` for
    NumPy), one dtype in all: that of the first keys. `k` and `v` are [kv_heads, n, head_dim], `q`
    and every output [q_heads, n, head_dim]; query head `h` reads KV head
    `h // (num_q_heads // num_kv_heads)`. Rotary embedding is already applied. Outputs have the kind
    and dtype of `q` and are accumulated in float32.

    Every error (`ValueError`, `TypeError`) is raised before anything is changed, and Ctrl-C during
    a long call takes back what it appended. Calls from several threads take turns.

    Args:
        num_q_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads.
        head_dim: elements of a key and of a value.
        config: options; see PARAMETERS.md.
        scale: factor of the logits; None means `head_dim ** -0.5`.
        layer_index: makes the random promotion of one layer differ from that of the next.
        first_kv_head: the number in the model of KV head 0 here, where other processes hold other
            heads of the layer: makes the random promotion of theirs differ.
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        config: IceConfig | None = None,
        scale: float | None = None,
        *,
        layer_index: int = 0,
        first_kv_head: int = 0,
    ) -> None:
        self.num_q_heads = require_int("num_q_heads", num_q_heads, 1)
        self.num_kv_heads = require_int("num_kv_heads", num_kv_heads, 1)
        self.head_dim = require_int("head_dim", head_dim, 1)
        if config is not None and not isinstance(config, IceConfig):
            raise TypeError(f"config must be an IceConfig, got {config!r}")
        self.config = IceConfig() if config is None else config
        self.scale = self.head_dim**-0.5 if scale is None else require_real("scale", scale)
        self._core = _icecache.Layer(
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            self.scale,
            require_int("layer_index", layer_index, 0),
            require_int("first_kv_head", first_kv_head, 0),
            self.config,
        )
        self._tensors = False
        # One call at a time: a prefill of tensors is several calls of the core.
        self._lock = threading.RLock()

    def prefill(self, k: Array, v: Array, q: Array | None = None) -> Array | None:
        """Appends `k` and `v` and indexes them; may be called repeatedly.

        With `q`, the queries of the same positions, returns exact attention to everything stored
        so far, each position to itself and what is before it.
        """
        keys, values = operand("k", k, 3), operand("v", v, 3)
        if q is None:
            dtype = same_dtype(k=keys, v=values)
            with self._lock:
                self._core.prefill(keys.array, values.array, dtype)
                self._tensors = is_tensor(k)
            return None
        queries = operand("q", q, 3)
        dtype = same_dtype(q=queries, k=keys, v=values)
        with self._lock:
            if is_tensor(q) and is_tensor(k) and is_tensor(v):
                self._core.validate(queries.array, keys.array, values.array, dtype)
                past = self.gather() if self.seq_len else None
                out = attend_causal(q.detach(), k.detach(), v.detach(), past, self.scale)
                self._core.prefill(keys.array, values.array, dtype)
            else:
                rows = self._output(queries)
                self._core.prefill(keys.array, values.array, dtype, queries.array, rows)
                out = given_back(rows, dtype, is_tensor(q))
            self._tensors = is_tensor(k)
        return out

    def decode(self, q: Array, k: Array, v: Array, like: LayerCache | None = None) -> Array:
        """Appends one position or more, then attends sparsely: each position selects for itself
        and sees nothing after it.

        With `like`, another layer of the same sequence that has just decoded the same positions,
        nothing is searched: each KV head takes the tokens that the same one of `like` selected, or
        everything if that attended to everything. `ValueError` if the other layer has other KV
        heads, another length than this one after the call, another number of positions in its last
        call, or selected more tokens than this one may.
        """
        if like is not None and not isinstance(like, LayerCache):
            raise TypeError(f"like must be a LayerCache, got {like!r}")
        queries, keys, values = operand("q", q, 3), operand("k", k, 3), operand("v", v, 3)
        dtype = same_dtype(q=queries, k=keys, v=values)
        out = self._output(queries)
        with self._lock:
            chosen = None if like is None else like._core.choices()
            self._core.decode(queries.array, keys.array, values.array, dtype, out, chosen)
            self._tensors = is_tensor(k)
        return given_back(out, dtype, is_tensor(q))

    @staticmethod
    def decode_batch(
        layers: Sequence[LayerCache],
        q: Array,
        k: Array,
        v: Array,
        like: Sequence[LayerCache] | None = None,
    ) -> Array:
        """`decode` of several sequences in one call, bit for bit; their heads share the threads.

        q: [rows, q_heads, n, head_dim], k and v: [rows, kv_heads, n, head_dim], one row for each
        layer. Returns outputs as `q`. If it fails, nothing is appended to any of them.
        """
        layers, followed = list(layers), None if like is None else list(like)
        for name, caches in ("layers", layers), ("like", followed or layers):
            if not all(type(cache) is LayerCache for cache in caches):
                raise TypeError(f"{name} must be LayerCaches, got {caches!r}")
        operands = {name: operand(name, x, 4) for name, x in (("q", q), ("k", k), ("v", v))}
        dtype = same_dtype(**operands)
        counts = [len(x.array) for x in operands.values()]
        counts += [len(followed)] if followed is not None else []
        if counts != [len(layers)] * len(counts):
            raise ValueError(f"expected one row for each of {len(layers)} layers, got {counts}")
        queries, keys, values = (list(x.array) for x in operands.values())
        out = np.empty(operands["q"].array.shape, ELEMENTS[dtype])
        with ExitStack() as locks:
            # In one order, whatever that of the call: two calls never wait for each other.
            for layer in sorted({*layers, *(followed or ())}, key=id):
                locks.enter_context(layer._lock)
            chosen = None if followed is None else [other._core.choices() for other in followed]
            cores = [layer._core for layer in layers]
            _icecache.Layer.decode_batch(cores, queries, keys, values, dtype, out, chosen)
            for layer in layers:
                layer._tensors = is_tensor(k)
        return given_back(out, dtype, is_tensor(q))

    def append(self, k: Array, v: Array) -> None:
        """Appends positions as `decode` does, without attending."""
        keys, values = operand("k", k, 3), operand("v", v, 3)
        dtype = same_dtype(k=keys, v=values)
        with self._lock:
            self._core.append(keys.array, values.array, dtype)
            self._tensors = is_tensor(k)

    def attend(self, q: Array) -> Array:
        """Attends sparsely with the queries of the last stored positions, without appending.

        Takes as many positions as the window holds at most (`stats().window_tokens`).
        """
        return self._attend(q, exact=False)

    def attend_exact(self, q: Array) -> Array:
        """Attends to everything with the queries of the last stored positions."""
        return self._attend(q, exact=True)

    def gather(self) -> tuple[Array, Array]:
        """Copies of all keys and values in order of position, [kv_heads, seq_len, head_dim]."""
        with self._turn():
            dtype, tensors = self.dtype or "f32", self._tensors
            shape = (self.num_kv_heads, self.seq_len, self.head_dim)
            keys, values = (np.empty(shape, ELEMENTS[dtype]) for _ in range(2))
            self._core.gather(dtype, keys, values)
        return given_back(keys, dtype, tensors), given_back(values, dtype, tensors)

    def crop(self, n: int) -> None:
        """Keeps the first `n` tokens.

        Inside the window nothing else changes; deeper, tokens leave the tree and the last ones
        kept become the window again.
        """
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
            raise ValueError(f"crop keeps the first n tokens: n must be at least 0, got {n!r}")
        with self._turn():
            if n > (most := self.seq_len):
                raise ValueError(
                    f"crop keeps the first n tokens: n must be at most {most}, got {n}"
                )
            self._core.crop(int(n))

    def fork(self) -> Self:
        """An independent cache with the same tokens: what is appended to one, or cropped from it,
        is not seen by the other. They share rows and index until one of them changes them."""
        twin = object.__new__(type(self))
        with self._turn():
            vars(twin).update(vars(self))
            twin._core = self._core.fork()
        twin._lock = threading.RLock()
        return twin

    def reset(self) -> None:
        """Forgets everything, the dtype too."""
        with self._lock:
            self._core.reset()

    def check(self) -> None:
        """Verifies every invariant of the index; `RuntimeError` names the first that is broken."""
        with self._turn():
            self._core.check()

    @property
    def seq_len(self) -> int:
        """Tokens stored."""
        with self._lock:
            return self._core.seq_len

    @property
    def dtype(self) -> str | None:
        """One of "f32", "f16" and "bf16"; None while nothing is stored."""
        with self._lock:
            return self._core.dtype

    def selected(self) -> list[npt.NDArray[np.int64]]:
        """Per KV head the positions, ascending, that the last step attended to exactly: sink,
        window and selected."""
        with self._turn():
            heads = self._core.selected()
        return [np.asarray(positions, np.int64) for positions in heads]

    def stats(self) -> LayerStats:
        """Sizes, and what the last step read."""
        with self._turn():
            return LayerStats(**self._core.stats())

    def _turn(self) -> AbstractContextManager[object]:
        """Within it a call has the layer to itself, and all before it is done."""
        return self._lock

    def _attend(self, q: Array, exact: bool) -> Array:
        queries = operand("q", q, 3)
        out = self._output(queries)
        with self._lock:
            self._core.attend(queries.array, queries.dtype, out, exact)
        return given_back(out, queries.dtype, is_tensor(q))

    def _output(self, queries: Operand) -> npt.NDArray[Any]:
        shape = (self.num_q_heads, queries.array.shape[1], self.head_dim)
        return np.empty(shape, queries.array.dtype)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: gather() its keys and values "
            "and prefill another with them"
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_q_heads={self.num_q_heads}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"seq_len={self.seq_len}, dtype={self.dtype})"
        )

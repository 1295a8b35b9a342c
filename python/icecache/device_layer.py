"""`DeviceLayerCache`: one layer of one sequence, the two flows for a model on a device.

Keys, values and the index stay in host memory; the device holds some token slots per KV head.

prefill: attend exactly on the device; beside that, copy to the host and index there.
decode:  queries down; append, search, pack on the host; one copy up; scatter into the slots; attend
         to slots on the device and merge the summary of the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from ._icecache import Choices, Layer
from .arrays import given_back, is_tensor, operand, same_dtype, without_gradients
from .config import IceConfig
from .device import CudaDevice, Device, Event, Tensor
from .layer import LayerCache
from .pipeline import Job, Pipeline
from .sdpa import Partial, RunningAttention, attend_causal, attend_partial, finish, merge
from .stats import LayerStats
from .transfer import Arrival, Marks, Slots, Staging, Transfer

_HISTORY_BYTES = 16 << 20
"""Bytes of stored keys and values that a prefill sends at a time; staging buffers grow to it."""


class DeviceLayerCache(LayerCache):
    """A `LayerCache` whose queries, keys, values and outputs are torch tensors on a device.

    The same calls, shapes, dtypes and errors, with these differences:

    - Calls return before the device is done, and order themselves after the work given to torch's
      current stream. A `k` or `v` given to `prefill` must not be changed in place before the next
      call on this layer; it may be freed.
    - `prefill` returns before the tokens are indexed. What is wrong with their elements (NaN) is
      raised by the next call, and by all that follow, which do nothing else: those tokens are gone.
      `crop` and `reset` forget such an error. Elements of a prefill's queries are not checked.
    - `attend` and `attend_exact` compute on the CPU.

    Device memory: `device_slots` tokens (`IceConfig.device_tokens`) per KV head, and the staging
    buffers of the `Transfer`, however long the sequence.

    Args:
        num_q_heads, num_kv_heads, head_dim, config, scale, layer_index,
            first_kv_head: as for `LayerCache`.
        device: a `torch.device`, its name, or a `Device`; None: that of `transfer`.
        transfer: shared by the layers on this device; None: one of its own.
        pipeline: shared by all layers of a cache; None: one of its own.

    Raises `ValueError` if `transfer` belongs to another device.
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
        device: Any = None,
        transfer: Transfer | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__(
            num_q_heads,
            num_kv_heads,
            head_dim,
            config,
            scale,
            layer_index=layer_index,
            first_kv_head=first_kv_head,
        )
        if device is None and transfer is None:
            raise TypeError("expected a device, or the transfer of one")
        if device is not None and not isinstance(device, Device):
            device = CudaDevice(device)
        self._transfer = Transfer(device) if transfer is None else transfer
        self._device = self._transfer.device.torch_device
        if device is not None and self._device != device.torch_device:
            raise ValueError(
                f"expected a transfer of {device.torch_device}, got one of {self._device}"
            )
        self._pipeline = Pipeline() if pipeline is None else pipeline
        self._core.open_device()
        self._tensors = True
        self._slots: Slots | None = None
        # A prefill that is being indexed, and length and dtype with it.
        self._pending: Job | None = None
        self._expected: tuple[int, str | None] = (0, None)
        self._failed: BaseException | None = None  # of the last prefill
        self._chosen: list[Choices] = []  # by the batches of the last decode
        self._last: tuple[tuple[Event, Event], float, Marks] | None = None

    # ---- the two flows --------------------------------------------------------------------------

    def prefill(self, k: Tensor, v: Tensor, q: Tensor | None = None) -> Tensor | None:
        """Appends `k` and `v`; may be called repeatedly. Returns before they are indexed.

        With `q`, the queries of the same positions, returns exact attention to everything stored
        so far, each position to itself and what is before it.
        """
        with self._growing():
            given = {"k": k, "v": v} if q is None else {"q": q, "k": k, "v": v}
            here = self._here(given)
            dtype = self._validate(here)
            k, v = here["k"], here["v"]
            with self._transfer.lock:
                # The copies go down while the device attends.
                arrival = self._transfer.down(k, v)
                out = None if q is None else self._attend_all(here["q"], k, v)
            self._expected = self.seq_len + k.shape[1], dtype
            self._pending = Job(partial(_index, self._core, arrival))
            self._pipeline.submit(self._pending)
        return out

    def decode(self, q: Tensor, k: Tensor, v: Tensor, like: LayerCache | None = None) -> Tensor:
        """Appends one position or more, then attends sparsely: each position selects for itself
        and sees nothing after it.

        `like`: a `DeviceLayerCache` with the same options, otherwise as for `LayerCache.decode`.
        """
        import torch

        if like is not None and not isinstance(like, DeviceLayerCache):
            raise TypeError(f"like must be a DeviceLayerCache, got {like!r}")
        with self._growing(), self._transfer.lock:
            core, transfer = self._core, self._transfer

            # 1. Queries, keys and values come down.
            q, k, v = self._here({"q": q, "k": k, "v": v}).values()
            arrival = transfer.down(q, k, v)
            dtype, queries, keys, values = _arrays(arrival, "qkv")
            core.validate(queries, keys, values, dtype)
            slots = self._open_slots(k.dtype)
            out, n, most = torch.empty_like(q), q.shape[1], core.positions_at_once
            batches = [slice(i, min(i + most, n)) for i in range(0, n, most)]
            chosen = [None] * len(batches) if like is None else like._chosen
            if len(chosen) != len(batches):
                raise ValueError(
                    f"expected the other layer to have decoded as many positions just before, in "
                    f"{len(batches)} batches, got {len(chosen)}"
                )
            self._chosen = []
            for some, others in zip(batches, chosen, strict=True):
                # 2. The host appends, searches, and packs what the device lacks.
                staging = transfer.staging(core.staging_bytes)
                begun = time.perf_counter()
                staged = core.stage(
                    queries[:, some], keys[:, some], values[:, some], dtype,
                    staging.host.numpy(), others,
                )  # fmt: skip
                self._chosen.append(core.choices())
                stage_ms = 1e3 * (time.perf_counter() - begun)
                # 3. That goes up in one copy, and its rows to their slots.
                transfer.send(staging, staged["bytes"])
                transfer.scatter(
                    staging, staged["rows"], staged["targets"], staged["misses"], slots
                )
                # 4. The device attends to slots, and merges the summary of the rest.
                work = self._attend_slots(q[:, some], staging, staged, slots, out[:, some])
                marks = transfer.use(work, staging, slots)
                self._last = arrival.events, stage_ms, marks
        return out

    def _attend_slots(
        self, q: Tensor, staging: Staging, staged: dict[str, int], slots: Slots, out: Tensor
    ) -> Callable[[], None]:
        """Attention of `p` positions to their slots, merged with what the host computed."""
        import torch

        q_heads, p, dim = q.shape
        kv_heads, count, _ = slots.keys.shape

        def section(name: str, *shape: int, dtype: Any = torch.float32) -> Tensor:
            return _view(staging.device[staged[name] :], shape, dtype)

        def work() -> None:
            attended = section("attended", kv_heads, p, count, dtype=torch.bool)
            exact = attend_partial(q, slots.keys, slots.values, self.scale, attended)
            rest = Partial(
                section("tail_max", q_heads, p),
                section("tail_sum", q_heads, p),
                section("tail_values", q_heads, p, dim),
            )
            finish(merge(exact, rest), out)

        return work

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exact attention of new positions to themselves, and to all that is stored: that comes
        from the host block by block."""
        import torch

        core, transfer, past = self._core, self._transfer, self.seq_len
        out = torch.empty_like(q)
        if past == 0:
            transfer.compute(lambda: out.copy_(attend_causal(q, k, v, None, self.scale)))
            return out
        attention = RunningAttention(q, self.scale)
        row = self.num_kv_heads * self.head_dim * k.element_size()
        most = max(1, _HISTORY_BYTES // (2 * row))
        for first in range(0, past, most):
            count = min(most, past - first)
            shape = (self.num_kv_heads, count, self.head_dim)
            end = 2 * count * row
            staging = transfer.staging(end)
            rows = staging.host.numpy()
            core.history(first, count, rows[: end // 2], rows[end // 2 : end])
            transfer.send(staging, end)
            keys, values = staging.device[:end].chunk(2)
            block = [_view(part, shape, k.dtype) for part in (keys, values)]
            transfer.use(partial(attention.add, *block), staging)
        transfer.compute(partial(attention.add, k, v, causal=True))
        transfer.compute(partial(attention.finish, out))
        return out

    # ---- the rest -------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor) -> None:
        """Appends positions as `decode` does, without attending."""
        with self._growing():
            dtype, keys, values = self._to_host({"k": k, "v": v})
            self._chosen = []
            self._core.append(keys, values, dtype)

    def gather(self) -> tuple[Tensor, Tensor]:
        """Copies of all keys and values in order of position, [kv_heads, seq_len, head_dim]."""
        with self._turn():
            keys, values = super().gather()
            return self._to_device(keys), self._to_device(values)

    def crop(self, n: int) -> None:
        """Keeps the first `n` tokens, as `LayerCache.crop` does; forgets the error of a prefill."""
        with self._lock:
            self._settle()
            failed, self._failed = self._failed, None
            try:
                super().crop(n)
            except BaseException:
                self._failed = failed
                raise
            self._chosen = []

    def fork(self) -> Self:
        """An independent layer with the same tokens, as `LayerCache.fork` makes it, on the same
        device, where it has slots of its own: empty ones. Waits for what is being indexed."""
        twin = super().fork()
        twin._slots = twin._last = None
        twin._chosen = []
        return twin

    def reset(self) -> None:
        """Forgets everything, the dtype, and the error of a prefill too."""
        with self._lock:
            if self._pending is not None:
                self._pending.cancel()
            self._core.reset()
            self._pending = self._failed = self._slots = self._last = None
            self._chosen = []

    @property
    def seq_len(self) -> int:
        """Tokens stored, with those that are being indexed; does not wait for them."""
        return self._core.seq_len if self._pending is None else self._expected[0]

    @property
    def dtype(self) -> str | None:
        """One of "f32", "f16" and "bf16"; None while nothing is stored. Does not wait."""
        return self._core.dtype if self._pending is None else self._expected[1]

    def stats(self) -> LayerStats:
        """Sizes, what the last step read, and its times; waits until the device is done with it."""
        with self._turn():
            stats = super().stats()
            if self._slots is not None:
                stats = replace(stats, device_bytes=self._slots.nbytes)
            if self._last is None:
                return stats
            down, stage_ms, marks = self._last
            return replace(stats, stage_ms=stage_ms, **self._transfer.times(down, marks))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            self._settle()
            if self._failed is not None:
                raise self._failed.with_traceback(None)
            yield

    @contextmanager
    def _growing(self) -> Iterator[None]:
        """A turn that appends. If it ends early, whatever the cause, the tokens are gone again."""
        with self._turn():
            before = self.seq_len
            try:
                yield
            except BaseException:
                if self._pending is not None:
                    self._pending.cancel()
                    self._pending = None
                self._chosen = []
                if self._core.seq_len != before:
                    self._core.abandon_stage()
                    self._core.crop(before)
                raise

    def _settle(self) -> None:
        """Waits for the tokens that are being indexed."""
        if (job := self._pending) is not None:
            job.wait()
            self._failed, self._chosen = job.error, []
            self._pending = None

    def _attend(self, q: Tensor, exact: bool) -> Tensor:
        with self._turn():
            dtype, queries = self._to_host({"q": q})
            out = np.empty((self.num_q_heads, queries.shape[1], self.head_dim), queries.dtype)
            self._core.attend(queries, dtype, out, exact)
            return self._to_device(given_back(out, dtype, tensors=True))

    def _here(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, without gradients; `TypeError` unless they are tensors on the device."""
        for name, tensor in tensors.items():
            if not is_tensor(tensor):
                kind = type(tensor).__name__
                raise TypeError(f"{name} must be a torch tensor on {self._device}, got {kind}")
            if tensor.device != self._device:
                raise TypeError(
                    f"{name} must be on {self._device}, got a tensor on {tensor.device}"
                )
        return {name: without_gradients(name, tensor) for name, tensor in tensors.items()}

    def _validate(self, given: dict[str, Tensor]) -> str:
        """Checks a prefill but for its elements, which are not at hand; returns the dtype."""
        like = {name: operand(name, _zeros(x.shape, x.dtype), 3) for name, x in given.items()}
        dtype, n = same_dtype(**like), given["k"].shape[1]
        heads = {"q": self.num_q_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        shapes = {name: (count, n, self.head_dim) for name, count in heads.items()}
        fit = n > 0 and all(x.shape == shapes[name] for name, x in given.items())
        if not fit or self.dtype not in (None, dtype):
            # The core says what is wrong.
            like.setdefault("q", operand("q", _zeros(shapes["q"], given["k"].dtype)))
            self._core.validate(like["q"].array, like["k"].array, like["v"].array, dtype)
        return dtype

    def _open_slots(self, dtype: Any) -> Slots:
        """The slots, made with the first keys."""
        if self._slots is None or self._slots.keys.dtype != dtype:
            shape = (self.num_kv_heads, self._core.device_slots, self.head_dim)
            self._slots = self._transfer.slots(shape, dtype)
        return self._slots

    def _to_host(self, tensors: dict[str, Tensor]) -> list[Any]:
        with self._transfer.lock:
            return _arrays(self._transfer.down(*self._here(tensors).values()), tensors)

    def _to_device(self, tensor: Tensor) -> Tensor:
        import torch

        copy = torch.empty_like(tensor, device=self._device)
        with self._transfer.lock:
            self._transfer.compute(lambda: copy.copy_(tensor))
        return copy


def _index(core: Layer, arrival: Arrival) -> None:
    """What the pipeline does of a prefill."""
    dtype, keys, values = _arrays(arrival, "kv")
    core.prefill(keys, values, dtype)


def _arrays(arrival: Arrival, names: Iterable[str]) -> list[Any]:
    """The dtype and the arrays, as the core takes them, of copies that are on their way."""
    rows = {name: operand(name, x, 3) for name, x in zip(names, arrival.wait(), strict=True)}
    return [same_dtype(**rows), *(x.array for x in rows.values())]


def _zeros(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Zeros in host memory: one row, repeated."""
    import torch

    return torch.zeros(shape[-1:], dtype=dtype, device="cpu").expand(shape)


def _view(memory: Tensor, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """The beginning of uint8 memory as elements of another type."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

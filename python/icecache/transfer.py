"""Between host and device: what goes down and up, and every event that orders it.

Three streams work beside the host: *compute*, in which torch makes q, k, v and attends; *down* and
*up*, which copy. Each hand-over is one event:

1. down waits for compute, which makes what is copied down;
2. the host waits for down before it reads the copy;
3. the host waits for up before it writes a staging buffer again;
4. up waits for compute before it overwrites what compute reads: a staging buffer, or slots;
5. compute waits for up before it reads what was sent.

Only this file waits for anything on a device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .device import CudaDevice, Device, Event, Tensor


class Marks(NamedTuple):
    """The events of one batch, in order: what `Transfer.times` needs."""

    begun: Event
    """up: before the copy."""
    sent: Event
    """up: the copy is done."""
    written: Event
    """up: the scatter too."""
    attending: Event
    """compute: before the work that reads it."""
    attended: Event
    """compute: after it."""


@dataclass(eq=False)
class Shared:
    """Memory of the device that up writes and compute reads."""

    read: Event
    """What up must wait for before it overwrites."""


@dataclass(eq=False)
class Staging(Shared):
    """One buffer of the ring: what the host writes to `host`, uint8 [n], goes to `device`."""

    host: Tensor
    device: Tensor
    begun: Event | None = None
    sent: Event | None = None


@dataclass(eq=False)
class Slots(Shared):
    """The slots of one layer: keys and values, [kv_heads, slots, head_dim] each."""

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)


class Arrival:
    """Copies in host memory that are on their way."""

    def __init__(self, tensors: list[Tensor], begun: Event, done: Event) -> None:
        self._tensors = tensors
        self.events = begun, done

    def wait(self) -> list[Tensor]:
        """Waits for the copies, and returns them: CPU tensors."""
        self.events[1].synchronize()
        return self._tensors


class Transfer:
    """Copies for the layers of one device, which share it: one thread at a time, under `lock`.

    Args:
        device: where the tensors are: a `torch.device`, its name, or a `Device`.
        depth: staging buffers, at least 2: while one is being sent the host writes the next.
    """

    def __init__(self, device: Any, depth: int = 2) -> None:
        if depth < 2:
            raise ValueError(f"depth must be at least 2, got {depth}")
        self.device: Device = device if isinstance(device, Device) else CudaDevice(device)
        self.lock = threading.RLock()
        self._down, self._up = self.device.stream(), self.device.stream()
        self._ring: list[Staging | None] = [None] * depth
        self._turn = 0

    def down(self, *tensors: Tensor) -> Arrival:
        """Begins to copy tensors to the host, as the compute stream leaves them by now.

        They must not change until the copies have arrived; they may be freed.
        """
        self._down.wait(self.device.compute().record())
        begun = self._down.record()
        copies = [self.device.pinned_like(tensor) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            self.device.copy(copy, tensor, self._down)
        return Arrival(copies, begun, self._down.record())

    def staging(self, nbytes: int) -> Staging:
        """The next staging buffer, of at least `nbytes`, once the host may write it."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._ring)
        staging = self._ring[turn]
        if staging is None or len(staging.host) < nbytes:
            memory = self.device.empty(nbytes)
            read = self.device.compute().record()
            staging = self._ring[turn] = Staging(read, self.device.pinned_like(memory), memory)
        elif staging.sent is not None:
            staging.sent.synchronize()
        return staging

    def slots(self, shape: tuple[int, ...], dtype: Any) -> Slots:
        """New slots, all zeros, of shape [kv_heads, slots, head_dim]."""
        keys, values = self.device.zeros(shape, dtype), self.device.zeros(shape, dtype)
        return Slots(self.device.compute().record(), keys, values)

    def send(self, staging: Staging, nbytes: int) -> None:
        """Sends the first `nbytes` of a staging buffer, in one copy."""
        self._up.wait(staging.read)
        staging.begun = self._up.record()
        self.device.copy(staging.device[:nbytes], staging.host[:nbytes], self._up)
        staging.sent = self._up.record()

    def scatter(self, staging: Staging, rows: int, targets: int, count: int, slots: Slots) -> None:
        """Writes the rows that were sent to their slots.

        rows, targets: where in the buffer, in bytes, `count` pairs of a key row and a value row
        begin, and as many uint32 row indices (KV head * slots + slot).
        """
        self._up.wait(slots.read)
        if count == 0:
            return
        row_bytes = slots.keys.shape[-1] * slots.keys.element_size()
        self.device.scatter(
            staging.device[rows:],
            staging.device[targets:],
            slots.keys,
            slots.values,
            count,
            row_bytes,
            self._up,
        )

    def use(
        self, work: Callable[[], object], staging: Staging, slots: Slots | None = None
    ) -> Marks:
        """Runs torch operations that read what was sent, in the compute stream."""
        compute = self.device.compute()
        written = self._up.record()
        compute.wait(written)
        attending = compute.record()
        kept = () if slots is None else (slots.keys, slots.values)
        compute.run(work, staging.device, *kept)
        attended = compute.record()
        for memory in (staging, slots):
            if memory is not None:
                memory.read = attended
        assert staging.begun is not None and staging.sent is not None, "nothing was sent"
        return Marks(staging.begun, staging.sent, written, attending, attended)

    def compute(self, work: Callable[[], object]) -> None:
        """Runs torch operations in the compute stream."""
        self.device.compute().run(work)

    def times(self, down: tuple[Event, Event], marks: Marks) -> dict[str, Any]:
        """Milliseconds of the parts of a step, once it is done: fields of `LayerStats`.

        down: the events of the `Arrival`.
        """
        marks.attended.synchronize()
        spans = {
            "down_ms": down,
            "transfer_ms": (marks.begun, marks.sent),
            "scatter_ms": (marks.sent, marks.written),
            "device_attend_ms": (marks.attending, marks.attended),
        }
        return {name: self.device.elapsed_ms(*span) for name, span in spans.items()}

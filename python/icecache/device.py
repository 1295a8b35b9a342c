"""What the device path needs of a device, and `CudaDevice`, which has it from torch.

A device does work in *streams*: each runs what it is given in order, beside the host and beside
the other streams, and only events order one after another. So everything here returns at once,
but for `Event.synchronize`, and memory of the device. Tests have a device in host memory whose
streams run as late, and as early, as events allow.

torch is imported only when a device is made, so that NumPy users need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from .kernels import prepare, scatter_rows

Tensor = Any
"""A torch tensor."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """The host waits until the work before this point is done."""


class Stream(Protocol):
    """Work in order."""

    def record(self) -> Event:
        """An event after everything given so far."""

    def wait(self, event: Event) -> None:
        """What is given from now on runs after the event."""

    def run(self, work: Callable[[], object], *uses: Tensor) -> None:
        """Does torch operations in this stream; the tensors `uses` stay allocated until then."""


@runtime_checkable
class Device(Protocol):
    """Memory and streams of one device."""

    @property
    def torch_device(self) -> Any:
        """The `torch.device` of its tensors."""

    def compute(self) -> Stream:
        """The stream in which torch works here and now: it makes q, k, v and takes the output."""

    def stream(self) -> Stream:
        """A stream of its own."""

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Host memory that `copy` reaches without the host's help, not initialised.

        Of the shape and dtype of `tensor`, and laid out like it if it has no gaps.
        """

    def empty(self, nbytes: int) -> Tensor:
        """uint8 memory of the device, [nbytes], aligned to 256 bytes, not initialised.

        The compute stream may have earlier work to do on it.
        """

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Memory of the device that the compute stream fills with zeros."""

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Copies between pinned and device memory. Both stay allocated until then."""

    def scatter(
        self,
        rows: Tensor,
        targets: Tensor,
        keys: Tensor,
        values: Tensor,
        count: int,
        row_bytes: int,
        stream: Stream,
    ) -> None:
        """Writes `rows[m][0]` to row `targets[m]` of `keys` and `rows[m][1]` to that of `values`.

        rows: uint8, [count][2][row_bytes]; targets: uint8 of `count` uint32, unequal; keys, values:
        contiguous, of rows of `row_bytes`. All are memory of the device, and stay allocated until
        then.
        """

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Milliseconds between two events that are done; 0 where the device cannot tell."""


class CudaDevice:
    """A CUDA GPU.

    Args:
        device: a `torch.device`, or what makes one: "cuda", "cuda:1".

    Raises `ValueError` if that is no CUDA device, `RuntimeError` if torch cannot use it, and
    `ImportError` if CuPy is missing, which compiles the kernel.
    """

    def __init__(self, device: Any) -> None:
        import torch

        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"expected a CUDA device, got {str(device)!r}")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        prepare(index)

    def compute(self) -> CudaStream:
        import torch

        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def stream(self) -> CudaStream:
        import torch

        return CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def pinned_like(self, tensor: Tensor) -> Tensor:
        import torch

        # Strides without gaps are kept: such a copy is one piece. Gaps are closed on the device.
        kept = tensor.is_contiguous() or (
            torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        )
        layout = torch.preserve_format if kept else torch.contiguous_format
        # torch gives the memory to someone else only once the copies are done. Outside inference
        # mode: what is made within could not be written outside.
        with torch.inference_mode(False):
            return torch.empty_like(tensor, device="cpu", pin_memory=True, memory_format=layout)

    def empty(self, nbytes: int) -> Tensor:
        import torch

        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        import torch

        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def copy(self, to: Tensor, source: Tensor, stream: Any) -> None:
        stream.run(lambda: to.copy_(source, non_blocking=True), to, source)

    def scatter(
        self,
        rows: Tensor,
        targets: Tensor,
        keys: Tensor,
        values: Tensor,
        count: int,
        row_bytes: int,
        stream: Any,
    ) -> None:
        index = int(self.torch_device.index)
        uses = rows, targets, keys, values

        def launch() -> None:
            into = [tensor.data_ptr() for tensor in uses]
            scatter_rows(into[0], into[1], into[2], into[3], count, row_bytes, stream.handle, index)

        stream.run(launch, *uses)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))


class CudaStream:
    """A `torch.cuda.Stream`; its events are torch's, with times."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def handle(self) -> int:
        """The address of the CUDA stream."""
        return int(self._stream.cuda_stream)

    def record(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def run(self, work: Callable[[], object], *uses: Tensor) -> None:
        import torch

        for tensor in uses:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)  # before the work, which may fail halfway
        with torch.cuda.stream(self._stream):
            work()

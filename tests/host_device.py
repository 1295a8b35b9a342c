"""A device in ordinary memory, whose streams run late, early and out of order.

What a stream is given waits in a queue; a schedule decides when it runs:

- "late": only when the host, or another stream that it holds up, waits for it;
- "eager": the streams that copy run at once, compute late;
- "random": now and then some stream does some of its work.

A *live* device computes at once whatever the schedule, as a model on the CPU does.

So whatever is not ordered by an event happens in the wrong order under one of them. Memory that has
not been written holds NaN, and the compute stream still has earlier work to do on new memory of the
device, as when torch's allocator hands out again what was freed.
"""

import random
import sys
import threading
from collections import Counter, deque
from contextlib import contextmanager
from pathlib import Path

import torch
from host_cuda import scatter_rows

SCHEDULES = ("late", "eager", "random")


class HostEvent:
    """The point in a stream's work at which it was recorded."""

    def __init__(self, stream):
        self._stream, self._at = stream, stream.given

    @property
    def is_done(self):
        return self._stream.done >= self._at

    def synchronize(self):
        if self._stream.device.notes(site()):
            self.force()

    def force(self):
        with self._stream.device.lock:
            while not self.is_done:
                self._stream.step()


class HostStream:
    """Work in order, at some time. An event in the queue is waited for."""

    def __init__(self, device, is_compute, is_eager):
        self.device, self.is_compute, self._is_eager = device, is_compute, is_eager
        self.queue, self.given, self.done = deque(), 0, 0

    def record(self):
        with self.device.lock:
            return HostEvent(self)

    def wait(self, event):
        if self.device.notes(site()):
            self._give(event)

    def run(self, work, *uses):
        inference = torch.is_inference_mode_enabled()  # a mode of the thread that asks, now

        def run():
            with torch.inference_mode(inference):
                work()

        self._give(run)

    def step(self):
        """Does the first thing in the queue, and whatever that waits for."""
        first = self.queue.popleft()
        self.done += 1
        first.force() if isinstance(first, HostEvent) else first()

    @property
    def is_blocked(self):
        first = self.queue[0] if self.queue else None
        return first is None or (isinstance(first, HostEvent) and not first.is_done)

    def finish(self):
        with self.device.lock:
            while self.queue:
                self.step()

    def _give(self, item):
        with self.device.lock:
            self.queue.append(item)
            self.given += 1
            if self._is_eager:
                self.finish()
            self.device.wander()


class HostDevice:
    """`icecache.device.Device` in host memory.

    sites: counts, by the lines that led to them, of the calls that waited for an event.
    skip: those of a call that does not.
    """

    def __init__(self, schedule="late", seed=0, skip=None, live=False):
        assert schedule in SCHEDULES
        self.torch_device = torch.device("cpu")
        self._live = live
        self.schedule, self.skip, self.sites = schedule, skip, Counter()
        self.lock = threading.RLock()
        self.copied = 0  # bytes that streams copied
        self._random = random.Random(seed)
        self._streams, self._here = [], threading.local()
        self._default = self.compute_stream()

    # ---- what icecache calls ----

    def compute(self):
        return getattr(self._here, "stream", self._default)

    def stream(self):
        return self._new(is_compute=False, is_eager=self.schedule == "eager")

    def pinned_like(self, tensor):
        with torch.inference_mode(False):
            return poison(torch.empty_like(tensor))

    def empty(self, nbytes):
        with torch.inference_mode(False):
            memory = poison(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        self.compute().run(lambda: poison(memory))
        return memory

    def zeros(self, shape, dtype):
        with torch.inference_mode(False):
            memory = poison(torch.empty(shape, dtype=dtype, device="cpu"))
        self.compute().run(lambda: memory.zero_())
        return memory

    def copy(self, to, source, stream):
        assert to.shape == source.shape and to.dtype == source.dtype

        def copy():
            to.copy_(source)
            self.copied += to.nbytes

        stream.run(copy)

    def scatter(self, rows, targets, keys, values, count, row_bytes, stream):
        assert keys.is_contiguous() and values.is_contiguous() and count > 0
        assert len(rows) >= 2 * count * row_bytes and len(targets) >= 4 * count

        def scatter():
            into = targets[: 4 * count].view(torch.int32)
            inside = (into >= 0) & (into < keys.nbytes // row_bytes)
            assert inside.all() and len(into.unique()) == count, "targets that nobody wrote"
            addresses = (x.data_ptr() for x in (rows, targets, keys, values))
            scatter_rows(*addresses, count, row_bytes, seed=self._random.randrange(2**32))

        stream.run(scatter)

    def elapsed_ms(self, start, end):
        assert start.is_done and end.is_done
        return 0.25

    # ---- what tests call ----

    def fill(self, tensor):
        """A tensor like this one, which holds NaN until the compute stream fills it."""
        filled = poison(tensor.clone())
        self.compute().run(lambda: filled.copy_(tensor))
        return filled

    def finish(self):
        """Lets the compute streams do all their work, and what that waits for."""
        with self.lock:
            for stream in self._streams:
                if stream.is_compute:
                    stream.finish()

    @contextmanager
    def computing(self, stream):
        """Makes a stream this thread's compute stream."""
        before, self._here.stream = self.compute(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def compute_stream(self):
        """Another compute stream."""
        return self._new(is_compute=True, is_eager=self._live)

    # ---- schedules ----

    def _new(self, **kind):
        with self.lock:
            self._streams.append(HostStream(self, **kind))
            return self._streams[-1]

    def notes(self, where):
        """Notes who waits; whether it may."""
        with self.lock:
            self.sites[where] += 1
        return where != self.skip

    def wander(self):
        """With the random schedule, does some work of some streams."""
        if self.schedule != "random":
            return
        while self._random.random() < 0.6:
            free = [stream for stream in self._streams if not stream.is_blocked]
            if not free:
                return
            self._random.choice(free).step()


def poison(tensor):
    """Fills memory with NaN, or with the byte 255."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 255)


def site():
    """The lines of icecache that lead here, as "file:line < file:line"."""
    frame, lines = sys._getframe(2), []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.parent.name == "icecache":
            lines.append(f"{file.name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)

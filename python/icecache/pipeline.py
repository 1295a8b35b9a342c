"""Indexing beside the device: a worker thread stores prefilled layers while the next ones are
computed.

Ctrl-C may come between any two lines of the main thread. So who does a job is decided by one step
that cannot be cut in two, and no lock is held over a line of Python.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

_POLL = 0.05
"""Seconds after which who waits for a job looks again whether it was cancelled."""


class Job:
    """Work for a `Pipeline`."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        """What the work raised."""
        self._work: Callable[[], object] | None = work
        self._process = os.getpid()
        self._owner: dict[str, str] = {}  # who came first: the worker, or who cancels it
        self._ended = False
        self._running = threading.Lock()
        self._running.acquire()

    @property
    def is_over(self) -> bool:
        """Whether the work has ended, or will never be done."""
        return self._ended or self._owner.get("is") == "canceller"

    def run(self) -> None:
        """Does the work, unless it was cancelled."""
        if self._owner.setdefault("is", "worker") == "worker" and self._work is not None:
            try:
                self._work()
            except BaseException as error:
                self.error = error
        self._work = None  # and what it holds
        self._ended = True
        self._running.release()

    def wait(self) -> None:
        """Waits until the work is over, however; Ctrl-C ends the wait, not the work.

        Raises `RuntimeError` in a process forked meanwhile: the worker thread is not there.
        """
        while not self.is_over:
            if os.getpid() != self._process:
                raise RuntimeError(
                    "the process was forked while a prefill was being indexed, which goes on only "
                    "in the parent: this cache cannot be used here"
                )
            if self._running.acquire(timeout=_POLL):
                self._running.release()

    def cancel(self) -> None:
        """Drops the work if it has not begun, or else waits as `wait` does."""
        if os.getpid() == self._process:
            self._owner.setdefault("is", "canceller")
        self.wait()


class Pipeline:
    """One worker thread, and what waits for it: at most `depth` jobs with the one that runs.

    The thread ends when the pipeline is dropped; at the end of the interpreter the jobs still
    waiting are done first. A forked process gets a thread of its own.

    Args:
        depth: most jobs at a time, each of which holds a layer's new keys and values.
    """

    def __init__(self, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._depth = depth
        self._jobs: list[Job] = []
        self._start()
        _pipelines.add(self)

    def submit(self, job: Job) -> None:
        """Does a job after all before it; waits while there are `depth` others."""
        if os.getpid() != self._process:
            self._start()
        for over in [job for job in self._jobs if job.is_over]:
            with suppress(ValueError):  # another thread has submitted, too
                self._jobs.remove(over)
        while len(waiting := [job for job in self._jobs if not job.is_over]) >= self._depth:
            waiting[0].wait()
        self._jobs.append(job)
        self._queue.put(job)

    def finish(self) -> None:
        """Waits until all jobs are over."""
        if os.getpid() == self._process:
            for job in self._jobs:
                job.wait()

    def _start(self) -> None:
        self._process = os.getpid()
        self._jobs = []
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        # The thread must not keep the pipeline alive.
        weakref.finalize(self, self._queue.put, None)
        threading.Thread(
            target=_work, args=(self._queue,), name="icecache-index", daemon=True
        ).start()


def _work(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job


_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """A daemon thread must not be in the core when the interpreter goes."""
    for pipeline in list(_pipelines):
        pipeline.finish()

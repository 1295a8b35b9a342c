"""Indexing beside the device: a worker thread stores prefilled layers while the next ones are
computed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for


class Job:
    """Work given to a `Pipeline`."""

    def __init__(self) -> None:
        self._future: Future[object]
        self._process = os.getpid()
        self._ended = False  # read without a lock, which a fork might have caught locked

    def wait(self) -> None:
        """Waits until the work has ended, however; Ctrl-C ends the wait, not the work.

        Raises `RuntimeError` in a process forked meanwhile: the worker thread is not there.
        """
        if self._ended:
            return
        if os.getpid() != self._process:
            raise RuntimeError(
                "the process was forked while a prefill was being indexed, which goes on only in "
                "the parent: this cache cannot be used here"
            )
        wait_for([self._future])

    def cancel(self) -> None:
        """Drops the work if it has not begun, or else waits as `wait` does."""
        if os.getpid() != self._process or not self._future.cancel():
            self.wait()

    @property
    def error(self) -> BaseException | None:
        """What the work raised, once it has ended."""
        return None if self._future.cancelled() else self._future.exception()


class Pipeline:
    """One worker thread, and what waits for it: at most `depth` jobs with the one that runs.

    The thread starts with the first job and ends when the pipeline is dropped; at the end of the
    interpreter the jobs still waiting are done first. A forked process gets a thread of its own.

    Args:
        depth: most jobs at a time, each of which holds a layer's new keys and values.
    """

    def __init__(self, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._depth = depth
        self._start()

    def submit(self, work: Callable[[], object]) -> Job:
        """Does `work` after all before it; waits while there are `depth` jobs."""
        if os.getpid() != self._process:
            self._start()
        room = self._room
        room.acquire()
        job = Job()
        try:
            job._future = self._executor.submit(work)
        except BaseException:
            room.release()
            raise

        def ended(_: object) -> None:
            job._ended = True
            room.release()

        job._future.add_done_callback(ended)
        return job

    def _start(self) -> None:
        self._process = os.getpid()
        self._room = threading.Semaphore(self._depth)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="icecache-index")

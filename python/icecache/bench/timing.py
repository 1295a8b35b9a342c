"""Clock, quantiles, and the memory's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

COLD_BYTES = 10**9
"""What is read in turns is at least as large together, so that no cache holds it."""

T = TypeVar("T")


def clock(call: Callable[[], T]) -> tuple[float, T]:
    """Milliseconds of a call, and its result."""
    started = time.perf_counter()
    result = call()
    return 1e3 * (time.perf_counter() - started), result


def quantile(times: Sequence[float], share: float) -> float:
    return float(np.quantile(times, share))


def rest() -> None:
    """Lets torch's workers, which spin for a while after each call, go to sleep."""
    time.sleep(0.3)


def bandwidth() -> float:
    """Bytes per second that torch's threads read in order: the best of several sums."""
    numbers = torch.ones(COLD_BYTES // 4)
    times = [clock(numbers.sum)[0] for _ in range(5)]
    return numbers.nbytes / min(times) * 1e3

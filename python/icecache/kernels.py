"""The kernel of the device path, compiled for and launched on an NVIDIA GPU by CuPy.

Addresses and streams are numbers (`tensor.data_ptr()`, `stream.cuda_stream`), so that nothing here
depends on who owns the memory. cuda/scatter_rows.cu says what the kernel does and expects.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from ._icecache import SCATTER_ROWS

_THREADS = 128
"""Threads of a block: a few small blocks spread over more multiprocessors than one large one."""

_MAX_BLOCKS = 2**31 - 1
"""CUDA's limit for a grid; a kernel strides over what is beyond it."""


def word_bytes(row_bytes: int, *addresses: int) -> int:
    """Bytes that a thread moves at once: the largest of 16, 8, 4 and 2 that divides the row and
    every address; `ValueError` if none does."""
    word = math.gcd(16, row_bytes, *addresses)
    if row_bytes <= 0 or word < 2:
        raise ValueError(
            "row_bytes (at least 2) and addresses must be multiples of 2, "
            f"got row_bytes {row_bytes} and addresses {[hex(a) for a in addresses]}"
        )
    return word


def launch_shape(count: int, row_bytes: int, word: int) -> tuple[tuple[int], tuple[int, int]]:
    """Grid and block for `count` pairs of rows moved in words: a thread per word of a pair, as many
    pairs in a block as fit."""
    x = min(2 * row_bytes // word, _THREADS)
    y = _THREADS // x
    return (min(-(-count // y), _MAX_BLOCKS),), (x, y)


def prepare(device: int) -> None:
    """Compiles the kernel for CUDA device number `device`, so that the first step need not.

    Raises `ImportError` without CuPy, and what CuPy raises if the device cannot be used.
    """
    with _cupy().cuda.Device(device):
        _kernel(16, device)


def scatter_rows(
    rows: int,
    targets: int,
    keys: int,
    values: int,
    count: int,
    row_bytes: int,
    stream: int,
    device: int,
) -> None:
    """Queues the copy of packed rows into their slots: row `targets[m]` of `keys` and of `values`
    becomes the first and the second row of pair `m` of `rows`.

    rows: u8 [count, 2, row_bytes]; targets: u32 [count], distinct; keys, values: u8
    [slots, row_bytes]; all addresses on CUDA device number `device`, to which the CUDA `stream`
    belongs. Returns at once, but that the first call for a width of words compiles; the caller
    keeps the memory until the stream has passed.

    Raises `ValueError` for a row or an address that no word divides, `ImportError` without CuPy,
    and what CuPy raises if the device cannot be used.
    """
    word = word_bytes(row_bytes, rows, keys, values)
    if targets % 4:
        raise ValueError(f"targets must be at a multiple of 4, got address {targets:#x}")
    if count == 0:
        return
    cupy = _cupy()
    grid, block = launch_shape(count, row_bytes, word)
    arguments = rows, targets, keys, values, cupy.uint32(count), cupy.uint32(row_bytes)
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(_Stream(stream)):
        _kernel(word, device)(grid, block, arguments)


class _Stream:
    """A stream of another library, by the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@functools.cache
def _kernel(word: int, device: int) -> Any:
    """The kernel for words of this size, compiled for `device`, which is the current one."""
    module = _cupy().RawModule(code=SCATTER_ROWS, options=("--std=c++17",), backend="nvrtc")
    return module.get_function(f"scatter_rows_{word}")


def _cupy() -> Any:
    try:
        import cupy
    except ModuleNotFoundError as error:
        raise ImportError(
            'a CUDA device needs CuPy: pip install "icecache[cuda12]" or "icecache[cuda13]", '
            "whichever the driver supports"
        ) from error
    return cupy

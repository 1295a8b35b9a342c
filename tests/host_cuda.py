"""The device's kernel on the CPU: the same `.cu`, compiled as C++ with `host_cuda.h`."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from icecache.kernels import launch_shape, word_bytes

HERE = Path(__file__).parent
SOURCE = HERE.parent / "cuda/scatter_rows.cu"
# A misaligned access, which a GPU refuses and an x86 allows, ends the process.
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
FLAGS += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels and `launch`, built once per process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scatter_rows.so"
        inputs = ["-include", HERE / "host_cuda.h", "-x", "c++", SOURCE]
        subprocess.run(["g++", *FLAGS, *inputs, "-o", path], check=True)
        built = ctypes.CDLL(str(path))  # stays mapped when the file is gone
    address, u32 = ctypes.c_void_p, ctypes.c_uint32
    built.launch.argtypes = [address, u32, u32, u32, ctypes.c_uint64]
    built.launch.argtypes += [address, address, address, address, u32, u32]
    built.launch.restype = None
    return built


def scatter_rows(
    rows: int,
    targets: int,
    keys: int,
    values: int,
    count: int,
    row_bytes: int,
    *,
    seed: int = 0,
    shape: tuple[tuple[int], tuple[int, int]] | None = None,
) -> None:
    """`icecache.kernels.scatter_rows` on addresses of ordinary memory, done when it returns.

    The seed orders the threads; `shape` is a grid and a block other than `launch_shape`'s.
    """
    word = word_bytes(row_bytes, rows, keys, values)
    (blocks,), (x, y) = shape or launch_shape(count, row_bytes, word)
    kernel = library()[f"scatter_rows_{word}"]
    library().launch(kernel, blocks, x, y, seed, rows, targets, keys, values, count, row_bytes)

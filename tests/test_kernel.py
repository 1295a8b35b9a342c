"""The device's kernel: the same source on the CPU against NumPy, and compiled for every GPU."""

import builtins
import re
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from host_cuda import SOURCE, library, scatter_rows
from hypothesis import given
from hypothesis import strategies as st

from icecache import kernels
from icecache._icecache import SCATTER_ROWS

# f32, and bf16 and f16, which are the same to a copy.
ITEM_BYTES = st.sampled_from([4, 2])
HEAD_DIMS = st.one_of(st.sampled_from([64, 80, 96, 128, 192, 256]), st.integers(1, 300))
GUARD = 48  # bytes of poison on either side of an array
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


class Buffer:
    """Random bytes that begin `offset` bytes past a multiple of 16, and what surrounds them."""

    def __init__(self, random, size, offset=0):
        self.all = random.integers(256, size=size + 2 * GUARD + 32, dtype=np.uint8)
        start = GUARD + (offset - self.all.ctypes.data - GUARD) % 16
        self.bytes = self.all[start : start + size]

    @property
    def address(self):
        return self.bytes.ctypes.data


@st.composite
def launch_shapes(draw):
    """The shape of a launch, or any other: too few threads and blocks, and too many."""
    if draw(st.booleans()):
        return None
    return (draw(st.integers(1, 9)),), (draw(st.integers(1, 160)), draw(st.integers(1, 5)))


@given(
    item_bytes=ITEM_BYTES,
    head_dim=HEAD_DIMS,
    slots=st.integers(1, 40),
    misses=st.integers(0, 40),
    offsets=st.tuples(*[st.sampled_from([0, 0, 0, 2, 4, 8, 12])] * 3),
    shape=launch_shapes(),
    seed=st.integers(0, 2**32),
)
def test_writes_the_targets_and_nothing_else(
    item_bytes, head_dim, slots, misses, offsets, shape, seed
):
    random = np.random.default_rng(seed)
    row_bytes, count = item_bytes * head_dim, min(misses, slots)
    keys, values = (Buffer(random, slots * row_bytes, offset) for offset in offsets[:2])
    rows = Buffer(random, count * 2 * row_bytes, offsets[2])
    targets = random.permutation(slots)[:count].astype(np.uint32)
    want = [buffer.all.copy() for buffer in (keys, values, rows)]
    for i, buffer in enumerate((keys, values)):
        start = buffer.bytes.ctypes.data - buffer.all.ctypes.data
        inside = want[i][start : start + buffer.bytes.size].reshape(slots, row_bytes)
        inside[targets] = rows.bytes.reshape(count, 2, row_bytes)[:, i]

    addresses = rows.address, targets.ctypes.data, keys.address, values.address
    scatter_rows(*addresses, count, row_bytes, seed=seed, shape=shape)

    for buffer, expected in zip((keys, values, rows), want, strict=True):
        np.testing.assert_array_equal(buffer.all, expected)


def test_offsets_are_64_bits_wide():
    """A row beyond 4 GiB: memory that is never touched costs nothing."""
    row_bytes, target = 2**20, 2**12 + 3
    buffers = [np.zeros((target + 1) * row_bytes, np.uint8) for _ in "kv"]
    rows = np.arange(2 * row_bytes, dtype=np.uint32).astype(np.uint8)
    rows[row_bytes:] ^= 0xFF
    targets = np.array([target], np.uint32)
    addresses = [array.ctypes.data for array in (rows, targets, *buffers)]
    scatter_rows(*addresses, 1, row_bytes)
    for buffer, row in zip(buffers, rows.reshape(2, row_bytes), strict=True):
        np.testing.assert_array_equal(buffer[-row_bytes:], row)
        assert not buffer[: 16 * row_bytes].any()


@given(row=st.integers(1, 600), addresses=st.lists(st.integers(0, 2**48), max_size=3))
def test_the_word_is_the_widest_that_fits(row, addresses):
    row_bytes, addresses = 2 * row, [2 * address for address in addresses]
    word = kernels.word_bytes(row_bytes, *addresses)
    assert word in (2, 4, 8, 16)
    assert all(n % word == 0 for n in (row_bytes, *addresses))
    assert word == 16 or any(n % (2 * word) for n in (row_bytes, *addresses))


@pytest.mark.parametrize("row_bytes, address", [(0, 16), (-2, 16), (129, 16), (128, 17)])
def test_refuses_what_no_word_divides(row_bytes, address):
    with pytest.raises(ValueError, match=rf"of 2, got row_bytes {row_bytes} .*{hex(address)}"):
        kernels.word_bytes(row_bytes, address)
    with pytest.raises(ValueError, match="multiples of 2"):
        kernels.scatter_rows(address, 16, 16, 16, 1, row_bytes, stream=0, device=0)


def test_refuses_misaligned_targets():
    with pytest.raises(ValueError, match="multiple of 4, got address 0x12"):
        kernels.scatter_rows(16, 18, 16, 16, 1, 128, stream=0, device=0)


@given(count=st.integers(1, 2**32 - 1), item_bytes=ITEM_BYTES, head_dim=HEAD_DIMS)
def test_a_launch_has_a_thread_per_word(count, item_bytes, head_dim):
    row_bytes = item_bytes * head_dim
    word = kernels.word_bytes(row_bytes)
    (blocks,), (x, y) = kernels.launch_shape(count, row_bytes, word)
    assert x == min(2 * row_bytes // word, 128)
    assert 64 < x * y <= 128
    assert blocks == 2**31 - 1 or (blocks - 1) * y < count <= blocks * y


def test_a_usual_pair_of_rows_is_one_warp():
    assert kernels.launch_shape(100, 256, 16) == ((25,), (32, 4))


def test_an_empty_launch_needs_no_device():
    kernels.scatter_rows(16, 16, 16, 16, 0, 128, stream=0, device=0)


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_cupy(name, *args, **kwargs):
        if name == "cupy":
            raise ModuleNotFoundError("No module named 'cupy'", name="cupy")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_cupy)
    with pytest.raises(ImportError, match=r'pip install "icecache\[cuda12\]" or .*\[cuda13\]'):
        kernels.scatter_rows(16, 16, 16, 16, 1, 128, stream=0, device=0)


def test_the_extension_embeds_the_source():
    assert SOURCE.read_text() == SCATTER_ROWS, "run `make test`: the build is old"


class HostCupy:
    """As much of CuPy as `kernels` uses, for a device that is the CPU."""

    uint32 = np.uint32

    def __init__(self):
        self.current, self.compiled, self.launched = [], [], []
        self.cuda = SimpleNamespace(Device=self.enter, Stream=SimpleNamespace())
        self.cuda.Stream.from_external = lambda stream: self.enter(stream.__cuda_stream__())

    @contextmanager
    def enter(self, what):
        self.current.append(what)
        yield
        self.current.pop()

    def RawModule(self, code, options, backend):
        assert (code, backend) == (SCATTER_ROWS, "nvrtc")
        return SimpleNamespace(get_function=self.get_function)

    def get_function(self, name):
        self.compiled.append((name, self.current[0]))

        def kernel(grid, block, arguments):
            assert [type(a) for a in arguments] == [int] * 4 + [np.uint32] * 2
            self.launched.append((name, *self.current))
            library().launch(library()[name], *grid, *block, 0, *arguments)

        return kernel


@pytest.fixture
def host_cupy(monkeypatch):
    kernels._kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", HostCupy())
    yield sys.modules["cupy"]
    kernels._kernel.cache_clear()


def test_launches_on_the_stream_and_compiles_once_per_device(host_cupy):
    rows = np.arange(3 * 2 * 24, dtype=np.uint16).reshape(3, 2, 24)
    targets = np.array([4, 0, 3], np.uint32)
    for device, stream in ((0, 0x7F00), (1, 0x7F08), (0, 0)):
        keys, values = np.zeros((2, 5, 24), np.uint16)
        addresses = [array.ctypes.data for array in (rows, targets, keys, values)]
        kernels.scatter_rows(*addresses, 3, 48, stream, device)
        np.testing.assert_array_equal(keys[targets], rows[:, 0])
        np.testing.assert_array_equal(values[targets], rows[:, 1])
        assert not keys[1:3].any() and not values[1:3].any()
        assert host_cupy.launched[-1] == ("scatter_rows_16", device, (0, stream))
    assert host_cupy.compiled == [("scatter_rows_16", 0), ("scatter_rows_16", 1)]


@pytest.fixture(scope="module")
def nvrtc():
    return pytest.importorskip("cuda.bindings.nvrtc", reason="needs the dev extra, on Linux")


def compile_kernel(nvrtc, target):
    """What NVRTC makes of the source for `sm_75` and the like (a cubin) or `compute_75` (PTX)."""

    def call(function, *arguments):
        status, *results = function(*arguments)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (function.__name__, status)
        return results[0] if results else None

    def read(name):
        buffer = bytes(call(getattr(nvrtc, f"nvrtcGet{name}Size"), program))
        call(getattr(nvrtc, f"nvrtcGet{name}"), program, buffer)
        return buffer

    program = call(nvrtc.nvrtcCreateProgram, SCATTER_ROWS.encode(), b"scatter_rows.cu", 0, [], [])
    options = [f"--gpu-architecture={target}", "--std=c++17", "--warning-as-error=all-warnings"]
    options = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = read("ProgramLog").strip(b" \0").decode()
    assert (status, log) == (nvrtc.nvrtcResult.NVRTC_SUCCESS, "")
    code = read("CUBIN" if target.startswith("sm_") else "PTX")
    call(nvrtc.nvrtcDestroyProgram, program)
    return code


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_every_gpu_without_a_warning(nvrtc, architecture):
    cubin = compile_kernel(nvrtc, f"sm_{architecture}")
    assert cubin.startswith(b"\x7fELF")
    for word in (16, 8, 4, 2):
        assert f"scatter_rows_{word}\0".encode() in cubin


def test_a_thread_moves_a_whole_word_at_once(nvrtc):
    ptx = compile_kernel(nvrtc, "compute_75").decode()
    bodies = dict(re.findall(r"\.entry (scatter_rows_\d+)\((.*?)\n}", ptx, re.DOTALL))
    words = {16: "v4.u32", 8: "v2.u32", 4: "u32", 2: "u16"}
    for word, access in words.items():
        body = bodies[f"scatter_rows_{word}"]
        assert re.search(rf"ld\.global\.nc\.{access}", body), word
        assert re.search(rf"st\.global\.{access}", body), word
    assert ".shared" not in ptx and ".local" not in ptx

"""Keys, values and queries for tests, in every kind of array that a cache takes."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from icecache import IceConfig, LayerCache
from icecache.reference import exact_attention

# The products are small: torch's threads would only wait for each other, and for the cache's.
torch.set_num_threads(1)

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
KINDS = [f"{library}-{dtype}" for library in ("numpy", "torch") for dtype in NUMPY]
# Largest relative error of rounding to the dtype.
ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def examples(share):
    """A share of the examples that the profile asks for, for costly tests."""
    return settings(max_examples=round(share * settings.default.max_examples))


def dtype_of(kind):
    return kind.split("-")[1]


def cast(kind, data):
    """float32 data as an array of this kind."""
    dtype = dtype_of(kind)
    if kind.startswith("torch"):
        return torch.from_numpy(np.array(data, np.float32)).to(TORCH[dtype])
    return np.asarray(data, np.float32).astype(NUMPY[dtype])


def tensor(array):
    """An array of any kind as float64."""
    return array.double() if torch.is_tensor(array) else torch.from_numpy(array.astype(np.float64))


def bits(array):
    """What is stored, bit for bit: as unsigned integers."""
    if torch.is_tensor(array):
        array = array.detach().contiguous()
        array = array.view(torch.uint16 if array.element_size() == 2 else torch.int32).numpy()
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.itemsize}")


def same(a, b):
    """Same kind, dtype, shape and bits."""
    return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def join(arrays):
    """Along the positions."""
    if torch.is_tensor(arrays[0]):
        return torch.cat(arrays, dim=1)
    return np.concatenate(arrays, axis=1)


def assert_close(out, want, values, slack=3e-5, roundings=1):
    """`out` is `want` to the rounding of its dtype and of float32 sums, in units of the values."""
    dtype = next(name for name in TORCH if out.dtype in (TORCH[name], np.dtype(NUMPY[name])))
    bound = (roundings * ROUNDING[dtype] + slack) * float(tensor(values).abs().max())
    error = float((tensor(out) - want).abs().max())
    assert error <= bound, f"off by {error:.3g}, at most {bound:.3g} allowed"


@dataclass(frozen=True)
class Problem:
    """Queries, keys and values of `n` positions, and the shape of the layer they belong to."""

    q: Any
    k: Any
    v: Any
    scale: float

    @property
    def n(self):
        return self.k.shape[1]

    def layer(self, **options):
        """An empty cache, always sparse unless told otherwise."""
        config = IceConfig(**{"dense_below": 0, **options})
        q_heads, kv_heads, dim = len(self.q), len(self.k), self.k.shape[2]
        return LayerCache(q_heads, kv_heads, dim, config, self.scale)

    def rows(self, start, stop):
        """q, k, v of some positions."""
        return self.q[:, start:stop], self.k[:, start:stop], self.v[:, start:stop]

    def exact(self, start, stop):
        """Full attention of some positions to all before and to themselves, float64."""
        q, k, v = tensor(self.q[:, start:stop]), tensor(self.k[:, :stop]), tensor(self.v[:, :stop])
        return exact_attention(q, k, v, self.scale)


def prefilled(problem, n, **options):
    """A cache of the first `n` positions."""
    layer = problem.layer(**options)
    layer.prefill(problem.k[:, :n], problem.v[:, :n])
    return layer


def decode_each(layer, problem, start, stop):
    """Decodes positions one by one; the outputs, joined."""
    steps = []
    for i in range(start, stop):
        q, k, v = problem.rows(i, i + 1)
        steps.append(layer.decode(q, k, v))
    return join(steps)


def make_problem(kind, kv_heads=2, group=2, dim=20, n=500, seed=0, content="clustered"):
    """`content`: "normal"; "clustered", keys of topics that return; "twins", many identical keys;
    "offset", keys far from the origin."""
    random = np.random.default_rng(seed)
    k, v = random.standard_normal((2, kv_heads, n, dim))
    q = random.standard_normal((kv_heads * group, n, dim))
    if content != "normal":
        topics = 2 * random.standard_normal((2, kv_heads, n // 20 + 1, dim))
        topic = random.integers(n // 20 + 1, size=n)
        spread = 0.0 if content == "twins" else 0.4
        k, v = topics[:, :, topic] + spread * np.stack([k, v])
    if content == "offset":
        k = k + 3 * random.standard_normal((kv_heads, 1, dim))
    return Problem(cast(kind, q), cast(kind, k), cast(kind, v), dim**-0.5)


CONTENTS = ("normal", "clustered", "twins", "offset")
# Short: fewer than a page, than sink and window; long: with a tree of several levels.
LENGTHS = st.one_of(st.integers(1, 60), st.integers(360, 480))


@st.composite
def problems(draw, kind, lengths=LENGTHS, contents=CONTENTS):
    """Random shapes: one KV head or more, groups of 1 to 8, any head_dim."""
    return make_problem(
        kind,
        kv_heads=draw(st.integers(1, 3), "kv_heads"),
        group=draw(st.integers(1, 8), "group"),
        dim=draw(st.sampled_from([1, 3, 16, 20, 33, 64]), "dim"),
        n=draw(lengths, "n"),
        seed=draw(st.integers(0, 2**20), "seed"),
        content=draw(st.sampled_from(contents), "content"),
    )


@st.composite
def tree_options(draw):
    """Options of every kind of tree."""
    page_size = draw(st.integers(1, 9))
    return dict(
        page_size=page_size,
        page_capacity=draw(st.one_of(st.none(), st.integers(page_size, 3 * page_size))),
        fanout=draw(st.integers(2, 13)),
        refine_passes=draw(st.integers(0, 3)),
        summary_dtype=draw(st.sampled_from(["f32", "f16", "bf16"])),
        sink_tokens=draw(st.integers(0, 40)),
        window_tokens=draw(st.integers(1, 70)),
        seed=draw(st.integers(0, 100)),
        num_threads=draw(st.sampled_from([None, 1, 2, 3])),
    )

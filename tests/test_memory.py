"""What a `LayerCache` holds beyond the raw keys and values, and whether it counts it right."""

import json
import subprocess
import sys

import pytest
from kv_arrays import decode_each, make_problem, prefilled

MOST_OVERHEAD = 0.30

# Grows by one layer after another and prints what the process grew by and what the layers say.
GROW = """
import json, sys
import ml_dtypes, numpy as np
from icecache import IceConfig, LayerCache

dtype, layers, tokens, dim = sys.argv[1], *map(int, sys.argv[2:])
dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
random = np.random.default_rng(0)
topics = 2 * random.standard_normal((2, tokens // 20, dim), np.float32)
rows = topics[:, random.integers(tokens // 20, size=tokens)]
rows += 0.4 * random.standard_normal((2, tokens, dim), np.float32)
rows = rows.astype(dtype)

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

config = IceConfig(refine_passes=1)
def make():
    layer = LayerCache(2, 2, dim, config)
    layer.prefill(rows, rows)
    return layer

first = make()  # starts threads, fills scratch
before = resident()
held = [make() for _ in range(layers)]
grown = resident() - before
stats = [layer.stats() for layer in held]
kv, index = (sum(getattr(s, name) for s in stats) for name in ("kv_bytes", "index_bytes"))
print(json.dumps({"grown": grown, "kv": kv, "index": index}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "layers"), [("f32", 36), ("f16", 36), ("bf16", 36)])
def test_the_bytes_it_counts_are_the_bytes_the_process_grows_by(dtype, layers):
    command = [sys.executable, "-c", GROW, dtype, str(layers), "4096", "128"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    sizes = json.loads(result.stdout)
    raw = layers * 2 * 2 * 4096 * 128 * (4 if dtype == "f32" else 2)
    assert sizes["kv"] == raw >= 150e6
    assert 0 < sizes["index"] <= MOST_OVERHEAD * raw
    counted = sizes["kv"] + sizes["index"]
    print(f"{dtype}: counted {counted / 1e6:.1f} MB, grown {sizes['grown'] / 1e6:.1f} MB")
    assert sizes["grown"] == pytest.approx(counted, rel=0.05)


# Makes, fills and drops one cache after another and prints what the process holds after each.
CHURN = """
import json, sys
import numpy as np
from icecache import LayerCache

random = np.random.default_rng(0)
rows = random.standard_normal((2, 2100, 64), np.float32)

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

sizes = []
for _ in range(int(sys.argv[1])):
    layer = LayerCache(2, 2, 64)
    layer.prefill(rows[:, :2000], rows[:, :2000])
    for i in range(2000, 2080, 4):
        layer.decode(*[rows[:, i : i + 4]] * 3)
    layer.crop(1000)
    layer.append(rows[:, :100], rows[:, :100])
    del layer
    sizes.append(resident())
print(json.dumps(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_caches_that_are_dropped_leave_nothing():
    command = [sys.executable, "-c", CHURN, "200"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    sizes = json.loads(result.stdout)
    # The first ones start threads, fill scratch and give the allocator its arenas.
    plateau, last = max(sizes[:100]), max(sizes[-10:])
    print(f"after 100 caches {plateau / 1e6:.2f} MB, after {len(sizes)} {last / 1e6:.2f} MB")
    assert last <= 1.02 * plateau


@pytest.mark.parametrize("content", ["clustered", "normal"])
@pytest.mark.parametrize("kind", ["numpy-f32", "numpy-f16", "numpy-bf16"])
def test_overhead_after_prefill(kind, content):
    problem = make_problem(kind, kv_heads=2, group=1, dim=64, n=4200, content=content)
    layer = prefilled(problem, 4096)
    stats = layer.stats()
    print(f"{kind}: overhead {stats.overhead:.3f}, mean page fill {stats.mean_page_fill:.2f}")
    assert stats.kv_bytes == 2 * 2 * 4096 * 64 * problem.k.dtype.itemsize
    assert stats.overhead == pytest.approx(stats.index_bytes / stats.kv_bytes)
    # At least the mean keys and values of the pages (f16), and each token's position.
    least = stats.pages * 2 * 64 * 2 + 2 * stats.tree_tokens * 4
    assert least <= stats.index_bytes and stats.overhead <= MOST_OVERHEAD
    # Pages that grew leave holes, but not without bound.
    decode_each(layer, problem, 4096, 4200)
    assert layer.stats().overhead <= MOST_OVERHEAD + 0.1


def test_bytes_come_back():
    problem = make_problem("numpy-f32", dim=64, n=2000)
    layer = prefilled(problem, 2000)
    full = layer.stats()
    layer.crop(10)
    assert layer.stats().kv_bytes == full.kv_bytes // 200
    layer.reset()
    assert layer.stats().kv_bytes == 0 and layer.stats().index_bytes < 1024

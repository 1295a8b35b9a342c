"""Every instruction set that this CPU has gives the same answers: `ICECACHE_SIMD` in a process."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Prints what a cache and a tree answer in each dtype; head_dim 33 leaves a rest in every register.
VALUES = """
import json
import ml_dtypes, numpy as np
from icecache import DciTree, IceConfig, LayerCache, _icecache

random = np.random.default_rng(0)
data = random.standard_normal((4, 2, 700, 33), np.float32)
answers = {"name": _icecache.simd_name()}
for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
    q, k, v = (x.astype(dtype) for x in (np.concatenate(data[:2]), data[2], data[3]))
    layer = LayerCache(4, 2, 33, IceConfig(token_budget=700, dense_below=0))
    layer.prefill(k[:, :-1], v[:, :-1])
    out = layer.decode(q[:, -1:], k[:, -1:], v[:, -1:])
    tree = DciTree(33)
    tree.insert(k[0])
    ids, scores = tree.search(q[0, :40], 8, field_of_view=2**31 - 1)
    sparse = LayerCache(4, 2, 33, IceConfig(token_budget=100, dense_below=0))
    sparse.prefill(k[:, :-1], v[:, :-1])
    near = sparse.decode(q[:, -1:], k[:, -1:], v[:, -1:])
    for each in (layer, sparse, tree):
        each.check()
    error = np.linalg.norm(near.astype(float) - out.astype(float))
    answers[np.dtype(dtype).name] = {
        "attention": out.astype(float).tolist(),
        "ids": ids.tolist(),
        "scores": scores.tolist(),
        "error": error / np.linalg.norm(out.astype(float)),
    }
print(json.dumps(answers))
"""


def values(name: str) -> dict:
    environment = {**os.environ, "ICECACHE_SIMD": name}
    command = [sys.executable, "-c", VALUES]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def scalar() -> dict:
    return values("scalar")


def test_plain_code_can_be_chosen(scalar: dict) -> None:
    assert scalar["name"] == "scalar"


@pytest.mark.parametrize(
    ("name", "machine", "features"),
    [
        ("avx2", "x86_64", {"avx2", "fma", "f16c"}),
        ("avx512", "x86_64", {"avx512bw", "avx512vl", "avx512dq"}),
        ("neon", "aarch64", {"asimd"}),
    ],
)
def test_instruction_sets_agree_with_plain_code(
    name: str, machine: str, features: set, scalar: dict
) -> None:
    if sys.platform != "linux" or platform.machine() != machine:
        pytest.skip(f"reads the features of an {machine} from /proc")
    if missing := features - set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text())):
        pytest.skip(f"the CPU has no {', '.join(sorted(missing))}")
    answers = values(name)
    assert answers["name"] == name
    for dtype in ("float32", "float16", "bfloat16"):
        got, want = answers[dtype], scalar[dtype]
        # One unit of the last place, where the sums round to different sides.
        room = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        np.testing.assert_allclose(got["attention"], want["attention"], rtol=room, atol=1e-6)
        assert got["ids"] == want["ids"]
        np.testing.assert_allclose(got["scores"], want["scores"], atol=2e-5)
        # The trees may differ where keys are as good as equally near; how well they serve, not.
        assert got["error"] <= 1.1 * want["error"] + 0.01

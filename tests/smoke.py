"""Checks an installed wheel where there is NumPy and nothing else: run by `make smoke`.

No torch, no transformers, no compiler and no pytest: plain assertions.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import find_spec

import numpy as np

import icecache
from icecache import DciTree, IceConfig, LayerCache, _icecache

Q_HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 24, 600


def check_environment():
    assert not {"torch", "transformers"} & set(sys.modules), "importing icecache is not cheap"
    for name in ("torch", "transformers", "pytest"):
        assert find_spec(name) is None, f"{name} is installed: this checks little"
    for name in ("cargo", "rustc"):
        assert shutil.which(name) is None, f"{name} is on the PATH: this checks little"


def check_contents():
    """The wheel has the package, its types and licences, and nothing else."""
    wheel = distribution("icecache")
    assert wheel.version == icecache.__version__
    assert "Tag: cp311-abi3-" in wheel.read_text("WHEEL")
    info = f"icecache-{wheel.version}.dist-info"
    files = [file for file in wheel.files if "__pycache__" not in file.parts]
    assert {file.parts[0] for file in files} == {"icecache", info, ".."}
    assert [file.name for file in files if file.parts[0] == ".."] == ["icecache"]  # the command
    package = [file for file in files if file.parts[0] == "icecache"]
    names = {str(file) for file in package}
    page = {f"icecache/report/page.{kind}" for kind in ("html", "css")}
    core = {"icecache/py.typed", "icecache/_icecache.pyi", "icecache/_icecache.abi3.so"}
    assert {name for name in names if not name.endswith(".py")} == page | core
    for licence in ("LICENSE-MIT", "LICENSE-APACHE"):
        assert f"{info}/licenses/{licence}" in map(str, files), f"no {licence}"


def check_missing_extra():
    for name in ("IceCache", "attach"):
        try:
            getattr(icecache, name)
        except ImportError as error:
            assert "pip install 'icecache[torch]'" in str(error), error
        else:
            raise AssertionError(f"{name} without torch")


def exact_attention(q, k, v):
    """q [q_heads, d] to all of k, v [kv_heads, n, d]; [q_heads, d] in float64."""
    k, v = (np.repeat(x, Q_HEADS // KV_HEADS, axis=0).astype(np.float64) for x in (k, v))
    logits = np.einsum("hd,hnd->hn", q, k) * DIM**-0.5
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.einsum("hn,hnd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def answers():
    """Attention and search, each checked against the exact answer."""
    random = np.random.default_rng(0)
    k, v = random.standard_normal((2, KV_HEADS, TOKENS, DIM), np.float32)
    q = random.standard_normal((Q_HEADS, TOKENS, DIM), np.float32)
    want = exact_attention(q[:, -1], k, v)
    outs = []
    # With a budget of everything, a step is full attention; with less, close to it.
    for budget, room in ((TOKENS, 1e-5), (128, 0.1)):
        layer = LayerCache(Q_HEADS, KV_HEADS, DIM, IceConfig(token_budget=budget, dense_below=0))
        layer.prefill(k[:, :-1], v[:, :-1])
        out = layer.decode(q[:, -1:], k[:, -1:], v[:, -1:])[:, 0]
        layer.check()
        error = np.abs(out - want).max()
        assert error <= room, f"budget {budget}: off by {error:.2g}"
        outs.append(out)

    keys, queries = random.standard_normal((3000, DIM), np.float32), q[0, :50]
    tree = DciTree(DIM)
    tree.insert(keys)
    tree.check()
    ids, scores = tree.search(queries, 10)
    best, best_scores = tree.exact_search(queries, 10)
    np.testing.assert_allclose(best_scores, -np.sort(-queries @ keys.T)[:, :10], atol=1e-4)
    recall = np.mean([np.isin(b, a).mean() for a, b in zip(ids, best, strict=True)])
    assert recall >= 0.9, f"recall {recall:.3f} of keys without any structure"
    np.testing.assert_allclose(scores, (keys[ids] @ queries[..., None])[..., 0], atol=1e-4)
    return {"simd": _icecache.simd_name(), "attention": outs[0].tolist(), "found": best.tolist()}


def main():
    check_environment()
    check_contents()
    check_missing_extra()
    mine = answers()
    command = [sys.executable, "-I", __file__, "answers"]
    environment = {**os.environ, "ICECACHE_SIMD": "scalar"}
    scalar = json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    )
    assert scalar["simd"] == "scalar"
    assert scalar["found"] == mine["found"]
    np.testing.assert_allclose(scalar["attention"], mine["attention"], atol=1e-5)
    print(f"icecache {icecache.__version__} works from its wheel, {mine['simd']} and scalar")


if __name__ == "__main__":
    if sys.argv[1:] == ["answers"]:
        print(json.dumps(answers()))
    else:
        main()

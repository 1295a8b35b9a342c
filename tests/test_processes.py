"""Signals, forks, the end of the interpreter and the environment: each in a process of its own."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks of POSIX")


def run(code, *args, env=(), timeout=60):
    """What a new interpreter prints; it must exit with 0."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **dict(env)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- Ctrl-C -------------------------------------------------------------------------------------

# Each defines `long`, a call of many seconds, and `state`, what it must leave as it was.
LONG_CALLS = {
    "the first bulk of a tree": """
tree = DciTree(128)
long = lambda: tree.insert(keys(400_000, 128))
check, state = tree.check, lambda: len(tree)
""",
    "a bulk that rebuilds a tree": """
tree = DciTree(128)
tree.insert(keys(2000, 128))
long = lambda: tree.insert(keys(400_000, 128))
check = tree.check
state = lambda: [x.tobytes() for x in tree.search(keys(20, 128), 5)]
""",
    "a bulk that goes in one by one": """
tree = DciTree(64, refine_passes=0)
tree.insert(keys(60_000, 64))
long = lambda: tree.insert(keys(59_000, 64))
check = tree.check
state = lambda: [x.tobytes() for x in tree.exact_search(keys(20, 64), 5)]
""",
    "brute force": """
tree = DciTree(128)
tree.insert(keys(20_000, 128))
long = lambda: tree.exact_search(keys(100_000, 128), 5)
check, state = tree.check, lambda: len(tree)
""",
    "a prefill": """
layer = LayerCache(4, 4, 128, IceConfig(dense_below=0))
rows = keys(4 * 100_000, 128).reshape(4, -1, 128)
long = lambda: layer.prefill(rows, rows)
check = layer.check
state = lambda: [layer.seq_len, layer.dtype, layer.stats()]
""",
    "a prefill that rebuilds the trees": """
layer = LayerCache(4, 4, 128, IceConfig(dense_below=0))
rows = keys(4 * 100_000, 128).reshape(4, -1, 128)
layer.prefill(rows[:, :900], rows[:, :900])
layer.decode(rows[:, :1], rows[:, :1], rows[:, :1])
long = lambda: layer.prefill(rows, rows)
check = layer.check
state = lambda: [layer.seq_len, *(x.tobytes() for x in layer.gather())]
""",
    "exact attention of a prefill": """
layer = LayerCache(8, 1, 128)
rows = keys(8 * 50_000, 128).reshape(8, -1, 128)
layer.prefill(rows[:1, :50], rows[:1, :50])
long = lambda: layer.prefill(rows[:1], rows[:1], rows)
check = layer.check
state = lambda: [layer.seq_len, layer.stats().tree_tokens, *(x.tobytes() for x in layer.gather())]
""",
    "positions appended one by one": """
layer = LayerCache(2, 2, 64, IceConfig(dense_below=0, refine_passes=0))
rows = keys(2 * 200_000, 64).reshape(2, -1, 64)
layer.prefill(rows[:, :900], rows[:, :900])
long = lambda: layer.append(rows, rows)
check = layer.check
state = lambda: [layer.seq_len, *(x.tobytes() for x in layer.gather())]
""",
}

INTERRUPTED = """
import sys, time
import numpy as np
from icecache import DciTree, IceConfig, LayerCache

def keys(n, dim):
    return np.random.default_rng(0).standard_normal((n, dim), np.float32)

exec(sys.argv[1])
before = state()
long_, started = long, time.monotonic()
print("started", flush=True)
try:
    long()
except KeyboardInterrupt:
    print("interrupted", flush=True)
else:
    sys.exit(f"done after {time.monotonic() - started} s")
check()
assert state() == before
"""


@pytest.mark.parametrize("name", LONG_CALLS)
def test_ctrl_c_ends_a_long_call_within_a_second_and_leaves_no_trace(name):
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, LONG_CALLS[name]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "started\n", child.stderr.read()
        time.sleep(0.7)
        child.send_signal(signal.SIGINT)
        sent = time.monotonic()
        line, took = child.stdout.readline(), time.monotonic() - sent
        assert line == "interrupted\n", child.stderr.read()
        assert child.wait(60) == 0, child.stderr.read()
    print(f"{name}: {took:.2f} s")
    assert took < 1

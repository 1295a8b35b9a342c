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
tree, rows = DciTree(128), keys(300_000, 128)
long = lambda: tree.insert(rows)
check, state = tree.check, lambda: len(tree)
""",
    "a bulk that rebuilds a tree": """
tree, rows = DciTree(128), keys(300_000, 128)
tree.insert(rows[:2000])
long = lambda: tree.insert(rows)
check = tree.check
state = lambda: [x.tobytes() for x in tree.search(rows[:20], 5)]
""",
    "a bulk that goes in one by one": """
tree, rows = DciTree(64, refine_passes=0), keys(150_000, 64)
tree.insert(rows)
long = lambda: tree.insert(rows[1:])
check = tree.check
state = lambda: [x.tobytes() for x in tree.exact_search(rows[:20], 5)]
""",
    "brute force": """
tree, rows = DciTree(128), keys(20_000, 128)
tree.insert(rows)
long = lambda: tree.exact_search(rows, 5)
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
    "a prefill of tensors": """
import torch
layer = LayerCache(16, 4, 128)
rows = torch.from_numpy(keys(16 * 30_000, 128).reshape(16, -1, 128)).bfloat16()
layer.prefill(rows[:4, :50], rows[:4, :50])
long = lambda: layer.prefill(rows[:4], rows[:4], rows)
check, state = layer.check, lambda: [layer.seq_len, layer.dtype]
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
import signal, sys, time
import numpy as np
from icecache import DciTree, IceConfig, LayerCache

# What a shell runs in the background ignores SIGINT, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

def keys(n, dim):
    return np.random.default_rng(0).standard_normal((n, dim), np.float32)

exec(sys.argv[1])
before = state()
started = time.monotonic()
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
def test_ctrl_c_ends_a_long_call_and_leaves_no_trace(name):
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, LONG_CALLS[name]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "started\n", child.stderr.read()
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        sent = time.monotonic()
        line, took = child.stdout.readline(), time.monotonic() - sent
        assert line == "interrupted\n", child.stderr.read()
        assert child.wait(60) == 0, child.stderr.read()
    print(f"{name}: {took:.2f} s")


def test_any_exception_of_a_signal_handler_ends_a_long_call():
    run(
        """
import signal
import numpy as np
from icecache import DciTree

def ring(*_):
    raise TimeoutError("too long")

rows = np.random.default_rng(0).standard_normal((200_000, 64), np.float32)
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.2)
tree = DciTree(64)
try:
    tree.insert(rows)
except TimeoutError as error:
    assert str(error) == "too long" and len(tree) == 0
else:
    raise SystemExit("not interrupted")
tree.insert(rows[:300])
tree.check()
"""
    )


# ---- forks --------------------------------------------------------------------------------------

FORKED = """
import os, sys, threading
import numpy as np
from icecache import IceConfig, LayerCache

rows = np.random.default_rng(0).standard_normal((2, 3000, 32), np.float32)
config = IceConfig(num_threads=4, dense_below=0)

def answer(layer):
    return layer.attend(rows[:, 2890:2900]).tobytes()

def build():
    layer = LayerCache(2, 2, 32, config)
    layer.prefill(rows[:, :2900], rows[:, :2900], rows[:, :2900])
    return layer

inherited = build()
want = answer(build())
names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
assert any(name.startswith("icecache-") for name in names), names
def child():
    assert len(os.listdir("/proc/self/task")) == 1
    assert answer(inherited) == want  # what came along
    assert answer(build()) == want  # on a pool of its own
    inherited.check()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_forked_child_makes_a_pool_of_its_own():
    run(
        FORKED
        + """
def fork(generations):
    pid = os.fork()
    if pid == 0:
        child()
        if generations > 1:
            fork(generations - 1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

fork(generations=2)
assert answer(inherited) == want
"""
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_multiprocessing_by_fork():
    run(
        FORKED
        + """
import multiprocessing
workers = [multiprocessing.get_context("fork").Process(target=child) for _ in range(3)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join(30)
    assert worker.exitcode == 0, worker.exitcode
"""
    )


# ---- the end of the interpreter -----------------------------------------------------------------


@pytest.mark.parametrize("call", ["insert", "search", "exact_search"])
def test_the_interpreter_ends_at_once_while_a_thread_is_in_a_call(call):
    started = time.monotonic()
    out = run(
        """
import sys, threading, time
import numpy as np
from icecache import DciTree

rows = np.random.default_rng(0).standard_normal((150_000, 64), np.float32)
tree, call = DciTree(64, num_threads=4), sys.argv[1]
tree.insert(rows[:5000])
work = {
    "insert": lambda: tree.insert(rows),
    "search": lambda: [tree.search(rows[:50], 5) for _ in range(10**6)],
    "exact_search": lambda: tree.exact_search(rows, 5),
}
threading.Thread(target=work[call], daemon=True).start()
time.sleep(0.3)
print("bye")
""",
        call,
    )
    assert out == "bye\n"
    assert time.monotonic() - started < 10


# ---- the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ICECACHE_NUM_THREADS", "0", 'must be an integer of at least 1, got "0"'),
        ("ICECACHE_NUM_THREADS", "-2", 'must be an integer of at least 1, got "-2"'),
        ("ICECACHE_NUM_THREADS", "many", 'must be an integer of at least 1, got "many"'),
        ("ICECACHE_NUM_THREADS", "2.5", 'must be an integer of at least 1, got "2.5"'),
        ("ICECACHE_SIMD", "avx1024", 'as this CPU has them, got "avx1024"'),
        ("ICECACHE_SIMD", "AVX2", 'as this CPU has them, got "AVX2"'),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(name, value, message):
    code = """
try:
    import icecache
except ValueError as error:
    print(error)
"""
    assert run(code, env={name: value}.items()).startswith(f"{name} must be ")
    assert message in run(code, env={name: value}.items())


@pytest.mark.parametrize("simd", ["scalar", ""])
def test_variables_that_make_sense(simd):
    out = run(
        "from icecache._icecache import available_threads, simd_name\n"
        "print(available_threads(), simd_name())",
        env={"ICECACHE_NUM_THREADS": " 3 ", "ICECACHE_SIMD": simd}.items(),
    )
    threads, name = out.split()
    assert threads == "3" and (name == simd or not simd)

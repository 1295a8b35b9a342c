"""`DeviceLayerCache` on a device in host memory, held against `LayerCache`."""

import contextlib
import copy
import os
import pickle
import signal
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from host_device import SCHEDULES, HostDevice
from hypothesis import given
from hypothesis import strategies as st
from kv_arrays import (
    TORCH,
    assert_close,
    examples,
    make_problem,
    problems,
    same,
    tensor,
    tree_options,
)
from test_arrays import BAD_CALLS, DIM, GROUP, HEADS, torch_views

from icecache import IceConfig, device_layer
from icecache.device import CudaDevice
from icecache.device_layer import DeviceLayerCache
from icecache.pipeline import Job, Pipeline
from icecache.sdpa import merge
from icecache.transfer import Transfer

every_dtype = pytest.mark.parametrize("dtype", TORCH)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
few_examples = examples(0.4)


def on_device(problem, device, shared=None, **options):
    """An empty cache for a problem, always sparse unless told otherwise."""
    q_heads, kv_heads, dim = len(problem.q), len(problem.k), problem.k.shape[2]
    config = IceConfig(**{"dense_below": 0, **options})
    return DeviceLayerCache(
        q_heads, kv_heads, dim, config, problem.scale, device=device, **(shared or {})
    )


def pair(problem, n, device, **options):
    """The same first `n` positions on the CPU and on a device."""
    layers = problem.layer(**options), on_device(problem, device, **options)
    for layer in layers:
        if n:
            layer.prefill(*problem.rows(0, n)[1:])
    return layers


def assert_alike(device, got, want, problem):
    """Equal to the rounding of the dtype, which both have."""
    device.finish()
    assert got.dtype == want.dtype and got.shape == want.shape
    assert_close(got, tensor(want), problem.v, roundings=2)


def assert_same_rows(device, layer, other):
    """Both hold the same keys and values, bit for bit."""
    rows = layer.gather(), other.gather()
    device.finish()
    assert all(same(a, b) for a, b in zip(*rows, strict=True))


# ---- what it answers ----------------------------------------------------------------------------


@every_dtype
@examples(1)
@given(data=st.data(), budget=st.integers(1, 20), steps=st.integers(1, 40))
def test_a_step_is_that_of_the_cpu(dtype, data, budget, steps):
    problem = data.draw(problems(f"torch-{dtype}"))
    n = max(0, problem.n - steps)
    options = dict(data.draw(tree_options()), token_budget=budget)
    options["dense_below"] = data.draw(st.sampled_from([0, n + 3, 1024]))
    options["tail"] = data.draw(st.sampled_from(["summary", "drop"]))
    options["device_tokens"] = budget * data.draw(st.integers(1, 6))
    device = HostDevice(data.draw(st.sampled_from(SCHEDULES)), data.draw(st.integers(0, 99)))
    cpu, layer = pair(problem, n, device, **options)
    while n < problem.n:
        stop = min(problem.n, n + data.draw(st.integers(1, 12)))
        q, k, v = problem.rows(n, stop)
        got = layer.decode(*map(device.fill, (q, k, v)))
        assert_alike(device, got, cpu.decode(q, k, v), problem)
        for mine, theirs in zip(layer.selected(), cpu.selected(), strict=True):
            assert np.array_equal(mine, theirs)
        n = stop
    layer.check()
    assert layer.seq_len == cpu.seq_len and layer.dtype == cpu.dtype == dtype
    assert_same_rows(device, layer, cpu)


@every_dtype
@few_examples
@given(data=st.data(), cuts=st.lists(st.integers(1, 480), max_size=4))
def test_prefill_in_pieces_is_full_attention(dtype, data, cuts):
    problem = data.draw(problems(f"torch-{dtype}"))
    device = HostDevice(data.draw(st.sampled_from(SCHEDULES)))
    layer, cpu = on_device(problem, device), problem.layer()
    edges = [0, *sorted({cut for cut in cuts if cut < problem.n}), problem.n]
    for start, stop in pairwise(edges):
        q, k, v = problem.rows(start, stop)
        got = layer.prefill(*map(device.fill, (k, v, q)))
        cpu.prefill(k, v, q)
        assert layer.seq_len == stop and layer.dtype == dtype
        device.finish()
        assert got.dtype == q.dtype
        assert_close(got, problem.exact(start, stop), problem.v, roundings=2)
    layer.check()
    assert layer.stats().pages == cpu.stats().pages
    assert_same_rows(device, layer, cpu)


def test_growth_from_dense_to_sparse_and_back():
    problem = make_problem("torch-bf16", n=700)
    device = HostDevice("eager")
    options = dict(token_budget=4, dense_below=400, sink_tokens=8)
    cpu, layer = pair(problem, 0, device, **options)
    for n in range(700):
        q, k, v = problem.rows(n, n + 1)
        got = layer.decode(*map(device.fill, (q, k, v)))
        assert_alike(device, got, cpu.decode(q, k, v), problem)
    for n in (690, 350, 0):
        for one in (cpu, layer):
            one.crop(n)
        assert layer.seq_len == n and (layer.dtype is None) == (n == 0)
        q, k, v = problem.rows(n, n + 5)
        got = layer.decode(*map(device.fill, (q, k, v)))
        assert_alike(device, got, cpu.decode(q, k, v), problem)
        layer.check()


def test_the_paper_s_pages():
    problem = make_problem("torch-f32", n=900)
    device = HostDevice("random")
    options = dict(selection="pages", tail="drop", page_size=8, token_budget=32)
    cpu, layer = pair(problem, 800, device, **options)
    q, k, v = problem.rows(800, 820)
    got = layer.decode(*map(device.fill, (q, k, v)))
    assert_alike(device, got, cpu.decode(q, k, v), problem)


@pytest.mark.parametrize("size", [1e10, 1e30, 3e38])
def test_huge_queries_are_those_of_the_cpu(size):
    problem = make_problem("torch-f32", kv_heads=1, dim=16, n=700)
    device = HostDevice()
    cpu, layer = pair(problem, 690, device, token_budget=4)
    q, k, v = problem.rows(690, 700)
    q = (q.double() / q.abs().max() * size).float()
    got, want = layer.decode(q, k, v), cpu.decode(q, k, v)
    device.finish()
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@every_schedule
def test_the_other_calls_are_those_of_the_cpu(schedule):
    problem = make_problem("torch-f16", n=600)
    device = HostDevice(schedule)
    cpu, layer = pair(problem, 500, device, token_budget=4)
    q, k, v = problem.rows(500, 510)
    cpu.append(k, v)
    layer.append(*map(device.fill, (k, v)))
    for name in ("attend", "attend_exact"):
        got = getattr(layer, name)(device.fill(q))
        assert_alike(device, got, getattr(cpu, name)(q), problem)
    assert layer.seq_len == 510
    layer.reset()
    assert layer.seq_len == 0 and layer.dtype is None and layer.selected() == []
    assert layer.stats().kv_bytes == 0
    # Any dtype may follow.
    layer.prefill(problem.k.float(), problem.v.float())
    layer.decode(*(x[:, :3].float() for x in (problem.q, problem.k, problem.v)))
    assert layer.dtype == "f32" and layer.seq_len == 603


def test_views_are_as_good_as_copies():
    problem = make_problem("torch-bf16", n=420)
    q, k, v = (torch_views(x) for x in (problem.q, problem.k, problem.v))
    for name in q:
        device = HostDevice()
        cpu, layer = pair(problem, 0, device, token_budget=4)
        cpu.prefill(problem.k[:, :410], problem.v[:, :410], problem.q[:, :410])
        got = layer.prefill(k[name][:, :410], v[name][:, :410], q[name][:, :410])
        device.finish()
        assert_close(got, problem.exact(0, 410), problem.v, roundings=2)
        got = layer.decode(q[name][:, 410:], k[name][:, 410:], v[name][:, 410:])
        assert_alike(device, got, cpu.decode(*problem.rows(410, 420)), problem)


def test_inside_and_outside_of_inference_mode():
    problem = make_problem("torch-f32", n=520)
    device = HostDevice()
    cpu, layer = pair(problem, 0, device, token_budget=4)
    for start, stop, inference in ((0, 480, True), (480, 500, False), (500, 520, True)):
        with torch.inference_mode(inference):
            q, k, v = (x.clone() for x in problem.rows(start, stop))
            layer.prefill(k, v, q) if start == 0 else layer.decode(q, k, v)
    cpu.prefill(*problem.rows(0, 480)[1:])
    for start in (480, 500):
        cpu.decode(*problem.rows(start, start + 20))
    cpu.crop(500), layer.crop(500)
    want = cpu.decode(*problem.rows(500, 520))
    with torch.no_grad():
        got = layer.decode(*(x.requires_grad_() for x in map(torch.clone, problem.rows(500, 520))))
    assert_alike(device, got, want, problem)


# ---- what it refuses ----------------------------------------------------------------------------

# Nothing like these is a tensor; and elements of a prefill's queries never come to the host.
NOT_HERE = ("a bare uint16 array", "another byte order", "infinity in q")
MESSAGES = {
    "float64": "k must be float32, float16 or bfloat16, got torch.float64",
    "int32": "got torch.int32",
    "another device": "v must be on cpu, got a tensor on meta",
    "a list": "k must be a torch tensor on cpu, got list",
    "nothing": "k must be a torch tensor on cpu, got NoneType",
}


class WithTensors:
    """A cache that is given tensors in place of arrays."""

    def __init__(self, layer):
        self.layer = layer

    def __getattr__(self, name):
        def convert(x):
            if not isinstance(x, np.ndarray):
                return x
            if x.dtype.name == "bfloat16":
                return torch.from_numpy(x.astype(np.float32)).bfloat16()
            return torch.from_numpy(x)

        value = getattr(self.layer, name)
        return (lambda *args: value(*map(convert, args))) if callable(value) else value


@pytest.mark.parametrize("stored", [50, 500])
@pytest.mark.parametrize("bad", [name for name in BAD_CALLS if name not in NOT_HERE])
def test_bad_input_is_refused_as_on_the_cpu_and_changes_nothing(bad, stored):
    problem = make_problem("torch-f32", HEADS, GROUP, DIM, stored + 40)
    device = HostDevice()
    layer, untouched = (
        pair(problem, stored, device, token_budget=4, device_tokens=8)[1] for _ in range(2)
    )
    call, error, message = BAD_CALLS[bad]
    for _ in range(2):
        with pytest.raises(error, match=MESSAGES.get(bad, message)):
            call(WithTensors(layer))
    assert layer.seq_len == stored and layer.dtype == "f32"
    assert layer.stats() == untouched.stats()
    assert_same_rows(device, layer, untouched)
    layer.check()
    rest = problem.rows(stored, problem.n)
    got, want = layer.decode(*rest), untouched.decode(*rest)
    device.finish()
    assert same(got, want)


CALLS = {
    "prefill": lambda layer, q, k, v: layer.prefill(k, v, q),
    "decode": lambda layer, q, k, v: layer.decode(q, k, v),
    "append": lambda layer, q, k, v: layer.append(k, v),
    "attend": lambda layer, q, k, v: layer.attend(q),
    "gather": lambda layer, q, k, v: layer.gather(),
    "check": lambda layer, q, k, v: layer.check(),
    "selected": lambda layer, q, k, v: layer.selected(),
    "stats": lambda layer, q, k, v: layer.stats(),
}


@every_schedule
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stored", [0, 400])
def test_an_error_of_a_prefill_is_raised_by_every_call_until_a_crop(call, stored, schedule):
    problem = make_problem("torch-f32", n=450)
    device = HostDevice(schedule)
    cpu, layer = pair(problem, stored, device, token_budget=4)
    bad = problem.k[:, :9].clone()
    bad[1, 4, 3] = torch.nan
    layer.prefill(device.fill(bad), device.fill(bad), device.fill(problem.q[:, :9]))
    assert layer.seq_len == stored + 9 and layer.dtype == "f32"
    rows = problem.rows(stored, stored + 3)
    for this in (call, "decode", call):
        with pytest.raises(ValueError, match="k must be finite, got NaN at head 1, token 4"):
            CALLS[this](layer, *rows)
    assert layer.seq_len == stored and layer.dtype == ("f32" if stored else None)
    with pytest.raises(ValueError, match=f"n must be at most {stored}"):
        layer.crop(stored + 1)
    with pytest.raises(ValueError, match="k must be finite"):
        layer.check()
    layer.crop(stored)
    layer.check()
    assert_alike(device, layer.decode(*rows), cpu.decode(*rows), problem)


@every_schedule
@examples(0.3)
@given(data=st.data())
def test_a_layer_that_reuses_is_that_of_the_cpu(schedule, data):
    first, second = (make_problem("torch-f32", n=440, seed=seed) for seed in (1, 2))
    device = HostDevice(schedule)
    options = dict(token_budget=6, device_tokens=6 * data.draw(st.integers(1, 4)))
    anchors, layers = (pair(problem, 400, device, **options) for problem in (first, second))
    n = 400
    while n < 440:
        stop = min(440, n + data.draw(st.integers(1, 12)))
        for problem, both, likes in ((first, anchors, (None, None)), (second, layers, anchors)):
            q, k, v = problem.rows(n, stop)
            want = both[0].decode(q, k, v, like=likes[0])
            got = both[1].decode(*map(device.fill, (q, k, v)), like=likes[1])
            assert_alike(device, got, want, problem)
        n = stop


def test_a_layer_to_be_like_must_have_decoded_the_same_positions_just_before():
    problem = make_problem("torch-f32", n=440)
    device = HostDevice("eager")
    cpu, anchor = pair(problem, 400, device, token_budget=6)
    layer = on_device(problem, device, token_budget=6)
    layer.prefill(*problem.rows(0, 400)[1:])
    rows = problem.rows(400, 410)
    with pytest.raises(ValueError, match="as many positions just before"):
        layer.decode(*rows, like=anchor)
    anchor.decode(*rows)
    anchor.crop(400)
    anchor.append(*rows[1:])
    with pytest.raises(ValueError, match="as many positions just before"):
        layer.decode(*rows, like=anchor)
    with pytest.raises(TypeError, match="like must be a DeviceLayerCache, got LayerCache"):
        layer.decode(*rows, like=cpu)
    assert layer.seq_len == 400
    layer.decode(*rows)


@pytest.mark.parametrize("dtype", TORCH)
def test_what_the_device_holds_does_not_depend_on_the_length(dtype):
    problem = make_problem(f"torch-{dtype}", kv_heads=2, group=2, dim=20, n=3000)
    held = []
    for n in (500, 2990):
        device = HostDevice("eager")
        layer = on_device(problem, device, token_budget=8, device_tokens=40)
        q, k, v = problem.rows(0, n)
        layer.prefill(device.fill(k), device.fill(v), device.fill(q))
        for i in range(n, n + 5):
            layer.decode(*map(device.fill, problem.rows(i, i + 1)))
        device.finish()
        held.append(layer.stats().device_bytes)
    # 32 first tokens, 64 of the window and 32 more, 40, and the positions that share them.
    assert held == [2 * 2 * (32 + 64 + 32 + 40 + 5) * 20 * problem.k.element_size()] * 2


def test_reset_forgets_the_error_of_a_prefill():
    problem = make_problem("torch-f32", n=40)
    layer = on_device(problem, HostDevice())
    layer.prefill(torch.full_like(problem.k, torch.nan), problem.v)
    layer.reset()
    assert layer.seq_len == 0 and layer.dtype is None
    layer.check()
    layer.prefill(problem.k, problem.v)
    layer.check()


def test_a_transfer_of_another_device_is_refused():
    class Elsewhere(HostDevice):
        def __init__(self):
            super().__init__()
            self.torch_device = torch.device("meta")

    with pytest.raises(ValueError, match="expected a transfer of cpu, got one of meta"):
        DeviceLayerCache(2, 1, 8, device=HostDevice(), transfer=Transfer(Elsewhere()))
    for device in ("cpu", torch.device("meta")):
        with pytest.raises(ValueError, match="expected a CUDA device"):
            DeviceLayerCache(2, 1, 8, device=device)
    with pytest.raises(ValueError, match="expected a CUDA device, got 'cpu'"):
        CudaDevice("cpu")
    with pytest.raises(TypeError, match="expected a device, or the transfer of one"):
        DeviceLayerCache(2, 1, 8)
    with pytest.raises(ValueError, match="expected a CUDA device, got 'cpu'"):
        Transfer("cpu")


def test_it_says_what_it_is_and_stays_where_it_is():
    layer = DeviceLayerCache(4, 2, 20, device=HostDevice())
    assert repr(layer) == (
        "DeviceLayerCache(num_q_heads=4, num_kv_heads=2, head_dim=20, seq_len=0, dtype=None)"
    )
    for work in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a DeviceLayerCache cannot be copied or pickled"):
            work(layer)


# ---- failures in the middle ---------------------------------------------------------------------


class Failing(HostDevice):
    """A device whose next call of a method, after some, raises."""

    def fail(self, name, after, error):
        count, work = iter(range(after + 1)), getattr(HostDevice, name)

        def method(*args, **kwargs):
            if next(count) == after:
                delattr(self, name)
                raise error
            return work(self, *args, **kwargs)

        setattr(self, name, method)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["copy", "scatter", "compute", "pinned_like"])
@pytest.mark.parametrize("after", range(8))
def test_a_decode_that_fails_anywhere_leaves_the_earlier_length(where, after, error):
    problem = make_problem("torch-f32", n=500)
    device = Failing("eager")
    cpu, layer = pair(problem, 450, device, token_budget=4, device_tokens=8)
    for one in (cpu, layer):
        one.decode(*problem.rows(450, 460))
    before = layer.stats()
    device.fail(where, after, error)
    rows = problem.rows(460, 470)  # five batches
    try:
        layer.decode(*rows)
    except type(error):
        assert layer.seq_len == 460 and layer.stats().kv_bytes == before.kv_bytes
        layer.check()
    else:
        layer.crop(460)
    vars(device).pop(where, None)
    for start in (460, 470, 480):
        rows = problem.rows(start, start + 10)
        assert_alike(device, layer.decode(*rows), cpu.decode(*rows), problem)
        for mine, theirs in zip(layer.selected(), cpu.selected(), strict=True):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("after", range(5))
def test_a_decode_whose_attention_fails_leaves_the_earlier_length(after, monkeypatch):
    problem = make_problem("torch-f32", n=500)
    device = HostDevice("late", live=True)
    cpu, layer = pair(problem, 450, device, token_budget=4, device_tokens=8)
    for one in (cpu, layer):
        one.decode(*problem.rows(450, 460))
    calls = iter(range(after + 1))

    def failing(*args):
        if next(calls) == after:
            raise torch.OutOfMemoryError("no memory for logits")
        return merge(*args)

    monkeypatch.setattr(device_layer, "merge", failing)
    with pytest.raises(torch.OutOfMemoryError):
        layer.decode(*problem.rows(460, 470))
    monkeypatch.undo()
    assert layer.seq_len == 460
    for start in (460, 470):
        rows = problem.rows(start, start + 10)
        assert_alike(device, layer.decode(*rows), cpu.decode(*rows), problem)


@pytest.mark.parametrize("where", ["copy", "compute", "pinned_like"])
@pytest.mark.parametrize("after", range(5))
def test_a_prefill_that_fails_stores_nothing(where, after):
    problem = make_problem("torch-f32", n=500)
    device = Failing("late")
    cpu, layer = pair(problem, 450, device, token_budget=4)
    layer.check()
    device.fail(where, after, RuntimeError("out of memory"))
    q, k, v = problem.rows(450, 460)
    try:
        layer.prefill(k, v, q)
    except RuntimeError:
        assert layer.seq_len == 450
    else:
        layer.crop(450)
    vars(device).pop(where, None)
    cpu.prefill(k, v, q)
    got = layer.prefill(k, v, q)
    device.finish()
    assert_close(got, problem.exact(450, 460), problem.v)
    rows = problem.rows(460, 470)
    assert_alike(device, layer.decode(*rows), cpu.decode(*rows), problem)


# ---- several layers, several threads ------------------------------------------------------------


@every_schedule
def test_layers_share_a_transfer_and_a_pipeline(schedule):
    device = HostDevice(schedule)
    shared = dict(transfer=Transfer(device), pipeline=Pipeline())
    sizes = [("torch-f32", 2, 20), ("torch-bf16", 1, 64), ("torch-f16", 3, 7)]
    all_problems = [make_problem(kind, heads, 2, dim, 500) for kind, heads, dim in sizes]
    options = dict(token_budget=6, device_tokens=12)
    layers = [on_device(problem, device, shared, **options) for problem in all_problems]
    cpus = [problem.layer(**options) for problem in all_problems]
    every = list(zip(layers, cpus, all_problems, strict=True))
    for layer, cpu, problem in every:
        q, k, v = problem.rows(0, 450)
        layer.prefill(*map(device.fill, (k, v, q)))
        cpu.prefill(k, v)
    for start, stop in ((450, 451), (451, 460), (460, 500)):
        outs = [layer.decode(*map(device.fill, p.rows(start, stop))) for layer, _, p in every]
        for out, (_, cpu, problem) in zip(outs, every, strict=True):
            assert_alike(device, out, cpu.decode(*problem.rows(start, stop)), problem)


def test_an_error_belongs_to_one_layer():
    problem = make_problem("torch-f32", n=60)
    device = HostDevice()
    shared = dict(transfer=Transfer(device), pipeline=Pipeline())
    good, bad = (on_device(problem, device, shared) for _ in range(2))
    bad.prefill(torch.full_like(problem.k, torch.inf), problem.v)
    good.prefill(problem.k, problem.v)
    good.check()
    assert good.seq_len == 60
    with pytest.raises(ValueError, match="must be finite"):
        bad.stats()
    assert bad.seq_len == 0


def test_prefill_returns_before_it_is_indexed_and_waits_when_too_many_do():
    problem = make_problem("torch-f32", n=300)
    device = HostDevice()
    pipeline, gate = Pipeline(depth=2), threading.Event()
    shared = dict(transfer=Transfer(device), pipeline=pipeline)
    layers = [on_device(problem, device, shared) for _ in range(2)]
    pipeline.submit(holding := Job(gate.wait))
    try:
        layers[0].prefill(problem.k, problem.v)
        assert (layers[0].seq_len, layers[0].dtype) == (300, "f32")
        assert layers[0]._core.seq_len == 0
        thread = threading.Thread(target=layers[1].prefill, args=(problem.k, problem.v))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    finally:
        gate.set()
    holding.wait()
    thread.join(10)
    for layer in layers:
        layer.check()
        assert layer._core.seq_len == layer.seq_len == 300


def test_reset_drops_what_waits_to_be_indexed():
    problem = make_problem("torch-f32", n=300)
    pipeline, gate = Pipeline(), threading.Event()
    layer = on_device(problem, HostDevice(), dict(pipeline=pipeline))
    pipeline.submit(holding := Job(gate.wait))
    try:
        layer.prefill(problem.k, problem.v)
        layer.reset()
        assert layer.seq_len == 0
    finally:
        gate.set()
    holding.wait()
    pipeline.submit(last := Job(lambda: None))
    last.wait()
    assert layer._core.seq_len == 0


@every_schedule
def test_threads_with_a_layer_each(schedule):
    device = HostDevice(schedule)
    shared = dict(transfer=Transfer(device), pipeline=Pipeline())
    options = dict(token_budget=4, device_tokens=8, num_threads=1)
    failed = []

    def work(seed):
        try:
            problem = make_problem("torch-f32", n=500, seed=seed)
            cpu, layer = problem.layer(**options), on_device(problem, device, shared, **options)
            with device.computing(device.compute_stream()):
                q, k, v = problem.rows(0, 400)
                layer.prefill(*map(device.fill, (k, v, q)))
                outs = [
                    layer.decode(*map(device.fill, problem.rows(at, at + 5)))
                    for at in range(400, 500, 5)
                ]
                device.finish()
            cpu.prefill(k, v)
            for at, out in zip(range(400, 500, 5), outs, strict=True):
                assert_close(out, tensor(cpu.decode(*problem.rows(at, at + 5))), problem.v)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads)
    if failed:
        raise failed[0]


def test_threads_take_turns_on_one_layer():
    problem = make_problem("torch-f32", n=600)
    layer = on_device(problem, HostDevice("random"), token_budget=4, device_tokens=8)
    layer.prefill(*problem.rows(0, 400)[1:])

    def work():
        for at in range(400, 440):
            layer.decode(*problem.rows(at, at + 1))
            layer.stats()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    layer.check()
    assert layer.seq_len == 560


@pytest.mark.skipif(sys.platform == "win32", reason="forks of POSIX")
def test_a_fork_in_the_middle_of_a_prefill_is_an_error_not_a_hang():
    problem = make_problem("torch-f32", n=300)
    pipeline, gate = Pipeline(), threading.Event()
    layer = on_device(problem, HostDevice(), dict(pipeline=pipeline))
    pipeline.submit(holding := Job(gate.wait))
    layer.prefill(problem.k, problem.v)
    if (pid := os.fork()) == 0:
        refused = 0
        for call in (layer.check, layer.stats, layer.reset):
            try:
                call()
            except RuntimeError as error:
                refused += "forked" in str(error)
        os._exit(0 if refused == 3 and layer.seq_len == 300 else 1)
    gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    holding.wait()
    layer.check()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers of POSIX")
@pytest.mark.parametrize("call", ["append", "decode", "prefill"])
def test_an_interrupt_at_any_time_leaves_what_was_there(call):
    problem = make_problem("torch-f32", n=430)
    layer = on_device(problem, HostDevice("eager", live=True), token_budget=6)
    layer.prefill(*problem.rows(0, 400)[1:])
    layer.check()
    (q, k, v), rows = problem.rows(400, 430), (problem.k, problem.v)
    work = {
        "append": lambda: layer.append(k, v),
        "decode": lambda: layer.decode(q, k, v),
        "prefill": lambda: layer.prefill(k, v, q),
    }[call]

    def interrupt(*_):
        raise KeyboardInterrupt

    before, interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        spent = 1e-3
        for i in range(60):
            begun = time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, spent * (i % 10 + 1) / 10)
                work()
                signal.setitimer(signal.ITIMER_REAL, 0)
                spent = time.perf_counter() - begun
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            with contextlib.suppress(ValueError):  # the device's work was cut in two
                layer.check()
            layer.crop(min(400, layer.seq_len))
            assert layer.seq_len == 400
            assert all(same(a, b[:, :400]) for a, b in zip(layer.gather(), rows, strict=True))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 5


@pytest.mark.parametrize("dtype", TORCH)
def test_autocast_and_a_default_device_change_nothing(dtype):
    problem = make_problem(f"torch-{dtype}", n=430)
    answers = []
    for plain in (True, False):
        device = HostDevice("eager", live=True)
        layer = on_device(problem, device, token_budget=6)
        around = contextlib.ExitStack()
        if not plain:
            around.enter_context(torch.device("meta"))
            around.enter_context(torch.autocast("cpu", torch.bfloat16))
        with around:
            answers.append(
                [
                    layer.prefill(*(problem.rows(0, 300)[i] for i in (1, 2, 0))),
                    layer.prefill(*(problem.rows(300, 420)[i] for i in (1, 2, 0))),
                    layer.decode(*problem.rows(420, 430)),
                ]
            )
    assert all(same(a, b) for a, b in zip(*answers, strict=True))


def test_layers_whose_steps_run_in_other_compute_streams_wait_for_their_slots():
    problem = make_problem("torch-f32", n=60)
    device = HostDevice("late")
    first, second = device.compute_stream(), device.compute_stream()
    shared = dict(transfer=Transfer(device))
    warm = on_device(problem, device, shared, dense_below=1024)  # fills the ring of buffers
    for i in range(4):
        warm.decode(*problem.rows(i, i + 1))
    device.finish()
    layer = on_device(problem, device, shared, dense_below=1024)
    cpu = problem.layer(dense_below=1024)
    layer.prefill(*problem.rows(0, 50)[1:])
    cpu.prefill(*problem.rows(0, 50)[1:])
    for i, stream in ((50, first), (51, second)):
        with device.computing(stream):
            out = layer.decode(*problem.rows(i, i + 1))
        want = cpu.decode(*problem.rows(i, i + 1))
    second.finish()
    assert_close(out, tensor(want), problem.v, roundings=2)

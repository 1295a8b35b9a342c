"""Transfers: every event is needed, and with all of them every schedule gives the same answers."""

import contextlib
import functools

import pytest
import torch
from host_device import SCHEDULES, HostDevice
from kv_arrays import make_problem

from icecache import IceConfig, LayerCache, device_layer
from icecache.device_layer import DeviceLayerCache
from icecache.transfer import Transfer

PROBLEM = make_problem("torch-f32", kv_heads=2, group=2, dim=20, n=700)
CONFIG = IceConfig(dense_below=0, token_budget=8, device_tokens=24, sink_tokens=4, window_tokens=32)
CASES = [("late", 0), ("eager", 0), ("random", 0), ("random", 1)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    # Prefills over a history of 400 tokens take more blocks than there are staging buffers.
    monkeypatch.setattr(device_layer, "_HISTORY_BYTES", 2 * 2 * 20 * 4 * 60)


def flow(layer, fill=lambda x: x):
    """Outputs and selections of every kind of call; nothing waits for outputs in between."""
    results = []

    def prefill(start, stop):
        q, k, v = map(fill, PROBLEM.rows(start, stop))
        results.append(layer.prefill(k, v, q))

    def decode(start, stop):
        results.append(layer.decode(*map(fill, PROBLEM.rows(start, stop))))
        results.extend(layer.selected())

    prefill(0, 400)
    prefill(400, 500)
    decode(500, 513)  # five batches
    layer.crop(508)
    decode(508, 512)
    decode(512, 513)
    layer.append(*map(fill, PROBLEM.rows(513, 516)[1:]))
    results.append(layer.attend(fill(PROBLEM.q[:, 513:516])))
    results.append(layer.attend_exact(fill(PROBLEM.q[:, 513:516])))
    results.extend(layer.gather())
    layer.reset()
    prefill(300, 650)
    decode(650, 660)
    return results


def two_streams(layers, fill=lambda x: x, started=lambda: None, other=contextlib.nullcontext):
    """Outputs of two layers, of which the second computes in a stream that nothing orders with
    that of the first; after a start in which all memory has been made."""
    results, first, second = [], *layers
    for layer in layers:
        layer.prefill(*map(fill, PROBLEM.rows(0, 450)[1:]))
        layer.decode(*map(fill, PROBLEM.rows(450, 452)))
    started()
    for at in range(452, 470, 6):
        results.append(first.decode(*map(fill, PROBLEM.rows(at, at + 6))))
        with other():
            results.append(second.decode(*map(fill, PROBLEM.rows(at, at + 6))))
    return results


def on_the_cpu():
    return LayerCache(4, 2, 20, CONFIG, PROBLEM.scale)


def on(device, transfer=None):
    return DeviceLayerCache(4, 2, 20, CONFIG, PROBLEM.scale, device=device, transfer=transfer)


def run_flow(schedule, seed=0, skip=None):
    device = HostDevice(schedule, seed, skip)
    outs = flow(on(device), device.fill)
    device.finish()
    return device, outs


def run_two_streams(schedule, seed=0, skip=None):
    device = HostDevice(schedule, seed)
    transfer, stream = Transfer(device), device.compute_stream()

    def started():
        device.finish()
        device.sites.clear()
        device.skip = skip

    layers = [on(device, transfer) for _ in range(2)]
    other = functools.partial(device.computing, stream)
    outs = two_streams(layers, device.fill, started, other)
    device.finish()
    return device, outs


def wanted(run):
    return flow(on_the_cpu()) if run is run_flow else two_streams([on_the_cpu(), on_the_cpu()])


def differ(got, want):
    """Whether any selection or output is not the wanted one."""
    for a, b in zip(got, want, strict=True):
        if torch.is_tensor(b):
            if a.dtype != b.dtype or not torch.allclose(a, b, rtol=1e-5, atol=1e-5):
                return True
        elif a.shape != b.shape or (a != b).any():
            return True
    return False


every_run = pytest.mark.parametrize("run", [run_flow, run_two_streams])


@every_run
@pytest.mark.parametrize("schedule,seed", [*CASES, *(("random", seed) for seed in range(2, 9))])
def test_whenever_streams_run_the_answers_are_those_of_the_cpu(run, schedule, seed):
    _, outs = run(schedule, seed)
    assert not differ(outs, wanted(run))


@every_run
def test_no_wait_can_be_left_out(run):
    device, _ = run("late")
    want = wanted(run)

    def shows(schedule, seed, site):
        try:
            return differ(run(schedule, seed, skip=site)[1], want)
        except (ValueError, AssertionError):
            return True  # numbers or targets that nobody wrote

    assert len(device.sites) >= 6
    idle = [site for site in device.sites if not any(shows(*case, site) for case in CASES)]
    assert not idle, f"these change nothing: {idle}"


def test_a_ring_of_any_length_and_buffers_that_grow():
    with pytest.raises(ValueError, match="depth must be at least 2, got 1"):
        Transfer(HostDevice(), depth=1)
    for depth in (2, 3, 5):
        transfer = Transfer(HostDevice(), depth)
        first = [transfer.staging(100) for _ in range(depth)]
        assert len({id(staging) for staging in first}) == depth
        again = [transfer.staging(size) for size in (100, 101) * depth][: depth + 1]
        assert again[0] is first[0] and again[1] is not first[1]
        assert len(again[1].host) == len(again[1].device) == 101


@every_schedule
def test_times_are_told_once_the_device_is_done(schedule):
    device = HostDevice(schedule)
    layer = on(device)
    layer.prefill(*PROBLEM.rows(0, 450)[1:])
    assert layer.stats().device_attend_ms == layer.stats().stage_ms == 0
    layer.decode(*map(device.fill, PROBLEM.rows(450, 452)))
    stats = layer.stats()
    parts = (stats.down_ms, stats.transfer_ms, stats.scatter_ms, stats.device_attend_ms)
    assert parts == (0.25,) * 4 and stats.stage_ms > 0
    layer.reset()
    assert layer.stats().down_ms == 0


def test_only_misses_are_sent():
    device = HostDevice()
    layer = on(device)
    layer.prefill(*PROBLEM.rows(0, 450)[1:])
    layer.decode(*PROBLEM.rows(450, 451))
    first = layer.stats()
    assert first.last_slot_hits == 0
    assert first.last_slot_misses == 2 * first.tokens_exact
    before = device.copied
    layer.decode(*PROBLEM.rows(451, 452))
    device.finish()
    stats = layer.stats()
    row_bytes = 20 * 4
    assert stats.last_row_bytes == stats.last_slot_misses * 2 * row_bytes
    assert 2 <= stats.last_slot_misses < 20 < stats.last_slot_hits
    # Besides: q, k, v; what is attended, and the tail; where rows go; each section's padding.
    other = (4 + 2 + 2) * row_bytes + 2 * stats.slots + 4 * (4 + 4) + 4 * row_bytes
    other += 4 * stats.last_slot_misses
    sent = device.copied - before - stats.last_row_bytes
    assert other <= sent <= other + 6 * 256

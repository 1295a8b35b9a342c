"""`_icecache.Layer.stage`: a device of NumPy arrays attends as `LayerCache.decode` does."""

import gc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_arrays import (
    KINDS,
    NUMPY,
    assert_close,
    bits,
    dtype_of,
    examples,
    make_problem,
    prefilled,
    problems,
    tree_options,
)

from icecache import IceConfig
from icecache.arrays import operand

every_dtype = pytest.mark.parametrize("kind", [kind for kind in KINDS if "numpy" in kind])
few_examples = examples(0.5)
ALIGNMENT = 256
SECTIONS = ("attended", "tail_max", "tail_sum", "tail_values", "rows", "targets")


def aligned(size, offset=0):
    """`size` bytes of garbage, `offset` beyond a multiple of 256."""
    buffer = np.full(size + ALIGNMENT + offset, 0xA5, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT + offset
    return buffer[start : start + size]


class Device:
    """What a device does with what a layer stages: slots [kv_heads, slots, dim] that start as
    garbage, a scatter, masked attention to the slots, the merge with the tail."""

    def __init__(self, layer, kind):
        self.layer, self.dtype = layer, dtype_of(kind)
        layer._core.open_device()
        self.shape = (layer.num_kv_heads, layer._core.device_slots, layer.head_dim)
        garbage = np.random.default_rng(1).standard_normal((2, *self.shape)) * 100
        self.keys, self.values = garbage.astype(NUMPY[self.dtype])
        self.hits = self.misses = 0

    @property
    def most(self):
        return self.layer._core.positions_at_once

    def stage(self, q, k, v, like=None):
        """The sections of the staging buffer as arrays, and what `stage` returned."""
        core = self.layer._core
        staging = aligned(max(core.staging_bytes, 1))
        arrays = (operand(name, x, 3).array for name, x in (("q", q), ("k", k), ("v", v)))
        info = core.stage(
            *arrays, self.dtype, staging, None if like is None else like._core.choices()
        )
        kv_heads, slots, dim = self.shape
        heads, n = q.shape[:2]
        misses = info["misses"]
        assert all(info[name] % ALIGNMENT == 0 for name in SECTIONS)
        assert info["bytes"] == info["targets"] + 4 * misses <= core.staging_bytes
        assert (staging[info["bytes"] :] == 0xA5).all()
        row = NUMPY[self.dtype]

        def section(name, dtype, *shape):
            start, count = info[name], int(np.prod(shape)) * np.dtype(dtype).itemsize
            return staging[start : start + count].view(dtype).reshape(shape)

        return info, dict(
            attended=section("attended", np.uint8, kv_heads, n, slots),
            tail_max=section("tail_max", np.float32, heads, n),
            tail_sum=section("tail_sum", np.float32, heads, n),
            tail_values=section("tail_values", np.float32, heads, n, dim),
            targets=section("targets", np.uint32, misses),
            rows=section("rows", row, misses, 2, dim),
        )

    def decode(self, q, k, v, like=None):
        """[q_heads, n, dim] in float64."""
        info, staged = self.stage(q, k, v, like)
        targets, attended = staged["targets"].astype(np.int64), staged["attended"].astype(bool)
        assert len(np.unique(targets)) == len(targets)
        if q.shape[1] == 1:
            assert (np.diff(targets) > 0).all()
        assert info["hits"] + info["misses"] == attended.sum()
        self.count(info)
        dim = self.shape[2]
        self.keys.reshape(-1, dim)[targets] = staged["rows"][:, 0]
        self.values.reshape(-1, dim)[targets] = staged["rows"][:, 1]
        self.attended = attended
        return self.attend(q, staged)

    def attend(self, q, staged):
        group = len(q) // self.shape[0]
        out = np.zeros(q.shape)
        for h, i in np.ndindex(q.shape[:2]):
            mask = self.attended[h // group, i]
            query = q[h, i].astype(np.float64) * self.layer.scale
            keys, values = (
                x[h // group, mask].astype(np.float64) for x in (self.keys, self.values)
            )
            logits, tail = keys @ query, float(staged["tail_max"][h, i])
            high = logits.max(initial=tail)
            weights, share = np.exp(logits - high), np.exp(tail - high)
            values = weights @ values + share * staged["tail_values"][h, i].astype(np.float64)
            out[h, i] = values / (weights.sum() + share * float(staged["tail_sum"][h, i]))
        return out

    def count(self, info):
        """The statistics against counts of our own."""
        self.hits += info["hits"]
        self.misses += info["misses"]
        stats = self.layer.stats()
        assert (stats.slot_hits, stats.slot_misses) == (self.hits, self.misses)
        assert (stats.last_slot_hits, stats.last_slot_misses) == (info["hits"], info["misses"])
        row_bytes = self.layer.head_dim * np.dtype(NUMPY[self.dtype]).itemsize
        assert stats.last_row_bytes == 2 * row_bytes * info["misses"]
        assert stats.slots == self.shape[1] and stats.slot_evictions <= stats.slot_misses

    def forget(self):
        self.hits = self.misses = 0

    def check_slots(self):
        """The last position attends to the rows of what it selected, and to nothing else."""
        if not self.attended[:, -1].any():  # exact: everything is in the tail
            return
        keys, values = self.layer.gather()
        for head, positions in enumerate(self.layer.selected()):
            mask = self.attended[head, -1]
            have = rows_of(self.keys[head, mask], self.values[head, mask])
            assert np.array_equal(have, rows_of(keys[head, positions], values[head, positions]))


def rows_of(keys, values):
    """Keys and values side by side, sorted, bit for bit."""
    rows = np.concatenate([bits(keys), bits(values)], axis=1)
    return rows[np.lexsort(rows.T)]


def close(problem, out, want):
    """`want`, float64, to what rounds `out` on its way."""
    assert_close(out, tensor64(want), problem.v, slack=3e-5)


def tensor64(array):
    import torch

    return torch.from_numpy(np.asarray(array, np.float64))


@st.composite
def device_options(draw):
    options = draw(tree_options())
    budget = draw(st.integers(1, 40))
    options |= dict(
        token_budget=budget,
        tail=draw(st.sampled_from(["summary", "drop"])),
        dense_below=draw(st.sampled_from([0, 0, 430])),
        device_tokens=draw(st.sampled_from([None, budget, budget + 1, 3 * budget])),
    )
    if draw(st.booleans()):
        page = options["page_capacity"] or 2 * options["page_size"]
        tokens = options["device_tokens"]
        options |= dict(selection="pages", tail="drop", field_of_view=8)
        options["device_tokens"] = None if tokens is None else max(tokens, page)
    return options


@every_dtype
@few_examples
@given(data=st.data())
def test_a_device_attends_as_decode_does(kind, data):
    problem = data.draw(problems(kind, st.just(1100)))
    options = data.draw(device_options())
    staged, plain = problem.layer(**options), problem.layer(**options)
    device, at = Device(staged, kind), 0

    def both(call, count):
        nonlocal at
        q, k, v = problem.rows(at, at + count)
        at += count
        return [call(layer, q, k, v) for layer in (staged, plain)]

    start = data.draw(st.sampled_from([0, 1, 100, 400, 440]))
    if start:
        both(lambda layer, q, k, v: layer.prefill(k, v), start)
    for _ in range(data.draw(st.integers(1, 10))):
        do = data.draw(st.sampled_from("sssscdrapx"))
        n = staged.seq_len
        if do == "s":
            for _ in range(data.draw(st.integers(1, 5))):
                count = data.draw(st.integers(1, min(device.most, 6)))
                q, k, v = problem.rows(at, at + count)
                at += count
                out = device.decode(q, k, v)
                close(problem, plain.decode(q, k, v), out)
                device.check_slots()
                for a, b in zip(staged.selected(), plain.selected(), strict=True):
                    assert np.array_equal(a, b)
                a, b = staged.stats(), plain.stats()
                assert (a.tokens_exact, a.key_rows_read) == (b.tokens_exact, b.key_rows_read)
                assert a.mass_exact == pytest.approx(b.mass_exact, abs=1e-6)
        elif do in "cd":
            back = data.draw(st.integers(0, min(n, 20 if do == "c" else n)))
            if back == n:
                device.forget()
            staged.crop(n - back)
            plain.crop(n - back)
        elif do == "r" and at < 300:
            staged.reset()
            plain.reset()
            device.forget()
        elif do == "a":
            both(lambda layer, q, k, v: layer.append(k, v), 3)
        elif do == "p":
            both(lambda layer, q, k, v: layer.prefill(k, v), data.draw(st.integers(1, 40)))
        elif do == "x":
            close(problem, *both(lambda layer, q, k, v: layer.decode(q, k, v), 1))
        staged.check()
        at = min(at, 700)


@pytest.mark.parametrize("kind", ["numpy-f32", "numpy-bf16"])
@pytest.mark.parametrize(
    "config", [IceConfig(), IceConfig.paper(), IceConfig(tail="drop"), IceConfig(token_budget=2000)]
)
def test_real_sizes(kind, config):
    problem = make_problem(kind, kv_heads=2, group=4, dim=64, n=1200)
    options = {**vars(config), "device_tokens": 2000 if config.token_budget == 2000 else None}
    staged, plain = (prefilled(problem, 1020, **options) for _ in range(2))
    device = Device(staged, kind)
    for at in range(1020, 1191, 3):
        counts = [3] if at % 2 and device.most >= 3 else [1, 1, 1]
        for count in counts:
            rows = problem.rows(at, at + count)
            at += count
            out = device.decode(*rows)
            close(problem, plain.decode(*rows), out)
            device.check_slots()
            if config.token_budget > problem.n:
                close(problem, plain.attend_exact(rows[0]), out)
    assert device.hits > device.misses


@given(problem=problems("numpy-f16", st.just(520)), options=device_options())
@few_examples
def test_threads_change_nothing(problem, options):
    devices = []
    for threads in (1, 3):
        layer = prefilled(problem, 480, **{**options, "num_threads": threads})
        devices.append(Device(layer, "numpy-f16"))
    at = 480
    for count in (1, 1, min(4, devices[0].most), 1):
        (info, one), (other_info, other) = (d.stage(*problem.rows(at, at + count)) for d in devices)
        at += count
        assert info == other_info
        for name in SECTIONS:
            assert np.array_equal(bits(one[name]), bits(other[name])), name
    layers = [device.layer for device in devices]
    assert layers[0]._core.selected() == layers[1]._core.selected()
    one, other = (layer.stats() for layer in layers)
    assert one.error_estimate != one.error_estimate or options["dense_below"]
    assert (one.slot_hits, one.slot_evictions) == (other.slot_hits, other.slot_evictions)


def test_what_is_wanted_again_is_not_sent_again():
    problem = make_problem("numpy-f32", kv_heads=1, group=1, dim=16, n=600)
    layer = prefilled(problem, 500, token_budget=8, device_tokens=8)
    device = Device(layer, "numpy-f32")
    q, k, v = problem.rows(500, 501)
    device.decode(q, k, v)
    assert device.hits == 0 and device.misses == layer.stats().tokens_exact
    layer.crop(500)
    device.decode(q, k, v)
    assert layer.stats().last_slot_misses == 1  # its own token: the crop took it
    # Not enough slots for all that is selected over time: some have to go.
    for at in range(501, 600):
        device.decode(*problem.rows(at, at + 1))
    stats = layer.stats()
    assert stats.slot_evictions > 50 and stats.slot_hits > 10 * stats.slot_misses
    assert stats.slots == 32 + 64 + 32 + 1 + 8


def test_rows_that_never_arrived_are_sent_again():
    problem = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=600)
    staged, plain = (prefilled(problem, 500, token_budget=8) for _ in range(2))
    device = Device(staged, "numpy-f32")
    for at in range(500, 510):
        device.decode(*problem.rows(at, at + 1))
        plain.decode(*problem.rows(at, at + 1))
    device.stage(*problem.rows(510, 511))  # lost on its way
    staged._core.abandon_stage()
    staged.crop(510)
    staged.check()
    q, k, v = problem.rows(510, 511)
    hits = staged.stats().slot_hits
    device.count = lambda info: None
    device.keys[:], device.values[:] = 100, 100
    close(problem, plain.decode(q, k, v), device.decode(q, k, v))
    assert staged.stats().slot_hits == hits


def test_a_device_that_opens_late_or_before_anything():
    problem = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=600)
    early, late, plain = (problem.layer(token_budget=8) for _ in range(3))
    devices = [Device(early, "numpy-f32")]
    for layer in (early, late, plain):
        layer.prefill(problem.k[:, :500], problem.v[:, :500])
    before = late.stats().index_bytes
    devices.append(Device(late, "numpy-f32"))
    late._core.open_device()
    late._core.open_device()  # again: nothing happens
    grown = late.stats().index_bytes - before
    assert 2 * 16 * late.stats().slots < grown < 2 * 80 * late.stats().slots
    q, k, v = problem.rows(500, 503)
    want = plain.decode(q, k, v)
    for device in devices:
        close(problem, want, device.decode(q, k, v))


def arguments(layer, problem, count=1):
    q, k, v = problem.rows(500, 500 + count)
    return dict(q=q, k=k, v=v, dtype="f32", staging=aligned(layer._core.staging_bytes))


def read_only(size):
    buffer = aligned(size)
    buffer.flags.writeable = False
    return buffer


# What is wrong -> the error, what it says, the arguments that differ.
REFUSED = {
    "numbers": (TypeError, None, lambda size: dict(staging=np.zeros(size, np.float32))),
    "two axes": (TypeError, None, lambda size: dict(staging=np.zeros((2, size), np.uint8))),
    "no array": (TypeError, None, lambda size: dict(staging=bytearray(size))),
    "read-only": (TypeError, None, lambda size: dict(staging=read_only(size))),
    "gaps": (TypeError, "contiguous", lambda size: dict(staging=aligned(2 * size)[::2])),
    "short": (ValueError, "at least .* bytes, got", lambda size: dict(staging=aligned(size - 1))),
    "crooked": (ValueError, "aligned to 16 bytes", lambda size: dict(staging=aligned(size, 8))),
    "many": (ValueError, "at most 4 positions.*got 5", lambda size: dict(count=5)),
    "none": (ValueError, r"k must have shape \[2, 1, 16\]", lambda size: dict(count=0)),
    "nan": (ValueError, "q must be finite", lambda size: dict(q=np.full((4, 1, 16), np.nan, "f4"))),
    "shape": (ValueError, r"q must have shape", lambda size: dict(q=np.ones((3, 1, 16), "f4"))),
    "dtype": (TypeError, "f32 like what is stored", lambda size: dict(dtype="f16")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_do_is_refused_before_anything_changes(what):
    error, match, changes = REFUSED[what]
    problem = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=600)
    layer, untouched = (prefilled(problem, 500, token_budget=8) for _ in range(2))
    for one in (layer, untouched):
        one._core.open_device()
    changes = changes(layer._core.staging_bytes)
    changed = {**arguments(layer, problem, changes.pop("count", 1)), **changes}
    if changed["dtype"] == "f16":
        changed |= {name: changed[name].astype(np.float16) for name in "qkv"}
    with pytest.raises(error, match=match):
        layer._core.stage(**changed)
    gc.collect()
    assert layer.seq_len == 500 and layer.stats() == untouched.stats()
    info = layer._core.stage(**arguments(layer, problem))
    assert info["hits"] == 0
    layer.check()


def test_no_stage_without_a_device():
    problem = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=600)
    layer = prefilled(problem, 500)
    with pytest.raises(ValueError, match="call open_device before stage"):
        layer._core.stage(**arguments(layer, problem))
    assert layer.seq_len == 500 and layer.stats().slots == 0


def test_how_many_slots_there_are():
    def core(**options):
        return make_problem("numpy-f32", dim=4, n=1).layer(**options)._core

    assert core().device_slots == 32 + (64 + 32) + 4 + 256
    assert core(device_tokens=130).positions_at_once == 2
    assert core(device_tokens=130).device_slots == 32 + (64 + 32) + 2 + 130
    pages = dict(selection="pages", tail="drop", page_size=16, page_capacity=20)
    assert core(token_budget=5, **pages).device_slots == 32 + (64 + 32) + 4 + 80
    assert core(token_budget=30, **pages).positions_at_once == 4
    huge = core(token_budget=2**30, num_threads=1)
    with pytest.raises(ValueError, match="device_tokens must be so small that"):
        huge.open_device()


# ---- history ------------------------------------------------------------------------------------


@every_dtype
@few_examples
@given(data=st.data())
def test_history_is_all_that_is_stored(kind, data):
    problem = data.draw(problems(kind))
    n = data.draw(st.integers(1, problem.n))
    layer = prefilled(problem, n, **data.draw(tree_options()))
    kv_heads, _, dim = problem.k.shape
    dtype = NUMPY[dtype_of(kind)]

    def history(first, count):
        buffers = [aligned(kv_heads * count * dim * np.dtype(dtype).itemsize + 5) for _ in "kv"]
        layer._core.history(first, count, *buffers)
        assert all((buffer[-5:] == 0xA5).all() for buffer in buffers)
        return [buffer[:-5].view(dtype).reshape(kv_heads, count, dim) for buffer in buffers]

    whole = history(0, n)
    for head in range(kv_heads):
        have = rows_of(*(x[head] for x in whole))
        assert np.array_equal(have, rows_of(*(x[head] for x in layer.gather())))
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
    for first, end in pairwise(cuts):
        for part, all_of_it in zip(history(first, end - first), whole, strict=True):
            assert np.array_equal(bits(part), bits(all_of_it[:, first:end]))


def test_history_that_is_not_there_is_refused():
    problem = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=600)
    layer = prefilled(problem, 500)
    room = np.zeros(2 * 10 * 16 * 4, np.uint8)
    layer._core.history(490, 10, room, room.copy())
    layer._core.history(0, 0, room[:0], room[:0].copy())
    with pytest.raises(ValueError, match="ends after 500 tokens, got 491 to 501"):
        layer._core.history(491, 10, room, room.copy())
    for keys, values in ((room[:-1], room.copy()), (room, room[1:].copy())):
        with pytest.raises(ValueError, match="must have shape 1280 bytes, got 1279"):
            layer._core.history(490, 10, keys, values)
    with pytest.raises(TypeError):
        layer._core.history(0, 1, room, read_only(len(room)))

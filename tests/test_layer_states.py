"""`LayerCache` under any order of calls, and from several threads, against a list of rows."""

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_arrays import (
    KINDS,
    Problem,
    assert_close,
    cast,
    examples,
    join,
    make_problem,
    prefilled,
    same,
    tensor,
    tree_options,
)

from icecache.reference import exact_attention

MOST = 1300  # positions: enough for a tree that grows, splits and is rebuilt


class AnyOrder(RuleBasedStateMachine):
    """The model is what was appended and not cropped away: `k` and `v`, [kv_heads, n, d]."""

    @initialize(
        kind=st.sampled_from(KINDS),
        kv_heads=st.integers(1, 2),
        group=st.integers(1, 3),
        dim=st.sampled_from([3, 16, 20]),
        budget=st.integers(1, 40),
        tail=st.sampled_from(["summary", "drop"]),
        options=tree_options(),
        content=st.sampled_from(["clustered", "twins", "offset"]),
        seed=st.integers(0, 2**20),
        dense_below=st.sampled_from([0, 0, 400]),
        start=st.sampled_from([1, 300, 450]),
    )
    def make(
        self, kind, kv_heads, group, dim, budget, tail, options, content, seed, dense_below, start
    ):
        # New positions are drawn from this pool, wrapping around.
        self.pool = make_problem(kind, kv_heads, group, dim, 3000, seed, content)
        self.tail, self.at = tail, 0
        self.layer = self.pool.layer(
            token_budget=budget, tail=tail, **{**options, "dense_below": dense_below}
        )
        self.k, self.v = self.pool.k[:, :0], self.pool.v[:, :0]
        self.start(start, True)

    @property
    def n(self):
        return self.k.shape[1]

    def take(self, count):
        """The next positions, as q, k, v; the model has them from now on."""
        if self.at + count > self.pool.n:
            self.at = 0
        q, k, v = self.pool.rows(self.at, self.at + count)
        self.at += count
        self.k, self.v = join([self.k, k]), join([self.v, v])
        return q, k, v

    def exact(self, q):
        return exact_attention(tensor(q), tensor(self.k), tensor(self.v), self.pool.scale)

    def start(self, count, with_q):
        q, k, v = self.take(count)
        out = self.layer.prefill(k, v, q if with_q else None)
        if with_q:  # torch rounds the weights to the dtype too
            assert_close(out, self.exact(q), self.pool.v, roundings=2)
        else:
            assert out is None

    @precondition(lambda self: self.n < MOST)
    @rule(count=st.one_of(st.integers(1, 40), st.integers(250, 400)), with_q=st.booleans())
    def prefill(self, count, with_q):
        self.start(count, with_q)

    @precondition(lambda self: self.n < MOST)
    @rule(count=st.integers(1, 80))
    def append(self, count):
        _, k, v = self.take(count)
        self.layer.append(k, v)

    @precondition(lambda self: self.n < MOST)
    @rule(count=st.integers(1, 8))
    def decode(self, count):
        q, k, v = self.take(count)
        out = self.layer.decode(q, k, v)
        self.check_sparse(q[:, count - 1 :], out[:, count - 1 :])
        # Attending once more with the last query finds the same.
        assert same(self.layer.attend(q[:, count - 1 :]), out[:, count - 1 :])

    @precondition(lambda self: self.n > 0)
    @rule(count=st.integers(1, 32), at=st.integers(0, 2900))
    def attend(self, count, at):
        stats = self.layer.stats()
        held = stats.window_tokens if stats.tree_tokens else self.n
        assume(held > 0)  # a crop may end where the window began
        q = self.pool.q[:, at : at + min(count, held)]
        out = self.layer.attend(q)
        self.check_sparse(q[:, -1:], out[:, -1:])
        assert_close(self.layer.attend_exact(q), self.exact(q), self.pool.v)

    @rule(back=st.integers(0, 32))
    def crop_a_little(self, back):
        self.crop_to(max(0, self.n - back))

    @rule(share=st.floats(0, 1))
    def crop_deep(self, share):
        self.crop_to(int(share * self.n))

    @rule()
    def reset(self):
        self.layer.reset()
        self.k, self.v = self.k[:, :0], self.v[:, :0]
        assert self.layer.dtype is None

    def crop_to(self, n):
        self.layer.crop(n)
        self.k, self.v = self.k[:, :n], self.v[:, :n]

    def check_sparse(self, q, out):
        """One position: an average of the values; without a tail, attention to the selected."""
        group = len(q) // len(self.k)
        stats = self.layer.stats()
        for head, positions in enumerate(self.layer.selected()):
            assert (np.diff(positions) > 0).all() and positions[-1] == self.n - 1
            mine = slice(head * group, (head + 1) * group)
            keys, values = tensor(self.k[head : head + 1]), tensor(self.v[head : head + 1])
            if self.tail == "drop" or len(positions) == self.n:
                keys, values = keys[:, positions], values[:, positions]
                want = exact_attention(tensor(q[mine]), keys, values, self.pool.scale)
                assert_close(out[mine], want, self.pool.v)
            else:
                room = 0.01 * float(values.abs().max())  # means may be rounded to bf16
                got = tensor(out[mine])
                assert (got <= values.amax(dim=1)[:, None] + room).all()
                assert (got >= values.amin(dim=1)[:, None] - room).all()
        exact = [len(positions) for positions in self.layer.selected()]
        assert stats.tokens_exact == np.mean(exact)

    @invariant()
    def holds_what_the_model_holds(self):
        layer, n = self.layer, self.n
        layer.check()
        stats = layer.stats()
        assert layer.seq_len == stats.seq_len == n
        assert stats.sink_tokens + stats.tree_tokens + stats.window_tokens == n
        size = self.layer.head_dim * len(self.k) * 2
        assert stats.kv_bytes == n * size * self.k.dtype.itemsize
        if n:
            keys, values = layer.gather()
            assert same(keys, self.k) and same(values, self.v)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(examples(1.5), stateful_step_count=25)


@pytest.mark.parametrize("tokens", [100, 700])
def test_several_threads_on_one_cache(tokens):
    # Calls take turns; each sees the cache as some whole call left it.
    problem = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=tokens + 1)
    layer = prefilled(problem, tokens, token_budget=8)
    q, k, v = problem.rows(tokens, tokens + 1)
    steps, decoders = 100, 3
    failures, done = [], threading.Event()

    def decode():
        for _ in range(steps):
            assert np.isfinite(layer.decode(q, k, v)).all()

    def gather():
        while not done.is_set():
            keys, values = layer.gather()
            assert same(keys[:, :tokens], problem.k[:, :tokens])
            assert same(values[:, :tokens], problem.v[:, :tokens])

    def look():
        while not done.is_set():
            layer.check()
            stats = layer.stats()
            assert stats.sink_tokens + stats.tree_tokens + stats.window_tokens == stats.seq_len
            assert all((np.diff(positions) > 0).all() for positions in layer.selected())
            assert np.isfinite(layer.attend(q)).all() and np.isfinite(layer.attend_exact(q)).all()

    def run(job):
        try:
            job()
        except BaseException as failure:
            failures.append(failure)

    writers, readers = (
        [threading.Thread(target=run, args=(job,)) for job in jobs]
        for jobs in ([decode] * decoders, [gather, gather, look])
    )
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in readers + writers:
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        for thread in readers:
            thread.join()
    finally:
        done.set()
        sys.setswitchinterval(interval)
    assert not failures, failures
    layer.check()
    assert layer.seq_len == tokens + decoders * steps
    assert layer.stats().steps >= decoders * steps
    keys, _ = layer.gather()
    assert same(keys, np.concatenate([problem.k[:, :tokens], *[k] * (decoders * steps)], axis=1))


def test_calls_of_many_threads_are_some_serial_order_of_whole_calls():
    # Every key says which call of which thread stored it, and as which of its rows. One value of
    # each call is 1, the others 0, and queries are 0: a prefill's output is the share of ones in
    # what it saw.
    base, dim, calls = 500, 16, 30
    problem = make_problem("torch-f32", kv_heads=1, group=1, dim=dim, n=base)
    layer = prefilled(replace(problem, v=torch.zeros_like(problem.v)), base, token_budget=8)
    failures, seen = [], {}
    jobs = ["prefill", "prefill", "decode", "append", "crop", "look"]
    start = threading.Barrier(len(jobs))

    def rows(thread, call, n):
        k, v = torch.zeros(2, 1, n, dim)
        k[0, :, 0], k[0, :, 1], k[0, :, 2] = thread, call, torch.arange(n)
        v[0, 0, 0] = 1
        return k, v

    def work(thread, job):
        start.wait()
        for call in range(calls):
            n = 1 + (7 * call + thread) % 40
            k, v = rows(thread, call, n)
            if job == "prefill":
                out = layer.prefill(k, v, torch.zeros(1, n, dim))
                seen[thread, call] = out[0, -1, 0]
            elif job == "decode":
                assert torch.isfinite(layer.decode(k, k, v)).all()
            elif job == "append":
                layer.append(k, v)
            elif job == "crop" and call % 10 == 0:
                layer.crop(base)
            else:
                layer.check()
                stats = layer.stats()
                assert stats.sink_tokens + stats.tree_tokens + stats.window_tokens == stats.seq_len
                keys, values = layer.gather()
                assert keys.shape == values.shape
                assert torch.isfinite(layer.attend_exact(k[:, :1])).all()

    def run(*job):
        try:
            work(*job)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=job) for job in enumerate(jobs)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures, failures
    layer.check()
    keys, _ = layer.gather()
    assert same(keys[:, :base], problem.k)
    at, last = base, {}
    while at < layer.seq_len:
        thread, call, row = keys[0, at, :3].int().tolist()
        n = 1 + (7 * call + thread) % 40
        assert row == 0 and same(keys[:, at : at + n], rows(thread, call, n)[0])
        assert call == last.get(thread, call - 1) + 1  # in order, and none left out
        last[thread] = call
        at += n
        if jobs[thread] == "prefill":
            ones = len([k for k in keys[0, base:at] if k[2] == 0])
            assert seen[thread, call] == pytest.approx(ones / at, rel=1e-4)
    assert all(call == calls - 1 for call in last.values())
    assert at == layer.seq_len


def test_many_caches_at_once_are_each_as_if_alone():
    problem = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=900)

    def work(into, name):
        layer = prefilled(problem, 800, token_budget=8, num_threads=2)
        into[name] = layer.decode(*problem.rows(800, 832))

    alone, together = {}, {}
    work(alone, 0)
    threads = [threading.Thread(target=work, args=(together, i)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 6 and all(same(out, alone[0]) for out in together.values())


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1e3, 1e5])
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("summary_dtype", ["f32", "f16", "bf16"])
def test_the_size_of_the_numbers_does_not_matter(what, size, summary_dtype):
    # With keys of another size the queries make up for it: the same attention.
    problem = make_problem("numpy-f32", kv_heads=1, group=2, dim=16, n=900)
    sizes = {"q": 1.0, "k": 1.0, "v": 1.0, what: size}
    if what == "k":
        sizes["q"] = 1 / size
    scaled = (cast("numpy-f32", sizes[name] * getattr(problem, name)) for name in "qkv")
    errors = []
    for each in (problem, Problem(*scaled, problem.scale)):
        layer = prefilled(each, 890, token_budget=32, summary_dtype=summary_dtype)
        layer.check()
        out = tensor(layer.decode(*each.rows(890, 900)))
        layer.check()
        want = each.exact(890, 900)
        errors.append(float((out - want).norm() / want.norm()))
    assert errors[1] <= 1.2 * errors[0] + 0.001, errors


@pytest.mark.parametrize("size", [1e12, 2e19, 3e19, 1e25])
@pytest.mark.parametrize("start", [100, 500])
def test_keys_too_large_to_square_do_not_break_the_cache(size, start):
    # Taken or refused, but what was stored before stays, and the cache can be used.
    problem = make_problem("numpy-f32", kv_heads=1, group=2, dim=8, n=1500)
    uniform = np.random.default_rng(0).uniform(-1, 1, (1, 900, 8))
    huge = (uniform * size).astype(np.float32)
    layer = prefilled(problem, start)
    try:
        layer.prefill(huge, problem.v[:, :900])
    except ValueError:
        assert layer.seq_len == start
    assert same(layer.gather()[0][:, :start], problem.k[:, :start])
    layer.crop(start)
    layer.check()
    q, k, v = problem.rows(start, 1500)
    assert_close(layer.prefill(k, v, q), problem.exact(start, 1500), problem.v)
    layer.check()

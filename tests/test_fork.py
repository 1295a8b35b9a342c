"""Forks of a layer: independent, whatever they share; and a batch of layers in one call."""

import gc
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_arrays import (
    KINDS,
    assert_close,
    bits,
    cast,
    decode_each,
    examples,
    join,
    make_problem,
    prefilled,
    problems,
    same,
    tensor,
    tree_options,
)

from icecache import LayerCache
from icecache.reference import FAINT, exact_attention

WHOLE = dict(token_budget=4096, tail="drop")


def contents(layer):
    k, v = layer.gather()
    return bits(k), bits(v)


def holds(layer, problem, tokens):
    """Whether the layer holds these positions of a problem, and passes its checks."""
    layer.check()
    k, v = layer.gather()
    return same(k, problem.k[:, tokens]) and same(v, problem.v[:, tokens])


# --- What a fork is


@pytest.mark.parametrize("kind", KINDS)
def test_forks_grow_apart(kind):
    problem = make_problem(kind, n=700)
    layer = prefilled(problem, 400)
    fork = layer.fork()
    assert repr(fork) == repr(layer)
    first, second = list(range(400)), list(range(400))
    for i in range(400, 700, 2):
        decode_each(layer, problem, i, i + 1)
        decode_each(fork, problem, i + 1, i + 2)
        first.append(i)
        second.append(i + 1)
    assert holds(layer, problem, first)
    assert holds(fork, problem, second)


def test_what_a_fork_forgets_the_other_keeps():
    problem = make_problem("numpy-f32", n=900)
    layer = prefilled(problem, 800)
    for n in (800, 799, 750, 400, 90, 10, 0):
        fork = layer.fork()
        fork.crop(n)
        assert holds(fork, problem, list(range(n))) if n else fork.dtype is None
        assert holds(layer, problem, list(range(800)))
    layer.fork().reset()
    assert holds(layer, problem, list(range(800)))


def test_an_empty_layer_forks():
    problem = make_problem("torch-bf16", n=300)
    layer = problem.layer()
    fork = layer.fork()
    layer.prefill(*problem.rows(0, 10)[1:])
    assert (layer.seq_len, fork.seq_len, fork.dtype) == (10, 0, None)
    fork.prefill(*problem.rows(0, 300)[1:])
    assert holds(fork, problem, list(range(300)))


def test_the_original_may_go_first():
    problem = make_problem("numpy-f32", n=1300)
    layer = prefilled(problem, 1200)
    alone = prefilled(problem, 1200).fork()
    fork = layer.fork()
    del layer
    gc.collect()
    out = decode_each(fork, problem, 1200, 1300)
    assert same(out, decode_each(alone, problem, 1200, 1300))
    assert holds(fork, problem, list(range(1300)))


@pytest.mark.parametrize("alive", [False, True])
def test_what_others_do_is_not_seen(alive):
    """A fork answers the same whether others live, grow or go: what is shared is never changed."""
    problem = make_problem("numpy-f32", n=1500)
    outs = []
    for lives in (True, alive):
        layer = prefilled(problem, 900)
        fork = layer.fork()
        if lives:
            decode_each(layer, problem, 1200, 1300)
        else:
            del layer
        outs.append(decode_each(fork, problem, 900, 1200))
    assert same(*outs)


def test_the_fork_of_a_short_layer_is_the_layer():
    """Small trees are copied: a fork then grows as the layer would, bit for bit."""
    problem = make_problem("numpy-f32", n=600)
    layer, alone = prefilled(problem, 300), prefilled(problem, 300)
    assert alone.stats().tree_tokens == 0
    decode_each(layer, problem, 300, 380)
    decode_each(alone, problem, 300, 380)
    assert 0 < alone.stats().tree_tokens <= 512
    fork = layer.fork()
    assert same(decode_each(fork, problem, 380, 600), decode_each(alone, problem, 380, 600))
    assert contents(fork)[0].tolist() == contents(alone)[0].tolist()


# --- Attention over several trees


def forked(problem, lengths, **options):
    """A layer that was forked at each of these lengths but the last; earlier ones are let go."""
    layer = problem.layer(**options)
    start = 0
    for n in lengths:
        if start:
            layer = layer.fork()
        layer.prefill(*problem.rows(start, n)[1:])
        start = n
    return layer


@given(st.data())
@examples(0.5)
def test_a_budget_for_everything_is_full_attention(data):
    kind = data.draw(st.sampled_from(KINDS), "kind")
    problem = data.draw(problems(kind, lengths=st.integers(700, 1100)))
    options = data.draw(tree_options())
    cuts = data.draw(st.sets(st.integers(300, problem.n - 20), min_size=1, max_size=6), "cuts")
    layer = forked(problem, sorted(cuts), **{**options, **WHOLE})
    n = layer.seq_len
    layer.check()
    out = decode_each(layer, problem, n, n + 12)
    layer.check()
    assert_close(out, problem.exact(n, n + 12), problem.v)


@given(st.data())
@examples(0.3)
def test_trees_opened_to_single_tokens_are_full_attention(data):
    """Pages of one token: what is not selected counts through its own mean, so all of it."""
    problem = data.draw(problems("numpy-f32", lengths=st.integers(700, 900)))
    options = dict(page_size=1, page_capacity=1, summary_dtype="f32", open_fraction=1.0)
    budget = data.draw(st.integers(1, 64), "budget")
    cuts = data.draw(st.sets(st.integers(450, problem.n - 20), min_size=1, max_size=4), "cuts")
    options |= dict(token_budget=budget, candidate_factor=1024)
    layer = forked(problem, sorted(cuts), **options)
    n, group = layer.seq_len, len(problem.q) // len(problem.k)
    for i in range(n, n + 5):
        out = layer.decode(*problem.rows(i, i + 1))
        assert_close(out, problem.exact(i, i + 1), problem.v, slack=FAINT)
        # Every key was scored, so the best are selected, whatever tree they are in.
        first, last = layer.stats().sink_tokens, i + 1 - layer.stats().window_tokens
        for h, chosen in enumerate(layer.selected()):
            q = tensor(problem.q[h * group : (h + 1) * group, i]) * problem.scale
            share = (q @ tensor(problem.k[h, : i + 1]).T).softmax(1).sum(0)[first:last]
            best = share.argsort(descending=True)[:budget] + first
            chosen = [p for p in chosen if first <= p < last]
            assert len(chosen) == budget
            # Of two that are all but equal, chance selects one.
            assert share[np.subtract(chosen, first)].sum() >= (1 - 1e-4) * share[best - first].sum()


def errors(layer, problem, start, stop):
    """Mean relative error of the outputs."""
    out = torch.as_tensor(decode_each(layer, problem, start, stop)).double()
    want = problem.exact(start, stop)
    return float(((out - want).norm(dim=-1) / want.norm(dim=-1)).mean())


@pytest.mark.parametrize("lengths", [(3000, 3040), (3000, 3900), (2000, 2600, 3300, 3900)])
@pytest.mark.parametrize("content", ["normal", "clustered"])
def test_several_trees_answer_as_well_as_one(lengths, content):
    """Where a small tree has a few tokens of each of many topics, its pages mix them: worse, and
    not so on a model's keys (benches/forks.py)."""
    problem = make_problem("numpy-f32", kv_heads=4, n=4000, dim=32, content=content)
    n = lengths[-1]
    forks = forked(problem, lengths, token_budget=32)
    alone = prefilled(problem, n, token_budget=32)
    got, want = (errors(layer, problem, n, n + 60) for layer in (forks, alone))
    worse = 3.0 if content == "clustered" and len(lengths) == 4 else 1.6
    assert 0.001 < got <= (1.1 if content == "normal" else worse) * want


def test_pages_of_several_trees():
    """The paper's selection over two trees finds the pages of both."""
    problem = make_problem("numpy-f32", n=1600, dim=32)
    options = dict(selection="pages", tail="drop", token_budget=64, refine_passes=0, page_size=16)
    layer = forked(problem, (900, 1500), **options)
    seen = set()
    for i in range(1500, 1540):
        decode_each(layer, problem, i, i + 1)
        for positions in layer.selected():
            seen |= set(positions.tolist())
    between = [p for p in seen if 32 <= p < 1400]
    assert any(p < 800 for p in between)
    assert any(p > 900 for p in between)


# --- Memory


def test_a_fork_costs_next_to_nothing_until_it_grows():
    problem = make_problem("numpy-f32", n=7100, dim=64)
    layer = prefilled(problem, 7000)
    before = layer.stats()
    assert before.shared_bytes == 0
    forks = [layer.fork() for _ in range(10)]
    everything = before.kv_bytes + before.index_bytes
    own = [f.stats().kv_bytes + f.stats().index_bytes - f.stats().shared_bytes for f in forks]
    assert sum(own) <= 0.01 * everything
    for i, fork in enumerate(forks):
        decode_each(fork, problem, 7000 + i, 7001 + i)
    own = [f.stats().kv_bytes + f.stats().index_bytes - f.stats().shared_bytes for f in forks]
    # A window each, with what grows behind.
    assert sum(own) <= 0.25 * everything
    del forks, fork
    assert layer.stats().shared_bytes == 0


def test_shared_bytes_are_counted_in_each():
    problem = make_problem("torch-f16", n=900)
    layer = prefilled(problem, 800)
    fork = layer.fork()
    a, b = layer.stats(), fork.stats()
    assert a.kv_bytes == b.kv_bytes
    assert a.shared_bytes == b.shared_bytes
    assert 0.9 * (a.kv_bytes + a.index_bytes) < a.shared_bytes <= a.kv_bytes + a.index_bytes


# --- Everything at once, against a plain list


@given(st.data())
@examples(0.4)
def test_any_sequence_of_calls_on_any_number_of_forks(data):
    problem = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=4000, seed=3)
    options = data.draw(tree_options())
    layers = [(problem.layer(**{**options, **WHOLE}), [])]
    next_token = 0
    for _ in range(data.draw(st.integers(4, 14), "calls")):
        at = data.draw(st.integers(0, len(layers) - 1), "which")
        layer, tokens = layers[at]
        call = data.draw(st.sampled_from(["fork", "prefill", "decode", "append", "crop", "drop"]))
        if call == "fork" and len(layers) < 6:
            layers.append((layer.fork(), list(tokens)))
        elif call == "drop" and len(layers) > 1:
            layers.pop(at)
        elif call == "crop":
            n = data.draw(st.integers(0, len(tokens)), "n")
            layer.crop(n)
            del tokens[n:]
        elif call in ("prefill", "decode", "append"):
            most = {"prefill": 600, "decode": 3, "append": 40}[call]
            n = data.draw(st.integers(1, most), "n")
            new = list(range(next_token, next_token + n))
            next_token = (next_token + n) % 3000
            tokens += new
            q, k, v = (x[:, new] for x in (problem.q, problem.k, problem.v))
            if call == "decode":
                out = layer.decode(q, k, v)
                whole = make_problem("numpy-f32", kv_heads=2, group=2, dim=16, n=1)
                whole = type(whole)(q, problem.k[:, tokens], problem.v[:, tokens], problem.scale)
                want = exact(whole, len(new))
                assert_close(out, want, whole.v)
            else:
                getattr(layer, call)(k, v)
        for other, held in layers:
            assert other.seq_len == len(held)
    for layer, tokens in layers:
        assert holds(layer, problem, tokens) if tokens else layer.seq_len == 0


def exact(problem, n):
    """Full attention of the last `n` positions."""
    return exact_attention(*map(tensor, (problem.q, problem.k, problem.v)), problem.scale)


# --- Threads


def test_forks_decode_in_threads_as_alone():
    problem = make_problem("numpy-f32", kv_heads=4, n=3400, dim=32)
    layer = prefilled(problem, 3000)
    forks = [layer.fork() for _ in range(6)]
    want = [decode_each(layer.fork(), problem, 3000 + 50 * i, 3050 + 50 * i) for i in range(6)]
    got = [None] * 6

    def work(i):
        got[i] = decode_each(forks[i], problem, 3000 + 50 * i, 3050 + 50 * i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    del layer
    for thread in threads:
        thread.join()
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    for fork in forks:
        fork.check()


# --- A layer that follows another


def test_forks_of_layers_that_follow_others():
    problem, other = (make_problem("numpy-f32", n=1600, seed=seed) for seed in (0, 1))
    pairs = [[forked(p, (900, 1400), token_budget=16) for p in (problem, other)] for _ in range(2)]
    pairs.append([layer.fork() for layer in pairs[1]])  # small trees are copied, others go on
    outs = []
    for anchor, layer in (pairs[0], pairs[2]):
        steps = []
        for i in range(1400, 1460):
            anchor.decode(*problem.rows(i, i + 1))
            steps.append(layer.decode(*other.rows(i, i + 1), like=anchor))
        outs.append(join(steps))
        assert all(
            np.array_equal(a, b) for a, b in zip(anchor.selected(), layer.selected(), strict=True)
        )
    assert same(*outs)


# --- Batches


def layers_of(problem, lengths, **options):
    return [prefilled(problem, n, **options) if n else problem.layer() for n in lengths]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_is_its_rows_alone_bit_for_bit(kind, n):
    problem = make_problem(kind, n=1200)
    lengths = [1, 0, 40, 360, 1100, 700]
    batch, alone = (layers_of(problem, lengths, token_budget=16) for _ in range(2))
    stack = torch.stack if kind.startswith("torch") else np.stack
    for step in range(4):
        starts = [(50 * i + n * step) % 1190 for i in range(len(lengths))]
        rows = [problem.rows(i, i + n) for i in starts]
        out = LayerCache.decode_batch(batch, *(stack(x) for x in zip(*rows, strict=True)))
        want = [layer.decode(*row) for layer, row in zip(alone, rows, strict=True)]
        assert type(out) is type(want[0])
        assert all(same(a, b) for a, b in zip(out, want, strict=True))
    for a, b in zip(batch, alone, strict=True):
        a.check()
        assert a.stats() == b.stats()
        assert a.stats().steps == 4 * n


def test_a_batch_that_follows_another():
    problem, other = (make_problem("numpy-f32", n=1200, seed=seed) for seed in (0, 1))
    anchors = layers_of(problem, [500, 900], token_budget=16)
    batch, alone = (layers_of(other, [500, 900], token_budget=16) for _ in range(2))
    rows = [np.stack([x[:, 1000:1002]] * 2) for x in (problem.q, problem.k, problem.v)]
    LayerCache.decode_batch(anchors, *rows)
    rows = [np.stack([x[:, 1000:1002]] * 2) for x in (other.q, other.k, other.v)]
    out = LayerCache.decode_batch(batch, *rows, like=anchors)
    for i, (layer, anchor) in enumerate(zip(alone, anchors, strict=True)):
        assert same(out[i], layer.decode(*other.rows(1000, 1002), like=anchor))


def test_a_batch_with_something_wrong_appends_nothing():
    problem = make_problem("numpy-f32", n=600)
    layers = layers_of(problem, [500, 400], token_budget=16)
    q, k, v = (np.stack([x[:, 500:501]] * 2) for x in (problem.q, problem.k, problem.v))
    bad = k.copy()
    bad[1, 1, 0, 3] = np.nan
    half = cast("numpy-f16", v)
    cases = [
        (
            (layers, q, bad, v),
            ValueError,
            r"k must be finite, got NaN at head 1, token 0 \(row 1 of the batch\)",
        ),
        ((layers, q, k, half), TypeError, "one dtype"),
        ((layers, q[:1], k, v), ValueError, r"one row for each of 2 layers, got \[1, 2, 2\]"),
        ((layers, q[0], k, v), ValueError, "q must have 4 dimensions"),
        ((layers, q[:, :3], k, v), ValueError, r"q must have shape \[4, 1, 20\], got \[3, 1, 20\]"),
        ((layers, q[:, :, :0], k[:, :, :0], v[:, :, :0]), ValueError, "must have shape"),
        (([layers[0]] * 2, q, k, v), ValueError, "each layer of a batch once"),
        (([layers[0], 3], q, k, v), TypeError, "layers must be LayerCaches"),
        ((layers, q, k, v, [layers[0], None]), TypeError, "like must be LayerCaches"),
        ((layers, q, k, v, layers[:1]), ValueError, r"2 layers, got \[2, 2, 2, 1\]"),
        ((layers, q, k, v, layers[::-1]), ValueError, "like must be a layer with"),
    ]
    before = [contents(layer) for layer in layers]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            LayerCache.decode_batch(*arguments)
        assert [layer.seq_len for layer in layers] == [500, 400]
    for layer, old in zip(layers, before, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(contents(layer), old, strict=True))
    none = LayerCache.decode_batch([], q[:0], k[:0], v[:0])
    assert none.shape == (0, 4, 1, 20)


def test_batches_in_threads_do_not_wait_for_each_other_forever():
    problem = make_problem("numpy-f32", n=500)
    layers = layers_of(problem, [400, 300, 200])
    rows = [np.stack([x[:, 400:401]] * 3) for x in (problem.q, problem.k, problem.v)]

    def work(order):
        for _ in range(30):
            LayerCache.decode_batch([layers[i] for i in order], *rows)

    orders = ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    threads = [threading.Thread(target=work, args=(o,), daemon=True) for o in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert [layer.seq_len for layer in layers] == [490, 390, 290]

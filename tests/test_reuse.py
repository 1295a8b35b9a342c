"""`decode(..., like=other)`: a step that attends to the tokens that another layer selected."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_arrays import (
    KINDS,
    assert_close,
    examples,
    join,
    make_problem,
    prefilled,
    problems,
    same,
    tensor,
    tree_options,
)
from test_stage import Device, device_options

from icecache import IceConfig, LayerCache

every_kind = pytest.mark.parametrize("kind", KINDS)
few_examples = examples(0.4)
FAINT = 0.1


def pair(draw, kind, lengths):
    """Two problems of one shape, for a layer that searches and one that follows it."""
    one = draw(problems(kind, lengths))
    shape = dict(kv_heads=len(one.k), group=len(one.q) // len(one.k), dim=one.k.shape[2], n=one.n)
    content = draw(st.sampled_from(["normal", "clustered", "twins", "offset"]))
    other = make_problem(kind, **shape, seed=draw(st.integers(0, 2**20)), content=content)
    return one, other


def follow(anchor, layer, problem, other, start, stop):
    """Decodes positions one by one, in both; the outputs of the follower, joined."""
    outs = []
    for i in range(start, stop):
        anchor.decode(*problem.rows(i, i + 1))
        outs.append(layer.decode(*other.rows(i, i + 1), like=anchor))
    return join(outs)


def reference_step(layer, problem, head, tail):
    """The last position of one KV head in float64, from its tree as it is: outputs [group, dim],
    and how far faint nodes may take them away, in units of the values: the mean value that stands
    for theirs is that of some tokens ago, and which are faint may be a matter of rounding."""
    n, group = layer.seq_len, len(problem.q) // len(problem.k)
    q = tensor(problem.q[head * group : (head + 1) * group, n - 1]).numpy() * layer.scale
    k, v = tensor(problem.k[head, :n]).numpy(), tensor(problem.v[head, :n]).numpy()
    exact = layer.selected()[head]
    logits, values, doubt = q @ k[exact].T, [v[exact]] * group, 0.0
    nodes = layer._core.nodes(head)
    if nodes is not None and tail == "summary":
        dim = k.shape[1]
        levels, mean = nodes["levels"], nodes["mean"].astype(np.float64)
        node = np.repeat(np.arange(len(levels[0]["count"])), levels[0]["count"])
        if len(levels) > 1:
            node, level = levels[0]["parent"][node], levels[1]
        else:
            level = levels[0]
        count = level["count"].astype(np.float64)
        keys, means = (level[x].reshape(-1, dim).astype(np.float64) for x in ("keys", "values"))
        selected = np.isin(nodes["ids"], exact)
        ids, node = nodes["ids"][selected], node[selected]
        gone = np.zeros((len(count), 2 * dim))
        np.add.at(gone, node, np.concatenate([k[ids] - mean, v[ids]], axis=1))
        left = count - np.bincount(node, minlength=len(count))
        full = left > 0
        keys, count, left, gone = keys[full], count[full], left[full], gone[full]
        rest = (count[:, None] * keys - gone[:, :dim]) / left[:, None]
        means = means[full]
        shift = (count[:, None] * means - gone[:, dim:]) / left[:, None] - means
        top = levels[-1]
        whole = (
            top["count"] @ top["values"].reshape(-1, dim).astype(np.float64) / top["count"].sum()
        )
        bound = (
            np.linalg.norm(q, axis=1)[:, None] * level["key_radius"][full] * np.sqrt(count / left)
        )
        moved = np.clip(q @ (rest - keys).T, -bound, bound)
        logits = np.concatenate(
            [logits, q @ keys.T + moved + (q @ mean)[:, None] + np.log(left)], 1
        )
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares = (weights / weights.sum(axis=1, keepdims=True))[:, len(exact) :]
        ratio = shares.sum(0) / (FAINT * group / len(level["count"]))
        means = np.where((ratio > 1)[:, None], means, whole) + shift
        values = [np.concatenate([v[exact], means])] * group
        close = (ratio > 0.98) & (ratio < 1.02)
        doubt = float((0.1 * shares[:, ratio <= 1.02].sum(1) + 2 * shares[:, close].sum(1)).max())
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.stack([w @ x for w, x in zip(weights, values, strict=True)]), doubt


def check_step(layer, problem, out, tail):
    """Some position's outputs, [q_heads, 1, dim], against the reference."""
    group = len(problem.q) // len(problem.k)
    for head in range(len(problem.k)):
        want, doubt = reference_step(layer, problem, head, tail)
        mine = out[head * group : (head + 1) * group, 0]
        assert_close(mine, tensor(want), problem.v, slack=3e-4 + doubt)


@every_kind
@few_examples
@given(data=st.data())
def test_a_reusing_step_is_that_of_the_reference(kind, data):
    problem, other = pair(data.draw, kind, st.just(700))
    options = data.draw(tree_options())
    tail = data.draw(st.sampled_from(["summary", "drop"]))
    options |= dict(token_budget=data.draw(st.integers(1, 120)), tail=tail)
    dense_below = data.draw(st.sampled_from([0, 0, 430]))
    anchor = prefilled(problem, 400, **options, dense_below=dense_below)
    layer = prefilled(other, 400, **options)
    at = 400
    for _ in range(data.draw(st.integers(1, 8))):
        do = data.draw(st.sampled_from("sssscdpa"))
        if do == "s":
            for _ in range(data.draw(st.integers(1, 8))):
                out = follow(anchor, layer, problem, other, at, at + 1)
                at += 1
                for mine, theirs in zip(layer.selected(), anchor.selected(), strict=True):
                    assert np.array_equal(mine, theirs)
                check_step(layer, other, out, tail)
                mine, theirs = layer.stats(), anchor.stats()
                assert mine.tokens_exact == theirs.tokens_exact
                assert 0 < mine.mass_exact <= 1 + 1e-5 and mine.error_estimate >= 0
        elif do in "cd":
            at -= data.draw(st.integers(0, 20 if do == "c" else 300))
            at = max(at, 1)
            anchor.crop(at)
            layer.crop(at)
        elif do == "p":
            more = data.draw(st.sampled_from([1, 30, 200]))
            more = min(more, 650 - at)
            if more > 0:
                for cache, rows in ((anchor, problem), (layer, other)):
                    cache.prefill(*rows.rows(at, at + more)[1:])
                at += more
        elif do == "a":
            for cache, rows in ((anchor, problem), (layer, other)):
                cache.append(*rows.rows(at, at + 3)[1:])
            at += 3
        layer.check()
        at = min(at, 690)
        anchor.crop(min(at, anchor.seq_len))
        layer.crop(min(at, layer.seq_len))


@every_kind
@few_examples
@given(data=st.data(), t=st.integers(1, 12))
def test_several_positions_at_once_are_single_ones(kind, data, t):
    problem, other = pair(data.draw, kind, st.just(430))
    options = data.draw(tree_options()) | dict(token_budget=data.draw(st.integers(1, 60)))
    once, each = ([prefilled(p, 400, **options) for p in (problem, other)] for _ in range(2))
    singly = follow(*each, problem, other, 400, 400 + t)
    once[0].decode(*problem.rows(400, 400 + t))
    together = once[1].decode(*other.rows(400, 400 + t), like=once[0])
    assert same(singly, together)
    once[1].check()


@every_kind
@few_examples
@given(data=st.data(), t=st.integers(1, 6), budget=st.integers(1, 700))
def test_single_tokens_or_a_budget_for_all_are_full_attention(kind, data, t, budget):
    """Nodes of one token stand for that token, and what is selected whole for nothing."""
    problem, other = pair(data.draw, kind, st.integers(400, 700))
    n = problem.n
    single = data.draw(st.booleans())
    options = data.draw(tree_options()) | dict(token_budget=n)
    if single:
        # Too many children for a second level: the leaves stand for the rest.
        options |= dict(page_size=1, page_capacity=1, fanout=200, summary_dtype="f32")
        options |= dict(token_budget=budget)
    anchor, layer = (prefilled(p, n - t, **options) for p in (problem, other))
    out = follow(anchor, layer, problem, other, n - t, n)
    want = other.exact(n - t, n)
    assert_close(out, want, other.v, slack=FAINT if single and budget < n else 3e-5)
    if not single:
        assert layer.stats().mass_exact == pytest.approx(1, abs=1e-5)


@every_kind
@few_examples
@given(data=st.data())
def test_what_is_exact_in_the_other_layer_is_exact(kind, data):
    problem, other = pair(data.draw, kind, st.just(460))
    options = data.draw(tree_options())
    anchor = prefilled(problem, 440, **options, dense_below=447)
    layer = prefilled(other, 440, **options, token_budget=512)
    anchor.decode(*problem.rows(440, 450))
    out = layer.decode(*other.rows(440, 450), like=anchor)
    assert_close(out[:, :6], other.exact(440, 446), other.v)
    assert [len(p) for p in layer.selected()] == [len(p) for p in anchor.selected()]
    follower = prefilled(other, 440, **options, dense_below=1000)
    anchor.crop(440)
    anchor.decode(*problem.rows(440, 450))
    assert_close(
        follower.decode(*other.rows(440, 450), like=anchor), other.exact(440, 450), other.v
    )


@given(data=st.data())
@few_examples
def test_a_device_attends_as_decode_does(data):
    kind = "numpy-f32"
    problem, other = pair(data.draw, kind, st.just(700))
    options = data.draw(device_options())
    anchor = prefilled(problem, 420, **options)
    staged, plain = (prefilled(other, 420, **options) for _ in range(2))
    device, at = Device(staged, kind), 420
    for count in data.draw(st.lists(st.integers(1, 6), max_size=12)):
        count = min(count, device.most)
        anchor.decode(*problem.rows(at, at + count))
        rows = other.rows(at, at + count)
        at += count
        out, want = device.decode(*rows, like=anchor), plain.decode(*rows, like=anchor)
        assert_close(want, tensor(out), other.v)
        device.check_slots()
        for a, b in zip(staged.selected(), plain.selected(), strict=True):
            assert np.array_equal(a, b)
        a, b = staged.stats(), plain.stats()
        assert (a.tokens_exact, a.key_rows_read) == (b.tokens_exact, b.key_rows_read)
        assert a.mass_exact == pytest.approx(b.mass_exact, abs=1e-5)
        staged.check()


def test_it_reads_one_level_and_the_selected_tokens():
    problem, other = (make_problem("numpy-f32", n=3000, seed=seed) for seed in range(2))
    anchor, layer = (prefilled(p, 2999, token_budget=40) for p in (problem, other))
    before = layer.stats().index_bytes
    anchor.decode(*problem.rows(2999, 3000))
    layer.decode(*other.rows(2999, 3000), like=anchor)
    stats = layer.stats()
    always, nodes = stats.sink_tokens + stats.window_tokens, stats.nodes_per_level[1] / 2
    assert stats.tokens_exact == always + 40
    assert stats.key_rows_read == always + 40 + nodes
    # The mean of everything, nodes that are not faint, and the selected once more.
    assert always + 80 < stats.value_rows_read <= always + 40 + 1 + nodes + 40 + 40
    assert stats.key_rows_read < anchor.stats().key_rows_read / 2
    # Four bytes for each position, in each head.
    assert 0 < stats.index_bytes - before < 4 * 2 * 3000 + 4096


def test_layers_that_do_not_fit_are_refused_before_anything_changes():
    problem = make_problem("numpy-f32", n=600)
    layer = prefilled(problem, 500)
    row = problem.rows(500, 501)

    def refused(like, *rows, match):
        core, dtype = layer._core, "f32"
        with pytest.raises(ValueError, match=match):
            layer.decode(*rows, like=like)
        core.open_device()
        staging = np.zeros(core.staging_bytes + 16, np.uint8)
        staging = staging[-staging.ctypes.data % 16 :]
        with pytest.raises(ValueError, match=match):
            core.stage(*rows, dtype, staging, like._core.choices())
        assert layer.seq_len == 500 and layer.stats().steps == 0
        layer.check()

    other = make_problem("numpy-f32", kv_heads=1, n=600)
    heads = prefilled(other, 500)
    heads.decode(*other.rows(500, 501))
    refused(heads, *row, match="2 KV heads.* got 1")
    refused(layer, *row, match="501 tokens.* got 0")
    refused(LayerCache(4, 2, 20), *row, match="2 KV heads.* got 0")
    long = prefilled(problem, 500)
    long.decode(*problem.rows(500, 502))
    refused(long, *row, match="501 tokens.* got 502")
    refused(long, *problem.rows(500, 503), match="503 tokens.* got 502")
    fresh = prefilled(problem, 500)
    fresh.append(*problem.rows(500, 501)[1:])
    refused(fresh, *row, match="501 tokens.* got 0")
    many = prefilled(problem, 499)
    many.decode(*problem.rows(499, 501))
    refused(many, *row, match="1 positions.* got 2")
    many.crop(500)
    many.append(*row[1:])
    refused(many, *row, match="501 tokens.* got 0")
    greedy = prefilled(problem, 500, token_budget=100)
    greedy.decode(*row)
    refused(greedy, *row, match="64 tokens selected at most.* got 100")
    with pytest.raises(TypeError, match="like must be a LayerCache"):
        layer.decode(*row, like=layer._core)


@given(data=st.data())
@few_examples
def test_threads_change_nothing(data):
    problem, other = pair(data.draw, "numpy-f16", st.just(450))
    options = data.draw(tree_options())
    outs = []
    for threads in (1, 3):
        layers = (
            prefilled(p, 420, **options | dict(num_threads=threads)) for p in (problem, other)
        )
        outs.append(follow(*layers, problem, other, 420, 440))
    assert same(*outs)


def test_reuse_in_paper_mode_attends_to_the_tokens_alone():
    problem, other = (make_problem("numpy-f32", n=700, seed=seed) for seed in range(2))
    options = vars(IceConfig.paper(dense_below=0))
    anchor, layer = (prefilled(p, 690, **options) for p in (problem, other))
    for i in range(690, 700):
        out = follow(anchor, layer, problem, other, i, i + 1)
        check_step(layer, other, out, "drop")


@given(data=st.data())
@few_examples
def test_tokens_are_found_while_a_tree_grows_and_shrinks(data):
    """`check` scans the pages for every token."""
    problem = data.draw(problems("numpy-f16", st.just(1500)))
    options = data.draw(tree_options())
    anchor, layer = (prefilled(problem, 450, **options) for _ in range(2))
    at = 450
    for _ in range(data.draw(st.integers(1, 8))):
        follow(anchor, layer, problem, problem, at, at + 1)
        at += 1
        count = min(data.draw(st.integers(0, 400)), 1490 - at)
        back = data.draw(st.one_of(st.just(0), st.integers(0, 500)))
        bulk = data.draw(st.booleans())
        for cache in (anchor, layer):
            if count > 0:
                _, k, v = problem.rows(at, at + count)
                cache.prefill(k, v) if bulk else cache.append(k, v)
            cache.crop(max(at + count - back, 1))
        at = layer.seq_len
        layer.check()
        follow(anchor, layer, problem, problem, at, at + 1)
        at += 1
        # The same keys and values: the other layer finds all that this one selected.
        for mine, theirs in zip(layer.selected(), anchor.selected(), strict=True):
            assert np.array_equal(mine, theirs)

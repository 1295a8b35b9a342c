"""Attention by torch in parts, held against full attention in float64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_arrays import TORCH, assert_close, examples, make_problem, problems, tensor

from icecache import sdpa
from icecache.reference import exact_attention
from icecache.sdpa import Partial, RunningAttention, attend_causal, attend_partial, finish, merge

every_dtype = pytest.mark.parametrize("dtype", TORCH)


def masked_attention(q, k, v, scale, mask):
    """Full attention in float64 where the mask [kv_heads, n, m] says so."""
    q, k, v = map(tensor, (q, k, v))
    group = len(q) // len(k)
    k, v, mask = (x.repeat_interleave(group, 0) for x in (k, v, mask))
    logits = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    return torch.softmax(logits, -1) @ v


def random_mask(seed, *shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[..., 0] = True
    return mask


@every_dtype
@examples(0.5)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_masked_partial_is_attention_to_what_the_mask_names(dtype, data, seed):
    problem = data.draw(problems(f"torch-{dtype}", st.integers(2, 90)))
    n = data.draw(st.integers(1, min(9, problem.n)))
    q, mask = problem.q[:, -n:], random_mask(seed, len(problem.k), n, problem.n)
    out = torch.empty_like(q)
    partial = attend_partial(q, problem.k, problem.v, problem.scale, mask)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in partial)
    finish(partial, out)
    assert_close(out, masked_attention(q, problem.k, problem.v, problem.scale, mask), problem.v)


@every_dtype
@examples(0.5)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_partials_of_any_split_merge_to_the_whole(dtype, data, seed):
    problem = data.draw(problems(f"torch-{dtype}", st.integers(2, 60)))
    q, k, v = problem.rows(0, problem.n)
    first = random_mask(seed, len(k), problem.n, problem.n)
    parts = [attend_partial(q, k, v, problem.scale, mask) for mask in (first, ~first)]
    out = torch.empty_like(q)
    finish(merge(*parts), out)
    everything = torch.ones_like(first)
    assert_close(out, masked_attention(q, k, v, problem.scale, everything), problem.v)


def test_no_key_is_nothing_and_merging_it_changes_nothing():
    problem = make_problem("torch-f32", n=12)
    nowhere = torch.zeros(len(problem.k), 12, 12, dtype=torch.bool)
    q, k, v = problem.rows(0, 12)
    nothing = attend_partial(q, k, v, problem.scale, nowhere)
    assert (nothing.max == -torch.inf).all() and not nothing.sum.any() and not nothing.values.any()
    out = torch.empty_like(q)
    finish(merge(nothing, nothing), out)
    assert not out.any()
    whole = attend_partial(q, k, v, problem.scale)
    for merged in (merge(whole, nothing), merge(nothing, whole)):
        assert all(torch.equal(a, b) for a, b in zip(merged, whole, strict=True))


def test_far_maxima_do_not_overflow():
    rows = torch.ones(1, 1, 1)
    near, far = Partial(rows[0] * 200, rows[0], rows * 3), Partial(rows[0] * -200, rows[0], rows)
    out = torch.empty_like(rows)
    for pair in ((near, far), (far, near)):
        finish(merge(*pair), out)
        assert out.item() == 3


@every_dtype
@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("size", [1e10, 1e30, 3e38])
def test_huge_queries_stay_finite(dtype, size, scale):
    problem = make_problem(f"torch-{dtype}", kv_heads=1, dim=16, n=40)
    size = min(size, torch.finfo(problem.q.dtype).max)
    q = (problem.q.double() / problem.q.abs().max() * size).to(problem.q.dtype)
    partial = attend_partial(q, problem.k, problem.v, scale)
    assert all(torch.isfinite(x).all() for x in partial)


@every_dtype
@examples(0.5)
@given(data=st.data(), cuts=st.lists(st.integers(1, 89), max_size=4))
def test_attention_in_blocks_is_full_attention(dtype, data, cuts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_BLOCK", data.draw(st.integers(1, 40)))
        patch.setattr(sdpa, "_KEYS", data.draw(st.integers(1, 40)))
        problem = data.draw(problems(f"torch-{dtype}", st.integers(1, 90)))
        new = data.draw(st.integers(1, problem.n))
        past = problem.n - new
        q, k, v = problem.rows(past, problem.n)
        attention, out = RunningAttention(q, problem.scale), torch.empty_like(q)
        edges = [0, *sorted({cut for cut in cuts if cut < past}), *[past] * (past > 0)]
        for start, stop in pairwise(edges):
            attention.add(problem.k[:, start:stop], problem.v[:, start:stop])
        attention.add(k, v, causal=True)
        attention.finish(out)
        assert_close(out, problem.exact(past, problem.n), problem.v)


@every_dtype
def test_a_real_block_size_too(dtype):
    problem = make_problem(f"torch-{dtype}", dim=16, n=5000)
    q, k, v = problem.rows(4300, 5000)
    attention, out = RunningAttention(q, problem.scale), torch.empty_like(q)
    attention.add(problem.k[:, :4300], problem.v[:, :4300])
    attention.add(k, v, causal=True)
    attention.finish(out)
    assert_close(out, problem.exact(4300, 5000), problem.v)


def test_masks_are_made_where_the_queries_are():
    # No other device is at hand than one that computes nothing: shapes and devices only.
    q = torch.empty(4, 300, 8, device="meta")
    k = torch.empty(2, 300, 8, device="meta")
    assert attend_causal(q, k, k, None, 1.0).device.type == "meta"
    assert attend_causal(q, k, k, (k, k), 1.0).shape == q.shape
    attention = RunningAttention(q, 1.0)
    attention.add(k, k)
    attention.add(k, k, causal=True)
    attention.finish(torch.empty_like(q))


def test_causal_attention_sees_the_past():
    problem = make_problem("torch-f32", n=600)
    past = (problem.k[:, :100], problem.v[:, :100])
    out = attend_causal(*problem.rows(100, 600), past, problem.scale)
    want = exact_attention(*map(tensor, (problem.q[:, 100:], problem.k, problem.v)), problem.scale)
    assert_close(out, want, problem.v)

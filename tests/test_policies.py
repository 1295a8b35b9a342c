"""The policies against brute force in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from icecache.config import IceConfig
from icecache.layer import LayerCache
from icecache.policies import POLICIES, Prompt, make_policy
from icecache.policies.dense import DenseLayer

SINK, WINDOW = 3, 5
DENSE = ("full", "window", "topk")


def make(name, kv_heads=2, group=2, dim=8, budget=4, scale=None):
    factory = make_policy(name, budget, sink_tokens=SINK, window_tokens=WINDOW, dense_below=0)
    return factory(
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=scale,
        layer_index=0,
    )


def rows(heads, n, dim, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, n, dim, generator=generator).to(dtype)


def probabilities(q, k, scale):
    """One position: q [kv, group, d], k [kv, n, d] -> [kv, group, n], float64."""
    return torch.softmax(q.double() @ k.double().mT * scale, dim=-1)


def expected_positions(name, probability, n, budget):
    """Per KV head, the positions that a policy's definition says it attends to."""
    sink = set(range(min(SINK, n)))
    window = set(range(max(SINK, n - 1 - WINDOW), n))
    chosen = []
    for head in probability.sum(dim=1):
        rest = sorted(set(range(n)) - sink - window)
        ranked = sorted(rest, key=lambda i, mass=head: -float(mass[i]))
        found = {"full": rest, "window": rest[-budget:], "topk": ranked[:budget]}[name]
        chosen.append(sorted(sink | window | set(found)))
    return chosen


@given(
    name=st.sampled_from(DENSE),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([4, 20]),
    n=st.integers(1, 40),
    budget=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_a_step_is_softmax_over_the_tokens_of_the_definition(
    name, kv_heads, group, dim, n, budget, seed
):
    layer = make(name, kv_heads, group, dim, budget)
    k, v = rows(kv_heads, n, dim, seed), rows(kv_heads, n, dim, seed + 1)
    q = rows(kv_heads * group, 1, dim, seed + 2)
    layer.prefill(k[:, : n - 1], v[:, : n - 1])
    out = layer.decode(q, k[:, n - 1 :], v[:, n - 1 :])

    probability = probabilities(q[:, 0].reshape(kv_heads, group, dim), k, dim**-0.5)
    chosen = expected_positions(name, probability, n, budget)
    assert [list(positions) for positions in layer.selected()] == chosen
    for head, positions in enumerate(chosen):
        weights = probability[head][:, positions]
        weights = weights / weights.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(
            out[head * group : (head + 1) * group, 0].double(),
            weights @ v[head, positions].double(),
            atol=1e-5,
            rtol=1e-5,
        )
    stats = layer.stats()
    assert stats.tokens_exact == stats.value_rows_read == len(chosen[0])
    assert stats.key_rows_read == (n if name == "topk" else len(chosen[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_exact_attention_is_causal_bottom_right(dtype):
    layer = make("window")
    k, v, q = rows(2, 30, 8, 0, dtype), rows(2, 30, 8, 1, dtype), rows(4, 30, 8, 2, dtype)
    parts = [layer.prefill(k[:, a:b], v[:, a:b], q[:, a:b]) for a, b in [(0, 7), (7, 8), (8, 30)]]
    out = torch.cat(parts, dim=1)
    assert out.dtype == dtype
    for i in range(30):
        p = probabilities(q[:, i].reshape(2, 2, 8), k[:, : i + 1], 8**-0.5)
        exact = (p @ v[:, : i + 1].double()).reshape(4, 8)
        torch.testing.assert_close(
            out[:, i].double(), exact, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0
        )


@pytest.mark.parametrize("name", DENSE)
def test_several_positions_are_causal_among_themselves(name):
    k, v, q = rows(2, 40, 8, 0), rows(2, 40, 8, 1), rows(4, 40, 8, 2)
    together, apart = make(name), make(name)
    for layer in (together, apart):
        layer.prefill(k[:, :30], v[:, :30])
    out = together.decode(q[:, 30:], k[:, 30:], v[:, 30:])
    for i in range(30, 40):
        one = apart.decode(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])
        torch.testing.assert_close(out[:, i - 30], one[:, 0])
    assert together.stats().steps == apart.stats().steps == 10


def test_the_scale_is_the_callers():
    k, v, q = rows(1, 6, 4, 0), rows(1, 6, 4, 1), rows(1, 1, 4, 2)
    layer = make("full", kv_heads=1, group=1, dim=4, scale=0.3)
    layer.append(k, v)
    exact = probabilities(q[:, 0].reshape(1, 1, 4), k, 0.3) @ v.double()
    torch.testing.assert_close(layer.attend(q).double(), exact)
    torch.testing.assert_close(layer.attend_exact(q).double(), exact)


@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6), kept=st.integers(0, 400))
def test_storage_keeps_every_row_while_it_grows_and_is_cropped(sizes, kept):
    n = sum(sizes)
    kept = min(kept, n)
    k, v = rows(2, n, 8, 0), rows(2, n, 8, 1)
    layer = make("full")
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        layer.append(k[:, end - size : end], v[:, end - size : end])
    stored = layer.gather()
    assert torch.equal(stored[0], k) and torch.equal(stored[1], v)
    stats = layer.stats()
    assert stats.kv_bytes == 2 * 2 * n * 8 * 4
    assert 0 <= stats.index_bytes <= stats.kv_bytes / 32 + 2 * 2 * 64 * 8 * 4
    layer.crop(kept)
    layer.append(k[:, kept:], v[:, kept:])
    assert torch.equal(layer.gather()[0], k)
    layer.reset()
    assert (layer.seq_len, layer.dtype, layer.stats().kv_bytes) == (0, None, 0)


def test_wrong_input_is_refused():
    layer = make("full")
    k, v = rows(2, 4, 8), rows(2, 4, 8, 1)
    with pytest.raises(ValueError, match=r"k must be \[2, n, 8\], got \[3, 4, 8\]"):
        layer.append(rows(3, 4, 8), v)
    with pytest.raises(TypeError, match="v must be a torch tensor, got ndarray"):
        layer.append(k, v.numpy())
    with pytest.raises(ValueError, match="one dtype"):
        layer.append(k, v.half())
    with pytest.raises(ValueError, match=r"expected 1 to 0"):
        layer.attend(rows(4, 1, 8))
    layer.append(k, v)
    with pytest.raises(ValueError, match=r"float32, got torch\.float16"):
        layer.append(k.half(), v.half())
    with pytest.raises(ValueError, match="q holds 5 positions, expected 1 to 4"):
        layer.attend(rows(4, 5, 8))
    with pytest.raises(ValueError, match="n must be between 0 and 4, got 5"):
        layer.crop(5)
    with pytest.raises(ValueError, match="multiple"):
        DenseLayer(3, 2, 8, IceConfig())
    assert layer.seq_len == 4


def test_the_window_of_the_statistics_is_the_one_attended_to():
    """After a prefill of n tokens it is `window_tokens` long, and grows by 32 before it moves."""
    layer = make("window", budget=1)
    k, v = rows(2, 100, 8), rows(2, 100, 8, 1)
    layer.prefill(k[:, :40], v[:, :40])
    for n in range(40, 100):
        layer.decode(rows(4, 1, 8), k[:, n : n + 1], v[:, n : n + 1])
        window = layer.stats().window_tokens
        assert window == min(WINDOW + n - 39, WINDOW + 32)
        # One token of the budget lies before it.
        assert list(layer.selected()[0]) == [*range(SINK), *range(n - window, n + 1)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("n", [1, 2, 20, 40])
def test_contexts_shorter_than_sink_and_window(name, n):
    factory = make_policy(name, 4, sink_tokens=32, window_tokens=64, dense_below=0)
    shape = dict(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=None)
    layers = [factory(layer_index=i, **shape) for i in range(2)]
    k, v, q = rows(2, n + 1, 8), rows(2, n + 1, 8, 1), rows(4, n + 1, 8, 2)
    exact = probabilities(q[:, -1].reshape(2, 2, 8), k, 8**-0.5) @ v.double()
    for layer in layers:
        layer.prefill(k[:, :n], v[:, :n])
        if isinstance(layer, DenseLayer):
            layer.observe(Prompt(k[:, :n], v[:, :n], q[:, :n], 8**-0.5))
        out = layer.decode(q[:, n:], k[:, n:], v[:, n:])
        torch.testing.assert_close(out[:, 0].double(), exact.reshape(4, 8), atol=1e-5, rtol=1e-5)


def test_names_make_the_layers_they_stand_for():
    assert list(POLICIES) == [
        "full",
        "topk",
        "window",
        "h2o",
        "snapkv",
        "quest",
        "arkvale",
        "pqcache",
        "magicpig",
        "omnikv",
        "retroinfer",
        "pages",
        "pages-reuse",
        "icecache-reuse",
        "icecache",
    ]
    with pytest.raises(ValueError, match=r"policy must be one of .* got 'ours'"):
        make_policy("ours", 64)
    with pytest.raises(TypeError, match="budgets"):
        make_policy("topk", 64, budgets=1)
    paper, ours = make("pages"), make("icecache")
    assert type(paper) is type(ours) is LayerCache
    assert POLICIES["pages"].config(token_budget=64) == IceConfig.paper(64)
    assert POLICIES["icecache"].config(token_budget=64) == IceConfig(token_budget=64)
    paper_reuse = POLICIES["pages-reuse"].config(token_budget=64)
    assert paper_reuse == IceConfig.paper(64, reuse_layers=3)
    reuse = POLICIES["icecache-reuse"].config(token_budget=64)
    assert reuse == IceConfig(token_budget=64, reuse_layers=3)


@pytest.mark.parametrize("name", ["pages", "icecache"])
def test_every_policy_attends_to_all_that_fits_its_budget(name):
    k, v, q = rows(2, 20, 8, 0), rows(2, 20, 8, 1), rows(4, 1, 8, 2)
    outputs = {}
    for policy in ("full", name):
        layer = make(policy, budget=64)
        layer.prefill(k[:, :19], v[:, :19])
        outputs[policy] = layer.decode(q, k[:, 19:], v[:, 19:])
        assert [list(positions) for positions in layer.selected()] == [list(range(20))] * 2
    torch.testing.assert_close(outputs[name], outputs["full"], atol=1e-5, rtol=1e-5)

"""What each re-made system is known for: its defining property, and one published finding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_layers import ALWAYS, SINK, WINDOW, layers, make, read, rows

from icecache.policies import POLICIES, magicpig, retroinfer
from icecache.policies.dense import DenseLayer
from icecache.policies.magicpig import sampling_probability

PEERS = ("h2o", "snapkv", "quest", "arkvale", "pqcache", "magicpig", "omnikv", "retroinfer")
DEPTH = {name: 4 if name == "omnikv" else 1 for name in POLICIES}
"""Layers of a sequence: the fourth of OmniKV is the first that does not see everything."""
DENSE = [name for name, policy in POLICIES.items() if issubclass(policy.layer, DenseLayer)]


def decoded(name, n, steps, budget, *, seed=0, together=True, layer=None, **options):
    """Outputs `[q_heads, steps, dim]` after a prompt of `n`, and the last layer."""
    k, v, q = (rows(h, n + steps, 8, 3 * seed + i) for i, h in enumerate((2, 2, 4)))
    stack = layer or layers(name, budget, **options)
    for one in stack:
        read(one, k[:, :n], v[:, :n], q[:, :n])
    outputs = []
    for start in range(n, n + steps, steps if together else 1):
        stop = n + steps if together else start + 1
        for one in stack:
            out = one.decode(q[:, start:stop], k[:, start:stop], v[:, start:stop])
        outputs.append(out)
    return torch.cat(outputs, dim=1), stack[-1]


def middle(layer):
    """Per KV head, the selected positions that are neither sink nor window."""
    end = layer.seq_len - layer.stats().window_tokens
    end = max(end, layer.seq_len - ALWAYS + SINK)
    return [{int(p) for p in positions if SINK <= p < end} for positions in layer.selected()]


@pytest.mark.parametrize("name", DENSE)
def test_a_budget_that_covers_everything_is_full_attention(name):
    full = decoded("full", 60, 70, 1)[0]
    for budget in (122, 500):
        for count in {1, DEPTH[name]}:
            out, layer = decoded(name, 60, 70, budget, count=count)
            torch.testing.assert_close(out, full, atol=1e-5, rtol=1e-5)
            assert [list(positions) for positions in layer.selected()] == [list(range(130))] * 2


@pytest.mark.parametrize("name", [n for n in DENSE if n != "full"])
def test_more_budget_comes_closer_to_full_attention(name):
    errors = []
    for budget in (4, 64, 500):
        pairs = [
            (
                decoded(name, 140, 8, budget, seed=s, count=DEPTH[name])[0],
                decoded("full", 140, 8, 1, seed=s)[0],
            )
            for s in range(6)
        ]
        errors.append(sum(float((out - full).square().mean()) for out, full in pairs))
    assert errors[0] > 1.5 * errors[1] > errors[2], errors


@pytest.mark.parametrize("name", DENSE)
def test_no_position_sees_a_later_one(name):
    n, steps = 90, 50
    k, v, q = rows(2, n + steps, 8, 0), rows(2, n + steps, 8, 1), rows(4, n + steps, 8, 2)
    outputs = []
    for later in (k, -3 * k):
        for layer in (stack := layers(name, 16, count=DEPTH[name])):
            read(layer, k[:, :n], v[:, :n], q[:, :n])
        keys = torch.cat([k[:, n:-1], later[:, -1:]], dim=1)
        outputs.append([layer.decode(q[:, n:], keys, v[:, n:]) for layer in stack][-1])
    assert torch.equal(outputs[0][:, :-1], outputs[1][:, :-1])
    assert not torch.equal(outputs[0][:, -1], outputs[1][:, -1])


@pytest.mark.parametrize("name", [n for n in DENSE if n != "h2o"])
def test_positions_of_one_call_attend_as_if_they_came_one_by_one(name):
    """Not H2O: its scores learn after each call."""
    together, one = decoded(name, 80, 45, 12, count=DEPTH[name])
    apart, other = decoded(name, 80, 45, 12, count=DEPTH[name], together=False)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    for a, b in zip(one.selected(), other.selected(), strict=True):
        assert list(a) == list(b)
    assert one.stats().key_rows_read == pytest.approx(other.stats().key_rows_read)


@given(
    name=st.sampled_from(PEERS),
    n=st.integers(1, 150),
    steps=st.integers(1, 60),
    budget=st.integers(1, 70),
    together=st.booleans(),
)
def test_budgets_hold_and_positions_are_sorted(name, n, steps, budget, together):
    out, layer = decoded(name, n, steps, budget, count=DEPTH[name], together=together)
    assert torch.isfinite(out).all()
    stats = layer.stats()
    for positions in layer.selected():
        assert list(positions) == sorted(set(positions))
        assert positions[-1] == layer.seq_len - 1
        if name != "magicpig":  # a mean
            assert len(positions) <= ALWAYS + budget
        assert set(range(min(SINK, layer.seq_len))) <= set(positions)
        assert set(range(max(0, layer.seq_len - WINDOW), layer.seq_len)) <= set(positions)
    assert stats.tokens_exact <= stats.value_rows_read <= layer.seq_len
    assert stats.tokens_exact <= stats.key_rows_read


@pytest.mark.parametrize("name", PEERS)
def test_a_crop_and_a_reset_leave_a_layer_that_goes_on(name):
    n, kept = 120, 100
    k, v, q = rows(2, 200, 8, 0), rows(2, 200, 8, 1), rows(4, 200, 8, 2)
    stack = layers(name, 16, count=DEPTH[name])
    for layer in stack:
        read(layer, k[:, :n], v[:, :n], q[:, :n])
        layer.decode(q[:, n : n + 60], k[:, n : n + 60], v[:, n : n + 60])
    fresh = layers(name, 16, count=DEPTH[name])
    for one in fresh:
        read(one, k[:, :n], v[:, :n], q[:, :n]).crop(kept)
    for size in (kept, 40, 1):
        for layer in stack:
            layer.crop(size)
            layer.append(k[:, size:kept], v[:, size:kept])
            out = layer.decode(q[:, kept:120], k[:, kept:120], v[:, kept:120])
            assert torch.isfinite(out).all() and layer.seq_len == 120
            layer.crop(kept)
        if name in ("quest", "arkvale") and size == kept:
            for one in fresh:
                again = one.decode(q[:, kept:120], k[:, kept:120], v[:, kept:120])
            torch.testing.assert_close(out, again)
    for layer in stack:
        layer.reset()
        assert layer.seq_len == 0
    torch.testing.assert_close(
        decoded(name, 90, 50, 16, layer=stack)[0], decoded(name, 90, 50, 16, count=DEPTH[name])[0]
    )


@pytest.mark.parametrize("name", PEERS)
def test_the_seed_decides_where_there_is_chance(name):
    outputs = [decoded(name, 150, 5, 16, count=DEPTH[name], seed=1)[0] for _ in range(2)]
    assert torch.equal(*outputs)
    k, v, q = rows(2, 150, 8, 3), rows(2, 150, 8, 4), rows(4, 150, 8, 5)
    other = read(make(name, 16, seed=7), k, v, q).attend(q[:, -5:])
    same = read(make(name, 16, seed=0), k, v, q).attend(q[:, -5:])
    assert torch.equal(other, same) == (not POLICIES[name].seeded)


@pytest.mark.parametrize("name", ["quest", "arkvale"])
@given(
    pages=st.integers(1, 5),
    tokens=st.integers(1, 9),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_a_pages_bound_is_never_below_its_true_maximum(name, pages, tokens, size, seed):
    layer = make(name)
    keys = (rows(2, pages * tokens, 8, seed) * size).unflatten(1, (pages, tokens))
    q = rows(2, 6, 8, seed + 1)
    bound = layer.bound(q, layer.digest(keys))
    true = torch.einsum("hmd,hptd->hmpt", q, keys).amax(dim=-1)
    assert (bound >= true - 1e-5 * size).all()
    if tokens == 1:
        torch.testing.assert_close(bound, true)


def needle(n, at, *, seed=0):
    """Keys, values and queries of a prompt in which nothing attends to the token `at`, and a query
    that looks for it."""
    k, v, q = rows(1, n, 8, seed), rows(1, n, 8, seed + 1), rows(1, n, 8, seed + 2)
    target = torch.zeros(8)
    target[0] = 1.0
    k[..., 0], q[..., 0] = 0.0, -2.0
    k[0, at] = 12 * target
    return k, v, q, 5 * target[None, None]


@pytest.mark.parametrize("name", ["quest", "arkvale", "pqcache", "retroinfer"])
def test_a_token_that_nothing_attended_to_is_found_when_a_query_asks_for_it(name):
    """Quest's figure on pass keys, ArkVale's recall: what was not selected, and what H2O and
    StreamingLLM have evicted, comes back."""
    k, v, q, asked = needle(300, 40)
    found = {}
    for policy in (name, "h2o", "snapkv", "window"):
        # A window longer than a page, as in practice: a page that is not full comes first.
        layer = read(make(policy, 32, kv_heads=1, group=1, window_tokens=40), k, v, q)
        for query in (q[:, :1], asked, q[:, :1]):
            layer.decode(query, k[:, -1:], v[:, -1:])
            found.setdefault(policy, []).append(40 in middle(layer)[0])
    assert found[name] == [False, True, False]
    assert found["h2o"] == found["snapkv"] == found["window"] == [False] * 3


def test_h2o_never_brings_an_evicted_token_back():
    k, v, q = rows(2, 260, 8, 0), rows(2, 260, 8, 1), rows(4, 260, 8, 2)
    layer = read(make("h2o", 12), k[:, :120], v[:, :120], q[:, :120])
    gone, changes = [set(), set()], 0
    for i in range(120, 260):
        layer.decode(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])
        for lost, kept in zip(gone, middle(layer), strict=True):
            assert not lost & kept and len(kept) == 12
            evicted = set(range(SINK, i + 1 - ALWAYS + SINK)) - kept
            changes += len(evicted - lost) > 1
            lost |= evicted
    assert changes > 0  # tokens kept for a while were evicted, too


def test_h2o_keeps_what_received_most_attention_and_recent_tokens():
    k, v, q = rows(1, 200, 8, 0), rows(1, 200, 8, 1), rows(1, 200, 8, 2)
    layer = read(make("h2o", 10, kv_heads=1, group=1), k, v, q)
    logits = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(200, 200).triu(1) > 0, -torch.inf)
    mass = torch.softmax(logits.double(), dim=-1).sum(dim=1)[0, SINK : 195 - WINDOW]
    expected = {SINK + int(i) for i in mass.topk(5).indices} | set(
        range(195 - WINDOW, 200 - WINDOW)
    )
    layer.attend(q[:, -1:])
    assert middle(layer)[0] == expected


def test_snapkv_never_changes_its_mind():
    k, v, q = rows(2, 260, 8, 0), rows(2, 260, 8, 1), rows(4, 260, 8, 2)
    layer = read(make("snapkv", 12), k[:, :120], v[:, :120], q[:, :120])
    choices = []
    for i in range(120, 260):
        layer.decode(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])
        choices.append([{p for p in chosen if p < 109} for chosen in middle(layer)])
        assert [len(chosen) for chosen in middle(layer)] == [12, 12]
    assert all(choice == choices[-1] for choice in choices)
    assert [len(kept) for kept in choices[-1]] == [6, 6]


def test_snapkv_beats_h2o_where_the_end_of_the_prompt_asks():
    """Its figure on instructions at the end: attention summed over a whole prompt favours what its
    beginning looked at, and the last positions know what the answer needs."""
    k, v, q, asked = needle(300, 220)
    q[:, -8:] = asked
    found = {}
    for name in ("snapkv", "h2o"):
        crowd = q.clone()
        crowd[0, :200] = 8 * torch.eye(8)[1]
        keys = k.clone()
        keys[0, 10:26, 1] = 6.0
        layer = read(make(name, 16, kv_heads=1, group=1), keys, v, crowd)
        layer.decode(asked, keys[:, -1:], v[:, -1:])
        found[name] = 220 in middle(layer)[0]
    assert found == {"snapkv": True, "h2o": False}


@given(n=st.integers(20, 70), budget=st.integers(1, 20), seed=st.integers(0, 100))
def test_pqcache_with_one_code_per_key_is_exact(n, budget, seed):
    k, v, q = rows(2, n, 8, seed), rows(2, n, 8, seed + 1), rows(4, n, 8, seed + 2)
    quantized, oracle = (read(make(name, budget), k, v, q) for name in ("pqcache", "topk"))
    torch.testing.assert_close(quantized.attend(q[:, -1:]), oracle.attend(q[:, -1:]))
    for a, b in zip(quantized.selected(), oracle.selected(), strict=True):
        assert list(a) == list(b)


def test_pqcache_finds_more_of_the_top_tokens_than_quest():
    """Its figure of recall: tokens that are scattered over pages are not worth a page each."""
    hits = {}
    for name in ("pqcache", "quest"):
        hits[name] = 0
        for seed in range(5):
            k, v, q = rows(2, 600, 8, seed), rows(2, 600, 8, 9), rows(4, 600, 8, 50 + seed)
            chosen = []
            for policy in (name, "topk"):
                layer = read(make(policy, 32), k, v, q)
                layer.attend(3 * q[:, -1:])
                chosen.append(middle(layer))
            hits[name] += sum(len(a & b) for a, b in zip(*chosen, strict=True))
    assert hits["pqcache"] > 0.6 * 5 * 2 * 32 > 1.5 * hits["quest"]


def test_pqcache_gives_later_tokens_codes_of_the_old_codebooks():
    k, v, q = rows(2, 400, 8, 0), rows(2, 400, 8, 1), rows(4, 400, 8, 2)
    layer = read(make("pqcache", 8), k[:, :200], v[:, :200], q[:, :200])
    layer.attend(q[:, 199:200])
    books = [book.clone() for book in layer._books]
    layer.decode(q[:, 200:], k[:, 200:], v[:, 200:])
    assert all(torch.equal(a, b) for a, b in zip(books, layer._books, strict=True))
    later = layer._quantized[:, 200:]
    assert later.shape[1] > 50
    for part, book in zip(later.tensor_split(2, dim=-1), books, strict=True):
        distance = torch.cdist(part, book).amin(dim=-1)
        assert float(distance.max()) < 1e-2


def estimates(n, tables, seeds, scale=0.5):
    """Numerator and denominator of a query's attention to the middle, by seed, and the true ones,
    in units of the true denominator. [seeds, 1 + dim], [1 + dim]"""
    k, v, q = scale * rows(1, n, 8, 0), rows(1, n, 8, 1), rows(1, n, 8, 2)
    found = []
    for seed in range(seeds):
        layer = read(
            make("magicpig", n - WINDOW - SINK - 1, kv_heads=1, group=1, seed=seed), k, v, q
        )
        layer._used[:] = tables
        seen = []
        layer.choose = lambda at, layer=layer, seen=seen: seen.append(
            (at, type(layer).choose(layer, at))
        )
        layer.attend(q[:, -1:])
        ((at, choice),) = seen
        weight = torch.exp(at.logits + choice.shift) * (choice.exact & at.middle)
        found.append(weight[0, 0, 0])
    weights = torch.stack(found).double()
    true = (at.logits.exp() * at.middle)[0, 0, 0].double()
    values = torch.cat([torch.ones(n, 1), v[0]], dim=1).double()
    return weights @ values / true.sum(), true @ values / true.sum()


def test_magicpigs_estimate_is_unbiased(monkeypatch):
    monkeypatch.setattr(magicpig, "TABLES", 20)
    monkeypatch.setattr(magicpig, "BITS", 4)
    found, true = estimates(80, 20, seeds=120)
    error = found.std(dim=0) / math.sqrt(len(found))
    assert ((found.mean(dim=0) - true).abs() < 4 * error).all()
    assert float(error.max()) < 0.2


def test_magicpigs_error_falls_with_the_number_of_tables(monkeypatch):
    monkeypatch.setattr(magicpig, "TABLES", 80)
    monkeypatch.setattr(magicpig, "BITS", 4)
    errors = []
    for tables in (5, 20, 80):
        found, true = estimates(80, tables, seeds=20)
        errors.append(float((found - true).square().mean().sqrt()))
    assert errors[0] > 1.5 * errors[1] > 1.5 * 1.5 * errors[2]


def test_the_probability_of_two_collisions():
    tables = torch.tensor([2.0, 150.0]).double()
    same = (1 - math.acos(0.5) / math.pi) ** magicpig.BITS
    expected = [same**2, 1 - (1 - same) ** 150 - 150 * same * (1 - same) ** 149]
    torch.testing.assert_close(
        sampling_probability(torch.tensor(0.5), tables), torch.tensor(expected).double()
    )
    assert sampling_probability(torch.tensor(1.0), tables).tolist() == [1, 1]


def test_magicpig_spends_its_budget_on_the_mean():
    k, v, q = rows(2, 1200, 8, 0), rows(2, 1200, 8, 1), rows(4, 1200, 8, 2)
    for budget in (20, 150):
        layer = read(make("magicpig", budget), k[:, :1100], v[:, :1100], q[:, :1100])
        counts = []
        for i in range(1100, 1140):
            layer.decode(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])
            counts.append(sum(map(len, middle(layer))) / 2)
        assert budget / 2 < sum(counts) / len(counts) < 2 * budget


def test_magicpig_beats_the_best_tokens_where_attention_is_flat():
    """Its main finding: the values of the best tokens are no mean of all values. Here they depend
    on the logit, so the best tokens' mean is off."""
    n, errors = 600, {"magicpig": 0.0, "topk": 0.0}
    k, q = rows(1, n, 8, 0), rows(1, n, 8, 2)
    v = (q[:, -1:] @ k.mT).mT.repeat(1, 1, 8)
    full = read(make("full", kv_heads=1, group=1), k, v, q).attend(q[:, -1:])
    for name in errors:
        for seed in range(10):
            layer = read(make(name, 150, kv_heads=1, group=1, seed=seed), k, v, q)
            errors[name] += float((layer.attend(q[:, -1:]) - full).norm() / 10)
    assert errors["magicpig"] < 0.5 * errors["topk"]


def test_omnikvs_layers_attend_to_the_tokens_of_the_filter_below():
    v, q = rows(2, 200, 8, 1), rows(4, 200, 8, 2)
    stack = layers("omnikv", 10, count=12)
    chosen = []
    for i, layer in enumerate(stack):
        keys = rows(2, 200, 8, 10 + i)
        read(layer, keys, v, q)
        layer.attend(q[:, -3:])
        probability = torch.softmax(q[:, -1].view(2, 2, 8) @ keys.mT * 8**-0.5, dim=-1)
        mass = probability.sum(dim=(0, 1))[SINK : 200 - WINDOW]
        chosen.append({SINK + int(t) for t in mass.topk(10).indices})
    for i, layer in enumerate(stack):
        if i <= 2 or i == 8:
            assert layer.stats().tokens_exact == 200
        else:
            assert middle(layer) == [chosen[2 if i < 8 else 8]] * 2
            assert layer.stats().key_rows_read == SINK + WINDOW + 10


def test_omnikv_is_as_good_as_layers_are_alike():
    """Its figure of neighbouring layers: where they look at the same tokens, a filter's choice is
    as good as the layer's own."""
    errors = []
    for alike in (1.0, 0.0):
        k, v, q = (rows(h, 300, 8, i) for i, h in enumerate((2, 2, 4)))
        stack = layers("omnikv", 16, count=4)
        keys = [k] * 3 + [alike * k + (1 - alike) * rows(2, 300, 8, 7)]
        for layer, mine in zip(stack, keys, strict=True):
            read(layer, mine, v, q)
            out = layer.attend(4 * q[:, -1:])
        full = read(make("full"), keys[3], v, q).attend(4 * q[:, -1:])
        errors.append(float((out - full).norm() / full.norm()))
    assert errors[0] < 0.4 * errors[1]


def test_retroinfer_with_a_cluster_per_token_is_the_best_tokens_and_an_exact_rest(monkeypatch):
    monkeypatch.setattr(retroinfer, "TOKENS", 1)
    k, v, q = rows(2, 200, 8, 0), rows(2, 200, 8, 1), rows(4, 200, 8, 2)
    layer, oracle = (read(make(name, 12), k, v, q) for name in ("retroinfer", "topk"))
    oracle.attend(q[:, -1:])
    layer.attend(q[:, -1:])
    assert middle(layer) == middle(oracle)
    monkeypatch.setattr(retroinfer, "ESTIMATED", 1.0)
    full = read(make("full"), k, v, q).attend(q[:, -1:])
    torch.testing.assert_close(layer.attend(q[:, -1:]), full, atol=1e-5, rtol=1e-5)


def test_retroinfer_counts_every_token_once(monkeypatch):
    """With equal keys all logits are equal, and estimating everything is full attention."""
    monkeypatch.setattr(retroinfer, "ESTIMATED", 1.0)
    monkeypatch.setattr(retroinfer, "UPDATE", 30)
    k = rows(2, 1, 8, 0).expand(-1, 260, -1)
    v, q = rows(2, 260, 8, 1), rows(4, 260, 8, 2)
    layer, full = (
        read(make(x, 6), k[:, :150], v[:, :150], q[:, :150]) for x in ("retroinfer", "full")
    )
    for start in range(150, 260, 10):
        part = slice(start, start + 10)
        outputs = [x.decode(q[:, part], k[:, part], v[:, part]) for x in (layer, full)]
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    assert layer._labels.shape[1] >= 150 - SINK - WINDOW + 2 * 30


def test_retroinfers_estimate_is_better_than_dropping(monkeypatch):
    """Its ablation: the estimation zone brings the output closer at no more exact tokens."""
    k, v, q = rows(2, 400, 8, 0), rows(2, 400, 8, 1), rows(4, 400, 8, 2)
    v = v + k  # values that go with keys
    full = read(make("full"), k, v, q).attend(q[:, -20:])
    errors = []
    for share in (0.0, 0.23, 1.0):
        monkeypatch.setattr(retroinfer, "ESTIMATED", share)
        layer = read(make("retroinfer", 32), k, v, q)
        errors.append(float((layer.attend(q[:, -20:]) - full).norm()))
    assert errors[0] > 1.3 * errors[1] > 1.3 * 1.3 * errors[2]

"""The comparison of policies, against its definitions computed directly on a tiny model."""

import math
import random
from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress
from tiny_models import llama
from tiny_tokenizer import VOCABULARY

from icecache import IceConfig, LayerCache
from icecache.eval import drift
from icecache.eval.compare import CHUNK, Passage, compare_tasks, compare_texts, read_context
from icecache.eval.comparison import Comparison
from icecache.eval.decode import Decoder
from icecache.eval.drift import VARIANTS, NotInserted, Rebuilt, measure_drift
from icecache.eval.errors import EvalError
from icecache.eval.kl import divergence, evaluate_text
from icecache.eval.ledger import Ledger
from icecache.eval.runs import FORCED, FULL, Run, plan
from icecache.eval.tasks import Question
from icecache.eval.traffic import Traffic
from icecache.policies import make_policy

CONTEXT, TOKENS = 600, 40
ROW = 2 * 2 * 16 * 4
"""Bytes of a token's key and value in one layer of the model."""
LAYERS = 4


@pytest.fixture(scope="module")
def model():
    return llama(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def passage():
    ids = random.Random(0).choices(range(VOCABULARY), k=CONTEXT + TOKENS + 1)
    return Passage.of("noise", ids, CONTEXT)


@pytest.fixture
def progress():
    return Progress(disable=True)


def measured(model, passages, runs, progress, path=None, config=None):
    ledger = Ledger(path, config or {"model": "tiny"}, ["model"])
    compare_texts(model, passages, runs, ledger, progress)
    return ledger.comparison


def test_tokens_fed_together_say_what_they_say_one_by_one(model, passage, progress):
    """The measurement of `icecache eval` feeds single tokens."""
    runs = plan(["full", "topk", "window", "icecache"], [16, 1000])
    ids = passage.context + passage.fed + passage.targets[-1:]
    alone = evaluate_text(model, "noise", ids, CONTEXT, runs, progress)
    together = measured(model, [passage], runs, progress).texts
    assert [(row.policy, row.budget) for row in together if row.equal == "tokens"] == [
        (row.policy, row.budget) for row in alone
    ]
    for one, row in zip(alone, together, strict=False):
        assert row.positions == TOKENS
        tolerance = 0.3 if row.policy == "icecache" else 1e-3  # its index grows at other moments
        assert row.kl == pytest.approx(one.kl, rel=tolerance, abs=1e-6)
        assert row.perplexity == pytest.approx(one.perplexity, rel=0.02)
        if row.policy != "icecache":
            assert row.agreement == one.agreement
            assert row.kl_stderr == pytest.approx(one.kl_stderr, rel=1e-3, abs=1e-6)


def test_what_policies_read_and_hold(model, passage, progress):
    rows = measured(model, [passage], plan(["full", "window", "icecache"], [16]), progress).texts
    by_name = {(row.policy, row.equal): row for row in rows}
    stored = CONTEXT + TOKENS - 3.5  # mean over the last 8 positions
    full, window = by_name["full", "tokens"], by_name["window", "tokens"]
    assert (full.kl, full.agreement, full.moved_bytes) == (0, 1, 0)
    assert full.exact_tokens == stored
    assert full.read_bytes == full.held_bytes == pytest.approx(LAYERS * stored * ROW)
    ends = 32 + 64 + 16
    grown = window.exact_tokens - ends
    assert 16 < grown <= 32  # the window grows by 32 before it moves
    assert window.read_bytes == pytest.approx(LAYERS * window.exact_tokens * ROW)
    assert window.held_bytes == LAYERS * (ends + 32) * ROW
    assert window.moved_bytes == 0
    ours = by_name["icecache", "tokens"]
    assert ours.exact_tokens == window.exact_tokens
    assert ours.held_bytes == LAYERS * (32 + 64 + 32 + 4 * 16) * ROW
    answers = LAYERS * 4 * 4 * (16 + 2)
    assert answers < ours.moved_bytes <= answers + LAYERS * 16 * ROW
    # As many bytes as icecache: so many more tokens.
    longer = by_name["window", "bytes"]
    assert longer.budget == 16
    assert longer.spent == 16 + round((ours.read_bytes - window.read_bytes) / (LAYERS * ROW))
    assert longer.read_bytes == pytest.approx(ours.read_bytes, rel=1e-2)
    assert longer.kl < window.kl


def test_equal_bytes_are_equal_where_a_token_costs_more_than_itself(model, passage, progress):
    """A clustered token also costs its part of a centroid, a sampled one that of a table."""
    policies = ["full", "magicpig", "icecache-reuse", "icecache"]
    rows = measured(model, [passage], plan(policies, [8]), progress).texts
    (ours,) = (row for row in rows if row.policy == "icecache")
    found = [row for row in rows if row.equal == "bytes"]
    assert {row.policy for row in found} <= {"magicpig", "icecache-reuse"} and found
    for row in found:
        (first,) = (r for r in rows if (r.policy, r.equal) == (row.policy, "tokens"))
        # Nearer than where it started, and to 10 % where its steps allow it.
        assert abs(row.read_bytes - ours.read_bytes) < abs(first.read_bytes - ours.read_bytes)
        assert row.read_bytes == pytest.approx(ours.read_bytes, rel=0.1)


def test_options_of_icecache_are_its_own_and_full_attention_is_fed_once(
    model, passage, progress, monkeypatch
):
    made = []

    class Listed(Decoder):
        def __init__(self, model, context, run, **options):
            made.append(run)
            super().__init__(model, context, run, **options)

    monkeypatch.setattr("icecache.eval.compare.Decoder", Listed)
    runs = plan(["full", "window", "icecache"], [16], {"page_size": 5})
    rows = measured(model, [passage], runs, progress).texts
    assert [(row.policy, row.equal) for row in rows][-1] == ("window", "bytes")
    assert [run.policy for run in made] == ["full", "window", "icecache", "window"]
    assert [run.config().page_size for run in made] == [6, 6, 5, 6]


def test_only_scored_positions_count(model, passage, progress):
    scored = [i % 3 == 0 for i in range(TOKENS)]
    some = replace(passage, scored=scored)
    (row,) = measured(model, [some], plan(["topk"], [16]), progress).texts
    decoder = Decoder(model, read_context(model, passage.context, progress), Run("topk", 16))
    full = Decoder(model, read_context(model, passage.context, progress), FULL)
    starts = range(0, TOKENS - 8, CHUNK)
    parts = [passage.fed[i : min(i + CHUNK, TOKENS - 8)] for i in starts]
    parts += [[token] for token in passage.fed[TOKENS - 8 :]]
    mine = torch.cat([decoder.read(part) for part in parts])[scored]
    truth = torch.cat([full.read(part) for part in parts])[scored]
    each = [divergence(p, q) for p, q in zip(truth, mine, strict=True)]
    assert row.positions == sum(scored) == len(each)
    assert row.kl == pytest.approx(sum(each) / len(each))
    losses = [-mine[i, passage.targets[j]] for i, j in enumerate(np.flatnonzero(scored))]
    assert row.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)))


def test_heads_are_compared_with_full_attention(model, passage, progress):
    runs = plan(["full", "topk"], [16, 1000])
    heads = measured(model, [passage], runs, progress).heads
    assert [(row.policy, row.budget, row.layer, row.head) for row in heads] == [
        (policy, budget, layer, head)
        for policy, budget in (("full", None), ("topk", 16), ("topk", 1000))
        for layer in range(LAYERS)
        for head in range(2)
    ]
    for row in heads:
        if row.budget == 16:
            assert 0.05 < row.mass < 1 and row.error > 1e-3
        else:
            assert row.mass == pytest.approx(1) and row.error < 1e-5


def test_a_run_that_was_stopped_goes_on(model, passage, progress, tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    runs = plan(["full", "window", "icecache"], [16])
    whole = measured(model, [passage], runs, progress)
    feed = Decoder.read
    fed = []

    def until_window(decoder, tokens, **options):
        fed.append(decoder.run.policy)
        if decoder.run.policy == "icecache":
            raise KeyboardInterrupt
        return feed(decoder, tokens, **options)

    monkeypatch.setattr(Decoder, "read", until_window)
    with pytest.raises(KeyboardInterrupt):
        measured(model, [passage], runs, progress, path)
    assert [row.policy for row in Comparison.read(path).texts] == ["full", "window"]
    fed.clear()
    monkeypatch.setattr(
        Decoder, "read", lambda *a, **o: fed.append(a[0].run.policy) or feed(*a, **o)
    )
    resumed = measured(model, [passage], runs, progress, path)
    assert set(fed) == {
        "full",
        "icecache",
        "window",
    }  # full as the reference, window at equal bytes
    assert replace(resumed, config={}) == replace(whole, config={})
    assert Comparison.read(path) == resumed
    fed.clear()
    assert measured(model, [passage], runs, progress, path) == resumed
    assert fed == []
    with pytest.raises(EvalError, match=r"model 'tiny', this one has 'other': give another file"):
        measured(model, [passage], runs, progress, path, {"model": "other"})


def test_a_ledger_takes_up_what_agrees(tmp_path):
    path = tmp_path / "out.json"
    Ledger(path, {"read": {"a": "1"}, "options": {}}, ["options"]).add()
    assert Ledger(path, {"read": {"b": "2"}, "options": {}}, ["options"]).comparison.config == {
        "read": {"a": "1", "b": "2"},
        "options": {},
    }
    with pytest.raises(EvalError, match="the text a '1', this one has '2'"):
        Ledger(path, {"read": {"a": "2", "c": "3"}})
    with pytest.raises(EvalError, match=r"options \{\}, this one has \{'page_size': 5\}"):
        Ledger(path, {"options": {"page_size": 5}}, ["options"])
    path.write_text(path.read_text()[:-9])
    with pytest.raises(EvalError, match="holds no comparison"):
        Ledger(path, {})
    path.write_text("")
    assert Ledger(path, {"model": "m"}).comparison.texts == []


@torch.inference_mode()
def test_questions(model, progress):
    ids = random.Random(1).choices(range(VOCABULARY), k=CONTEXT + 5)
    said = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    greedy = said[0, len(ids) :].tolist()
    wrong = [*greedy[:2], (greedy[2] + 1) % VOCABULARY]
    questions = [
        Question("t", i, ids[:CONTEXT], ids[CONTEXT:], answer)
        for i, answer in enumerate((greedy, wrong))
    ]
    ledger = Ledger(None, {})
    compare_tasks(model, questions, plan(["full", "window", "topk"], [1000]), ledger, progress)
    rows = ledger.comparison.tasks
    names = ["full", "window", "topk"]
    assert [(row.policy, row.instance) for row in rows] == [(n, i) for i in (0, 1) for n in names]
    log_probs = torch.log_softmax(model(torch.tensor([ids + greedy])).logits[0].float(), dim=-1)
    for row in rows:
        answer = questions[row.instance].answer
        if row.policy != "window":
            at = range(len(ids) - 1, len(ids) - 1 + len(answer))
            expected = sum(float(log_probs[i, token]) for i, token in zip(at, answer, strict=True))
            assert row.logprob == pytest.approx(expected, abs=1e-3)
            assert row.right == (row.instance == 0)
        assert row.full_right == (row.instance == 0)
        assert row.context == CONTEXT
    done = len(rows)
    compare_tasks(model, questions, plan(["full", "topk"], [1000]), ledger, progress)
    assert len(ledger.comparison.tasks) == done


@dataclass
class Stats:
    seq_len: int
    kv_bytes: int
    sink_tokens: int = 2
    window_tokens: int = 3


@given(
    steps=st.lists(
        st.lists(st.sets(st.integers(0, 49), max_size=12), min_size=2, max_size=2), max_size=12
    ),
    slots=st.integers(1, 9),
)
def test_traffic_is_that_of_a_list_of_slots(steps, slots):
    config = IceConfig(token_budget=1, device_tokens=slots, sink_tokens=2, window_tokens=3)
    traffic = Traffic("pages", LayerCache(4, 2, 8, config), 4, 8)
    resident = [OrderedDict(), OrderedDict()]
    for wanted in steps:
        n, moved, kept = 50, 0, 2 + 3 + 32
        for head, positions in enumerate(wanted):
            for position in sorted(p for p in positions if 2 <= p < 47):
                moved += resident[head].pop(position, 0) == 0
                resident[head][position] = 1
            while len(resident[head]) > slots:
                resident[head].pop(next(iter(resident[head])))
        selected = [np.array(sorted(positions), dtype=np.int64) for positions in wanted]
        assert traffic.step(selected, Stats(n, n * 2 * 64)) == (moved * 64, (kept + slots) * 2 * 64)


def layer_of(n, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, n, 8, generator=generator) for _ in range(2))
    config = IceConfig(**{**FORCED, "token_budget": 8, **options})
    return LayerCache(4, 2, 8, config), k, v


def test_what_is_not_inserted_is_lost():
    layer, k, v = layer_of(900)
    layer.prefill(k[:, :500], v[:, :500])
    lost = NotInserted(layer)
    for start in range(500, 900, CHUNK):
        part = slice(start, start + CHUNK)
        lost.decode(torch.randn(4, CHUNK, 8), k[:, part], v[:, part])
        assert lost.seq_len == start + CHUNK
        newest = range(max(500, start + CHUNK - 96), start + CHUNK)
        for positions in layer.selected():
            # The layer's own positions: the prompt's, then those of what is left.
            later = positions[positions >= 500]
            assert list(later) == list(range(500, 500 + len(newest)))
        stored = layer.gather()[0]
        assert torch.equal(stored[:, :500], k[:, :500])
        assert torch.equal(stored[:, 500:], k[:, newest.start : newest.stop])


def test_a_rebuilt_layer_is_a_new_one():
    layer, k, v = layer_of(800)
    layer.prefill(k[:, :500], v[:, :500])
    rebuilt = Rebuilt(layer)
    for start in range(500, 756, CHUNK):
        part = slice(start, start + CHUNK)
        rebuilt.decode(torch.randn(4, CHUNK, 8), k[:, part], v[:, part])
    new, _, _ = layer_of(800)
    new.prefill(k[:, :756], v[:, :756])
    q = torch.randn(4, CHUNK, 8)
    part = slice(756, 756 + CHUNK)
    out = rebuilt.decode(q, k[:, part], v[:, part])
    assert torch.equal(out, new.decode(q, k[:, part], v[:, part]))


def test_drift(model, progress, monkeypatch):
    monkeypatch.setattr(drift, "PREFILL", 400)
    monkeypatch.setattr(drift, "STRETCH", 150)
    ids = random.Random(2).choices(range(VOCABULARY), k=800)
    ledger = Ledger(None, {})
    for budget in (16, 1000):
        run = Run("icecache", budget)
        measure_drift(model, "noise", ids, run, ledger, progress)
        measure_drift(model, "noise", ids, run, ledger, progress)
    rows = ledger.comparison.drift
    assert [(row.variant, row.budget, row.start, row.positions) for row in rows] == [
        (variant, budget, start, n)
        for budget in (16, 1000)
        for variant in VARIANTS
        for start, n in ((400, 150), (550, 150), (700, 100))
    ]
    by_key = {(row.variant, row.budget, row.start): row.kl for row in rows}
    for variant in ("inserted", "rebuilt"):
        assert by_key[variant, 1000, 700] < 1e-6
        assert 1e-4 < by_key[variant, 16, 700] < by_key["not inserted", 16, 700]
    assert by_key["not inserted", 1000, 700] > 1e-2


def test_policies_are_made_with_the_seed_of_their_run(model, passage, progress):
    context = read_context(model, passage.context, progress)
    one, other = (
        Decoder(model, context, Run("icecache", 16, {"seed": seed})).read(passage.fed[:CHUNK])
        for seed in (0, 1)
    )
    assert not torch.equal(one, other)
    factory = make_policy("icecache", 16, seed=1)
    shape = dict(num_q_heads=2, num_kv_heads=1, head_dim=8, scale=None, layer_index=0)
    assert factory(**shape).config.seed == 1

"""Layouts, what is measured on them, and the calibration, against values known otherwise."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from kv_arrays import make_problem
from rich.progress import Progress
from tiny_models import llama, tokens
from tiny_tokenizer import VOCABULARY, byte_tokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from typer.testing import CliRunner

from icecache.cli import app
from icecache.eval import decode
from icecache.eval.calibration import calibration, estimates, spearman
from icecache.eval.capture import Captured, capture
from icecache.eval.errors import EvalError
from icecache.eval.layouts import LAYOUTS, count, lay_out, sequential, shuffled
from icecache.eval.purity import RULES, Head, heads, measure, measure_purity, take
from icecache.eval.runs import Run

N, POSITIONS = 900, 8
FIRST = N - POSITIONS
MIDDLE = slice(32, FIRST - 64)


@pytest.fixture
def progress():
    return Progress(disable=True)


@pytest.fixture(scope="module")
def problem():
    return make_problem("torch-f32", n=N)


def laid_out(problem):
    k, v = problem.k[:, :FIRST], problem.v[:, :FIRST]
    return lay_out(k, v, len(problem.q), problem.scale, layer=3)


def heads_of(problem):
    return list(heads(problem.k, problem.v, problem.q[:, FIRST:], problem.scale))


def test_layouts_are_partitions_of_the_middle(problem):
    for layouts in laid_out(problem):
        assert tuple(layouts) == LAYOUTS
        sizes = {}
        for name, pages in layouts.items():
            assert len(pages) == MIDDLE.stop - MIDDLE.start
            sizes[name] = np.bincount(pages)
            assert sizes[name].min() > 0 and len(sizes[name]) == count(pages)
        assert sizes["paper"].max() <= 16
        assert count(layouts["refined"]) == pytest.approx(count(layouts["paper"]), rel=0.15)
        assert count(layouts["refined small"]) > 1.3 * count(layouts["paper"])
        for size, like in ("", "paper"), (" small", "refined small"):
            spans, mixed = layouts[f"sequential{size}"], layouts[f"random{size}"]
            assert count(spans) == count(mixed) == count(layouts[like])
            assert (np.diff(spans) >= 0).all() and np.ptp(np.bincount(spans)) <= 1
            assert Counter(spans) == Counter(mixed) and (spans != mixed).any()


def test_pages_of_a_tree_hold_its_tokens(problem):
    config = Run("icecache").config()
    layer = problem.layer(**{f: getattr(config, f) for f in ("sink_tokens", "window_tokens")})
    layer.prefill(problem.k[:, :FIRST], problem.v[:, :FIRST])
    k = problem.k[:, :FIRST].double().numpy()
    layouts = lay_out(problem.k[:, :FIRST], problem.v[:, :FIRST], len(problem.q), problem.scale, 0)
    for head, layout in enumerate(layouts):
        nodes, pages = layer._core.nodes(head), layout["refined small"]
        means = nodes["levels"][0]["keys"].reshape(-1, problem.k.shape[2]) + nodes["mean"]
        rows = k[head, MIDDLE]
        want = np.stack([rows[pages == page].mean(0) for page in range(count(pages))])
        np.testing.assert_allclose(means, want, atol=5e-3)


def test_few_tokens_are_refused(progress):
    problem = make_problem("torch-f32", n=150)
    layers = [(problem.k, problem.v)]
    for positions in (8, 60, 150):
        captured = Captured(layers, {150: [problem.q[:, -positions:]]}, [problem.scale])
        with pytest.raises(EvalError, match="too few"):
            measure_purity(captured, 150, 8, {}, progress)


def one_position(shares, values=None):
    """A head of [group, n] shares of the softmax, between one sink and one window token."""
    shares = np.array(shares, np.float32)
    n = shares.shape[1]
    values = np.eye(n, dtype=np.float32) if values is None else values
    return Head(np.log(shares)[None], values, slice(1, n - 1))


def test_figures_of_one_page_taken():
    shares = np.array([0.1, 0.4, 0.05, 0.2, 0.05, 0.2])
    pages = np.array([0, 0, 1, 1])
    figures = measure(one_position([shares]), pages, "mass", 2)
    # The first page: 0.4, the best, and 0.05, which is below 1 / 6. The second best is left.
    assert figures["fill"] == 2
    assert figures["recall"] == figures["irrelevant"] == 0.5
    assert figures["mass"] == pytest.approx(0.45 / 0.7)
    size = np.linalg.norm(shares)
    without = np.array([0.1, 0.4, 0.05, 0, 0, 0.2]) / 0.75
    assert figures["error_dropped"] == pytest.approx(np.linalg.norm(without - shares) / size)
    # Of the second page both tokens weigh the geometric mean of 0.2 and 0.05.
    by_mean = np.array([0.1, 0.4, 0.05, 0.1, 0.1, 0.2]) / 0.95
    assert figures["error_summarised"] == pytest.approx(np.linalg.norm(by_mean - shares) / size)


def test_figures_of_the_best_tokens():
    shares = np.array([0.1, 0.4, 0.05, 0.2, 0.05, 0.2])
    figures = measure(one_position([shares]), np.array([0, 0, 1, 1]), "tokens", 2)
    assert (figures["recall"], figures["irrelevant"]) == (1, 0)
    assert figures["mass"] == pytest.approx(0.6 / 0.7)
    assert figures["error_summarised"] == pytest.approx(0, abs=1e-6)  # one token left per page
    assert figures["error_dropped"] > 0.1


def test_what_a_page_leaves_is_summarised_without_what_was_taken():
    shares = np.array([[0.1, 0.4, 0.02, 0.08, 0.2, 0.2]])
    figures = measure(one_position(shares), np.zeros(4, int), "tokens", 1)
    left = (0.02 * 0.08 * 0.2) ** (1 / 3)
    by_mean = np.array([0.1, 0.4, left, left, left, 0.2])
    error = np.linalg.norm(by_mean / by_mean.sum() - shares) / np.linalg.norm(shares)
    assert figures["error_summarised"] == pytest.approx(error)


def taken(head, pages, rule, budget):
    return np.flatnonzero(take(head, np.array(pages), rule, budget)[0]).tolist()


def test_the_last_page_is_cut_by_position():
    head = one_position([[0.1, 0.02, 0.05, 0.2, 0.3, 0.13, 0.2]])
    pages = [1, 0, 0, 0, 1]
    assert taken(head, pages, "mass", 2) == [1, 2]
    assert taken(head, pages, "mass", 3) == [1, 2, 3]
    assert taken(head, pages, "mass", 4) == [0, 1, 2, 3]
    assert taken(head, pages, "mass", 99) == [0, 1, 2, 3, 4]


def test_rules_rank_pages_as_they_say():
    one = [0.01, 0.30, 0.001, 0.12, 0.12, 0.009, 0.009, 0.431]
    other = [0.01, 0.01, 0.01, 0.20, 0.10, 0.16, 0.16, 0.35]
    pages = [0, 0, 1, 1, 2, 2]
    both = one_position([one, other])
    # True masses of the pages: 0.321, 0.54, 0.338; by their means 0.035 + 0.02, 0.24 + 0.28 and
    # 0.018 + 0.32.
    assert taken(both, pages, "mass", 4) == taken(both, pages, "mean", 4) == [2, 3, 4, 5]
    # The likeliest tokens: of the first head in pages 0, 1, 2, of the other in 1, 2, 0.
    assert taken(both, pages, "best token", 2) == [0, 1]
    assert taken(both, pages, "best token", 4) == [0, 1, 2, 3]
    alone = one_position([one])
    assert taken(alone, pages, "mass", 2) == [0, 1]
    assert taken(alone, pages, "mean", 2) == [2, 3]
    assert taken(both, pages, "tokens", 3) == [0, 2, 3]
    with pytest.raises(ValueError, match="rule must be one of"):
        take(both, np.array(pages), "worst", 2)


def test_heads_attend_as_attention_does(problem):
    out = np.concatenate([head.out.swapaxes(0, 1) for head in heads_of(problem)])
    np.testing.assert_allclose(out, problem.exact(FIRST, N).numpy(), atol=1e-5)
    for head in heads_of(problem):
        assert head.middle == MIDDLE
        np.testing.assert_allclose(head.share.sum(-1), 1, rtol=1e-5)


def test_a_budget_for_everything_is_exact(problem):
    for head, layouts in zip(heads_of(problem), laid_out(problem), strict=True):
        for pages in layouts.values():
            for rule in RULES:
                figures = measure(head, pages, rule, N)
                assert (figures["recall"], figures["mass"]) == (1, pytest.approx(1))
                assert figures["error_dropped"] == figures["error_summarised"] < 1e-6


def by_topic(scattered):
    """896 tokens of 112 topics, each in one place or anywhere; queries look for a topic."""
    random = np.random.default_rng(0)
    topic = np.arange(N) // 8
    topic = random.permutation(topic) if scattered else topic
    topics = 4 * random.standard_normal((topic.max() + 1, 24))
    k = topics[topic] + 0.2 * random.standard_normal((N, 24))
    v = topics[topic] + random.standard_normal((N, 24))
    q = topics[random.integers(10, 90, (2, N))]
    return [torch.from_numpy(x).float() for x in (k[None], v[None], q)]


def test_spans_are_as_good_as_similar_tokens_where_topics_are_spans():
    figures = {}
    for scattered in (False, True):
        k, v, q = by_topic(scattered)
        (layouts,) = lay_out(k[:, :FIRST], v[:, :FIRST], 2, 24**-0.5, layer=0)
        (head,) = heads(k, v, q[:, FIRST:], 24**-0.5)
        for name in "sequential", "refined":
            figures[name, scattered] = measure(head, layouts[name], "mass", 32)
    found = {key: value["mass"] for key, value in figures.items()}
    assert found["sequential", False] == pytest.approx(found["refined", False], abs=0.05)
    assert found["refined", True] == pytest.approx(found["refined", False], abs=0.05)
    assert found["refined", False] > 0.95
    assert found["sequential", True] < 0.8
    errors = {key: value["error_summarised"] for key, value in figures.items()}
    assert max(errors["refined", True], errors["refined", False]) < errors["sequential", True] / 3


def test_a_perfect_estimate_is_one():
    errors = np.array([0.1, 0.3, 0.2, 0.2])
    perfect = calibration(errors, errors, None)
    assert (perfect.layer, perfect.steps) == (None, 4)
    assert perfect.correlation == pytest.approx(1)
    assert perfect.ratio_10 == perfect.ratio_50 == perfect.ratio_90 == 1
    assert perfect.estimate == perfect.error == pytest.approx(0.2)


def test_the_calibration_follows_its_definitions():
    one = calibration(np.array([0.2, 0.8, 1.8, 0.5]), np.array([0.1, 0.2, 0.3, 0.0]), 7)
    assert one.layer == 7
    assert (one.ratio_10, one.ratio_50, one.ratio_90) == pytest.approx((2.4, 4, 5.6))
    assert one.correlation == pytest.approx(0.8)  # ranks 1 3 4 2 and 2 3 4 1: 1 - 6 * 2 / 60
    assert (one.estimate, one.error) == pytest.approx((0.825, 0.15))
    assert math.isnan(calibration(np.array([0.5]), np.array([0.0]), 0).ratio_50)


def test_the_correlation_of_ranks():
    x = np.array([3.0, 1.0, 2.0, 9.0])
    assert spearman(x, np.exp(x)) == pytest.approx(1)
    assert spearman(x, -(x**3)) == pytest.approx(-1)
    # Ranks 1.5, 1.5, 3 and 1, 2, 3.
    assert spearman(np.array([1, 1, 2]), np.array([1, 2, 3])) == pytest.approx(1.5 / 3**0.5)
    assert math.isnan(spearman(np.ones(4), x))


def test_estimates_are_of_the_steps_that_are_compared(problem):
    k, v, q = problem.k, problem.v, problem.q[:, FIRST:]
    config = Run("icecache", 16).config()
    estimated, errors = estimates(k, v, q, problem.scale, 0, config)
    layer = problem.layer(
        token_budget=16, sink_tokens=config.sink_tokens, window_tokens=config.window_tokens
    )
    layer.prefill(k[:, :FIRST], v[:, :FIRST])
    exact = problem.exact(FIRST, N)
    for i in range(POSITIONS):
        out = layer.decode(*problem.rows(FIRST + i, FIRST + i + 1))[:, 0].double()
        assert estimated[i] == layer.stats().error_estimate > 0
        off = (out - exact[:, i]).norm(dim=-1) / exact[:, i].norm(dim=-1)
        assert errors[i] == pytest.approx(float(off.mean()), rel=1e-3)
    estimated, errors = estimates(k, v, q, problem.scale, 0, Run("icecache", N).config())
    assert max(*estimated, *errors) < 1e-5


@torch.inference_mode()
def test_a_capture_holds_what_the_model_computed(monkeypatch, progress):
    monkeypatch.setattr(decode, "_PREFILL_CHUNK", 64)
    model = llama()
    ids = tokens(150)[0].tolist()
    captured = capture(model, ids, [70, 150], 12, progress)
    assert model.config._attn_implementation == "sdpa"
    assert captured.scales == [16**-0.5] * 4
    assert [len(rows) for rows in captured.queries.values()] == [4, 4]
    base, layer = model.model, model.model.layers[0]
    normed = layer.input_layernorm(base.embed_tokens(torch.tensor([ids])))
    q, k, v = (
        getattr(layer.self_attn, f"{name}_proj")(normed).reshape(1, 150, -1, 16).transpose(1, 2)
        for name in "qkv"
    )
    q, k = apply_rotary_pos_emb(q, k, *base.rotary_emb(normed, torch.arange(150)[None]))
    for n in 70, 150:
        torch.testing.assert_close(captured.queries[n][0], q[0, :, n - 12 : n])
    for stored, want in zip(captured.layers[0], (k, v), strict=True):
        torch.testing.assert_close(stored, want[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    llama(vocab_size=VOCABULARY, num_hidden_layers=2).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(folder, *arguments):
    text = folder / "story.txt"
    text.write_text("It was a dark and stormy night. The rain fell in torrents. " * 20)
    command = ["purity", "--model", str(folder), "--text", str(text), *arguments]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def test_the_command(folder, tmp_path):
    out = tmp_path / "out.json"
    size = ("--context", "700", "--budget", "16", "--positions", "3")
    result = run(folder, *size, "--json", str(out))
    assert result.exit_code == 0, result.output
    for word in ("sequential small", "best token", "irrelevant", "layers 1 to 1", "estimates"):
        assert word in result.stdout
    document = json.loads(out.read_text())
    rows = document["rows"]
    assert [(row["layer"], row["head"], row["layout"], row["rule"]) for row in rows] == [
        (layer, head, layout, rule)
        for layer in range(2)
        for head in range(2)
        for layout in LAYOUTS
        for rule in RULES
    ]
    for row in rows:
        assert 0 <= row["recall"] <= 1 and 0 < row["mass"] <= 1 and 0 <= row["irrelevant"] <= 1
        if row["rule"] == "tokens":
            assert row["recall"] == 1
    assert [row["layer"] for row in document["calibration"]] == [0, 1, None]
    assert [row["steps"] for row in document["calibration"]] == [3, 3, 6]
    config = document["config"]
    assert (config["text"], config["context"], config["positions"]) == ("story.txt", 700, 3)
    assert [run["budget"] for run in config["runs"]] == [16, 16]
    again = tmp_path / "again.json"
    run(folder, *size, "--json", str(again))
    assert json.loads(again.read_text())["rows"] == rows


def test_too_short_a_context_is_an_error(folder):
    with pytest.raises(EvalError, match="too few"):
        run(folder, "--context", "120", "--positions", "100")


def test_sequential_pages_are_as_equal_as_can_be():
    assert sequential(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert sequential(4, 4).tolist() == [0, 1, 2, 3]
    assert sorted(shuffled(sequential(7, 3), 1).tolist()) == sequential(7, 3).tolist()

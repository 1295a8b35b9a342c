"""The transformers adapter: real model classes with small random weights, real icecache layers.

With a budget of at least the sequence length, attention is full attention: tokens must be those of
`DynamicCache`, and logits equal up to rounding.
"""

import gc
import inspect
import logging
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_models import (
    MODELS,
    REPLACED,
    SLIDING_WINDOW,
    VOCABULARY,
    gemma3,
    gemma3_with_images,
    llama,
    mistral,
    qwen2_mixed,
    tokens,
)
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from icecache import IceCache, IceConfig, LayerCache, attach
from icecache.attention import icecache_attention_forward
from icecache.ice_layer import IceLayer
from icecache.rows import Row

# Everything within the budget, and the index in use from the first token on.
WHOLE: dict[str, Any] = dict(
    token_budget=1024, sink_tokens=4, window_tokens=32, dense_below=0, dense_layers=0
)
# Few tokens attended exactly.
SPARSE: dict[str, Any] = {**WHOLE, "token_budget": 8}
# Forwards are given the cache, and give it back, under the name that transformers has for it.
_parameters = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _parameters else "past_key_values"
torch.set_num_threads(1)  # the models are tiny
every_model = pytest.mark.parametrize("name", MODELS)


def forward(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **inputs: Any) -> torch.Tensor:
    """Logits `[1, t, vocabulary]`."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{CACHE: cache}, **inputs).logits


def greedy(model: PreTrainedModel, ids: torch.Tensor, new: int = 24, **options: Any) -> list[int]:
    out = model.generate(ids, max_new_tokens=new, do_sample=False, **options)
    answer = out[0, ids.shape[1] :].tolist()
    assert len(answer) >= new  # prompt lookup in transformers 5.4 may answer with a few more
    return answer[:new]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


class Recorded:
    """A `LayerCache` that notes which calls it got, and can be told to fail at the next one."""

    def __init__(self, inner: LayerCache, layer_index: int) -> None:
        self.inner = inner
        self.layer_index = layer_index
        self.calls: list[tuple[str, int]] = []
        self.fail = False

    @property
    def seq_len(self) -> int:
        return self.inner.seq_len

    def prefill(self, k: Any, v: Any, q: Any = None) -> Any:
        self.calls.append(("prefill", k.shape[1]))
        out = self.inner.prefill(k, v, q)
        return self._checked(out)

    def decode(self, q: Any, k: Any, v: Any) -> Any:
        self.calls.append(("decode", k.shape[1]))
        return self._checked(self.inner.decode(q, k, v))

    def _checked(self, out: Any) -> Any:
        if self.fail:
            self.fail = False
            raise ValueError("told to fail")
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def recorded(model: PreTrainedModel, **options: Any) -> tuple[IceCache, dict[int, Recorded]]:
    """A cache, and its stores by layer once they exist."""
    stores: dict[int, Recorded] = {}
    config = IceConfig(**{**WHOLE, **options})

    def make(*, num_q_heads, num_kv_heads, head_dim, scale, layer_index, device):  # type: ignore[no-untyped-def]
        inner = LayerCache(
            num_q_heads, num_kv_heads, head_dim, config, scale, layer_index=layer_index
        )
        stores[layer_index] = Recorded(inner, layer_index)
        return stores[layer_index]

    return IceCache(model, config=config, layer_factory=make), stores


# --- The same answers as full attention


@every_model
def test_generate_with_the_whole_budget_is_full_attention(name: str) -> None:
    ids = tokens(70)
    options: dict[str, Any] = dict(
        max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    expected = MODELS[name]().generate(ids, **options)
    model = MODELS[name]()
    cache = IceCache(model, **WHOLE)
    got = model.generate(ids, **{CACHE: cache}, **options)
    assert cache.replaced_layers == REPLACED[name]
    assert got.sequences.tolist() == expected.sequences.tolist()
    close(torch.stack(got.logits), torch.stack(expected.logits))
    assert getattr(got, CACHE) is cache
    assert cache.get_seq_length() == 70 + 24 - 1


def test_only_the_text_part_of_a_multimodal_model_is_set() -> None:
    ids = tokens(60)
    model = gemma3_with_images()
    expected = forward(model, ids, DynamicCache(config=model.config))
    with attach(model, **WHOLE) as cache:
        assert cache.replaced_layers == REPLACED["gemma3"]
        assert model.config.text_config._attn_implementation == "icecache"
        assert model.config.vision_config._attn_implementation == "sdpa"
        parts = ids.split([45, 12, 1, 2], dim=1)
        close(torch.cat([forward(model, part, cache) for part in parts], dim=1), expected)
    assert model.config.text_config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_generate_takes_the_cache_under_its_old_name() -> None:
    ids = tokens(50)
    expected = greedy(llama(), ids)
    model = llama()
    cache = IceCache(model, **WHOLE)
    assert greedy(model, ids, past_key_values=cache) == expected
    assert cache.get_seq_length() == 50 + 24 - 1


@every_model
def test_chunks_and_single_tokens_are_full_attention(name: str) -> None:
    ids = tokens(140)
    model = MODELS[name]()
    reference = DynamicCache(config=model.config)
    parts = ids.split([37, 64, 7, 20, 1, 1, 10], dim=1)
    expected = [forward(model, part, reference) for part in parts]
    cache, stores = recorded(model)
    got = [forward(model, part, cache) for part in parts]
    close(torch.cat(got, dim=1), torch.cat(expected, dim=1))
    calls = [("prefill", 37), ("prefill", 64), ("decode", 7), ("decode", 20), ("decode", 1)]
    assert {i: store.calls for i, store in stores.items()} == {
        i: [*calls, ("decode", 1), ("decode", 10)] for i in REPLACED[name]
    }
    assert [layer.get_seq_length() for layer in cache.layers] == [140] * 4


@every_model
def test_a_second_turn_continues_on_the_filled_cache(name: str) -> None:
    first, second = tokens(60), tokens(45, seed=1)
    model, reference = MODELS[name](), MODELS[name]()
    caches = (IceCache(model, **WHOLE), DynamicCache(config=reference.config))
    turns = []
    for m, cache in zip((model, reference), caches, strict=True):
        answer = greedy(m, first, new=12, **{CACHE: cache})
        ids = torch.cat([first, torch.tensor([answer]), second], dim=1)
        turns.append((answer, greedy(m, ids, new=12, **{CACHE: cache})))
        assert cache.get_seq_length() == 60 + 12 + 45 + 12 - 1
    assert turns[0] == turns[1]


@every_model
def test_prompt_lookup_is_greedy(name: str) -> None:
    # Beyond its window a sliding layer of transformers 5.4 to 5.14 cannot be cropped at all.
    can_crop = hasattr(DynamicSlidingWindowLayer, "activate_past_recording")
    window = {} if can_crop or len(REPLACED[name]) == 4 else {"sliding_window": 512}
    ids = tokens(80, repeat=9)
    expected = greedy(MODELS[name](**window), ids, new=30)
    model = MODELS[name](**window)
    cache, stores = recorded(model)
    cropped = []
    crop, cache.crop = cache.crop, lambda n: (cropped.append(n), crop(n))  # type: ignore[method-assign]
    lookup = dict(prompt_lookup_num_tokens=10, eos_token_id=VOCABULARY)  # none of its tokens
    assert greedy(model, ids, new=30, **lookup, **{CACHE: cache}) == expected
    assert cropped, "generate did not crop"
    assert max(t for store in stores.values() for call, t in store.calls if call == "decode") > 1


def test_generate_prefills_in_chunks() -> None:
    ids = tokens(120)
    expected = greedy(llama(), ids)
    model = llama()
    cache, stores = recorded(model)
    assert greedy(model, ids, prefill_chunk_size=50, **{CACHE: cache}) == expected
    assert stores[0].calls[:3] == [("prefill", 50), ("prefill", 50), ("decode", 20)]


def test_assisted_decoding_is_greedy() -> None:
    ids = tokens(80)
    expected = greedy(llama(), ids, new=30)
    model, assistant = llama(), llama(num_hidden_layers=2)
    cache = IceCache(model, **WHOLE)
    assert greedy(model, ids, new=30, assistant_model=assistant, **{CACHE: cache}) == expected


def test_a_sparse_step_attends_few_tokens_exactly() -> None:
    model = llama()
    cache, _ = recorded(model, **SPARSE)
    ids = tokens(600)
    full = forward(model, ids, DynamicCache(config=model.config))
    close(forward(model, ids[:, :590], cache), full[:, :590])
    got = torch.cat([forward(model, ids[:, i : i + 1], cache) for i in range(590, 600)], dim=1)
    assert not torch.allclose(got, full[:, 590:], atol=1e-3)  # the index was really used
    stats = cache.stats()
    assert stats.seq_len == 600
    for layer in stats.layers.values():
        assert layer.steps == 10
        assert layer.tokens_exact == 8 + layer.sink_tokens + layer.window_tokens
    assert stats.tokens_exact < 100


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_and_modes_without_gradients(mode: Any, dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    ids = tokens(60)
    cache = IceCache(model, **WHOLE)
    with mode():
        expected = model(ids).logits
        got = [model(part, **{CACHE: cache}).logits for part in ids.split([50, 9, 1], dim=1)]
    error = (torch.cat(got, dim=1) - expected).float().abs().max() / expected.float().abs().max()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    assert got[0].dtype == dtype


# --- Which layers


def test_the_first_dense_layers_stay_plain() -> None:
    ids = tokens(70)
    expected = greedy(llama(), ids)
    model = llama()
    cache = IceCache(model, **{**WHOLE, "dense_layers": 2})
    assert cache.replaced_layers == (2, 3)
    assert greedy(model, ids, **{CACHE: cache}) == expected
    assert cache.layers[0].keys.shape == (1, 2, 93, 16)
    assert cache.stats().dense_kv_bytes == 2 * 2 * 93 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (lambda: mistral(sliding_window=MistralConfig().sliding_window), {}),
        (llama, {"dense_layers": 4}),
        (gemma3, {"dense_layers": 4}),
    ],
)
def test_a_model_without_a_layer_to_replace_is_refused(model: Any, options: Any) -> None:
    made = model()
    with pytest.raises(ValueError, match="at least one layer of type 'full_attention'"):
        IceCache(made, **options)
    assert made.config._attn_implementation == "sdpa"


def test_a_model_that_shares_keys_between_layers_is_refused() -> None:
    model = llama()
    model.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="shares keys between layers"):
        IceCache(model)


def test_layers_that_only_the_config_counts_are_left_alone() -> None:
    model = llama()
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 4
    cache = IceCache(model, **WHOLE)
    assert cache.replaced_layers == (0, 1, 2)


def test_options_and_config() -> None:
    model = llama()
    assert IceCache(model).config == IceConfig(token_budget=64)
    assert IceCache(model, 16, window_tokens=48).config == IceConfig(
        token_budget=16, window_tokens=48
    )
    config = IceConfig(token_budget=7)
    assert IceCache(model, config=config).config is config
    with pytest.raises(TypeError, match="either config or options"):
        IceCache(model, 7, config=config)
    with pytest.raises(TypeError, match="no_such_option"):
        IceCache(model, no_such_option=1)


def test_the_softmax_scale_is_the_models() -> None:
    model = gemma3()
    seen = []

    def make(**shape: Any) -> LayerCache:
        seen.append(shape)
        return LayerCache(
            shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"], IceConfig(**WHOLE)
        )

    forward(model, tokens(5), IceCache(model, layer_factory=make))
    heads = dict(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=24**-0.5)
    heads["device"] = torch.device("cpu")
    assert seen == [heads | {"layer_index": 1}, heads | {"layer_index": 3}]


# --- Exact or sparse


@every_model
@pytest.mark.parametrize("reuse", [2, 3])
def test_layers_in_between_attend_to_what_their_anchor_selected(name: str, reuse: int) -> None:
    model, replaced = MODELS[name](), REPLACED[name]
    cache = IceCache(model, reuse_layers=reuse, **SPARSE)
    ids = tokens(620)

    def selected() -> list[list[list[int]]]:
        return [[list(p) for p in cache.layers[i].store.selected()] for i in replaced]

    def check() -> None:
        chosen = selected()
        for i in range(len(replaced)):
            assert chosen[i] == chosen[i - i % reuse]
        anchors = chosen[::reuse]
        assert all(a != b for a, b in pairwise(anchors))

    forward(model, ids[:, :590], cache)
    for start, stop in ((590, 591), (591, 595), (595, 596)):
        forward(model, ids[:, start:stop], cache)
        check()
    with cache.exact():
        forward(model, ids[:, 596:598], cache)
    if not any(kind == "sliding_attention" for kind in _kinds(model)):
        cache.crop(560)
        forward(model, ids[:, 560:600], cache)
    forward(model, ids[:, 600:601], cache)
    check()
    for index in replaced:
        cache.layers[index].store.check()


def _kinds(model: PreTrainedModel) -> list[str]:
    return getattr(model.config, "layer_types", None) or []


def test_dense_layers_are_no_anchors() -> None:
    model = llama()
    cache = IceCache(model, reuse_layers=2, **{**SPARSE, "dense_layers": 1})
    ids = tokens(600)
    forward(model, ids[:, :599], cache)
    forward(model, ids[:, 599:], cache)
    read = [cache.stats().layers[i].key_rows_read for i in (1, 2, 3)]
    assert read[1] < min(read[0], read[2]) / 2


@every_model
def test_reuse_with_the_whole_budget_is_full_attention(name: str) -> None:
    model, ids = MODELS[name](), tokens(600)
    full = forward(model, ids, DynamicCache(config=model.config))
    cache = IceCache(model, reuse_layers=3, **WHOLE)
    got = [forward(model, part, cache) for part in ids.split([570, 1, 20, 1, 8], dim=1)]
    close(torch.cat(got, dim=1), full)


def test_length_decides_and_exact_and_sparse_override_it() -> None:
    model = llama()
    cache, stores = recorded(model, sparse_max_queries=5)
    ids = tokens(40)
    with cache.sparse():
        forward(model, ids[:, :3], cache)  # the first forward is exact whatever is said
        forward(model, ids[:, :9], cache)
    forward(model, ids[:, :5], cache)
    forward(model, ids[:, :6], cache)
    with cache.exact():
        forward(model, ids[:, :1], cache)
        with cache.sparse():
            forward(model, ids[:, :2], cache)
        forward(model, ids[:, :3], cache)
    with pytest.raises(KeyError), cache.exact():
        raise KeyError
    forward(model, ids[:, :1], cache)
    expected = [
        ("prefill", 3),
        ("decode", 9),
        ("decode", 5),
        ("prefill", 6),
        ("prefill", 1),
        ("decode", 2),
        ("prefill", 3),
        ("decode", 1),
    ]
    assert [store.calls for store in stores.values()] == [expected] * 4


def test_a_short_first_forward_is_exact_again_after_reset() -> None:
    model = llama()
    cache, stores = recorded(model)
    first = forward(model, tokens(4), cache)
    forward(model, tokens(2), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(forward(model, tokens(4), cache), first)
    assert stores[2].calls == [("prefill", 4), ("decode", 2), ("prefill", 4)]


# --- Setting and restoring the attention implementation


def test_registered_for_attention_and_for_masks() -> None:
    assert AttentionInterface()["icecache"] is icecache_attention_forward
    # Without this the padding mask would be lost in silence.
    assert AttentionMaskInterface()["icecache"] is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def test_attach_restores_the_model() -> None:
    model = llama()
    ids = tokens(50)
    expected = greedy(model, ids)
    with attach(model, **WHOLE) as cache:
        assert model.config._attn_implementation == "icecache"
        assert greedy(model, ids, **{CACHE: cache}) == expected
        with attach(model, 8) as inner:
            assert inner.config.token_budget == 8
        assert model.config._attn_implementation == "icecache"
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(KeyError), attach(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with attach(model):
        pass
    assert model.config._attn_implementation == "eager"
    with pytest.raises(TypeError), attach(model, no_such_option=1):
        pass
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_another_attention_implementation_is_noticed_by_update(name: str) -> None:
    # Otherwise the model would attend to the new rows only, and generate wrong tokens in silence.
    model = llama()
    cache = IceCache(model, **WHOLE)
    forward(model, tokens(30), cache)
    model.set_attn_implementation(name)
    with pytest.raises(RuntimeError, match=rf"to be 'icecache', got '{name}'.*IceCache\(model\)"):
        forward(model, tokens(1), cache)
    with pytest.raises(RuntimeError, match=f"got '{name}'"):
        greedy(model, tokens(40), **{CACHE: cache})
    assert cache.get_seq_length() == 30
    model.set_attn_implementation("icecache")
    forward(model, tokens(1), cache)
    assert cache.get_seq_length() == 31


def test_a_cache_is_refused_after_attach_has_ended() -> None:
    model = llama()
    with attach(model, **WHOLE) as cache:
        forward(model, tokens(10), cache)
    with pytest.raises(RuntimeError, match=r"to be 'icecache', got 'sdpa'.*attach"):
        forward(model, tokens(1), cache)


def test_a_model_whose_attention_cannot_be_set_is_refused() -> None:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=2))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"goes through transformers' AttentionInterface.*Bloom"):
        IceCache(model)
    assert model.config._attn_implementation == before


def test_attention_that_bypasses_the_interface_is_noticed(monkeypatch: Any) -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    # As a model does that calls an attention function of its own.
    monkeypatch.setitem(AttentionInterface._global_mapping, "icecache", sdpa_attention_forward)
    with pytest.raises(RuntimeError, match="attention on layer 0 before layer 1, got none"):
        forward(model, tokens(10), cache)


def test_a_model_that_changes_the_keys_after_update_is_noticed(monkeypatch: Any) -> None:
    def changed(module: Any, query: Any, key: Any, *rest: Any, **kwargs: Any) -> Any:
        return icecache_attention_forward(module, query, key + 0, *rest, **kwargs)

    model = llama()
    cache = IceCache(model, **WHOLE)
    monkeypatch.setitem(AttentionInterface._global_mapping, "icecache", changed)
    with pytest.raises(RuntimeError, match=r"very keys and values|does not go through"):
        forward(model, tokens(10), cache)


def test_a_layer_is_handed_over_once() -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    k = torch.randn(1, 2, 5, 16)
    q, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    keys, values = cache.update(k, v, 0)
    icecache_attention_forward(module, q, keys, values, None)
    assert cache.layers[0].stored == 5
    icecache_attention_forward(module, q, keys, values, None)
    assert cache.layers[0].stored == 5
    shown: dict[str, Any] = {}
    keys, values = cache.update(k, v, 1, kwargs=shown)
    icecache_attention_forward(module, q, keys, values, None, **shown)
    with pytest.raises(RuntimeError, match="very keys and values"):
        icecache_attention_forward(module, q, keys, values, None, **shown)
    assert cache.layers[1].stored == 5


def test_a_dropped_cache_is_freed_at_once() -> None:
    # Nothing holds on to it: no cycle, no layer left for an attention call.
    model = llama()
    cache = IceCache(model, **WHOLE)
    forward(model, tokens(20), cache)
    model.generate(tokens(30), max_new_tokens=4, **{CACHE: cache})
    layers = [weakref.ref(layer) for layer in cache.layers]
    gc.disable()
    try:
        del cache
        assert [layer() for layer in layers] == [None] * 4
    finally:
        gc.enable()


def test_several_caches_share_a_model_with_other_caches() -> None:
    model = llama()
    texts = [tokens(60, seed=i) for i in range(3)]
    plain = [DynamicCache(config=model.config) for _ in texts]
    expected = [forward(llama(), text, DynamicCache()) for text in texts]
    caches = [IceCache(model, **WHOLE), IceCache(model, **WHOLE), plain[2]]
    got: list[list[torch.Tensor]] = [[], [], []]
    for start, end in [(0, 40), (40, 50), (50, 51), (51, 60)]:
        for text, cache, logits in zip(texts, caches, got, strict=True):
            logits.append(forward(model, text[:, start:end], cache))
    for logits, whole in zip(got, expected, strict=True):
        close(torch.cat(logits, dim=1), whole)


def test_without_an_icecache_layer_it_is_sdpa() -> None:
    model = gemma3()
    ids = tokens(70)
    expected = greedy(model, ids)
    IceCache(model)
    assert greedy(model, ids) == expected
    assert torch.equal(model(ids).logits, gemma3()(ids).logits)


# --- Refusals


def test_another_number_of_rows_is_refused() -> None:
    model = llama()
    for dense_layers in (0, 1):
        cache = IceCache(model, **{**WHOLE, "dense_layers": dense_layers})
        forward(model, tokens(10).repeat(2, 1), cache)
        with pytest.raises(ValueError, match=r"a batch of 2, .* got 3: reset\(\)"):
            forward(model, tokens(1).repeat(3, 1), cache)
        with pytest.raises(ValueError, match=r"a batch of 2, .* got 3: reset\(\)"):
            model.generate(tokens(12), num_beams=3, max_new_tokens=2, **{CACHE: cache})
        assert [layer.get_seq_length() for layer in cache.layers] == [10] * 4
        forward(model, tokens(1).repeat(2, 1), cache)
        cache.reset()
        forward(model, tokens(1).repeat(3, 1), cache)
        assert cache.stats().rows == 3


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_tokens_cannot_be_hidden_later(dense_layers: int) -> None:
    model = llama()
    cache = IceCache(model, **{**WHOLE, "dense_layers": dense_layers})
    mask = torch.ones(1, 40, dtype=torch.long)
    close(
        forward(model, tokens(40), cache, attention_mask=mask),
        forward(llama(), tokens(40), DynamicCache()),
    )
    mask = torch.ones(1, 41, dtype=torch.long)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match=r"padding before, columns none, .* hides 0 to 2: a"):
        forward(model, tokens(1), cache, attention_mask=mask)
    assert cache.get_seq_length() == 40
    cache.reset()
    forward(model, tokens(40), cache, attention_mask=mask[:, :40])
    for wrong, given in (
        (mask.new_ones(1, 41), "none: pass the attention_mask"),  # transformers then makes none
        (None, "none: pass the attention_mask"),
        (mask.roll(1, 1), "one that hides 1 to 3"),
    ):
        with pytest.raises(ValueError, match=f"row 0.*, columns 0 to 2, .*got {given}"):
            forward(model, tokens(1), cache, attention_mask=wrong)
    forward(model, tokens(1), cache, attention_mask=mask)
    assert [layer.get_seq_length() for layer in cache.layers] == [41] * 4
    assert cache.stats().layers[3].seq_len == 38


def test_masks_that_are_not_causal_are_followed_exactly() -> None:
    model = llama()
    ids = tokens(6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    minus = torch.finfo(torch.float32).min
    additive = torch.zeros(1, 1, 6, 6).masked_fill(~causal, minus)
    expected = forward(model, ids, DynamicCache())
    for mask in (causal, additive, additive.masked_fill(~causal, -torch.inf)):
        close(forward(model, ids, IceCache(model, **WHOLE), attention_mask=mask), expected)
    full = torch.ones_like(causal)
    hidden = causal.clone()
    hidden[..., 4, 2] = False
    biased = additive.clone()
    biased[..., 5, 1] = -0.5
    weak = additive.masked_fill(~causal, -3.0)
    by_head = additive.repeat(1, 4, 1, 1)
    by_head[:, 1] = weak[0]
    for mask in (full, hidden, biased, weak, by_head):
        expected = forward(llama(), ids, DynamicCache(), attention_mask=mask)
        cache = IceCache(model, **WHOLE)
        close(forward(model, ids, cache, attention_mask=mask), expected)
        later = torch.cat([mask.new_full((*mask.shape[:3], 6), mask.dtype == torch.bool), mask], 3)
        reference = DynamicCache()
        forward(llama(), ids, reference)
        expected = forward(llama(), ids, reference, attention_mask=later)
        cache = IceCache(model, **SPARSE)  # which is why a short forward may not be sparse
        forward(model, ids, cache)
        close(forward(model, ids, cache, attention_mask=later), expected)
        bias = later[..., -1:, :].clone() if mask.dtype != torch.bool else additive[..., -1:, :]
        bias = torch.cat([torch.zeros(*bias.shape[:3], 13 - bias.shape[3]), bias], 3)
        bias[..., 3] = -0.5
        with pytest.raises(ValueError, match=r"without a bias in a sparse.*cache\.exact"):
            forward(model, ids[:, :1], cache, attention_mask=bias)
        cache.crop(-6)
        with cache.exact():
            close(forward(model, ids, cache, attention_mask=later), expected)
        for layer in cache.layers:
            layer.store.check()
    with pytest.raises(ValueError, match=r"mask \[1, heads, 6, 6\].*got \[1, 1, 6, 5\]"):
        forward(model, ids, IceCache(model, **WHOLE), attention_mask=causal[..., :5])
    packed = causal.clone()
    packed[..., 3:, :3] = False
    with pytest.raises(ValueError, match=r"last position of row 0 .* column 0 attends to itself"):
        forward(model, ids, IceCache(model, **WHOLE), attention_mask=packed)


def test_gradients_are_refused() -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    with pytest.raises(ValueError, match=r"no gradients.*torch\.no_grad"):
        model(tokens(5), **{CACHE: cache})
    model.requires_grad_(False)
    model(tokens(5), **{CACHE: cache})
    assert cache.get_seq_length() == 5
    model.model.layers[1].self_attn.q_proj.requires_grad_(True)  # only queries carry a gradient
    with pytest.raises(ValueError, match="no gradients"):
        model(tokens(5), **{CACHE: cache})
    assert cache.get_seq_length() == 5


def test_output_attentions_is_refused() -> None:
    model = llama()
    with pytest.raises(ValueError, match="output_attentions"):
        forward(model, tokens(5), IceCache(model), output_attentions=True)


def test_dropout_is_refused() -> None:
    model = llama(attention_dropout=0.1)
    cache = IceCache(model, **WHOLE)
    forward(model, tokens(5), cache)
    model.train()
    with pytest.raises(ValueError, match=r"no dropout, got 0\.1.*eval"):
        forward(model, tokens(5), cache)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"softcap": 30.0}, "no softcap, got 30.0"),
        ({"s_aux": torch.zeros(4)}, "no s_aux"),
        ({"position_bias": torch.zeros(1)}, "no position_bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"sliding_window": 8}, "a window of 8"),
        ({"is_causal": False}, "is_causal=False"),
        ({"dropout": 0.5}, "no dropout"),
    ],
)
def test_attention_features_that_are_refused(given: dict[str, Any], message: str) -> None:
    cache = IceCache(llama(), **WHOLE)
    keys, values = cache.update(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), 0)
    with pytest.raises(ValueError, match=message):
        icecache_attention_forward(
            torch.nn.Module(), torch.randn(1, 4, 5, 16), keys, values, None, **given
        )
    assert cache.layers[0].stored == 0


@pytest.mark.parametrize(
    ("q", "v", "message"),
    [
        ((1, 4, 5, 16), (1, 2, 5, 8), r"one dimension .* got \[16, 16, 8\]"),
        ((1, 4, 3, 16), (1, 2, 5, 16), "expected 5 queries"),
    ],
)
def test_shapes_that_are_refused(q: Any, v: Any, message: str) -> None:
    cache = IceCache(llama(), **WHOLE)
    keys, values = cache.update(torch.randn(1, 2, 5, 16), torch.randn(v), 0)
    with pytest.raises(ValueError, match=message):
        icecache_attention_forward(torch.nn.Module(), torch.randn(q), keys, values, None)


def test_a_changing_softmax_scale_is_refused() -> None:
    layer = IceCache(llama(), **WHOLE).layers[0]
    for scale in (0.25, 0.5):
        keys, values = layer.update(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))
        q = torch.randn(1, 4, 5, 16)
        if scale == 0.5:
            with pytest.raises(ValueError, match=r"scale 0\.25, got 0\.5"):
                icecache_attention_forward(torch.nn.Module(), q, keys, values, None, scaling=scale)
        else:
            icecache_attention_forward(torch.nn.Module(), q, keys, values, None, scaling=scale)


@pytest.mark.parametrize("window", [None, 6])
def test_sdpa_gets_a_bottom_right_mask_if_it_got_none(window: int | None) -> None:
    # sdpa's own causal rule is top-left: with more keys than queries it would hide the newest.
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    q = torch.randn(1, 4, 3, 16)
    k, v = torch.randn(2, 1, 2, 10, 16)
    out, weights = icecache_attention_forward(module, q, k, v, None, sliding_window=window)
    rows = []
    for i in range(3):
        last = 10 - 3 + i + 1
        seen = slice(max(0, last - (window or last)), last)
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen], enable_gqa=True
            )
        )
    torch.testing.assert_close(out, torch.cat(rows, dim=2).transpose(1, 2))
    assert weights is None


# --- A forward that fails


class Failure(Exception):
    pass


@contextmanager
def failing(module: torch.nn.Module) -> Iterator[None]:
    """Within it, the module's forward raises, as an out-of-memory error or an interrupt would."""

    def fail(*args: Any) -> None:
        raise Failure

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


# Before a layer's update, or after its attention. (After the last layer's attention the cache is
# complete: such a failure is the caller's to crop.)
PLACES = ["0.self_attn.k_proj", "0.mlp", "1.self_attn.o_proj", "2.mlp", "3.self_attn.v_proj"]


@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama", "qwen2_mixed", "gemma3"])
def test_a_failed_forward_leaves_no_trace(name: str, place: str, t: int) -> None:
    model = MODELS[name]()
    ids = tokens(120)
    assert SLIDING_WINDOW < 60  # the sliding layers have dropped tokens before the failure
    caches = [IceCache(model, **{**SPARSE, "dense_layers": int(name == "llama")}) for _ in range(2)]
    for cache in caches:
        forward(model, ids[:, :60], cache)
        forward(model, ids[:, 60:62], cache)
    with failing(model.get_submodule(f"model.layers.{place}")), pytest.raises(Failure):
        forward(model, ids[:, 62 : 62 + t], caches[1])
    assert caches[1].get_seq_length() == 62
    for part in ids[:, 62:].split([t, 1, 57 - t], dim=1):
        expected, got = (forward(model, part, cache) for cache in caches)
        assert torch.equal(got, expected)
    lengths = [layer.get_seq_length() for layer in caches[1].layers]
    assert lengths == [120] * 4


@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_failure_between_update_and_attention_leaves_no_trace(
    layer: int, t: int, monkeypatch: Any, caplog: Any
) -> None:
    model = llama()
    ids = tokens(120)
    caches = [IceCache(model, **SPARSE) for _ in range(2)]
    for cache in caches:
        forward(model, ids[:, :60], cache)

    def fail(module: Any, *rest: Any, **kwargs: Any) -> Any:
        if module.layer_idx == layer:
            raise ValueError("no")
        return icecache_attention_forward(module, *rest, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no"):
        patch.setitem(AttentionInterface._global_mapping, "icecache", fail)
        forward(model, ids[:, 60 : 60 + t], caches[1])
    assert caches[1].get_seq_length() == 60
    # What was left for the attention function must not reach a run without the cache.
    assert torch.equal(forward(model, ids, DynamicCache()), forward(llama(), ids, DynamicCache()))
    with caplog.at_level(logging.WARNING, "icecache"):
        for part in ids[:, 60:].split([t, 60 - t], dim=1):
            expected, got = (forward(model, part, cache) for cache in caches)
            assert torch.equal(got, expected)
    assert [r.getMessage() for r in caplog.records] == [
        f"the last forward failed before its last layer: {layer + 1} layers go back to 60 tokens"
    ]


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_store_that_fails_after_storing_leaves_no_trace(layer: int) -> None:
    model = llama()
    ids = tokens(80)
    cache, stores = recorded(model, **SPARSE)
    untouched = IceCache(model, **SPARSE)
    forward(model, ids[:, :60], cache)
    forward(model, ids[:, :60], untouched)
    stores[layer].fail = True
    with pytest.raises(ValueError, match="told to fail"):
        forward(model, ids[:, 60:61], cache)
    assert cache.layers[layer].stored == cache.get_seq_length() == 60
    expected = forward(model, ids[:, 60:], untouched)
    assert torch.equal(forward(model, ids[:, 60:], cache), expected)


@every_model
def test_a_failed_first_forward_leaves_an_empty_cache(name: str) -> None:
    model = MODELS[name]()
    ids = tokens(50)
    cache = IceCache(model, **WHOLE)
    with failing(model.model.layers[3].input_layernorm), pytest.raises(Failure):
        forward(model, ids, cache)
    assert cache.get_seq_length() == 0
    expected = forward(model, ids, IceCache(model, **WHOLE))
    assert torch.equal(forward(model, ids, cache), expected)


def test_a_failed_forward_leaves_no_trace_where_masks_are_given() -> None:
    # The model then asks the cache for no sizes: the first update has to notice.
    model = llama()
    ids = tokens(70)
    cache, untouched = (IceCache(model, **{**SPARSE, "dense_layers": 1}) for _ in range(2))
    forward(model, ids[:, :60], cache)
    forward(model, ids[:, :60], untouched)
    with failing(model.model.layers[2].mlp), pytest.raises(Failure):
        forward(model, ids[:, 60:63], cache)
    mask = torch.ones(10, 70, dtype=torch.bool).tril(60)[None, None]
    got = forward(model, ids[:, 60:], cache, attention_mask=mask)
    assert torch.equal(got, forward(model, ids[:, 60:], untouched, attention_mask=mask))


def test_generate_continues_after_a_failed_generate() -> None:
    ids = tokens(60)
    expected = greedy(llama(), ids)
    model = llama()
    cache = IceCache(model, **WHOLE)
    forward(model, ids[:, :40], cache)
    with failing(model.model.layers[2].mlp), pytest.raises(Failure):
        greedy(model, ids, **{CACHE: cache})
    assert greedy(model, ids, **{CACHE: cache}) == expected


def test_crop_after_a_failed_forward_counts_from_the_last_complete_one() -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    forward(model, tokens(40), cache)
    with failing(model.model.layers[2].mlp), pytest.raises(Failure):
        forward(model, tokens(5), cache)
    cache.crop(-10)
    assert [layer.get_seq_length() for layer in cache.layers] == [30] * 4


# --- Several threads


def test_generate_in_two_threads_on_one_cache_fails_instead_of_mixing() -> None:
    model = llama()
    texts = [tokens(40, seed=i) for i in range(2)]
    expected = [greedy(llama(), text, new=8) for text in texts]
    results: list[Any] = [None, None]

    def work(i: int, cache: IceCache, barrier: threading.Barrier) -> None:
        barrier.wait()
        try:
            results[i] = greedy(model, texts[i], new=8, **{CACHE: cache})
        except (RuntimeError, ValueError) as error:
            results[i] = str(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failed = 0
    try:
        for _ in range(10):
            cache, barrier = IceCache(model, **WHOLE), threading.Barrier(2)
            threads = [
                threading.Thread(target=work, args=(i, cache, barrier)) for i in range(len(texts))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for got, wanted in zip(results, expected, strict=True):
                if isinstance(got, str):
                    failed += 1
                    assert "at a time" in got or "another thread" in got
                else:
                    assert got == wanted
            # It can be used again.
            cache.reset()
            assert greedy(model, texts[0], new=8, **{CACHE: cache}) == expected[0]
    finally:
        sys.setswitchinterval(interval)
    assert failed


def test_one_thread_after_the_other_may_use_a_cache() -> None:
    model, ids = llama(), tokens(80)
    expected = forward(llama(), ids, DynamicCache())
    cache, got = IceCache(model, **WHOLE), []

    def work(part: torch.Tensor) -> None:
        got.append(forward(model, part, cache))

    for part in ids.split([40, 30, 1, 9], dim=1):
        thread = threading.Thread(target=work, args=(part,))
        thread.start()
        thread.join()
    close(torch.cat(got, dim=1), expected)


def test_a_forward_that_another_interrupts_stores_nothing() -> None:
    model, ids = llama(), tokens(60)
    cache = IceCache(model, **WHOLE)
    forward(model, ids[:, :40], cache)

    def other(*_: Any) -> None:
        thread = threading.Thread(target=forward, args=(model, ids[:, 40:50], cache))
        handle.remove()
        thread.start()
        thread.join()

    handle = model.model.layers[2].mlp.register_forward_pre_hook(other)
    with pytest.raises(RuntimeError, match="one forward at a time"):
        forward(model, ids[:, 50:], cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [50] * 4
    expected = forward(llama(), ids, DynamicCache())[:, 50:]
    close(forward(model, ids[:, 50:], cache), expected)


# --- What transformers asks of a cache


def test_it_says_that_it_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"an IceCache cannot be pickled.*fork\(\) copies it"):
        pickle.dumps(IceCache(llama()))


def test_crop_removes_keeps_or_does_nothing() -> None:
    model = llama()
    ids = tokens(100)
    cache = IceCache(model, **{**WHOLE, "dense_layers": 1})
    forward(model, ids, cache)
    for n, length in [
        (0, 100),
        (-3, 97),
        (90, 90),
        (95, 90),
        (torch.tensor(-2), 88),
        (-90, 0),
        (-1, 0),
        (5, 0),
    ]:
        cache.crop(n)
        assert [layer.get_seq_length() for layer in cache.layers] == [length] * 4
    layer = IceCache(model, **WHOLE).layers[0]
    layer.crop(-2)
    layer.crop(2)
    assert layer.get_seq_length() == 0


def test_a_crop_that_a_sliding_layer_refuses_changes_nothing() -> None:
    model = qwen2_mixed()
    cache = IceCache(model, **{**WHOLE, "dense_layers": 1})
    forward(model, tokens(60), cache)
    with pytest.raises((RuntimeError, ValueError), match="crop"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [60] * 4
    cache.crop(60)
    expected = forward(qwen2_mixed(), tokens(70), DynamicCache())[:, 60:]
    close(forward(model, tokens(70)[:, 60:], cache), expected)


@pytest.mark.parametrize("n", [-1, -9, -70, 33])
def test_a_cropped_cache_continues_as_one_that_was_never_longer(n: int) -> None:
    model = llama()
    ids = tokens(120)
    kept = 100 + n if n < 0 else n
    cache, whole = IceCache(model, **WHOLE), DynamicCache()
    forward(model, ids[:, :100], cache)
    cache.crop(n)
    expected = forward(model, torch.cat([ids[:, :kept], ids[:, 100:]], dim=1), whole)[:, kept:]
    close(forward(model, ids[:, 100:], cache), expected)


def test_lengths_and_flags() -> None:
    model = gemma3()
    cache = IceCache(model, **WHOLE)
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 1) == (5, 0)
    forward(model, tokens(30), cache)
    layer = cache.layers[1]
    assert isinstance(layer, IceLayer)
    assert cache.get_seq_length() == cache.get_seq_length(2) == layer.get_seq_length() == 30
    assert cache.get_mask_sizes(5, 1) == layer.get_mask_sizes(5) == (35, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
    assert layer.is_initialized
    assert layer.is_croppable
    assert not layer.is_compileable
    assert cache.is_sliding == [True, False, True, False]
    assert not cache.is_compileable
    if hasattr(cache, "get_max_cache_shape"):
        assert cache.get_max_cache_shape(1) == -1
    if hasattr(cache, "get_max_length"):
        assert cache.get_max_length(1) == -1
    if hasattr(cache, "is_croppable"):
        assert cache.is_croppable


def test_a_waiting_layer_counts_its_rows() -> None:
    cache = IceCache(llama(), **WHOLE)
    cache.update(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), 0)
    layer = cache.layers[0]
    assert (layer.get_seq_length(), layer.stored, layer.is_waiting) == (5, 0, True)
    layer.crop(-5)
    assert (layer.get_seq_length(), layer.is_waiting) == (0, False)


def test_rows_that_are_not_there_are_refused_before_anything_changes() -> None:
    model = llama()
    cache = IceCache(model, **{**WHOLE, "dense_layers": 1})
    forward(model, tokens(20), cache)
    rows = [layer.rows[0] for layer in cache.layers[1:]]
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([True]))
    cache.batch_repeat_interleave(1)
    for target in (cache, cache.layers[2]):
        for bad, message in (([0, 1], "from 0 to 0, got 1"), ([-1], "from 0 to 0, got -1")):
            for select in (target.reorder_cache, target.batch_select_indices):
                with pytest.raises(IndexError, match=f"rows {message}"):
                    select(torch.tensor(bad))
        for bad, message in (
            (torch.tensor([], dtype=torch.long), "at least one of 1 rows"),
            (torch.tensor([False]), "at least one of 1 rows"),
            (torch.tensor([True, True]), r"mask over 1 rows, got shape \[2\]"),
        ):
            with pytest.raises(ValueError, match=message):
                target.batch_select_indices(bad)
        with pytest.raises(ValueError, match="at least once, got 0"):
            target.batch_repeat_interleave(0)
    assert all(layer.rows == [row] for layer, row in zip(cache.layers[1:], rows, strict=True))
    for layer in cache.layers[1:]:
        layer.offload()
        layer.prefetch()
    forward(model, tokens(1), cache)
    assert cache.get_seq_length() == 21


def test_empty_layers_survive_what_transformers_does_to_them() -> None:
    cache = IceCache(llama(), **WHOLE)
    cache.reset()
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([2, 0]))
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    for layer in cache.layers:
        layer.batch_select_indices(torch.tensor([1]))
        layer.batch_repeat_interleave(3)
        layer.offload()
        layer.prefetch()
    assert cache.get_seq_length() == 0
    assert cache.stats().rows == 0


def test_stats_add_up() -> None:
    model = gemma3()
    cache = IceCache(model, **SPARSE)
    assert cache.stats().layers == {}
    assert cache.stats().overhead == 0.0
    forward(model, tokens(200), cache)
    forward(model, tokens(1), cache)
    stats = cache.stats()
    assert list(stats.layers) == [1, 3]
    assert stats.seq_len == 201
    assert stats.kv_bytes == 2 * 201 * 2 * 2 * 16 * 4
    assert stats.index_bytes == sum(layer.index_bytes for layer in stats.layers.values()) > 0
    assert stats.overhead == stats.index_bytes / stats.kv_bytes
    for name in ("tokens_exact", "key_rows_read", "value_rows_read", "mass_exact"):
        a, b = (getattr(layer, name) for layer in stats.layers.values())
        assert getattr(stats, name) == pytest.approx((a + b) / 2)
        assert getattr(stats, name) > 0


# --- Interrupted changes of all layers


class Interrupted(BaseException):
    """Ctrl-C, at a chosen place."""


@contextmanager
def interrupted(owner: type, method: str, call: int) -> Iterator[None]:
    """Ends the `call`-th call of a method, from 0, after it is done."""
    inner, calls = getattr(owner, method), 0

    def cut(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = inner(*args, **kwargs)
        calls += 1
        if calls == call + 1:
            raise Interrupted
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, cut)
        yield


@pytest.mark.parametrize("name", ["llama", "qwen2_mixed"])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_crop_is_finished_by_the_next_call(name: str, layer: int) -> None:
    window = {} if name == "llama" else {"sliding_window": 512}
    model, ids = MODELS[name](**window), tokens(100)
    cache, untouched = (IceCache(model, **SPARSE) for _ in range(2))
    for c in (cache, untouched):
        if hasattr(DynamicSlidingWindowLayer, "activate_past_recording") and name != "llama":
            for plain in c.layers[1::2]:
                plain.activate_past_recording()
        forward(model, ids, c)
        forward(model, tokens(1), c)
    with interrupted(IceLayer, "restore", layer), pytest.raises(Interrupted):
        cache.crop(-31)
    untouched.crop(-31)
    assert cache.get_seq_length() == 70
    assert [layer.get_seq_length() for layer in cache.layers] == [70] * 4
    for t in (1, 40):
        expected = forward(model, tokens(t, seed=t), untouched)
        assert torch.equal(forward(model, tokens(t, seed=t), cache), expected)


@every_model
def test_an_interrupted_reset_is_finished_by_the_next_call(name: str) -> None:
    model = MODELS[name]()
    cache = IceCache(model, **SPARSE)
    forward(model, tokens(60), cache)
    with interrupted(IceLayer, "reset", 0), pytest.raises(Interrupted):
        cache.reset()
    expected = forward(model, tokens(50, seed=1), IceCache(model, **SPARSE))
    assert torch.equal(forward(model, tokens(50, seed=1), cache), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2_mixed", "gemma3"])
@pytest.mark.parametrize("owner", [IceLayer, DynamicSlidingWindowLayer])
def test_an_interrupted_reordering_moves_no_row(name: str, owner: type) -> None:
    model, ids = MODELS[name](), tokens(120).reshape(3, 40)
    cache, untouched = (IceCache(model, **SPARSE) for _ in range(2))
    for c in (cache, untouched):
        forward(model, ids, c)
    if owner is IceLayer or name != "llama":
        with interrupted(owner, "reorder_cache", 1), pytest.raises(Interrupted):
            cache.reorder_cache(torch.tensor([2, 0, 0]))
    for t in (1, 5):
        more = tokens(3 * t, seed=t).reshape(3, t)
        assert torch.equal(forward(model, more, cache), forward(model, more, untouched))


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("name", ["qwen2_mixed", "gemma3", "llama"])
def test_a_layer_that_runs_out_of_memory_loses_nothing(name: str, dense: int) -> None:
    """Wherever a plain layer fails while it takes new tokens, even the last layer."""
    model, ids = MODELS[name](), tokens(60)
    if name == "llama" and not dense:
        return
    options = {**SPARSE, "dense_layers": dense}
    untouched = IceCache(model, **options)
    forward(model, ids, untouched)
    expected = forward(model, tokens(4, seed=1), untouched)
    failed = 0
    for call in range(100):
        cache = IceCache(model, **options)
        forward(model, ids, cache)
        calls, cat = 0, torch.cat

        def fail(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1:  # noqa: B023
                raise MemoryError
            return cat(*args, **kwargs)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "cat", fail)
            try:
                forward(model, tokens(4, seed=1), cache)
                break
            except MemoryError:
                failed += 1
        assert cache.get_seq_length() == 60
        assert torch.equal(forward(model, tokens(4, seed=1), cache), expected)
    assert failed >= 2


def test_what_counts_or_names_rows_must_be_whole_numbers() -> None:
    model = llama()
    cache = IceCache(model, **SPARSE)
    forward(model, tokens(60).reshape(2, 30), cache)
    for call, error in (
        (lambda: cache.crop(1.5), TypeError),  # type: ignore[arg-type]
        (lambda: cache.crop("2"), TypeError),  # type: ignore[arg-type]
        (lambda: cache.reorder_cache(torch.tensor([[0, 1]])), ValueError),
        (lambda: cache.reorder_cache(torch.tensor([0.0, 1.0])), ValueError),
        (lambda: cache.batch_repeat_interleave("2"), TypeError),  # type: ignore[arg-type]
    ):
        with pytest.raises(error):
            call()
    assert [len(layer.rows) for layer in cache.layers] == [2] * 4
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("crop", [0, 1, 3])
def test_taking_a_failed_forward_back_may_be_interrupted_too(name: str, crop: int) -> None:
    model = MODELS[name]()
    ids, more = tokens(80).reshape(2, 40), tokens(6, seed=1).reshape(2, 3)
    cache, untouched = (IceCache(model, **SPARSE) for _ in range(2))
    for c in (cache, untouched):
        forward(model, ids, c)
    with failing(model.model.layers[3].self_attn.v_proj), pytest.raises(Failure):
        forward(model, more, cache)
    with interrupted(Row, "keep", crop), suppress(Interrupted):
        cache.crop(0)
    fork = cache.fork()
    expected = forward(model, more, untouched)
    for c in (cache, fork):
        assert torch.equal(forward(model, more, c), expected)


def test_a_store_that_cannot_be_taken_back_at_once_is_later() -> None:
    """The second Ctrl-C, while the layer that got the first takes its rows back."""
    model = llama()
    ids, more = tokens(80).reshape(2, 40), tokens(6, seed=1).reshape(2, 3)
    cache, untouched = (IceCache(model, **SPARSE) for _ in range(2))
    for c in (cache, untouched):
        forward(model, ids, c)
    cut = interrupted(LayerCache, "decode_batch", 2)
    with cut, interrupted(Row, "keep", 0), pytest.raises(Interrupted):
        forward(model, more, cache)
    expected = forward(model, more, untouched)
    assert torch.equal(forward(model, more, cache), expected)


def test_a_refused_crop_may_be_interrupted() -> None:
    model = qwen2_mixed()
    cache, untouched = (IceCache(model, **SPARSE) for _ in range(2))
    for c in (cache, untouched):
        forward(model, tokens(60), c)
    module = sys.modules["icecache.cache"]
    calls, inner = 0, module._set_state

    def cut(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # of two that take it back
            raise Interrupted
        inner(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_set_state", cut)
        with pytest.raises(Interrupted):
            cache.crop(-3)
    assert cache.get_seq_length() == 60
    expected = forward(model, tokens(2), untouched)
    assert torch.equal(forward(model, tokens(2), cache), expected)

"""Models whose decoder has a config of its own inside another: an image in the prompt.

With a budget of at least the sequence length, attention is full attention.
"""

import inspect
from typing import Any

import pytest
import torch
from test_cache import CACHE, SPARSE, WHOLE, close, forward
from tiny_models import tokens
from tiny_vision_models import MODELS, REPLACED, TEXT
from transformers import DynamicCache

from icecache import IceCache, attach

every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """A model and its inputs, without those that this transformers does not have."""
    model, inputs = MODELS[name]()
    known = inspect.signature(model.forward).parameters
    return model, {name: value for name, value in inputs.items() if name in known}


@every_model
def test_generate_from_an_image_with_the_whole_budget_is_full_attention(name: str) -> None:
    options: dict[str, Any] = dict(
        max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    model, inputs = made(name)
    expected = model.generate(**inputs, **options)
    model, inputs = made(name)
    with attach(model, **WHOLE) as cache:
        assert cache.replaced_layers == REPLACED[name]
        assert model.config.vision_config._attn_implementation == "sdpa"
        got = model.generate(**inputs, **options, **{CACHE: cache})
    assert got.sequences.tolist() == expected.sequences.tolist()
    close(torch.stack(got.logits), torch.stack(expected.logits))
    assert cache.get_seq_length() == got.sequences.shape[1] - 1
    assert model.config.get_text_config()._attn_implementation == "sdpa"


@every_model
def test_text_after_an_image_is_full_attention(name: str) -> None:
    parts = (tokens(60) % TEXT).split([40, 1, 12, 1, 1, 5], dim=1)
    logits = []
    for kind in (DynamicCache, IceCache):
        model, inputs = made(name)
        cache = (
            DynamicCache(config=model.config) if kind is DynamicCache else IceCache(model, **WHOLE)
        )
        logits.append([forward(model, cache=cache, ids=inputs.pop("input_ids"), **inputs)])
        logits[-1] += [forward(model, part, cache) for part in parts]
    close(torch.cat(logits[1], dim=1), torch.cat(logits[0], dim=1))


@every_model
def test_an_image_with_a_small_budget(name: str) -> None:
    model, inputs = made(name)
    cache = IceCache(model, **SPARSE)
    forward(model, cache=cache, ids=inputs.pop("input_ids"), **inputs)
    for part in (tokens(410) % TEXT).split([400] + [1] * 10, dim=1):
        assert forward(model, part, cache).isfinite().all()
    assert cache.stats().tokens_exact < 200

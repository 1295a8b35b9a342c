"""Small models with random weights, one for each attention layout that the adapter meets."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
LAYERS = 4
SLIDING_WINDOW = 24
FULL = "full_attention"
SLIDING = "sliding_attention"

SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    initializer_range=0.25,  # large enough that attention is far from uniform
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    attn_implementation="sdpa",
)


def make(model: Callable[[Any], PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return model(config).eval()


def llama(**options: Any) -> PreTrainedModel:
    return make(LlamaForCausalLM, LlamaConfig(**{**SIZES, **options}))


def qwen2(**options: Any) -> PreTrainedModel:
    return make(Qwen2ForCausalLM, Qwen2Config(**{**SIZES, **options}))


def qwen3(**options: Any) -> PreTrainedModel:
    return make(Qwen3ForCausalLM, Qwen3Config(**{**SIZES, **options}))


def mistral(**options: Any) -> PreTrainedModel:
    return make(MistralForCausalLM, MistralConfig(**{**SIZES, "sliding_window": None, **options}))


def phi3(**options: Any) -> PreTrainedModel:
    """One projection for queries, keys and values."""
    return make(Phi3ForCausalLM, Phi3Config(**{**SIZES, "sliding_window": None, **options}))


def qwen2_mixed(**options: Any) -> PreTrainedModel:
    """Full and sliding layers in turns; the first layer is full, the last one sliding."""
    mixed = dict(
        use_sliding_window=True,
        sliding_window=SLIDING_WINDOW,
        layer_types=[FULL, SLIDING, FULL, SLIDING],
    )
    return qwen2(**{**mixed, **options})


GEMMA3: dict[str, Any] = dict(
    sliding_window=SLIDING_WINDOW,
    layer_types=[SLIDING, FULL, SLIDING, FULL],
    query_pre_attn_scalar=24,
)


def gemma3(**options: Any) -> PreTrainedModel:
    """Sliding and full layers in turns, a softmax scale of its own, query and key norms."""
    return make(Gemma3ForCausalLM, Gemma3TextConfig(**{**SIZES, **GEMMA3, **options}))


def gemma3_with_images() -> PreTrainedModel:
    """The same as the text part of a multimodal model."""
    vision = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**{**SIZES, **GEMMA3}),
        vision_config=vision,
        mm_tokens_per_image=4,
        attn_implementation="sdpa",
    )
    return make(Gemma3ForConditionalGeneration, config)


MODELS = {f.__name__: f for f in (llama, qwen2, qwen3, mistral, qwen2_mixed, gemma3)}
"""By name: every model that the adapter is tested with."""

REPLACED = {name: (0, 1, 2, 3) for name in MODELS} | {"qwen2_mixed": (0, 2), "gemma3": (1, 3)}
"""By name: the full-attention layers."""


def tokens(n: int, seed: int = 0, repeat: int = 0) -> torch.Tensor:
    """Token ids `[1, n]`; with `repeat`, a text of that period, which prompt lookup can guess."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (repeat or n,), generator=generator)
    return ids.repeat(n // len(ids) + 1)[None, :n]

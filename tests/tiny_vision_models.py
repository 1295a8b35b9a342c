"""Small vision-language models with random weights, and a prompt with an image for each."""

from typing import Any

import torch
from tiny_models import GEMMA3, LAYERS, SIZES, VOCABULARY, make, tokens
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
)

IMAGE = VOCABULARY - 1
"""The token that stands for a part of the image."""
TEXT = VOCABULARY - 6  # the tokens from here on are special to some model

_VISION: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=7,
    initializer_range=0.25,
)


def _prompt(parts: int, pixels: tuple[int, ...], before: int = 12, after: int = 60) -> Any:
    """Text, the `parts` tokens of an image, and text again; the image; which tokens are of it."""
    ids = tokens(before + parts + after) % TEXT
    ids[:, before : before + parts] = IMAGE
    image = torch.randn(pixels, generator=torch.Generator().manual_seed(0))
    return ids, image, (ids == IMAGE).long()


def llava() -> tuple[PreTrainedModel, dict[str, Any]]:
    """CLIP and Llama."""
    config = LlavaConfig(
        text_config=LlamaConfig(**SIZES),
        vision_config=CLIPVisionConfig(**_VISION, projection_dim=32),
        image_token_index=IMAGE,
        attn_implementation="sdpa",
    )
    ids, image, _ = _prompt(16, (1, 3, 28, 28))
    inputs = dict(input_ids=ids, pixel_values=image)
    return make(LlavaForConditionalGeneration, config), inputs


def qwen2_5_vl() -> tuple[PreTrainedModel, dict[str, Any]]:
    """Positions in three dimensions, and a vision model that is told the size of each image."""
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
    special = dict(vision_start_token_id=TEXT, vision_end_token_id=TEXT + 1)
    config = Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": rope},
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=32,
            num_heads=2,
            patch_size=7,
            out_hidden_size=SIZES["hidden_size"],
            fullatt_block_indexes=[1],
            window_size=28,
            initializer_range=0.25,
        ),
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        **special,
        attn_implementation="sdpa",
    )
    ids, image, kinds = _prompt(6, (24, 3 * 2 * 7 * 7))
    ids[:, 11], ids[:, 18] = TEXT, TEXT + 1
    inputs = dict(
        input_ids=ids,
        pixel_values=image,
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        mm_token_type_ids=kinds,
    )
    return make(Qwen2_5_VLForConditionalGeneration, config), inputs


def idefics3() -> tuple[PreTrainedModel, dict[str, Any]]:
    """What SmolVLM is built on: several images, whose parts are joined into fewer."""
    config = Idefics3Config(
        text_config=LlamaConfig(**SIZES),
        vision_config=_VISION,
        image_token_id=IMAGE,
        scale_factor=2,
        attn_implementation="sdpa",
    )
    ids, image, _ = _prompt(8, (1, 2, 3, 28, 28))
    inputs = dict(input_ids=ids, pixel_values=image)
    return make(Idefics3ForConditionalGeneration, config), inputs


def gemma3_vision() -> tuple[PreTrainedModel, dict[str, Any]]:
    """The tokens of an image see each other, also those after them."""
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**{**SIZES, **GEMMA3}),
        vision_config=SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        attn_implementation="sdpa",
    )
    ids, image, kinds = _prompt(4, (1, 3, 28, 28))
    inputs = dict(input_ids=ids, pixel_values=image, token_type_ids=kinds)
    return make(Gemma3ForConditionalGeneration, config), inputs


def paligemma() -> tuple[PreTrainedModel, dict[str, Any]]:
    """The whole prompt sees itself: only what is generated is causal."""
    config = PaliGemmaConfig(
        text_config=GemmaConfig(**SIZES),
        vision_config=SiglipVisionConfig(**_VISION),
        projection_dim=SIZES["hidden_size"],
        image_token_index=IMAGE,
        attn_implementation="sdpa",
    )
    ids, image, _ = _prompt(16, (1, 3, 28, 28))
    inputs = dict(input_ids=ids, pixel_values=image, token_type_ids=torch.zeros_like(ids))
    return make(PaliGemmaForConditionalGeneration, config), inputs


MODELS = {f.__name__: f for f in (llava, qwen2_5_vl, idefics3, gemma3_vision, paligemma)}
REPLACED = {name: tuple(range(LAYERS)) for name in MODELS} | {"gemma3_vision": (1, 3)}
"""By name: the full-attention layers."""

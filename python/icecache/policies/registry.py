"""The policies by name, and how a name becomes the layers of a model's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from icecache.config import IceConfig
from icecache.layer import LayerCache
from icecache.policies.arkvale import ArkValeLayer
from icecache.policies.base import LayerFactory, LayerLike
from icecache.policies.dense import WINDOW_SLACK, DenseLayer
from icecache.policies.full import FullLayer
from icecache.policies.h2o import H2OLayer
from icecache.policies.magicpig import MagicPIGLayer
from icecache.policies.omnikv import OmniKVLayer
from icecache.policies.pqcache import PQCacheLayer
from icecache.policies.quest import QuestLayer
from icecache.policies.retroinfer import TOKENS as RETROINFER_TOKENS
from icecache.policies.retroinfer import RetroInferLayer
from icecache.policies.snapkv import SnapKVLayer
from icecache.policies.topk import TopKLayer
from icecache.policies.window import WindowLayer


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A kind of layer, the options it runs with, and what it would keep on a device.

    what: one sentence. deployable: whether choosing costs less than attending to everything.
    fetches: whether the rows it chooses lie in host memory and are fetched. answers: whether the
    host sends up an output of its own part, for each query head. keeps: key and value rows (pairs)
    per KV head of a layer that are always on the device, of `n` tokens; nothing is fetched where
    all are.
    """

    what: str
    layer: type[LayerCache] | type[DenseLayer]
    config: Callable[..., IceConfig] = IceConfig
    budgeted: bool = True
    seeded: bool = False
    deployable: bool = True
    fetches: bool = False
    answers: bool = False
    keeps: Callable[[int, Any], float]


def _everything(n: int, layer: Any) -> float:
    return n


def _sink_and_window(n: int, layer: Any) -> float:
    return float(min(n, layer.config.sink_tokens + layer.config.window_tokens + WINDOW_SLACK))


def _pages(n: int, tokens: int, layer: Any) -> float:
    """Pages, smaller ones where the budget is."""
    return float(n / min(tokens, layer.config.token_budget))


def _within_budget(n: int, layer: Any) -> float:
    return float(min(n, _sink_and_window(n, layer) + layer.config.token_budget))


POLICIES: dict[str, Policy] = {
    "full": Policy(
        what="Full attention: every token, at every step.",
        layer=FullLayer,
        budgeted=False,
        keeps=_everything,
    ),
    "topk": Policy(
        what="The oracle: the best tokens by their true attention, the rest dropped.",
        layer=TopKLayer,
        deployable=False,
        keeps=_everything,
    ),
    "window": Policy(
        what="StreamingLLM: sink tokens and a longer window.",
        layer=WindowLayer,
        keeps=_within_budget,
    ),
    "h2o": Policy(
        what="H2O: tokens by the attention they received so far, others evicted.",
        layer=H2OLayer,
        keeps=_within_budget,
    ),
    "snapkv": Policy(
        what="SnapKV: tokens that the end of the prompt attends to, chosen once.",
        layer=SnapKVLayer,
        keeps=_within_budget,
    ),
    "quest": Policy(
        what="Quest: pages of 16 tokens by the minimum and maximum of their keys.",
        layer=QuestLayer,
        keeps=lambda n, layer: n + _pages(n, QuestLayer.PAGE, layer),
    ),
    "arkvale": Policy(
        what="ArkVale: pages of 32 tokens by a box around their keys, recalled from the host.",
        layer=ArkValeLayer,
        fetches=True,
        keeps=lambda n, layer: _sink_and_window(n, layer) + _pages(n, ArkValeLayer.PAGE, layer),
    ),
    "pqcache": Policy(
        what="PQCache: tokens by product-quantized keys of 12 bits.",
        layer=PQCacheLayer,
        seeded=True,
        fetches=True,
        # 12 bits beside a key and a value of 128 numbers of 16 bits.
        keeps=lambda n, layer: _sink_and_window(n, layer) + n * 12 / 4096 + 32,
    ),
    "magicpig": Policy(
        what="MagicPIG: tokens sampled by hash tables, weighted by their probability.",
        layer=MagicPIGLayer,
        seeded=True,
        answers=True,
        keeps=_sink_and_window,
    ),
    "omnikv": Policy(
        what="OmniKV: three layers see everything and choose for the layers above them.",
        layer=OmniKVLayer,
        fetches=True,
        keeps=lambda n, layer: n if layer.sees_everything() else _sink_and_window(n, layer),
    ),
    "retroinfer": Policy(
        what="RetroInfer: clusters of 16 tokens, the best exactly, the next by their means.",
        layer=RetroInferLayer,
        seeded=True,
        fetches=True,
        keeps=lambda n, layer: _sink_and_window(n, layer) + _pages(n, RETROINFER_TOKENS, layer),
    ),
    "pages": Policy(
        what="The paper IceCache: whole semantic pages of 16 found by M-DCI, the rest dropped.",
        layer=LayerCache,
        config=IceConfig.paper,
        seeded=True,
        fetches=True,
        keeps=_sink_and_window,
    ),
    "pages-reuse": Policy(
        what="The paper IceCache that searches in every third layer only.",
        layer=LayerCache,
        config=partial(IceConfig.paper, reuse_layers=3),
        seeded=True,
        fetches=True,
        keeps=_sink_and_window,
    ),
    "icecache-reuse": Policy(
        what="icecache that searches in every third layer only.",
        layer=LayerCache,
        config=partial(IceConfig, reuse_layers=3),
        seeded=True,
        fetches=True,
        answers=True,
        keeps=_sink_and_window,
    ),
    "icecache": Policy(
        what="Tokens found by the tree, and a summary of all the rest.",
        layer=LayerCache,
        seeded=True,
        fetches=True,
        answers=True,
        keeps=_sink_and_window,
    ),
}


def policy_config(name: str, token_budget: int, **options: Any) -> IceConfig:
    """The options that the policy `name` runs with; an unknown name raises `ValueError`."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {list(POLICIES)}, got {name!r}")
    return POLICIES[name].config(token_budget=token_budget, **options)


def make_policy(name: str, token_budget: int, **options: Any) -> LayerFactory:
    """A factory of the layers of one sequence under the policy `name`, to be made in order.

    `options` are fields of `IceConfig`.
    """
    config = policy_config(name, token_budget, **options)
    kind = POLICIES[name].layer
    below: DenseLayer | None = None

    def build(
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None,
        layer_index: int,
    ) -> LayerLike:
        nonlocal below
        shape = (num_q_heads, num_kv_heads, head_dim, config, scale)
        if not issubclass(kind, DenseLayer):
            return kind(*shape, layer_index=layer_index)
        below = kind(*shape, layer_index=layer_index, below=below if layer_index else None)
        return below

    return build

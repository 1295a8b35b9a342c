"""The policies by name, and how a name becomes the layers of a model's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from icecache.config import IceConfig
from icecache.layer import LayerCache
from icecache.policies.base import LayerFactory, LayerLike
from icecache.policies.full import FullLayer
from icecache.policies.topk import TopKLayer
from icecache.policies.window import WindowLayer


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A kind of layer, the options it runs with, and which of them make a difference to it."""

    layer: Callable[..., LayerLike]
    config: Callable[..., IceConfig] = IceConfig
    budgeted: bool = True
    seeded: bool = False


POLICIES: dict[str, Policy] = {
    "full": Policy(layer=FullLayer, budgeted=False),
    "window": Policy(layer=WindowLayer, budgeted=False),
    "topk": Policy(layer=TopKLayer),
    # The paper IceCache: whole semantic pages of 16 found by M-DCI, the rest dropped.
    "pages": Policy(layer=LayerCache, config=IceConfig.paper, seeded=True),
    "icecache": Policy(layer=LayerCache, seeded=True),
    # Every third layer searches.
    "icecache-reuse": Policy(
        layer=LayerCache, config=partial(IceConfig, reuse_layers=3), seeded=True
    ),
}


def policy_config(name: str, token_budget: int, **options: Any) -> IceConfig:
    """The options that the policy `name` runs with; an unknown name raises `ValueError`."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {list(POLICIES)}, got {name!r}")
    return POLICIES[name].config(token_budget=token_budget, **options)


def make_policy(name: str, token_budget: int, **options: Any) -> LayerFactory:
    """A factory of the layers of the policy `name`; `options` are fields of `IceConfig`."""
    config = policy_config(name, token_budget, **options)
    policy = POLICIES[name]

    def build(
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None,
        layer_index: int,
    ) -> LayerLike:
        return policy.layer(
            num_q_heads, num_kv_heads, head_dim, config, scale, layer_index=layer_index
        )

    return build

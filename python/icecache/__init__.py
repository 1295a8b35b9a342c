"""A long-context KV-cache in host memory: attention to the few tokens that matter, and to a
summary of all the rest.

    from icecache import IceCache
    model.generate(**inputs, past_key_values=IceCache(model, token_budget=64))

`LayerCache` serves custom inference loops, `DciTree` is the index alone; both need NumPy only.
`DeviceLayerCache` (with `Transfer` and `Pipeline`) is a `LayerCache` for tensors on a GPU; it needs
torch and CuPy. `IceCache` and `attach` need torch and transformers
(`pip install icecache[torch]`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._icecache import __version__
from .config import IceConfig
from .layer import LayerCache
from .stats import LayerStats, TreeStats
from .tree import DciTree

if TYPE_CHECKING:
    from .cache import IceCache, attach
    from .device_layer import DeviceLayerCache
    from .pipeline import Pipeline
    from .transfer import Transfer

__all__ = [
    "DciTree",
    "DeviceLayerCache",
    "IceCache",
    "IceConfig",
    "LayerCache",
    "LayerStats",
    "Pipeline",
    "Transfer",
    "TreeStats",
    "__version__",
    "attach",
]


# Where to find what needs torch, which NumPy users need not have.
_LAZY = {
    "DeviceLayerCache": "device_layer",
    "IceCache": "cache",
    "Pipeline": "pipeline",
    "Transfer": "transfer",
    "attach": "cache",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_LAZY[name]}", __name__)
    except ImportError as error:
        raise ImportError(
            f"icecache.{name} needs torch and transformers: pip install 'icecache[torch]'"
        ) from error
    return getattr(module, name)

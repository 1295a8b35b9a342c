"""A long-context KV-cache in host memory: attention to the few tokens that matter, and to a
summary of all the rest.

    from icecache import IceCache
    model.generate(**inputs, past_key_values=IceCache(model, token_budget=64))

`LayerCache` serves custom inference loops, `DciTree` is the index alone. `IceCache` and `attach`
need torch and transformers (`pip install icecache[torch]`); the others need NumPy only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._icecache import __version__
from .config import IceConfig
from .layer import LayerCache
from .stats import LayerStats, TreeStats
from .tree import DciTree

if TYPE_CHECKING:
    from .cache import IceCache, attach

__all__ = [
    "DciTree",
    "IceCache",
    "IceConfig",
    "LayerCache",
    "LayerStats",
    "TreeStats",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name not in ("IceCache", "attach"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import cache
    except ImportError as error:
        raise ImportError(
            f"icecache.{name} needs torch and transformers: pip install 'icecache[torch]'"
        ) from error
    return getattr(cache, name)

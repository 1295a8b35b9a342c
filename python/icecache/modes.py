"""What torch must not do with a cache: compile it, or send gradients through it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def not_compiled(function: _F) -> _F:
    """Makes `torch.compile` call a function as it is, between what it compiles.

    The cache is in host memory and in Rust: tracing it would compile every step anew.
    """
    why = "icecache attends outside of torch: compile without fullgraph=True"
    disable: Any = torch.compiler.disable
    takes_reason = "reason" in inspect.signature(disable).parameters  # from torch 2.7
    plain: _F = disable(function, reason=why) if takes_reason else disable(function)
    return plain


def refuse_gradients(*tensors: torch.Tensor) -> None:
    """Raises `ValueError` if a gradient would have to flow through the cache."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "icecache computes no gradients: run the model under torch.no_grad() or "
            "torch.inference_mode() (model.generate does)"
        )

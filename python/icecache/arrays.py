"""NumPy arrays and CPU torch tensors as what the core takes, without a copy where possible.

torch is never imported here: a tensor is known by its module, so that NumPy users need no torch.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = Any
"""A NumPy array or a CPU torch tensor of f32, f16 or bf16."""


ELEMENTS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
"""What an array holds by dtype."""


class Operand(NamedTuple):
    """An array as the core takes it."""

    array: npt.NDArray[Any]
    """The elements; bf16 as a uint16 view."""
    dtype: str
    """"f32", "f16" or "bf16"."""
    like: Any
    """What was given: results are made of its kind and dtype."""


def is_tensor(value: Any) -> bool:
    """Whether this is a torch tensor, found out without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def operand(name: str, value: Array, ndim: int | None = None) -> Operand:
    """Checks kind, dtype and, if given, the number of dimensions. Copies only if the last axis is
    not contiguous or an axis runs backwards.

    Raises `TypeError` for anything but f32, f16 or bf16 in a NumPy array or a CPU torch tensor,
    `ValueError` for a tensor that records gradients.
    """
    array, dtype = _from_tensor(name, value) if is_tensor(value) else _from_numpy(name, value)
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {list(array.shape)}")
    item = array.itemsize
    unit_rows = array.ndim == 0 or array.shape[-1] <= 1 or array.strides[-1] == item
    forward = all(s >= 0 and s % item == 0 for s in array.strides)
    if not (unit_rows and forward and array.flags.aligned):
        array = array.copy(order="C")  # aligned too, which ascontiguousarray does not promise
    return Operand(array, dtype, value)


def _from_tensor(name: str, value: Any) -> tuple[npt.NDArray[Any], str]:
    import torch

    if value.device.type != "cpu":
        raise TypeError(f"{name} must be on the CPU, got a tensor on {value.device}")
    value = without_gradients(name, value)
    if value.dtype == torch.float32:
        return value.numpy(), "f32"
    if value.dtype == torch.float16:
        return value.numpy(), "f16"
    if value.dtype == torch.bfloat16:
        return value.view(torch.uint16).numpy(), "bf16"
    raise TypeError(f"{name} must be float32, float16 or bfloat16, got {value.dtype}")


def without_gradients(name: str, value: Any) -> Any:
    """A tensor that records no gradients; `ValueError` if they would have to flow through."""
    import torch

    if not value.requires_grad:
        return value
    if torch.is_grad_enabled():
        raise ValueError(
            f"{name} records gradients, which a cache cannot pass on: "
            "run under torch.no_grad() or torch.inference_mode()"
        )
    return value.detach()


def _from_numpy(name: str, value: Any) -> tuple[npt.NDArray[Any], str]:
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"{name} must be a NumPy array or a CPU torch tensor, got {type(value).__name__}"
        )
    if value.dtype == np.float32:
        return value, "f32"
    if value.dtype == np.float16:
        return value, "f16"
    if value.dtype.name == "bfloat16":
        return value.view(np.uint16), "bf16"
    hint = " (bf16 is the bfloat16 of ml_dtypes)" if value.dtype == np.uint16 else ""
    raise TypeError(f"{name} must be float32, float16 or bfloat16, got {value.dtype}{hint}")


def same_dtype(**operands: Operand) -> str:
    """The dtype that all operands share; `TypeError` if they differ."""
    dtypes = {op.dtype for op in operands.values()}
    if len(dtypes) > 1:
        listed = ", ".join(f"{name} {op.dtype}" for name, op in operands.items())
        raise TypeError(f"all arrays of a call must have one dtype, got {listed}")
    return dtypes.pop()


def given_back(array: npt.NDArray[Any], dtype: str, tensors: bool) -> Array:
    """What the core wrote or gives back (bf16 as uint16), as a tensor or an array; no copy."""
    if tensors:
        import torch

        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor
    if dtype != "bf16":
        return array
    from ml_dtypes import bfloat16

    return array.view(bfloat16)

"""Layers of any shape, made of real KV heads: SmolLM2's, or those of a file.

A KV head of a layer is a real head with its queries: the heads of all copies of a layer take the
real ones in turns. Where the layer's head_dim is larger than the real one, keys, values and queries
are mapped into it by one orthonormal map, and queries scaled so that `head_dim ** -0.5` gives the
real logits. Query heads beyond the real ones of a group are the same at neighbouring positions.
Fewer tokens than there are: the last ones. More: `lengthen`, which takes rows for SmolLM2's (rotary
halves, its theta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from icecache.bench.lengthen import lengthen
from icecache.eval.errors import EvalError

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_STRIDE = 11
"""Between the heads of a layer, so that they come from several real layers."""
_FEWEST = 256
"""Rows of a file."""
_LARGEST = 1e15
"""Of elements that the core takes."""


@dataclass(frozen=True)
class Shape:
    """A layer: `EvalError` unless the query heads are a multiple of the KV heads."""

    q_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise EvalError(f"{self.q_heads} query heads are no multiple of {self.kv_heads}")

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Layer:
    """`k`, `v` [kv_heads, n, head_dim]; `q` [q_heads, positions, head_dim], not scaled, of the last
    positions; one dtype."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor

    def queries(self) -> list[torch.Tensor]:
        """Those of each position, [q_heads, 1, head_dim]."""
        return [self.q[:, t : t + 1].contiguous() for t in range(self.q.shape[1])]


@dataclass(frozen=True)
class Heads:
    """Real KV heads: `k`, `v` [heads, n, dim]; `q` [heads, group, positions, dim], not scaled, the
    queries of the last positions. f32."""

    name: str
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor

    @property
    def positions(self) -> int:
        return self.q.shape[2]

    def layer(self, shape: Shape, n: int, dtype: str, copy: int = 0) -> Layer:
        """Copy `copy` of a layer of `n` tokens; `EvalError` if head_dim is below the real one."""
        embed = _embedding(self.k.shape[2], shape.head_dim)
        stretch = math.sqrt(shape.head_dim / self.k.shape[2])
        kind = DTYPES[dtype]
        keys, values, queries = [], [], []
        for i in range(shape.kv_heads):
            k, v, q = self._head(copy * shape.kv_heads + i)
            if n > k.shape[1]:
                k, v = lengthen(k, v, n, seed=copy)
            keys.append((k[:, -n:] @ embed).to(kind))
            values.append((v[:, -n:] @ embed).to(kind))
            queries.append((stretch * (_grouped(q, shape.group) @ embed)).to(kind))
        return Layer(torch.cat(keys), torch.cat(values), torch.cat(queries))

    def _head(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`k`, `v` [1, n, dim], `q` [group, positions, dim] of the next real head."""
        count = len(self.k)
        stride = _STRIDE if math.gcd(_STRIDE, count) == 1 else 1
        i = number * stride % count
        return self.k[i : i + 1], self.v[i : i + 1], self.q[i]


def smollm2_heads() -> Heads:
    """The 90 KV heads of SmolLM2 on Python's reference; computed on the first call."""
    from icecache.bench.rows import CONTEXT, load_rows

    rows = load_rows("reference")
    q = rows.q[CONTEXT].reshape(-1, rows.group, *rows.q[CONTEXT].shape[2:])
    return Heads("smollm2", rows.k.flatten(0, 1), rows.v.flatten(0, 1), q)


def read_heads(path: Path) -> Heads:
    """The heads of a .npz, .pt or .safetensors file.

    It holds `k` and `v` [kv_heads, n, head_dim] and `q` [q_heads, positions, head_dim], the queries
    of the last positions, after rotary embedding and not scaled; any float dtype. `EvalError` names
    what is wrong with a file.
    """
    arrays = _read(path)
    missing = sorted({"k", "v", "q"} - set(arrays))
    if missing:
        raise EvalError(f"{path} must hold k, v and q: {missing[0]} is missing")
    rows = {}
    for name in ("k", "v", "q"):
        array = arrays[name]
        if not isinstance(array, torch.Tensor) or not array.is_floating_point() or array.ndim != 3:
            raise EvalError(f"{path}: {name} must be floats [heads, positions, head_dim]")
        if array.layout != torch.strided or array.device.type != "cpu":
            raise EvalError(f"{path}: {name} must be a plain tensor, got {array.layout}")
        rows[name] = array.detach().float()
        if 0 in array.shape:
            raise EvalError(f"{path}: {name} is empty, got {list(array.shape)}")
        if not rows[name].abs().max() <= _LARGEST:  # nor NaN
            raise EvalError(
                f"{path}: {name} has elements that are not finite or above {_LARGEST:g}"
            )
    k, v, q = rows["k"], rows["v"], rows["q"]
    shapes = f"k {list(k.shape)}, v {list(v.shape)}, q {list(q.shape)}"
    if k.shape != v.shape or k.shape[2] != q.shape[2]:
        raise EvalError(f"{path}: k and v must have one shape, and q their head_dim; got {shapes}")
    if len(q) % len(k):
        raise EvalError(f"{path}: q must have a multiple of k's heads; got {shapes}")
    if k.shape[1] < _FEWEST or q.shape[1] > k.shape[1]:
        raise EvalError(
            f"{path}: at least {_FEWEST} keys and no more queries than keys are needed; "
            f"got {shapes}"
        )
    return Heads(path.name, k, v, q.reshape(len(k), -1, *q.shape[1:]))


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".npz":
            with np.load(path) as archive:
                return {name: torch.from_numpy(archive[name]) for name in archive.files}
        if path.suffix == ".pt":
            content = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(content, dict):
                raise EvalError(f"{path} must hold a dict of tensors, got {type(content).__name__}")
            return content
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
    except EvalError:
        raise
    except Exception as error:  # three libraries, each with its own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EvalError(f"cannot read {path}: {lines[0]}") from error
    raise EvalError(f"{path} must end in .npz, .pt or .safetensors")


def _embedding(dim: int, head_dim: int) -> torch.Tensor:
    """Orthonormal rows, [dim, head_dim]."""
    if dim > head_dim:
        raise EvalError(f"keys of {dim} elements do not fit in a head_dim of {head_dim}")
    if dim == head_dim:
        return torch.eye(dim)
    generator = torch.Generator().manual_seed(0)
    columns: torch.Tensor = torch.linalg.qr(torch.randn(head_dim, dim, generator=generator))[0]
    return columns.T


def _grouped(q: torch.Tensor, group: int) -> torch.Tensor:
    """`group` query heads out of the real ones, [heads, positions, dim]."""
    real = len(q)
    return torch.stack([q[i % real].roll(i // real, 0) for i in range(group)])

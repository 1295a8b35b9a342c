"""The Rust core. Private: `LayerCache` and `DciTree` check what they pass on."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "SCATTER_ROWS",
    "Choices",
    "Index",
    "Layer",
    "__version__",
    "available_threads",
    "simd_name",
]
__version__: str
SCATTER_ROWS: str

def simd_name() -> str: ...
def available_threads() -> int: ...

@final
class Choices: ...

@final
class Layer:
    def __new__(
        cls,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        layer_index: int,
        first_kv_head: int,
        config: Any,
    ) -> Layer: ...
    def prefill(
        self,
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        dtype: str,
        q: npt.NDArray[Any] | None = None,
        out: npt.NDArray[Any] | None = None,
    ) -> None: ...
    def validate(
        self, q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any], dtype: str
    ) -> None: ...
    def decode(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        dtype: str,
        out: npt.NDArray[Any],
        like: Choices | None = None,
    ) -> None: ...
    @staticmethod
    def decode_batch(
        layers: Sequence[Layer],
        q: Sequence[npt.NDArray[Any]],
        k: Sequence[npt.NDArray[Any]],
        v: Sequence[npt.NDArray[Any]],
        dtype: str,
        out: npt.NDArray[Any],
        like: Sequence[Choices] | None = None,
    ) -> None: ...
    def append(self, k: npt.NDArray[Any], v: npt.NDArray[Any], dtype: str) -> None: ...
    def attend(
        self, q: npt.NDArray[Any], dtype: str, out: npt.NDArray[Any], exact: bool
    ) -> None: ...
    def open_device(self) -> None: ...
    @property
    def device_slots(self) -> int: ...
    @property
    def positions_at_once(self) -> int: ...
    @property
    def staging_bytes(self) -> int: ...
    def stage(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        dtype: str,
        staging: npt.NDArray[np.uint8],
        like: Choices | None = None,
    ) -> dict[str, int]: ...
    def abandon_stage(self) -> None: ...
    def history(
        self,
        first: int,
        count: int,
        keys: npt.NDArray[np.uint8],
        values: npt.NDArray[np.uint8],
    ) -> None: ...
    def crop(self, n: int) -> None: ...
    def fork(self) -> Layer: ...
    def reset(self) -> None: ...
    def gather(self, dtype: str, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def dtype(self) -> str | None: ...
    def choices(self) -> Choices: ...
    def selected(self) -> list[list[int]]: ...
    def nodes(self, head: int) -> dict[str, Any] | None: ...
    def check(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

@final
class Index:
    def __new__(
        cls,
        dim: int,
        page_size: int,
        page_capacity: int,
        fanout: int,
        refine_passes: int,
        scan_below: int,
        summary_dtype: str,
        seed: int,
        num_threads: int,
    ) -> Index: ...
    def insert(self, keys: npt.NDArray[Any], dtype: str) -> None: ...
    def search(
        self,
        queries: npt.NDArray[Any],
        dtype: str,
        field_of_view: Sequence[int],
        exact: bool,
        ids: npt.NDArray[np.int64],
        scores: npt.NDArray[np.float32],
    ) -> tuple[int, int]: ...
    def check(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def dtype(self) -> str | None: ...
    def stats(self) -> tuple[int, int, int, list[int]]: ...

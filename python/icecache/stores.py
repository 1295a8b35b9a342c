"""`Stores`: what an `IceCache` makes the stores of its layers with."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .config import IceConfig
from .device import CudaDevice, Device
from .device_layer import DeviceLayerCache
from .layer import LayerCache
from .pipeline import Pipeline
from .rows import LayerStore
from .transfer import Transfer


class Stores:
    """Makes the store of each layer where its queries are: on the CPU, or on a device, whose layers
    share one `Transfer`. The layers of all devices share one `Pipeline`.

    open_device: makes the `Device` of a `torch.device` other than the CPU.
    tp_rank: of this process among those that share the `model_q_heads` query heads of every layer.
    """

    def __init__(
        self,
        config: IceConfig,
        open_device: Callable[[torch.device], Device] = CudaDevice,
        *,
        tp_rank: int = 0,
        model_q_heads: int = 0,
    ) -> None:
        self._config, self._open_device = config, open_device
        self._tp_rank, self._model_q_heads = tp_rank, model_q_heads
        self._pipeline: Pipeline | None = None
        self._transfers: dict[torch.device, Transfer] = {}
        self._lock = threading.Lock()  # forks share their stores' maker

    def __call__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None,
        layer_index: int,
        device: torch.device,
    ) -> LayerStore:
        shape = (num_q_heads, num_kv_heads, head_dim, self._config, scale)
        # A plan may also leave all heads of a layer to every process.
        is_split = num_q_heads < self._model_q_heads
        first = self._tp_rank * num_kv_heads if is_split else 0
        if device.type == "cpu":
            return LayerCache(*shape, layer_index=layer_index, first_kv_head=first)
        with self._lock:
            if self._pipeline is None:
                self._pipeline = Pipeline()
            if device not in self._transfers:
                self._transfers[device] = Transfer(self._open_device(device))
            transfer, pipeline = self._transfers[device], self._pipeline
        return DeviceLayerCache(
            *shape,
            layer_index=layer_index,
            first_kv_head=first,
            transfer=transfer,
            pipeline=pipeline,
        )

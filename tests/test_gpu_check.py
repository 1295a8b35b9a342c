"""The script for a real GPU, run on a device in host memory: what it checks and what it counts."""

import io

import gpu_check
import torch
from host_device import HostDevice
from rich.console import Console
from transformers import DynamicCache

from icecache import IceCache, IceConfig
from icecache.bench.heads import Shape
from icecache.stores import Stores

SMALL = gpu_check.Sizes(Shape(4, 2, 32), (1500, 2500), 6, 4096, 64, 2, 64, 600, 4)
CONFIG = IceConfig(token_budget=32, dense_below=0)


def caches(device):
    stores = Stores(CONFIG, lambda _: device)

    def ours(model):
        def on_device(**shape):
            return stores(**{**shape, "device": torch.device("cuda")})

        return IceCache(model, config=CONFIG, layer_factory=on_device)

    def full(model):
        model.set_attn_implementation("sdpa")
        return DynamicCache(config=model.config)

    return {"full": full, "icecache": ours}


def run(device):
    text = io.StringIO()
    console = Console(file=text, width=110)
    wrong, results = gpu_check.run(device, SMALL, caches(device), CONFIG, console)
    return wrong, results, text.getvalue()


def test_all_of_it_runs_and_finds_nothing_wrong():
    wrong, results, text = run(HostDevice(live=True))
    assert wrong == [] and "all answers right" in text
    assert [row["tokens"] for row in results["steps"]] == [1500, 2500]
    for row in results["steps"]:
        assert row["step_ms"] > row["stage_ms"] > row["pack_ms"] > 0
        assert 0 < row["hit_percent"] < 100
        assert 0 < row["sent_kib"] <= 2 * SMALL.shape.kv_heads * 300 * 64 / 1024
    assert [row["cache"] for row in results["models"]] == ["full", "icecache"]


class Careless(HostDevice):
    """Its kernel leaves the last row out."""

    def scatter(self, rows, targets, keys, values, count, row_bytes, stream):
        if count > 1:
            super().scatter(rows, targets, keys, values, count - 1, row_bytes, stream)


def test_a_wrong_kernel_is_found():
    device = Careless(live=True)
    clock = gpu_check.Clock(device)
    assert len(gpu_check.check_kernel(device, clock)) == 5
    assert any("decode" in what for what in gpu_check.check_path(device, clock))


def test_a_difference_beyond_the_tolerance_is_found(monkeypatch):
    monkeypatch.setattr(gpu_check, "TOLERANCE", {torch.float32: 0.0})
    device = HostDevice(live=True)
    wrong = gpu_check.check_path(device, gpu_check.Clock(device))
    assert any("decode" in what for what in wrong)

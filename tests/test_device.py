"""`CudaDevice` without a GPU: what it asks torch and the kernel for, in which order."""

from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

import icecache.device as device_module
from icecache.device import CudaDevice, CudaStream, Device


@pytest.fixture
def calls(monkeypatch):
    """What torch's streams are asked for."""
    calls = []

    @contextmanager
    def stream(which):
        calls.append("enter")
        yield
        calls.append("leave")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    return calls


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """The numbers of the devices for which the kernel was compiled."""
    prepared = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(device_module, "prepare", prepared.append)
    return prepared


def tensor(calls, name, address=0):
    """A tensor on a device that is not there."""
    fake = Mock(is_cuda=True, data_ptr=Mock(return_value=address))
    fake.record_stream = lambda stream: calls.append(f"keep {name}")
    fake.copy_ = lambda source, non_blocking: calls.append(f"copy {non_blocking}")
    return fake


def test_a_copy_keeps_both_and_does_not_block(calls):
    device, stream = CudaDevice("cuda:1"), CudaStream(Mock(cuda_stream=77))
    device.copy(tensor(calls, "to"), tensor(calls, "source"), stream)
    assert calls == ["keep to", "keep source", "enter", "copy True", "leave"]


def test_a_scatter_is_launched_in_its_stream_on_its_device(calls, monkeypatch):
    launched = []
    monkeypatch.setattr(device_module, "scatter_rows", lambda *args: launched.append(args))
    device, stream = CudaDevice("cuda:1"), CudaStream(Mock(cuda_stream=77))
    tensors = [tensor(calls, i, address=256 * i) for i in range(4)]
    device.scatter(*tensors, 5, 32, stream)
    assert launched == [(0, 256, 512, 768, 5, 32, 77, 1)]
    assert calls == [*(f"keep {i}" for i in range(4)), "enter", "leave"]


def test_work_that_fails_has_kept_what_it_uses(calls):
    with pytest.raises(ZeroDivisionError):
        CudaStream(Mock()).run(lambda: 1 // 0, tensor(calls, "a"))
    assert calls == ["keep a", "enter"]


def test_pinned_memory_has_the_layout_of_the_tensor_unless_that_has_gaps(monkeypatch):
    empty_like = torch.empty_like

    def without_pinning(tensor, *, pin_memory=False, **options):
        assert pin_memory == (options["device"] == "cpu")
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", without_pinning)
    device, rows = CudaDevice("cuda:0"), torch.zeros(3, 6, 4, dtype=torch.bfloat16)
    with torch.inference_mode():
        for given, strides in (
            (rows, (24, 4, 1)),
            (rows.transpose(0, 1), (4, 24, 1)),
            (rows[:, ::2], (12, 4, 1)),
            (rows.transpose(0, 1)[1:], (12, 4, 1)),
        ):
            pinned = device.pinned_like(given)
            assert pinned.shape == given.shape and pinned.dtype == given.dtype
            assert pinned.stride() == strides and not pinned.is_inference()


def test_it_is_a_device_and_only_a_cuda_device(prepared):
    device = CudaDevice(torch.device("cuda", 2))
    assert prepared == [2]
    assert isinstance(device, Device) and device.torch_device == torch.device("cuda:2")
    with pytest.raises(ValueError, match="expected a CUDA device, got 'cpu'"):
        CudaDevice("cpu")


def test_what_cannot_be_compiled_is_said_at_once(monkeypatch):
    def missing(index):
        raise ImportError(f"no CuPy for {index}")

    monkeypatch.setattr(device_module, "prepare", missing)
    with pytest.raises(ImportError, match="no CuPy for 0"):
        CudaDevice("cuda:0")

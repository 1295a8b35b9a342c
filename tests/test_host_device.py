"""The host device: its streams keep the order that events give, and no other."""

import pytest
import torch
from host_device import SCHEDULES, HostDevice
from hypothesis import given
from hypothesis import strategies as st

from icecache.device import Device


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_a_device(schedule):
    device = HostDevice(schedule)
    assert isinstance(device, Device)
    assert not isinstance("cuda:0", Device) and not isinstance(torch.device("cuda"), Device)


def test_late_work_is_done_when_it_is_waited_for_and_no_sooner():
    device, done = HostDevice("late"), []
    first, second = device.stream(), device.stream()
    first.run(lambda: done.append("a"))
    event = first.record()
    first.run(lambda: done.append("b"))
    second.wait(event)
    second.run(lambda: done.append("c"))
    assert done == [] and not event.is_done
    second.record().synchronize()
    assert done == ["a", "c"] and event.is_done
    first.record().synchronize()
    assert done == ["a", "c", "b"]


def test_eager_work_is_done_at_once_but_for_computing():
    device, done = HostDevice("eager"), []
    device.compute().run(lambda: done.append("compute"))
    device.stream().run(lambda: done.append("copy"))
    assert done == ["copy"]
    device.finish()
    assert done == ["copy", "compute"]


@given(seed=st.integers(0, 1000), schedule=st.sampled_from(SCHEDULES), data=st.data())
def test_a_stream_is_in_order_and_events_order_streams(seed, schedule, data):
    device, done, must = HostDevice(schedule, seed), [], []
    streams = [device.compute(), device.stream(), device.stream()]
    last, events = [None] * 3, []
    for item in range(data.draw(st.integers(1, 30))):
        at = data.draw(st.integers(0, 2))
        if events and data.draw(st.booleans()):
            event, before = data.draw(st.sampled_from(events))
            streams[at].wait(event)
            must.append((before, item))
        streams[at].run(lambda item=item: done.append(item))
        must += [(last[at], item)] if last[at] is not None else []
        last[at] = item
        events.append((streams[at].record(), item))
    for stream in streams:
        stream.record().synchronize()
    assert sorted(done) == list(range(len(done)))
    assert all(done.index(a) < done.index(b) for a, b in must)


def test_random_orders_differ_and_a_seed_repeats_them():
    def order(seed):
        device, done = HostDevice("random", seed), []
        streams = [device.stream() for _ in range(4)]
        for item in range(12):
            streams[item % 4].run(lambda item=item: done.append(item))
        return done

    assert order(1) == order(1) and len({tuple(order(seed)) for seed in range(5)}) > 1


def test_new_memory_holds_nothing_that_anyone_wrote():
    device = HostDevice("late")
    rows = torch.ones(2, 3, 4)
    assert device.pinned_like(rows).isnan().all() and device.fill(rows).isnan().all()
    assert (device.empty(9) == 255).all() and device.zeros((2, 2), torch.float16).isnan().all()
    # New memory of the device may still be in use by earlier work.
    memory = device.empty(4)
    memory.zero_()
    device.finish()
    assert (memory == 255).all()
    assert device.pinned_like(rows.transpose(0, 1)).stride() == rows.transpose(0, 1).stride()

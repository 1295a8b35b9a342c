"""`IceCache.fork()`: independent caches that share what was stored before."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from batches import Reader, divergence, generated, padded, texts
from host_device import SCHEDULES, HostDevice
from test_batch import check
from test_cache import (
    CACHE,
    SPARSE,
    WHOLE,
    Failure,
    close,
    every_model,
    failing,
    forward,
    recorded,
)
from tiny_models import MODELS, gemma3, llama, qwen2_mixed, tokens
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from icecache import IceCache, IceConfig
from icecache.stores import Stores

QUESTIONS = [tokens(n, seed=20 + n) for n in (3, 12, 1, 40)]


def answer(model: Any, cache: Any, text: torch.Tensor, question: torch.Tensor) -> list[int]:
    return generated(model, torch.cat([text, question], dim=1), cache)[0]


@every_model
def test_forks_grow_independently(name: str) -> None:
    model, text = MODELS[name](), tokens(600)
    cache = IceCache(model, **WHOLE)
    forward(model, text, cache)
    forks = [cache.fork() for _ in QUESTIONS[:3]]
    caches = [*forks, cache]  # the original goes on too
    for read, question in zip(caches, QUESTIONS, strict=True):
        expected = answer(MODELS[name](), DynamicCache(config=model.config), text, question)
        assert answer(model, read, text, question) == expected
        assert read.get_seq_length() == 600 + question.shape[1] + 15
        check(read)


@every_model
def test_forks_that_grow_in_turns_do_not_see_each_other(name: str) -> None:
    model, text = MODELS[name](), tokens(600)
    shared, *others = (IceCache(model, **SPARSE) for _ in range(4))
    for cache in (shared, *others):
        forward(model, text, cache)
    together = [shared, shared.fork(), shared.fork()]
    alone = [others[0], others[1].fork(), others[2].fork()]
    kept = others[0].fork()  # so that all share alike
    for t in (1, 5, 40, 1, 100, 2):
        for i, pair in enumerate(zip(together, alone, strict=True)):
            ids = tokens(t, seed=100 * i + t)
            assert torch.equal(*(forward(model, ids, cache) for cache in pair))
    for fork in (*together, kept):
        check(fork)


def test_a_fork_errs_as_little_as_the_cache_that_read_the_same() -> None:
    errors = {"fork": 0.0, "alone": 0.0}
    model, text = llama(), tokens(900)
    cache = IceCache(model, **SPARSE)
    forward(model, text, cache)
    for seed in range(4):
        caches = {"fork": cache.fork(), "alone": IceCache(model, **SPARSE)}
        forward(model, text, caches["alone"])
        for t in (1, 20, 5, 120, 1, 3):
            ids = tokens(t, seed=seed)
            text_so_far = torch.cat([text, ids], dim=1)
            full = DynamicCache()
            forward(model, text_so_far[:, :-t], full)
            expected = forward(model, ids, full)[0]
            for name, read in caches.items():
                got = forward(model, ids, read)[0]
                errors[name] += divergence(got, expected)
            for read in caches.values():
                read.crop(-t)
    assert errors["fork"] <= 1.2 * errors["alone"]


def test_forks_of_forks_outlive_the_original() -> None:
    model, text = llama(), tokens(500)
    cache = IceCache(model, **WHOLE)
    forward(model, text, cache)
    first = cache.fork()
    dropped = [weakref.ref(layer) for layer in cache.layers]
    forward(model, tokens(30, seed=1), first)
    gc.disable()
    try:
        del cache
        assert [layer() for layer in dropped] == [None] * 4
    finally:
        gc.enable()
    second, third = first.fork(), first.fork()
    third.crop(250)
    first.reset()
    del first
    base = torch.cat([text, tokens(30, seed=1)], dim=1)
    for cache, before in ((second, base), (third, text[:, :250])):
        assert cache.get_seq_length() == before.shape[1]
        expected = answer(llama(), DynamicCache(), before, QUESTIONS[1])
        assert answer(model, cache, before, QUESTIONS[1]) == expected
        check(cache)


@pytest.mark.parametrize("model", [qwen2_mixed, gemma3])
@pytest.mark.parametrize("recording", [False, True])
def test_layers_that_are_left_as_they_are_fork_too(model: Any, recording: bool) -> None:
    made, text = model(), tokens(80)
    cache = IceCache(made, **{**WHOLE, "dense_layers": 1})
    if recording:
        if not hasattr(DynamicSlidingWindowLayer, "activate_past_recording"):
            pytest.skip("this version records no past")
        for layer in cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
    forward(made, text, cache)
    fork = cache.fork()
    assert [type(layer) for layer in fork.layers] == [type(layer) for layer in cache.layers]
    assert all(a is not b for a, b in zip(fork.layers, cache.layers, strict=True))
    forward(made, tokens(20, seed=3), cache)
    if recording:
        fork.crop(-5)
    kept = fork.get_seq_length()
    assert kept == (75 if recording else 80)
    cache.reset()
    more = tokens(9, seed=4)
    expected = forward(model(), torch.cat([text[:, :kept], more], dim=1), DynamicCache())
    close(forward(made, more, fork), expected[:, kept:])


def test_other_layers_are_copied_deeply() -> None:
    class Mine(DynamicSlidingWindowLayer):
        pass

    model = gemma3()
    cache = IceCache(model, **WHOLE)
    cache.layers[0].__class__ = Mine
    forward(model, tokens(30), cache)
    fork = cache.fork()
    assert type(fork.layers[0]) is Mine
    assert fork.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()
    assert torch.equal(fork.layers[0].keys, cache.layers[0].keys)


def test_forks_in_threads() -> None:
    model, text = llama(), tokens(600)
    cache = IceCache(model, **SPARSE)
    forward(model, text, cache)
    ends = [tokens(4, seed=i) for i in range(6)]
    alone = [answer(model, cache.fork(), text, end) for end in ends]
    got: list[Any] = [None] * len(ends)

    def work(i: int) -> None:
        got[i] = answer(model, forks[i], text, ends[i])

    for _ in range(3):
        forks = [cache.fork() for _ in ends]
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(ends))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == alone
        for fork in forks:
            check(fork)
    assert cache.get_seq_length() == 600


@pytest.mark.parametrize("options", [WHOLE, SPARSE])
def test_many_questions_about_one_text_as_forks_and_as_a_batch(options: dict[str, Any]) -> None:
    model, text = llama(), tokens(500)
    cache = IceCache(model, **options)
    forward(model, text, cache)
    one_by_one = [answer(model, cache.fork(), text, question) for question in QUESTIONS]
    batch = cache.fork()
    batch.batch_repeat_interleave(len(QUESTIONS))
    ids, mask = padded(QUESTIONS, "left")
    ids = torch.cat([text.expand(len(ids), -1), ids], dim=1)
    mask = torch.cat([torch.ones(len(ids), 500, dtype=torch.long), mask], dim=1)
    together = generated(model, ids, batch, attention_mask=mask, pad_token_id=0)
    if options is WHOLE:
        assert together == one_by_one
    else:  # a forward is sparse or not by its columns
        assert together[1] == one_by_one[1] or together[3] == one_by_one[3]
    assert cache.get_seq_length() == 500
    assert cache.stats().rows == 1
    assert batch.stats().rows == len(QUESTIONS)
    check(batch)


def test_a_fork_of_a_batch() -> None:
    model = llama()
    cache = IceCache(model, **{**WHOLE, "dense_layers": 1})
    read = Reader(model, cache)
    rows = texts(120, 7, 64)
    read(*padded(rows, "left"))
    fork = Reader(model, cache.fork())
    fork.mask = read.mask
    fork.cache.batch_select_indices(torch.tensor([2, 0]))
    fork.mask = fork.mask[[2, 0]]
    more, others = tokens(12).reshape(3, 4), tokens(10, seed=1).reshape(2, 5)
    for got, row, ids in (
        *zip(read(more), rows, more, strict=True),
        *zip(fork(others), (rows[2], rows[0]), others, strict=True),
    ):
        whole = torch.cat([row, ids[None]], dim=1)
        close(got, forward(llama(), whole, DynamicCache())[0, row.shape[1] :])


@pytest.mark.parametrize("reuse", [2, 3])
def test_layers_of_a_fork_follow_its_own_layers(reuse: int) -> None:
    model, text = llama(), tokens(600)
    cache, plain = (IceCache(model, reuse_layers=reuse, **SPARSE) for _ in range(2))
    forward(model, text, cache)
    forward(model, text, plain)
    fork = cache.fork()
    for layer in fork.layers:
        assert layer.anchor is None or any(layer.anchor is own for own in fork.layers)
    forward(model, tokens(1, seed=1), cache)
    for t in (1, 3):
        ids = tokens(t, seed=2)
        assert torch.equal(forward(model, ids, fork), forward(model, ids, plain))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, IceCache.fork])
def test_copies_are_forks(copied: Any) -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    forward(model, tokens(50), cache)
    with cache.exact():
        twin = copied(cache)
    assert type(twin) is IceCache
    assert twin.config is cache.config
    assert twin.replaced_layers == cache.replaced_layers
    assert twin._lock is not cache._lock
    forward(model, tokens(3), cache)
    assert (twin.get_seq_length(), cache.get_seq_length()) == (50, 53)
    expected = forward(llama(), torch.cat([tokens(50), tokens(9)], dim=1), DynamicCache())
    close(forward(model, tokens(9), twin), expected[:, 50:])
    assert twin.layers[0].store.stats().steps == 9  # sparse: what was forced is not copied


def test_a_fork_has_nothing_of_a_failed_forward() -> None:
    model = llama()
    cache = IceCache(model, **{**SPARSE, "dense_layers": 1})
    forward(model, tokens(40), cache)
    with failing(model.model.layers[2].mlp), pytest.raises(Failure):
        forward(model, tokens(5), cache)
    fork = cache.fork()
    assert [layer.get_seq_length() for layer in fork.layers] == [40] * 4
    assert not any(layer.is_waiting for layer in fork.layers[1:])
    for ids in (tokens(1), tokens(40)):
        assert torch.equal(forward(model, ids, fork), forward(model, ids, cache))
    # And one of the fork leaves the other alone.
    with failing(model.model.layers[2].mlp), pytest.raises(Failure):
        forward(model, tokens(5), fork)
    assert [layer.get_seq_length() for layer in cache.layers] == [81] * 4


def test_an_empty_cache_forks() -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    fork = cache.fork()
    forward(model, tokens(20).reshape(2, 10), fork)
    assert cache.get_seq_length() == 0
    forward(model, tokens(9), cache)
    assert (fork.stats().rows, cache.stats().rows) == (2, 1)


def test_stores_that_cannot_fork_are_named() -> None:
    model = llama()

    class Store:
        def __init__(self, inner: Any) -> None:
            self.inner, self.seq_len = inner, 0

        def prefill(self, *rows: Any) -> Any:
            return self.inner.prefill(*rows)

    inner = Stores(IceConfig(**WHOLE))
    cache = IceCache(model, layer_factory=lambda **shape: Store(inner(**shape)))
    forward(model, tokens(9), cache)
    for copied in (cache.fork, lambda: cache.layers[0].batch_repeat_interleave(2)):
        with pytest.raises(TypeError, match=r"a store with a method fork, got Store"):
            copied()


def test_forks_keep_what_a_layer_factory_makes() -> None:
    model = llama()
    cache, stores = recorded(model)
    forward(model, tokens(30), cache)
    fork = cache.fork()
    forward(model, tokens(3), fork)
    assert [store.seq_len for store in stores.values()] == [30] * 4
    fork.reset()
    forward(model, tokens(3), fork)
    assert fork.get_seq_length() == 3


# --- On a device


DEVICE = IceConfig(
    token_budget=8, device_tokens=24, sink_tokens=4, window_tokens=32, dense_below=350
)


def on_device(model: Any, schedule: str) -> IceCache:
    host = HostDevice(schedule, live=True)
    stores = Stores(DEVICE, lambda _: host)

    def make(**shape: Any) -> Any:
        return stores(**{**shape, "device": torch.device("cuda")})

    return IceCache(model, config=DEVICE, layer_factory=make)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_batches_beams_and_forks_on_a_device(name: str, schedule: str) -> None:
    model = MODELS[name]()
    ids, mask = padded(texts(380, 420), "left")
    options: dict[str, Any] = dict(attention_mask=mask, num_beams=3, pad_token_id=0)
    caches = IceCache(model, config=DEVICE), on_device(model, schedule)
    answers = [generated(model, ids, cache, **options) for cache in caches]
    assert answers[0] == answers[1]
    forks = [cache.fork() for cache in caches]
    ids, more = padded(texts(400, 360, 1), "right"), tokens(6).reshape(3, 2)
    readers = [Reader(model, cache) for cache in forks]
    for read in readers:
        read.cache.reset()
    for rows in (ids, (more,)):
        for a, b in zip(*(read(*rows) for read in readers), strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)
    check(caches[1])
    check(forks[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_on_a_device_that_cannot_be_indexed_can_be_cropped(schedule: str) -> None:
    model = llama()
    cache = on_device(model, schedule)
    read = Reader(model, cache)
    ids, mask = padded(texts(400, 370), "left")
    read(ids, mask)
    project = model.model.layers[1].self_attn.k_proj.weight
    good = project.detach().clone()
    project.data[0, 0] = torch.nan
    read(tokens(80).reshape(2, 40))
    project.data.copy_(good)
    one = torch.ones(2, 1, dtype=torch.long)
    for _ in range(2):
        with pytest.raises(ValueError, match="k must be finite"):
            forward(model, one, cache, attention_mask=torch.cat([read.mask, one], dim=1))
    cache.crop(400)
    read.mask = mask
    with cache.exact():
        got = read(tokens(6, seed=2).reshape(2, 3))
    for row, logits, more in zip(
        texts(400, 370), got, tokens(6, seed=2).reshape(2, 3), strict=True
    ):
        whole = torch.cat([row, more[None]], dim=1)
        with torch.no_grad():
            want = model(input_ids=whole, **{CACHE: DynamicCache()}).logits[0, -3:]
        torch.testing.assert_close(logits, want, atol=2e-3, rtol=1e-3)


def test_stats_say_what_forks_share() -> None:
    model = llama()
    cache = IceCache(model, **SPARSE)
    forward(model, tokens(600), cache)
    assert cache.stats().shared_bytes == 0
    fork = cache.fork()
    stats = fork.stats()
    everything = stats.kv_bytes + stats.index_bytes
    assert 0.9 * everything < stats.shared_bytes == cache.stats().shared_bytes < everything
    fork.batch_repeat_interleave(2)
    assert fork.stats().shared_bytes == 2 * stats.shared_bytes
    del fork
    gc.collect()
    assert cache.stats().shared_bytes == 0


def test_a_fork_of_a_running_forward_does_not_disturb_it() -> None:
    model, ids = qwen2_mixed(), tokens(60)
    cache, untouched = (IceCache(model, **SPARSE) for _ in range(2))
    for c in (cache, untouched):
        forward(model, ids, c)
    forks: list[Any] = []

    def fork(*_: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=lambda: forks.append(cache.fork()))
        thread.start()
        thread.join()

    expected = forward(model, tokens(3, seed=1), untouched)
    handle = model.model.layers[2].mlp.register_forward_pre_hook(fork)
    assert torch.equal(forward(model, tokens(3, seed=1), cache), expected)
    assert [layer.get_seq_length() for layer in forks[0].layers] == [60] * 4
    assert torch.equal(forward(model, tokens(3, seed=1), forks[0]), expected)

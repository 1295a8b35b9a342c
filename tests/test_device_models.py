"""Whole models on a device in host memory, from prefill to text, against the CPU's path."""

import pytest
import torch
from host_device import SCHEDULES, HostDevice
from test_cache import CACHE
from tiny_models import MODELS, VOCABULARY, llama, tokens

from icecache import IceCache, IceConfig
from icecache.device_layer import DeviceLayerCache
from icecache.eval.model import load_model
from icecache.eval.texts import make_haystack
from icecache.pipeline import Pipeline
from icecache.stores import Stores
from icecache.transfer import Transfer

CONFIG = IceConfig(
    token_budget=8, device_tokens=24, sink_tokens=4, window_tokens=32, dense_below=350
)


def on_device(model, host):
    """A cache whose layers share a device's transfer and a pipeline."""
    shared = dict(device=host, transfer=Transfer(host), pipeline=Pipeline())

    def make(*, num_q_heads, num_kv_heads, head_dim, scale, layer_index, device):
        return DeviceLayerCache(
            num_q_heads, num_kv_heads, head_dim, CONFIG, scale, layer_index=layer_index, **shared
        )

    return IceCache(model, config=CONFIG, layer_factory=make)


def talk(model, cache, first, second, **options):
    """Two turns; what the model says, and the logits of the last step."""
    ids = first
    for more in (second, None):
        out = model.generate(
            ids,
            max_new_tokens=20,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **{CACHE: cache},
            **options,
        )
        ids = out.sequences if more is None else torch.cat([out.sequences, more], dim=1)
    return ids, torch.stack(out.logits)


@pytest.mark.parametrize(
    "name,schedule", [*((name, "late") for name in MODELS), ("llama", "eager"), ("llama", "random")]
)
def test_a_model_says_on_a_device_what_it_says_on_the_cpu(name, schedule):
    model = MODELS[name]()
    first, second = tokens(340), tokens(30, seed=1)
    want, want_logits = talk(model, IceCache(model, config=CONFIG), first, second)
    device = HostDevice(schedule, live=True)
    cache = on_device(model, device)
    got, logits = talk(model, cache, first, second)
    assert torch.equal(got, want)
    torch.testing.assert_close(logits, want_logits, atol=2e-3, rtol=1e-3)
    stats = cache.stats()
    assert stats.seq_len == want.shape[1] - 1
    assert all(layer.slot_hits > layer.slot_misses > 0 for layer in stats.layers.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_that_are_refused_leave_no_trace(schedule):
    model, ids = llama(), tokens(380, repeat=37)
    device = HostDevice(schedule, live=True)
    answers = [
        model.generate(
            ids,
            **{CACHE: cache},
            max_new_tokens=20,
            do_sample=False,
            prompt_lookup_num_tokens=9,
        )
        for cache in (IceCache(model, config=CONFIG), on_device(model, device))
    ]
    assert torch.equal(*answers) and answers[0].max() < VOCABULARY


def test_a_prompt_is_indexed_behind_the_layers_that_compute():
    model = llama()
    cache = on_device(model, HostDevice(live=True))
    with torch.no_grad():
        model(input_ids=tokens(3000), **{CACHE: cache})
    assert cache.get_seq_length() == 3000
    for layer in cache.layers:
        layer.store.check()
        assert layer.store.stats().tree_tokens > 2800


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reuse", [2, 3])
def test_layers_that_reuse_do_on_a_device_what_they_do_on_the_cpu(reuse, schedule):
    model, config = llama(), CONFIG.replace(reuse_layers=reuse)
    device = HostDevice(schedule, live=True)
    stores = Stores(config, lambda _: device)

    def make(**shape):
        return stores(**{**shape, "device": torch.device("cuda")})

    caches = IceCache(model, config=config), IceCache(model, config=config, layer_factory=make)
    (want, want_logits), (got, logits) = (
        talk(model, cache, tokens(340), tokens(30, seed=1), prompt_lookup_num_tokens=9)
        for cache in caches
    )
    assert torch.equal(got, want)
    torch.testing.assert_close(logits, want_logits, atol=2e-3, rtol=1e-3)
    follower = caches[1].layers[1].store.stats()
    assert follower.key_rows_read == caches[0].layers[1].store.stats().key_rows_read


def test_layers_spread_over_devices_share_what_is_theirs():
    model, ids = llama(), tokens(400)
    devices = {torch.device("cuda", i): HostDevice("random", i, live=True) for i in (0, 1)}
    stores = Stores(CONFIG, devices.__getitem__)

    def make(*, layer_index, **shape):
        shape["device"] = torch.device("cuda", layer_index // 2)  # as a device_map would
        return stores(layer_index=layer_index, **shape)

    caches = IceCache(model, config=CONFIG), IceCache(model, config=CONFIG, layer_factory=make)
    answers = [
        model.generate(ids, **{CACHE: cache}, max_new_tokens=20, do_sample=False)
        for cache in caches
    ]
    assert torch.equal(*answers)
    transfers = [layer.store._transfer for layer in caches[1].layers]
    assert transfers[0] is transfers[1] is not transfers[2] is transfers[3]
    assert [t.device for t in transfers[::2]] == list(devices.values())
    assert all(device.copied > 0 for device in devices.values())


@pytest.mark.parametrize("before", [0, 400])
@pytest.mark.parametrize("broken", [0, 1, 3])
def test_a_prefill_that_cannot_be_indexed_is_an_error_until_it_is_cropped(broken, before):
    model, ids = llama(), tokens(460)
    cache = on_device(model, HostDevice(live=True))

    @torch.no_grad()
    def forward(start, stop):
        return model(input_ids=ids[:, start:stop], past_key_values=cache).logits[0, -1]

    if before:
        forward(0, before)
    project = model.model.layers[broken].self_attn.k_proj.weight
    good = project.detach().clone()
    project.data[0, 0] = torch.nan
    forward(before, before + 50)
    project.data.copy_(good)
    for _ in range(2):
        with pytest.raises(ValueError, match="k must be finite"):
            forward(before + 50, before + 51)
    if before + 50 == cache.get_seq_length():  # the last layer has stored it
        with pytest.raises(RuntimeError, match=f"expected {before + 40} tokens .*, got {before}"):
            cache.crop(before + 40)
    cache.crop(before) if before else cache.reset()
    assert cache.get_seq_length() == before
    # Exactly: what was cropped away may have left another tree.
    with cache.exact():
        got = forward(before, 460)
    with torch.no_grad():
        want = model(input_ids=ids).logits[0, -1]
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_smollm2_reads_and_writes_on_a_device_as_on_the_cpu(schedule):
    model, tokenizer = load_model()
    haystack = make_haystack(tokenizer, 3000, 0.4)
    ids = torch.tensor([haystack.context + haystack.cue])
    config = IceConfig()
    device = HostDevice(schedule, live=True)
    stores = Stores(config, lambda _: device)

    def on_host_device(**shape):
        return stores(**{**shape, "device": torch.device("cuda")})

    caches = (
        IceCache(model, config=config),
        IceCache(model, config=config, layer_factory=on_host_device),
    )
    answers = [
        model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
        for cache in caches
    ]
    assert torch.equal(*answers)
    assert haystack.passkey in tokenizer.decode(answers[1][0, ids.shape[1] :])
    cpu, here = (cache.stats() for cache in caches)
    assert here.tokens_exact == cpu.tokens_exact and here.key_rows_read == cpu.key_rows_read
    hits = sum(layer.slot_hits for layer in here.layers.values())
    misses = sum(layer.slot_misses for layer in here.layers.values())
    print(f"{hits / (hits + misses):.1%} of what was wanted was there")

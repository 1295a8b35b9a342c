"""Everything that needs a real GPU, in one run of a few minutes.

Checks the kernel and the whole device path against the CPU's; then measures the bus, the kernel,
the parts of a step at several lengths (one layer of Llama-3.1-8B's shape), and a model with random
weights against full attention on the GPU and against transformers' offloaded cache. Prints short
tables last and exits with 1 if any answer was wrong, with 2 if there is no GPU to check.

    python benches/gpu_check.py [--device cuda:0] [--json gpu.json] [--quick]

Needs `pip install "icecache[bench,cuda13]"` (or cuda12). Rows and queries are synthetic: keys of
topics that return, queries that walk from topic to topic. Hit rates of a real model are in
docs/findings.md.
"""

import argparse
import gc
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from rich.console import Console
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from icecache import IceCache, IceConfig, LayerCache
from icecache.bench.heads import Shape
from icecache.bench.report import table
from icecache.device import CudaDevice
from icecache.device_layer import DeviceLayerCache

LLAMA_8B = Shape(32, 8, 128)
TOPICS = 400
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest relative difference of an output: its dtype rounds."""
ATTENTION_ERROR = 0.5
"""Relative error of logits beyond which a model's answer is wrong."""
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    shape: Shape
    lengths: tuple[int, ...]
    steps: int
    copy_bytes: int
    rows: int
    """Of one scatter."""
    model_layers: int
    model_hidden: int
    model_tokens: int
    new_tokens: int


FULL = Sizes(LLAMA_8B, (8192, 32768, 131072), 48, 256 * MIB, 4096, 8, 4096, 32768, 24)
QUICK = Sizes(LLAMA_8B, (8192, 32768), 16, 64 * MIB, 4096, 2, 4096, 8192, 8)


class Clock:
    """Milliseconds of work on a device, from an idle device to an idle one."""

    def __init__(self, device):
        self.device = device
        on_gpu = device.torch_device.type == "cuda"
        self.finish = partial(torch.cuda.synchronize, device.torch_device) if on_gpu else None
        if self.finish is None:
            self.finish = device.finish

    def once(self, work):
        self.finish()
        begun = time.perf_counter()
        work()
        self.finish()
        return 1e3 * (time.perf_counter() - begun)

    def many(self, work, times=20):
        self.once(work)
        return median(self.once(work) for _ in range(times))


# ---- rows ---------------------------------------------------------------------------------------


def content(shape, n, dtype, device, seed=0):
    """Keys and values [kv_heads, n, head_dim] of topics that return, and the topics of the keys."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=random, device=device)

    topics = normal(2, shape.kv_heads, TOPICS, shape.head_dim)
    which = torch.randint(TOPICS, (n,), generator=random, device=device)
    k, v = ((topics[i, :, which] + 0.4 * normal(shape.kv_heads, n, shape.head_dim)).to(dtype)
            for i in (0, 1))  # fmt: skip
    return k, v, topics[0]


def queries(topics, shape, steps, dtype):
    """[q_heads, steps, head_dim]: each head walks from one topic to the next, and lingers."""
    random = torch.Generator(topics.device).manual_seed(1)
    heads = torch.arange(shape.q_heads, device=topics.device) // shape.group
    size = (shape.q_heads, steps // 8 + 2)
    goals = torch.randint(TOPICS, size, generator=random, device=topics.device)
    share = torch.arange(steps, device=topics.device) / 8
    at = share.long()
    here, there = topics[heads[:, None], goals[:, at]], topics[heads[:, None], goals[:, at + 1]]
    return (here + (share - at)[:, None] * (there - here)).to(dtype) * 1.2


# ---- checks -------------------------------------------------------------------------------------


def relative(got, want):
    got, want = got.float().cpu(), want.float().cpu()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-9)).max())


def check_kernel(device, clock):
    """Rows that the kernel writes, and that it leaves, are those of plain indexing, bit for bit."""
    wrong = []
    for dtype, dim in ((torch.float32, 64), (torch.bfloat16, 128), (torch.float16, 256),
                       (torch.float16, 33), (torch.bfloat16, 100)):  # fmt: skip
        slots = torch.randn(2, 5000, dim).to(dtype)
        targets = torch.randperm(5000)[:1237]
        rows = torch.randn(len(targets), 2, dim).to(dtype)
        want = slots.clone()
        want[0][targets], want[1][targets] = rows[:, 0], rows[:, 1]
        on = [x.to(device.torch_device) for x in (rows, targets.to(torch.int32), *slots)]
        scatter(device, on, dim * dtype.itemsize)
        clock.finish()
        if not (torch.equal(on[2].cpu(), want[0]) and torch.equal(on[3].cpu(), want[1])):
            wrong.append(f"scatter {dtype} {dim}")
    return wrong


def scatter(device, on, row_bytes):
    """on: rows, targets (int32), keys, values."""
    rows, targets = (x.view(torch.uint8).flatten() for x in on[:2])
    stream = device.compute()
    device.scatter(rows, targets, on[2], on[3], len(on[1]), row_bytes, stream)


def check_path(device, clock):
    """Two prefills, steps of one and of several positions, a crop: the CPU says the same."""
    wrong, shape = [], Shape(12, 3, 64)
    for dtype in TOLERANCE:
        k, v, topics = content(shape, 3000, dtype, "cpu")
        q = queries(topics, shape, 3000, dtype)
        config = IceConfig(token_budget=32)
        cpu = LayerCache(shape.q_heads, shape.kv_heads, shape.head_dim, config)
        gpu = DeviceLayerCache(shape.q_heads, shape.kv_heads, shape.head_dim, config, device=device)

        def both(call, *rows, cpu=cpu, gpu=gpu):
            want = getattr(cpu, call)(*rows)
            got = getattr(gpu, call)(*(row.to(device.torch_device) for row in rows))
            clock.finish()
            return relative(got, want)

        worst = {"prefill": both("prefill", k[:, :2000], v[:, :2000], q[:, :2000])}
        worst["second prefill"] = both("prefill", k[:, 2000:2600], v[:, 2000:2600], q[:, 2000:2600])
        for n in (2600, 2700):
            for layer in (cpu, gpu):
                layer.crop(2600)
            for start, stop in ((n, n + 1), (n + 1, n + 12), (n + 12, n + 13)):
                rows = (x[:, start:stop] for x in (q, k, v))
                worst[f"decode at {start}"] = both("decode", *rows)
        same = all((a == b).all() for a, b in zip(cpu.selected(), gpu.selected(), strict=True))
        wrong += [f"{dtype} {what}: {error:.2g}" for what, error in worst.items()
                  if not error <= TOLERANCE[dtype]]  # fmt: skip
        if not same:
            wrong.append(f"{dtype}: other tokens selected than on the CPU")
        gpu.check()
    return wrong


# ---- measurements -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bus:
    """Bandwidths, GB/s."""

    one_copy: float
    """One large pinned copy."""
    staging: float
    """One staging buffer of a typical step, 1 MiB."""
    device_copy: float
    """Device to device, of as many bytes as the scatter writes."""
    scatter: float


@dataclass(frozen=True)
class StepRow:
    """One layer of `tokens` tokens; medians, milliseconds unless the name says otherwise."""

    tokens: int
    build_s: float
    step_ms: float
    down_ms: float
    stage_ms: float
    """Append, search and pack on the host."""
    pack_ms: float
    transfer_ms: float
    scatter_ms: float
    attend_ms: float
    hit_percent: float
    sent_kib: float
    device_mib: float
    full_ms: float
    """Full attention over keys and values that lie on the device."""
    offloaded_ms: float
    """The same after copying them from pinned host memory."""


@dataclass(frozen=True)
class ModelRow:
    cache: str
    prefill_s: float
    token_ms: float
    held_mib: float
    """Device memory beyond the model's, after prefill."""
    logit_error: float


def measure_bus(device, clock, sizes):
    like = torch.empty(sizes.copy_bytes, dtype=torch.uint8)
    on = device.empty(sizes.copy_bytes)
    host = device.pinned_like(like)

    def copy(nbytes):
        return lambda: device.copy(on[:nbytes], host[:nbytes], device.compute())

    row_bytes = LLAMA_8B.head_dim * 2
    slots = device.zeros((2, 4 * sizes.rows, LLAMA_8B.head_dim), torch.bfloat16)
    rows = device.zeros((sizes.rows, 2, LLAMA_8B.head_dim), torch.bfloat16)
    targets = torch.randperm(4 * sizes.rows)[: sizes.rows].to(device.torch_device, torch.int32)
    written = 2 * sizes.rows * row_bytes
    other = torch.empty_like(rows)
    rate = lambda nbytes, ms: nbytes / ms / 1e6  # noqa: E731
    return Bus(
        one_copy=rate(sizes.copy_bytes, clock.many(copy(sizes.copy_bytes))),
        staging=rate(min(MIB, sizes.copy_bytes), clock.many(copy(min(MIB, sizes.copy_bytes)))),
        device_copy=rate(written, clock.many(lambda: other.copy_(rows))),
        scatter=rate(
            written, clock.many(lambda: scatter(device, [rows, targets, *slots], row_bytes))
        ),
    )


def measure_steps(device, clock, sizes, n, config):
    """Decode steps of one layer after `n` tokens."""
    shape, on = sizes.shape, device.torch_device
    steps = 2 * sizes.steps
    k, v, topics = content(shape, n + steps, torch.bfloat16, on)
    q = queries(topics, shape, steps, torch.bfloat16)
    held = allocated(on)
    layer = DeviceLayerCache(shape.q_heads, shape.kv_heads, shape.head_dim, config, device=device)

    def build():
        layer.prefill(k[:, :n], v[:, :n])
        layer.stats()  # waits for the index

    build_s = clock.once(build) / 1e3

    def step(i):
        rows = (x[:, i : i + 1] for x in (k[:, n:], v[:, n:]))
        return layer.decode(q[:, i : i + 1], *rows)

    walls = [clock.once(partial(step, i)) for i in range(sizes.steps)]
    parts = []
    for i in range(sizes.steps, steps):
        step(i)
        parts.append(layer.stats())
    held = allocated(on) - held
    query = q[:, -1:]

    def full(k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            query[None], k[None], v[None], enable_gqa=True
        )

    error = relative(layer.attend(query), full(k, v)[0])
    pinned = [device.pinned_like(x) for x in (k, v)]
    room = [torch.empty_like(x) for x in (k, v)]

    def offloaded():
        for to, source in zip(room, pinned, strict=True):
            device.copy(to, source, device.compute())
        full(*room)

    def mean(name):
        return median(getattr(part, name) for part in parts)

    hits, misses = (sum(getattr(part, name) for part in parts)
                    for name in ("last_slot_hits", "last_slot_misses"))  # fmt: skip
    row = StepRow(
        tokens=n,
        build_s=build_s,
        step_ms=median(walls),
        down_ms=mean("down_ms"),
        stage_ms=mean("stage_ms"),
        pack_ms=mean("pack_ms"),
        transfer_ms=mean("transfer_ms"),
        scatter_ms=mean("scatter_ms"),
        attend_ms=mean("device_attend_ms"),
        hit_percent=100 * hits / max(1, hits + misses),
        sent_kib=mean("last_row_bytes") / 1024,
        device_mib=held / MIB,
        full_ms=clock.many(lambda: full(k, v)),
        offloaded_ms=clock.many(offloaded, 5),
    )
    return row, [] if error <= ATTENTION_ERROR else [f"step at {n}: error {error:.2g}"]


def random_model(sizes, device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shape = sizes.shape
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=sizes.model_hidden,
        intermediate_size=7 * sizes.model_hidden // 2,
        num_hidden_layers=sizes.model_layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2**20,
    )
    with torch.device(device.torch_device):
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval().requires_grad_(False)


@torch.inference_mode()
def measure_model(device, clock, sizes, caches):
    """Prefill and time per token with each of `caches`, makers by name; the first is the truth."""
    model, on = random_model(sizes, device), device.torch_device
    ids = torch.randint(512, (1, sizes.model_tokens + sizes.new_tokens), device=on)
    rows, truth = [], None
    for name, make in caches.items():
        gc.collect()
        held, cache = allocated(on), make(model)
        prompt = ids[:, : sizes.model_tokens]
        prefill = partial(model, input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        prefill_s = clock.once(prefill) / 1e3
        held, logits, times = allocated(on) - held, [], []

        def token(i, cache=cache, logits=logits):
            out = model(input_ids=ids[:, i : i + 1], past_key_values=cache)
            logits.append(out.logits[0, -1].float())

        for i in range(sizes.model_tokens, ids.shape[1]):
            times.append(clock.once(partial(token, i)))
        logits = torch.stack(logits)
        truth = logits if truth is None else truth
        error = float(((logits - truth).norm(dim=-1) / truth.norm(dim=-1)).mean())
        rows.append(ModelRow(name, prefill_s, median(times), held / MIB, error))
        del cache, token, prefill
    wrong = [f"model, {row.cache}: error {row.logit_error:.2g}" for row in rows
             if not row.logit_error <= ATTENTION_ERROR]  # fmt: skip
    return rows, wrong


def allocated(on):
    return torch.cuda.memory_allocated(on) if on.type == "cuda" else 0


def transformers_caches(config):
    def full(model):
        model.set_attn_implementation("sdpa")
        return DynamicCache(config=model.config)

    def offloaded(model):
        model.set_attn_implementation("sdpa")
        return DynamicCache(config=model.config, offloading=True)

    return {
        "full, on the GPU": full,
        "offloaded": offloaded,
        "icecache": lambda model: IceCache(model, config=config),
    }


def run(device, sizes, caches, config, console):
    """All of it; what was wrong, and the results."""
    clock = Clock(device)
    wrong = check_kernel(device, clock)
    console.print(f"kernel: {wrong or 'as plain indexing'}")
    wrong += (path := check_path(device, clock))
    console.print(f"device path: {path or 'as on the CPU'}")
    bus = measure_bus(device, clock, sizes)
    console.print(table("bus, GB/s", [bus]))
    steps = []
    for n in sizes.lengths:
        row, bad = measure_steps(device, clock, sizes, n, config)
        steps.append(row)
        wrong += bad
        console.print(f"{n} tokens: {row.step_ms:.3g} ms")
    models, bad = measure_model(device, clock, sizes, caches)
    wrong += bad
    console.print(table("a step of one layer", steps))
    title = f"{sizes.model_layers} layers, random weights, {sizes.model_tokens} tokens"
    console.print(table(title, models))
    console.print("WRONG: " + "; ".join(wrong) if wrong else "all answers right")
    results = {"bus": asdict(bus), "steps": [asdict(row) for row in steps],
               "models": [asdict(row) for row in models]}  # fmt: skip
    return wrong, results


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="the results")
    parser.add_argument("--quick", action="store_true", help="shorter, fewer layers")
    args = parser.parse_args()
    console = Console(width=110)
    if not torch.cuda.is_available():
        console.print("no CUDA GPU here: nothing was checked")
        sys.exit(2)
    device, config = CudaDevice(args.device), IceConfig()
    name = torch.cuda.get_device_name(device.torch_device)
    console.print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}")
    sizes = QUICK if args.quick else FULL
    wrong, results = run(device, sizes, transformers_caches(config), config, console)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": name, "wrong": wrong, "sizes": asdict(sizes), **results}, file)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

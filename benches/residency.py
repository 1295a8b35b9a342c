"""What a device holds already when a step wants it: SmolLM2's decode steps on real text.

The model reads the last 256 of 7,936 tokens; these queries, keys and values are then decoded one by
one, at the defaults, f16. Every step wants sink, window and what it selects, and misses at least
its own token. Means per KV head and step, after the first 32 steps: by then the slots are full.

    python benches/residency.py --texts reference
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from icecache import IceConfig
from icecache._icecache import Layer
from icecache.bench.rows import CONTEXT, Rows, load_rows
from icecache.eval.decode import forward
from icecache.eval.model import load_model
from icecache.eval.texts import TEXTS

STEPS, WARM = 256, 32
DEVICE_TOKENS = (64, 128, 256, 512)


@torch.inference_mode()
def queries(rows: Rows) -> list[torch.Tensor]:
    """Of the last `STEPS` positions, per layer [q_heads, STEPS, head_dim]."""
    found: list[torch.Tensor] = []

    def capture(module, query, key, *args, **kwargs):
        found.append(query[0].clone())
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    AttentionInterface.register("capture", capture)
    AttentionMaskInterface.register("capture", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model, _ = load_model()
    model.set_attn_implementation("capture")
    start, cache = CONTEXT - STEPS, DynamicCache()
    for layer, (k, v) in enumerate(zip(rows.k, rows.v, strict=True)):
        cache.update(k[None, :, :start], v[None, :, :start], layer)
    forward(model, rows.ids[start:CONTEXT], start, cache)
    return found


def measure(k, v, q, scale: float, layer: int, device_tokens: int) -> np.ndarray:
    """One layer: tokens wanted and missed, and selected, per KV head and step; bytes per step."""
    q, k, v = (x.half().numpy() for x in (q, k, v))
    config = IceConfig(device_tokens=device_tokens)
    core = Layer(len(q), len(k), k.shape[2], scale, layer, 0, config)
    core.open_device()
    start = CONTEXT - STEPS
    core.prefill(k[:, :start], v[:, :start], "f16")
    buffer = np.empty(core.staging_bytes + 16, np.uint8)
    staging = buffer[-buffer.ctypes.data % 16 :][: core.staging_bytes]
    counts = []
    for i in range(STEPS):
        at = slice(start + i, start + i + 1)
        step = core.stage(q[:, i : i + 1], k[:, at], v[:, at], "f16", staging)
        stats = core.stats()
        wanted = step["hits"] + step["misses"]
        always = len(k) * (stats["sink_tokens"] + stats["window_tokens"])
        counts.append([wanted, step["misses"], wanted - always, stats["last_row_bytes"]])
    return np.mean(counts[WARM:], axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    print(
        "| text | device_tokens | wanted | hit | of the selected | misses per head | KB per layer |"
    )
    print("|---|---|---|---|---|---|---|")
    for text in parser.parse_args().texts:
        rows = load_rows(text)
        heads, captured = rows.k.shape[1], queries(rows)
        for device_tokens in DEVICE_TOKENS:
            layers = enumerate(zip(rows.k, rows.v, captured, strict=True))
            wanted, misses, selected, sent = np.mean(
                [measure(*kvq, rows.scale, i, device_tokens) for i, kvq in layers], axis=0
            )
            # Every head and step misses its own token.
            again = 1 - (misses - heads) / selected
            print(
                f"| {text} | {device_tokens} | {wanted / heads:.0f} | {1 - misses / wanted:.1%} "
                f"| {again:.1%} | {misses / heads:.1f} | {sent / 1e3:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

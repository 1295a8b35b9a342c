"""Page size, capacity, candidates, refinement, fan-out and summary precision: error against bytes.

    python benches/sizes.py --plot docs/sizes.svg

One option at a time away from the defaults, through `LayerCache`, on f16 rows of real texts at 8k:
relative RMS error of head outputs, bytes of the index beyond keys and values, rows read. "spread":
lowest and highest mean of a seed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from measure import relative
from opening import numbers
from tree_view import OPTIONS

from icecache import IceConfig, LayerCache
from icecache.bench.rows import CONTEXT, load_rows
from icecache.eval.texts import TEXTS

DEFAULT = IceConfig()
OPTION_VALUES: dict[str, tuple[object, ...]] = {
    "page_size": (4, 5, 6, 8, 12),
    "page_capacity": (9, 12, 18),
    "candidate_factor": (4, 8, 16),
    "refine_passes": (0, 1, 2, 3),
    "fanout": (8, 12, 16, 24),
    "summary_dtype": ("f32", "f16", "bf16"),
}


def default_of(option: str) -> object:
    return 2 * DEFAULT.page_size if option == "page_capacity" else getattr(DEFAULT, option)


def attempt(
    rows: tuple[torch.Tensor, ...], truth: torch.Tensor, layer: int, **options: object
) -> tuple[float, ...]:
    """Mean square relative error, overhead, key and value rows read (shares) of one tree."""
    k, v, q = rows
    config = IceConfig(**{**OPTIONS, **options})
    cache = LayerCache(len(q), len(k), k.shape[2], config, layer_index=layer)
    cache.prefill(k, v)
    errors = relative(cache.attend(q).numpy(), truth.numpy())
    s = cache.stats()
    return (
        float((errors**2).mean()),
        s.overhead,
        s.key_rows_read / s.seq_len,
        s.value_rows_read / s.seq_len,
    )


def run(texts: list[str], layers: list[int], seeds: int) -> dict[tuple[str, object], np.ndarray]:
    """Per option and value [texts x layers, seeds, 4], see `attempt`."""
    found: dict[tuple[str, object], list[list[tuple[float, ...]]]] = {}
    for text in texts:
        real = load_rows(text)
        for layer in layers:
            k, v = real.k[layer].half(), real.v[layer].half()
            rows = k, v, real.q[CONTEXT][layer].contiguous()
            exact = LayerCache(len(rows[2]), len(k), k.shape[2], IceConfig(dense_below=2**30))
            exact.append(k, v)
            truth = exact.attend_exact(rows[2])
            default = [attempt(rows, truth, layer, seed=seed) for seed in range(seeds)]
            for option, values in OPTION_VALUES.items():
                for value in values:
                    mine = default
                    if value != default_of(option):
                        chosen = {option: value}
                        mine = [attempt(rows, truth, layer, seed=s, **chosen) for s in range(seeds)]
                    found.setdefault((option, value), []).append(mine)
    return {key: np.array(mine) for key, mine in found.items()}


def table(results: dict[tuple[str, object], np.ndarray]) -> str:
    lines = [
        "| option | value | error | spread | index beyond f16 K, V | keys read | values read |",
        "|---|---|---|---|---|---|---|",
    ]
    for (option, value), mine in results.items():
        seeds = np.sqrt(mine[..., 0].mean(0))
        shown = f"**{value}**" if value == default_of(option) else str(value)
        lines.append(
            f"| {option} | {shown} | {np.sqrt(mine[..., 0].mean()):.4f} "
            f"| {seeds.min():.4f} to {seeds.max():.4f} "
            + "".join(f"| {mine[..., i].mean():.1%} " for i in (1, 2, 3))
            + "|"
        )
    return "\n".join(lines)


def plot(results: dict[tuple[str, object], np.ndarray], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "icecache", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for option in OPTION_VALUES:
        mine = [(value, r) for (name, value), r in results.items() if name == option]
        x = [100 * r[..., 1].mean() for _, r in mine]
        y = [np.sqrt(r[..., 0].mean()) for _, r in mine]
        axes.plot(x, y, "o-", label=option, markersize=4, linewidth=1)
        for (value, _), *at in zip(mine, x, y, strict=True):
            axes.annotate(str(value), at, fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set_xlabel("index, % of the f16 keys and values")
    axes.set_ylabel("relative RMS error of head outputs")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=lambda text: text.split(","), default=list(TEXTS))
    parser.add_argument("--layers", type=numbers, default=[1, 9, 17, 25])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    started = time.time()
    results = run(a.texts, a.layers, a.seeds)
    seconds = time.time() - started
    print(f"{table(results)}\n\n{seconds:.0f} s")
    if a.plot:
        plot(results, a.plot)

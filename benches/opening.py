"""Which nodes a decode step opens: error, needles found and rows read under several rules.

    python benches/opening.py                                             # 4k and 8k, real rows
    python benches/opening.py --lengths 32768,131072 --layers 8,20 --heads 1 --seeds 2 --stride 8
    python benches/opening.py --lengths "" --plot docs/opening.svg        # of what was measured

Lengths beyond the real rows are made by `lengthen`. Means over texts, layers, heads, queries and
seeds of the tree. Refuses to measure if the readable step disagrees with the package.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from measure import SHARE, Candidate, Problem, Result, check, measure
from rules import (
    count_of_lowest,
    expected_gain,
    far_keys,
    far_leaves,
    mass_of_lowest,
    raised_share,
    search_leaves,
    share_of_each,
    share_of_lowest,
)

from icecache.bench.lengthen import lengthen
from icecache.bench.rows import CONTEXT, load_rows
from icecache.eval.texts import TEXTS

RESULTS = Path(__file__).parent.parent / "results"
SHIPPED = share_of_lowest(SHARE)
CANDIDATES = [
    Candidate("every node", share_of_lowest(1.0)),
    Candidate("half of each level", share_of_each(0.5)),
    *(Candidate(f"{f:.0%} of the lowest", share_of_lowest(f)) for f in (0.75, 0.5, 0.25)),
    *(Candidate(f"{f:.0%} ranked by mean", share_of_lowest(f, 0.0)) for f in (0.75, 0.5, 0.25)),
    *(Candidate(f"gain above {t:g}", expected_gain(t)) for t in (1e-4, 3e-4, 1e-3)),
    *(Candidate(f"raised share above {t:g}", raised_share(t)) for t in (1e-3, 3e-3, 1e-2)),
    *(Candidate(f"all but {m:.0%} of raised mass", mass_of_lowest(m)) for m in (0.01, 0.03)),
    *(Candidate(f"{n} nodes", count_of_lowest(n)) for n in (64, 256)),
    *(
        Candidate(f"50% and {name}", share_of_lowest(0.5), extra)
        for name, extra in (
            ("5% farthest leaves", partial(far_leaves, share=0.05)),
            ("leaves of 5% farthest keys", partial(far_keys, share=0.05)),
            ("an M-DCI search", lambda view: search_leaves(16)),
        )
    ),
    Candidate("50% with factor 16", share_of_lowest(0.5), factor=16),
    Candidate("raised share above 0.003 with factor 16", raised_share(3e-3), factor=16),
    Candidate("75% and leaves by farthest key", share_of_lowest(0.75), far=2.5),
    Candidate("50% and all by farthest key", share_of_lowest(0.5, far=2.5), far=2.5),
]


def problem(text: str, layer: int, head: int, n: int, stride: int) -> Problem:
    rows = load_rows(text)
    real = min(n, CONTEXT)
    k, v = rows.k[layer, head : head + 1, :real], rows.v[layer, head : head + 1, :real]
    if n > real:
        k, v = lengthen(k, v, n)
    q = rows.queries(layer, head, real, stride)
    return Problem(*(x.contiguous().numpy().copy() for x in (k[0], v[0], q)), stride)


def run(
    candidates: list[Candidate],
    n: int,
    texts: list[str],
    layers: list[int],
    heads: int,
    seeds: int,
    stride: int,
) -> dict[str, list[Result]]:
    results = defaultdict(list)
    for text in texts:
        for layer in layers:
            for head in range(heads):
                one = problem(text, layer, head, n, stride)
                if head == 0:
                    check(one, 0, SHIPPED)
                for seed in range(seeds):
                    for result in measure(one, seed, candidates):
                        results[result.name].append(result)
    return results


def table(results: dict[str, list[Result]]) -> str:
    lines = [
        "| opened | error | 99 % below | likely needles | aligned | keys read | values read |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, mine in results.items():
        errors = np.concatenate([r.errors for r in mine])
        lines.append(
            f"| {name} | {np.sqrt(np.mean(errors**2)):.4f} | {np.quantile(errors, 0.99):.3f} "
            f"| {fmean(r.likely for r in mine):.1%} | {fmean(r.aligned for r in mine):.1%} "
            f"| {fmean(r.key_share for r in mine):.1%} | {fmean(r.value_share for r in mine):.1%} |"
        )
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def plot(path: Path) -> None:
    """Error against rows read of every length that was measured."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "icecache", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    files = sorted(RESULTS.glob("opening-*.json"), key=lambda file: int(file.stem.split("-")[1]))
    figure, panels = plt.subplots(1, len(files), figsize=(3.4 * len(files), 3.6), squeeze=False)
    for axes, file in zip(panels[0], files, strict=True):
        for number, (family, belongs) in enumerate(FAMILIES.items()):
            points = []
            for name, mine in json.loads(file.read_text()).items():
                if belongs in name and "factor" not in name and "and " not in name:
                    rows = fmean(r["key_share"] + r["value_share"] for r in mine)
                    error = np.sqrt(np.mean(np.concatenate([r["errors"] for r in mine]) ** 2))
                    points.append((100 * rows / 2, error))
            axes.plot(
                *zip(*sorted(points), strict=True), "osD^vP"[number] + "-", label=family, ms=4
            )
        axes.set_title(f"{file.stem.split('-')[1]} tokens", fontsize=9)
        axes.set_xlabel("rows read, % of all keys and values", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("relative RMS error of head outputs", fontsize=8)
    panels[0, -1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


FAMILIES = {
    "share of each level": "each level",
    "share of the lowest (default)": "of the lowest",
    "the same, ranked by mean": "ranked by mean",
    "expected gain": "gain",
    "raised share": "raised share",
    "all but some raised mass": "raised mass",
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=numbers, default=[4096, CONTEXT])
    parser.add_argument("--texts", type=lambda text: text.split(","), default=list(TEXTS))
    parser.add_argument("--layers", type=numbers, default=[1, 14, 24])
    parser.add_argument("--heads", type=int, default=3, help="KV heads of a layer")
    parser.add_argument("--seeds", type=int, default=5, help="trees of each head")
    parser.add_argument("--stride", type=int, default=4, help="positions between queries, of 32")
    parser.add_argument("--rules", default="", help="only those whose name contains this")
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    candidates = [c for c in CANDIDATES if a.rules in c.name]
    for n in a.lengths:
        started = time.time()
        results = run(candidates, n, a.texts, a.layers, a.heads, a.seeds, a.stride)
        print(f"\n{n} tokens, {time.time() - started:.0f} s\n\n{table(results)}", flush=True)
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"opening-{n}.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        known |= {name: [asdict(r) for r in mine] for name, mine in results.items()}
        file.write_text(json.dumps(known))
    if a.plot:
        plot(a.plot)

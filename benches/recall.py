"""How many of the true top 16 a search of `DciTree` finds, at its defaults, and what it reads.

8,192 keys of topics that return, and SmolLM2's keys of three layers (every KV head) with queries of
the same text; inserted at once and one by one.

    python benches/recall.py
"""

import argparse

import numpy as np

from icecache import DciTree
from icecache.bench.rows import CONTEXT, load_rows
from icecache.eval.texts import TEXTS

K = 16


def topics(n=8192, dim=64, count=400):
    random = np.random.default_rng(0)
    centres, topic = random.standard_normal((count, dim)), random.integers(count, size=n)
    keys = centres[topic] + 0.4 * random.standard_normal((n, dim))
    return keys.astype(np.float32), 2 * random.standard_normal((96, dim), np.float32)


def measure(keys, queries, batch):
    tree = DciTree(keys.shape[1])
    for start in range(0, len(keys), batch):
        tree.insert(keys[start : start + batch])
    tree.check()
    ids, _ = tree.search(queries, K)
    stats = tree.stats()
    want, _ = tree.exact_search(queries, K)
    recall = np.mean([np.isin(b, a).mean() for a, b in zip(ids, want, strict=True)])
    read = np.array([stats.last_keys_scored, stats.last_nodes_scored]) / len(keys)
    return [recall, *read]


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    problems = {"topics that return": [topics()]}
    for text in TEXTS:
        rows = load_rows(text)
        for layer in (0, rows.k.shape[0] // 2, rows.k.shape[0] - 1):
            problems[f"{text}, layer {layer}"] = [
                (
                    rows.k[layer, head].numpy(),
                    rows.q[CONTEXT][layer, head * rows.group :][: rows.group].flatten(0, 1).numpy(),
                )
                for head in range(rows.k.shape[1])
            ]
    print("| keys | found, at once | found, one by one | keys scored | nodes scored |")
    print("|---|---|---|---|---|")
    for name, heads in problems.items():
        bulk = np.mean([measure(keys, queries, len(keys)) for keys, queries in heads], axis=0)
        single = np.mean([measure(keys, queries, 1) for keys, queries in heads], axis=0)
        found = f"{bulk[0]:.3f} | {single[0]:.3f}"
        print(f"| {name} | {found} | {bulk[1]:.1%} | {bulk[2]:.1%} |", flush=True)


if __name__ == "__main__":
    main()

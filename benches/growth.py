"""A cache that grows one token at a time: what a step costs, and what growth costs in quality.

Prints, for keys of topics that return, for a drifting mean and for keys that become ten times as
long: the error and overhead of the grown cache beside those of one that was built at once; and the
time (median, 99th percentile, largest) of attention alone, of an insertion and of a step of both.
With one thread it is the thread's CPU time, which other processes disturb less.

    python benches/growth.py [--tokens 8192] [--seeds 3] [--steps 2000] [--kv-heads 3] [--group 3]
"""

import argparse
import time

import numpy as np

from icecache import IceConfig, LayerCache

FIRST = 352  # sink, window and the first tree


def content(name, random, kv_heads, n, dim):
    """Keys and values, [kv_heads, n, dim]."""
    centres = random.standard_normal((2, kv_heads, 400, dim))
    topic = random.integers(400, size=n)
    k, v = centres[:, :, topic] + 0.4 * random.standard_normal((2, kv_heads, n, dim))
    if name == "drift":
        k += np.linspace(0, 3, n)[:, None] * random.standard_normal((kv_heads, 1, dim))
    elif name == "ten times as long":
        k[:, FIRST:] *= 10
    return k.astype(np.float32), v.astype(np.float32)


def error(layer, q):
    """RMS relative error of the outputs of the last positions."""
    out, want = layer.attend(q), layer.attend_exact(q)
    relative = np.linalg.norm(out - want, axis=-1) / np.linalg.norm(want, axis=-1)
    return float(np.sqrt(np.square(relative).mean()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seeds", type=int, default=1, help="averaged; times are of the last")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    q_heads = args.kv_heads * args.group
    config = IceConfig(dense_below=0, num_threads=args.threads)

    for name in ("topics", "drift", "ten times as long"):
        n, errors = FIRST + args.tokens, []
        for seed in range(args.seeds):
            random = np.random.default_rng(seed)
            k, v = content(name, random, args.kv_heads, n + args.steps, args.dim)
            q = random.standard_normal((q_heads, 64, args.dim), np.float32)
            q *= 0.2 if name == "ten times as long" else 2.0

            grown = LayerCache(q_heads, args.kv_heads, args.dim, config)
            grown.prefill(k[:, :FIRST], v[:, :FIRST])
            for i in range(FIRST, n):
                grown.append(k[:, i : i + 1], v[:, i : i + 1])
            grown.check()
            built = LayerCache(q_heads, args.kv_heads, args.dim, config)
            # As many tokens in the window as there are in that of the grown cache.
            bulk = n - (grown.stats().window_tokens - config.window_tokens)
            built.prefill(k[:, :bulk], v[:, :bulk])
            built.append(k[:, bulk:n], v[:, bulk:n])
            assert grown.stats().window_tokens == built.stats().window_tokens
            errors.append([error(grown, q), error(built, q)])
        ours, theirs = np.mean(errors, 0)
        ratio = np.mean([ours / theirs for ours, theirs in errors])
        print(f"{name}: error {ours:.4f} grown, {theirs:.4f} built, ratio {ratio:.2f}")
        for which, layer in (("grown", grown), ("built", built)):
            stats = layer.stats()
            fill, overhead = stats.mean_page_fill, stats.overhead
            print(f"  {which}: {fill:.2f} tokens per page, overhead {overhead:.1%}")

        clock = time.thread_time if args.threads == 1 else time.perf_counter
        alone, insert, step = [], [], []
        for i in range(args.steps):
            q1 = np.ascontiguousarray(q[:, i % 64, None])
            start = clock()
            built.attend(q1)
            alone.append(clock() - start)
        for i in range(n, n + args.steps):
            q1, k1, v1 = (
                np.ascontiguousarray(x) for x in (q[:, i % 64, None], k[:, i, None], v[:, i, None])
            )
            start = clock()
            built.append(k1, v1)
            middle = clock()
            built.attend(q1)
            insert.append(middle - start)
            step.append(clock() - start)
        # The window fills up first: 32 steps that insert nothing.
        parts = {"attention alone": alone, "insertion": insert[32:], "step": step[32:]}
        for what, times in parts.items():
            median, high, most = 1e6 * np.percentile(times, [50, 99, 100])
            ratio = high / median
            print(f"  {what}: p50 {median:.0f} us, p99 {high:.0f} ({ratio:.2f} x), max {most:.0f}")


if __name__ == "__main__":
    main()

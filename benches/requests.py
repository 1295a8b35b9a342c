"""Many requests on SmolLM2: forks of one document, second turns, prefill in chunks, batches, beams.

    python benches/requests.py                    # all, 20 minutes
    python benches/requests.py forks --context 7000

Distances are KL divergences of next-token distributions, in nats, mean over positions that are fed
one by one; the text is Python's own reference, questions are pieces of the source of `argparse`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from transformers import DynamicCache

from icecache import IceCache, IceConfig, LayerCache
from icecache.bench.rows import load_rows
from icecache.eval import decode
from icecache.eval.model import load_model
from icecache.eval.texts import built_in, encode, first_tokens, read_text

FORKS, QUESTION, ANSWER = 10, 40, 32
"""Forks of a document; tokens of the question that each is asked, and of the answer."""


def forward(model: Any, cache: Any, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities after the last of the tokens, [vocabulary]."""
    with torch.no_grad():
        logits = decode.forward(model, ids, cache.get_seq_length(), cache)
    return logits.double().log_softmax(0)


def feed(model: Any, cache: Any, ids: Sequence[int]) -> list[torch.Tensor]:
    return [forward(model, cache, [token]) for token in ids]


def divergence(p: Sequence[torch.Tensor], q: Sequence[torch.Tensor]) -> float:
    """Mean KL(p || q)."""
    return fmean(float((a.exp() * (a - b)).sum()) for a, b in zip(p, q, strict=True))


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forks(model: Any, tokenizer: Any, context: int) -> None:
    """Ten questions about one document: its cache forked for each, and prefilled for each alone."""
    document = text(tokenizer, context)
    asked = encode(tokenizer, built_in("argparse"))
    step = QUESTION + ANSWER
    asked = [asked[i * step : (i + 1) * step] for i in range(FORKS)]
    full = DynamicCache()
    forward(model, full, document)
    empty = resident()
    original = IceCache(model)
    forward(model, original, document)
    one = resident() - empty
    begun = time.perf_counter()
    forked = [original.fork() for _ in asked]
    seconds = time.perf_counter() - begun
    stats = [fork.stats() for fork in forked]
    sizes = original.stats()
    own = sum(s.kv_bytes + s.index_bytes - s.shared_bytes for s in stats)
    ten = resident() - empty
    counted = sizes.kv_bytes + sizes.index_bytes
    print(f"forks of {context:,} tokens: {1e3 * seconds / FORKS:.2f} ms each")
    print(f"  one cache: {counted / 1e6:.1f} MB counted, {one / 1e6:.1f} MB resident")
    print(f"  and {FORKS} forks: {1 + own / counted:.3f} x counted, {ten / one:.3f} x resident")
    del original
    gc.collect()
    ratios = []
    distances: list[tuple[float, float]] = []
    for fork, ids in zip(forked, asked, strict=True):
        question, answer = ids[:QUESTION], ids[QUESTION:]
        alone = IceCache(model)
        forward(model, alone, document + question)
        truth = copy.deepcopy(full)
        forward(model, truth, question)
        forward(model, fork, question)
        want = feed(model, truth, answer)
        got = [divergence(want, feed(model, cache, answer)) for cache in (fork, alone)]
        distances.append((got[0], got[1]))
        ratios.append(got[0] / got[1])
        print(f"  fork {got[0]:.5f}, alone {got[1]:.5f}", flush=True)
    a, b = (fmean(column) for column in zip(*distances, strict=True))
    print(f"  mean: fork {a:.5f}, alone {b:.5f}: {a / b:.2f} x; median ratio {median(ratios):.2f}")
    grown = sum(f.stats().kv_bytes + f.stats().index_bytes - f.stats().shared_bytes for f in forked)
    print(f"  after {step} tokens each: {1 + grown / counted:.3f} x counted (the original is gone)")


def turns(model: Any, tokenizer: Any, context: int) -> None:
    """A second turn on the cache of the first, and a new cache of the whole text."""
    ids = text(tokenizer, context + 64 + 100 + 48)
    first, answer = ids[:context], ids[context : context + 64]
    second, rest = ids[context + 64 : -48], ids[-48:]
    full = DynamicCache()
    forward(model, full, ids[:-48])
    want = feed(model, full, rest)
    turned, anew = IceCache(model), IceCache(model)
    forward(model, turned, first)
    feed(model, turned, answer)
    forward(model, turned, second)
    forward(model, anew, ids[:-48])
    a, b = (feed(model, cache, rest) for cache in (turned, anew))
    own = divergence(want, b)
    print(f"second turn after {context:,} + 64 tokens, then 100, then 48 one by one:")
    print(f"  from full attention: second turn {divergence(want, a):.5f}, anew {own:.5f}")
    print(f"  second turn from anew: {divergence(b, a):.5f}, {divergence(b, a) / own:.2f} x")


def chunks(model: Any, tokenizer: Any, context: int) -> None:
    """A prompt in chunks, and at once."""
    ids = text(tokenizer, context + 64)
    prompt, rest = ids[:context], ids[context:]
    full, once = DynamicCache(), IceCache(model)
    outs = [forward(model, cache, prompt) for cache in (full, once)]
    want, whole = (feed(model, cache, rest) for cache in (full, once))
    print(f"prefill of {context:,} tokens, then 64 one by one, from full attention:")
    print(f"  at once {divergence(want, whole):.5f}")
    for size in (256, 1024, 3000):
        cache = IceCache(model)
        for start in range(0, context, size):
            last = forward(model, cache, prompt[start : start + size])
        apart = float((last - outs[0]).abs().max())
        got = divergence(want, feed(model, cache, rest))
        print(f"  in chunks of {size}: {got:.5f}; prompt's log-probabilities {apart:.1e} apart")


def rows(model: Any, tokenizer: Any, context: int) -> None:
    """Rows of unequal lengths in one batch, and each alone: next-token distributions apart."""
    lengths, more = (1, 300, 1500, min(4096, context)), 24
    ids = text(tokenizer, lengths[-1] + more + 1)
    print(f"rows of {lengths} tokens, then {more} one by one: KL from each row alone")
    alone = []
    for n in lengths:
        cache = IceCache(model)
        first = forward(model, cache, ids[:n])
        alone.append([first, *feed(model, cache, ids[n : n + more])])
    for side in ("left", "right"):
        batch = torch.zeros(len(lengths), lengths[-1], dtype=torch.long)
        mask = torch.zeros_like(batch)
        for i, n in enumerate(lengths):
            place = slice(lengths[-1] - n, None) if side == "left" else slice(n)
            batch[i, place], mask[i, place] = torch.tensor(ids[:n]), 1
        cache = IceCache(model)
        last = mask.cumsum(1).argmax(1)
        apart = 0.0
        for step in range(more + 1):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -batch.shape[1] :]
            with torch.no_grad():
                out = model(batch, attention_mask=mask, position_ids=positions, cache=cache)
            for i in range(len(lengths)):
                at = int(last[i]) if step == 0 else 0
                got = out.logits[i, at].double().log_softmax(0)
                apart = max(apart, divergence([alone[i][step]], [got]))
            batch = torch.tensor([ids[n + step : n + step + 1] for n in lengths])
            mask = torch.cat([mask, torch.ones_like(batch)], dim=1)
        print(f"  padded on the {side}: {apart:.1e} at most", flush=True)


def beams(model: Any, tokenizer: Any, context: int) -> None:
    """Beam search and prompt lookup: with the whole budget the text of full attention."""
    ids = torch.tensor([text(tokenizer, min(context, 1500))])
    ways: dict[str, dict[str, Any]] = {
        "4 beams": {"num_beams": 4},
        "prompt lookup": {"prompt_lookup_num_tokens": 5},
    }
    for name, options in ways.items():
        said = []
        for cache in (DynamicCache(), IceCache(model, 100_000), IceCache(model, 64)):
            out = model.generate(ids, cache=cache, max_new_tokens=24, do_sample=False, **options)
            said.append(out[0, ids.shape[1] :].tolist()[:24])
            for layer in getattr(cache, "_replaced", []):
                for row in layer.rows:
                    row.store.check()
        same = [sum(a == b for a, b in zip(said[0], other, strict=True)) for other in said[1:]]
        print(f"{name}: of 24 tokens as full attention: whole budget {same[0]}, 64: {same[1]}")
        if same[0] != 24:
            raise SystemExit("with the whole budget another text than full attention's")


def batches() -> None:
    """One step of a layer for several rows: one call for all, and a call for each."""
    real = load_rows("reference")
    k, v, q = real.k[14], real.v[14], real.q[7936][14]
    print("a step of a layer of SmolLM2, 4,096 tokens a row, ms: a call each, one call, ratio")
    for count in (1, 2, 4, 8):
        caches = []
        for _ in range(2 * count):
            cache = LayerCache(9, 3, 64, IceConfig(dense_below=0))
            cache.prefill(k[:, :4096], v[:, :4096])
            caches.append(cache)
        alone, together = caches[:count], caches[count:]
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(200):
            new = [x[:, i % 32 : i % 32 + 1].expand(count, -1, -1, -1) for x in (q, k, v)]
            begun = time.perf_counter()
            outs = [c.decode(*(x[0] for x in new)) for c in alone]
            between = time.perf_counter()
            out = LayerCache.decode_batch(together, *new)
            done = time.perf_counter()
            if not torch.equal(out, torch.stack(outs)):
                raise SystemExit("the batch differs from its rows: nothing was measured")
            times[0].append(between - begun)
            times[1].append(done - between)
        each, one = (1e3 * median(column) for column in times)
        print(f"  {count} rows: {each:.2f}, {one:.2f}, {each / one:.2f}")


def text(tokenizer: Any, count: int) -> list[int]:
    return first_tokens(tokenizer, *read_text(None), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument(
        "what", nargs="*", default=["forks", "turns", "chunks", "rows", "beams", "batches"]
    )
    parser.add_argument("--context", type=int, default=7000)
    args = parser.parse_args()
    measures: dict[str, Callable[[Any, Any, int], None]] = dict(
        forks=forks, turns=turns, chunks=chunks, rows=rows, beams=beams
    )
    if unknown := set(args.what) - {*measures, "batches"}:
        parser.error(f"expected {sorted(measures)} or batches, got {sorted(unknown)}")
    model, tokenizer = load_model() if set(args.what) & set(measures) else (None, None)
    for what in args.what:
        batches() if what == "batches" else measures[what](model, tokenizer, args.context)


if __name__ == "__main__":
    main()

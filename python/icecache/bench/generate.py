"""`icecache bench generate`: a model's time per token with our cache and with transformers'.

The model is SmolLM2 (or another one) after a real prefill, or one layer of a larger model with
random weights over long rows. All caches hold the same rows and are fed the same tokens, by the
same loop; the tokens are those that full attention decodes greedily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from rich.progress import Progress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from icecache.bench.heads import Shape
from icecache.bench.step import WRONG
from icecache.bench.timing import clock, quantile, rest
from icecache.cache import attach
from icecache.config import IceConfig
from icecache.eval.decode import forward
from icecache.eval.errors import EvalError
from icecache.layer import LayerCache

LLAMA_8B = Shape(32, 8, 128)
OURS = "icecache"

Stored = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer keys and values [kv_heads, n, head_dim]."""


@dataclass(frozen=True)
class GenerateRow:
    """One cache at one length."""

    tokens: int
    cache: str
    p50_ms: float
    """Per token."""
    p95_ms: float
    p99_ms: float
    ratio: float
    """p50 of the faster of the caches of transformers over this."""
    logit_error: float
    """Relative, against `DynamicCache`; mean over tokens."""


def llama_layer(dtype: torch.dtype) -> Any:
    """A model of one layer of Llama-3.1-8B's shape, with random weights and a small vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=LLAMA_8B.q_heads,
        num_key_value_heads=LLAMA_8B.kv_heads,
        head_dim=LLAMA_8B.head_dim,
        max_position_embeddings=2**20,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval().requires_grad_(False)


@torch.inference_mode()
def measure_generate(
    model: Any, rows: Stored, token: int, new: int, config: IceConfig, progress: Progress
) -> list[GenerateRow]:
    """`new` tokens are timed with each cache after `token`, which follows the stored rows.

    `EvalError` if the logits under our cache are wrong.
    """
    n = rows[0][0].shape[1]
    caches: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "DynamicCache": partial(_plain, lambda: DynamicCache(config=model.config), rows),
        "StaticCache": partial(
            _plain, lambda: StaticCache(config=model.config, max_cache_len=n + new + 1), rows
        ),
        OURS: partial(_ours, model, config, rows),
    }
    fed = [token]
    reference: list[torch.Tensor] = []
    times: dict[str, list[float]] = {}
    errors: dict[str, float] = {}
    for name, make in caches.items():
        task = progress.add_task(f"{n} tokens: {name}", total=new + 1)
        times[name], logits = [], []
        with make() as cache:
            rest()
            for i in range(new + 1):
                ms, out = clock(partial(forward, model, [fed[i]], n + i, cache))
                times[name].append(ms)
                logits.append(out.float())
                if not reference and len(fed) == i + 1:
                    fed.append(int(out.argmax()))
                progress.advance(task)
        progress.remove_task(task)
        reference = reference or logits
        errors[name] = fmean(
            float((a - b).norm() / b.norm()) for a, b in zip(logits, reference, strict=True)
        )
        if not errors[name] <= WRONG:
            raise EvalError(
                f"the logits under {name} are wrong: their relative error at {n} tokens is "
                f"{errors[name]:.3g}, at most {WRONG} is allowed"
            )
    # The first forward is not timed: ours indexes what is stored.
    middle = {name: quantile(mine[1:], 0.5) for name, mine in times.items()}
    theirs = min(middle["DynamicCache"], middle["StaticCache"])
    return [
        GenerateRow(
            tokens=n,
            cache=name,
            p50_ms=middle[name],
            p95_ms=quantile(mine[1:], 0.95),
            p99_ms=quantile(mine[1:], 0.99),
            ratio=theirs / middle[name],
            logit_error=errors[name],
        )
        for name, mine in times.items()
    ]


def crossover(rows: Sequence[GenerateRow]) -> float | None:
    """The length from which our cache is never slower than the faster other one.

    Between two measured lengths the times are taken for straight lines. The shortest length if ours
    is faster at once, None if it is slower at the longest.
    """
    ours = sorted((row.tokens, row.p50_ms * (row.ratio - 1)) for row in rows if row.cache == OURS)
    if ours[-1][1] < 0:
        return None
    for (n, gain), (longer, later) in reversed(list(pairwise(ours))):
        if gain < 0:
            return n + (longer - n) * gain / (gain - later)
    return float(ours[0][0])


def _plain(make: Callable[[], Any], rows: Stored) -> AbstractContextManager[Any]:
    cache = make()
    for i, (k, v) in enumerate(rows):
        cache.update(k[None], v[None], i)
    return nullcontext(cache)


def _ours(model: Any, config: IceConfig, rows: Stored) -> AbstractContextManager[Any]:
    def filled(
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None,
        layer_index: int,
        device: torch.device,
    ) -> LayerCache:
        layer = LayerCache(
            num_q_heads, num_kv_heads, head_dim, config, scale, layer_index=layer_index
        )
        layer.prefill(*rows[layer_index])
        return layer

    return attach(model, config=config, layer_factory=filled)


def shortened(rows: Stored, n: int) -> Stored:
    """The first `n` tokens of every layer: what a prefill of them alone would have stored."""
    return [(k[:, :n], v[:, :n]) for k, v in rows]

"""Parameters of the compared policies, tuned on a text that no comparison reports.

    python benches/tune_policies.py quest snapkv snapkv:VOTERS=32:KERNEL=5 --budgets 16,64,256

KL from full attention of SmolLM2 on the source of `typing`, and what a step read. A name may change
constants of its policy's file.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import time
from statistics import fmean
from typing import Any

import torch
from rich.progress import Progress
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from icecache import IceCache
from icecache.eval.decode import prefill
from icecache.eval.model import load_model
from icecache.eval.runs import FULL, Run
from icecache.eval.texts import first_tokens
from icecache.policies import POLICIES
from icecache.policies.base import Prompt
from icecache.policies.dense import DenseLayer

CALL = 16  # positions of a forward


def read(model: Any, ids: list[int]) -> list[Prompt]:
    """The prompt, layer by layer."""
    layers = model.config.num_hidden_layers
    queries: list[list[torch.Tensor]] = [[] for _ in range(layers)]

    def capture(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries[module.layer_idx].append(query[0])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("capture", capture)
    AttentionMaskInterface.register("capture", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("capture")
    context = prefill(model, ids, Progress(disable=True))
    pairs = zip(context.layers, queries, strict=True)
    return [Prompt(k, v, torch.cat(q, dim=1), k.shape[-1] ** -0.5) for (k, v), q in pairs]


@torch.inference_mode()
def run(model: Any, prompts: list[Prompt], fed: list[int], run: Run) -> tuple[torch.Tensor, ...]:
    """Log-probabilities `[len(fed), vocabulary]`; exact tokens, key and value rows of a step;
    seconds of indexing and of a call."""
    layers: list[Any] = []
    indexing = 0.0

    def filled(*, layer_index: int, device: Any, **shape: Any) -> Any:
        nonlocal indexing
        layer = factory(layer_index=layer_index, **shape)
        prompt = prompts[layer_index]
        started = time.process_time()
        layer.prefill(prompt.k, prompt.v)
        if isinstance(layer, DenseLayer):
            layer.observe(prompt)
        indexing += time.process_time() - started
        layers.append(layer)
        return layer

    factory = run.factory()
    n = prompts[0].k.shape[1]
    cache = IceCache(model, config=run.config(), layer_factory=filled)
    found, counts, calls = [], [], []
    for start in range(0, len(fed), CALL):
        chunk = torch.tensor([fed[start : start + CALL]])
        positions = torch.arange(n + start, n + start + chunk.shape[1])[None]
        started, before = time.process_time(), indexing
        logits = model(chunk, position_ids=positions, use_cache=True, past_key_values=cache).logits
        calls.append(time.process_time() - started - (indexing - before))
        found.append(torch.log_softmax(logits[0].float(), dim=-1))
        stats = [layer.stats() for layer in layers]
        fields = ("tokens_exact", "key_rows_read", "value_rows_read")
        counts.append([fmean(getattr(s, f) for s in stats) for f in fields])
    return torch.cat(found), torch.tensor(counts).mean(0), torch.tensor([indexing, min(calls)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policies", nargs="*", default=[p for p in POLICIES if p != "full"])
    parser.add_argument("--budgets", default="16,64,256")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--module", default="typing", help="the module whose source is read")
    a = parser.parse_args()
    model, tokenizer = load_model()
    source = inspect.getsource(importlib.import_module(a.module))
    ids = first_tokens(tokenizer, a.module, source, a.context + a.tokens)
    prompts = read(model, ids[: a.context])
    fed = ids[a.context :]
    truth = run(model, prompts, fed, FULL)[0].double()
    print("| policy | budget | KL | agreement | exact | keys | values | index s | call s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in a.policies:
        policy, *changes = name.split(":")
        layer = POLICIES[policy].layer
        module: Any = importlib.import_module(layer.__module__)
        for change in changes:
            key, value = change.split("=")
            setattr(module, key, ast.literal_eval(value))
            for kind in layer.__mro__:
                if key in vars(kind):
                    setattr(kind, key, ast.literal_eval(value))
        for budget in map(int, a.budgets.split(",")):
            steps, counts, seconds = run(model, prompts, fed, Run(policy, budget))
            kl = (truth.exp() * (truth - steps)).sum(dim=-1)
            same = (truth.argmax(-1) == steps.argmax(-1)).double().mean()
            rows = " | ".join(f"{x:.0f}" for x in counts)
            times = " | ".join(f"{x:.2f}" for x in seconds)
            print(f"| {name} | {budget} | {kl.mean():.4f} | {same:.3f} | {rows} | {times} |")


if __name__ == "__main__":
    main()

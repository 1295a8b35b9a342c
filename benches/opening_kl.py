"""The opening rules on a model: next-token distributions and pass keys.

    python benches/opening_kl.py --budget 64        # KL from full attention, three texts
    python benches/opening_kl.py --budget 16 --passkey 4096,7168

The layers of the model attend by the readable step of `tree_view` over the trees that the package
builds; what is decoded stays in the window. "package" is `LayerCache` itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from measure import FACTOR, Candidate
from opening import CANDIDATES, numbers
from rich.progress import Progress
from tree_view import Step, View, decode

from icecache import LayerCache
from icecache.bench.rows import CONTEXT, load_rows
from icecache.eval.decode import Decoder, Prefill, prefill
from icecache.eval.kl import divergence, feed
from icecache.eval.model import load_model
from icecache.eval.passkey import ask
from icecache.eval.runs import FULL, Run
from icecache.eval.texts import TEXTS, make_haystack
from icecache.policies.dense import DenseLayer, Positions
from icecache.stats import LayerStats


class Trees:
    """The views of all layers of one context under one seed, shared by all rules."""

    def __init__(self, context: Prefill, run: Run, seed: int, group: int) -> None:
        self.layers: list[list[View]] = []
        for index, (k, v) in enumerate(context.layers):
            heads, _, dim = k.shape
            layer = LayerCache(heads * group, heads, dim, run.config(seed=seed), layer_index=index)
            layer.prefill(k, v)
            rows = k.numpy(), v.numpy()
            self.layers.append([View(layer, h, rows[0][h], rows[1][h]) for h in range(heads)])


class RuleLayer(DenseLayer):
    """All rows in two tensors, and a rule over the tree of the first ones."""

    def __init__(self, *args: Any, views: list[View], rule: Candidate, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views, self._rule = views, rule
        self._rows_read = (0.0, 0.0)

    def _attend(self, at: Positions) -> torch.Tensor:
        steps = range(at.q.shape[2])
        first = at.k.shape[1] - len(steps)
        rows = [self._attend_one(at.q[:, :, i], at.k[:, : first + i + 1]) for i in steps]
        return torch.stack(rows, dim=2)

    def _attend_one(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        v = self._stored()[1]
        keys, values = [], []
        for head, tree in enumerate(self._views):
            view = copy(tree)
            stored = len(view.ids) + len(view.always)
            view.always = np.append(view.always, np.arange(stored, k.shape[1]))
            view.always_keys = k[head].numpy()[view.always]
            view.always_values = v[head].numpy()[view.always]
            step = Step(view, q[head, None].numpy(), np.array([k.shape[1]]))
            outcome = decode(
                step,
                self._rule.rule,
                budget=self.config.token_budget,
                candidates=self.config.token_budget * self._rule.factor,
                extra=self._rule.extra and self._rule.extra(view),
                far=self._rule.far,
            )
            out[head] = torch.from_numpy(outcome.out[0])
            keys.append(outcome.key_rows[0])
            values.append(outcome.value_rows[0])
        self._rows_read = (fmean(keys), fmean(values))
        return out

    def stats(self) -> LayerStats:
        keys, values = self._rows_read
        return replace(super().stats(), key_rows_read=keys, value_rows_read=values)


@dataclass(frozen=True)
class RuleRun(Run):
    """A rule as a run of a `Decoder`."""

    rule: Candidate | None = None
    trees: Trees | None = None

    def factory(self, **options: Any) -> Any:
        def build(*, layer_index: int, **shape: Any) -> RuleLayer:
            views = self.trees.layers[layer_index]
            return RuleLayer(
                config=self.config(**options),
                layer_index=layer_index,
                views=views,
                rule=self.rule,
                **shape,
            )

        return build


def runs(names: list[str], budget: int, context: Prefill, seed: int, group: int) -> dict[str, Run]:
    """The rules of these names over one set of trees, and the package itself."""
    packages = {
        "package": Run("icecache", budget, {"candidate_factor": FACTOR}),
        "package with factor 16": Run("icecache", budget, {"candidate_factor": 16}),
    }
    rules = {c.name: c for c in CANDIDATES if c.name in names}
    trees = Trees(context, packages["package"], seed, group) if rules else None
    made = {name: RuleRun("icecache", budget, {}, rule, trees) for name, rule in rules.items()}
    return {**{name: run for name, run in packages.items() if name in names}, **made}


def kl(names: list[str], budget: int, seeds: int, tokens: int, texts: list[str]) -> None:
    model, _ = load_model()
    found: dict[tuple[str, str], list[Any]] = {}
    with Progress(disable=True) as progress:
        for text in texts:
            rows = load_rows(text)
            context = Prefill(list(zip(rows.k, rows.v, strict=True)), CONTEXT)
            fed = rows.ids[CONTEXT : CONTEXT + tokens]
            truth = feed(Decoder(model, context, FULL), fed, progress)
            for seed in range(seeds):
                for name, run in runs(names, budget, context, seed, rows.group).items():
                    steps = feed(Decoder(model, context, run, seed=seed), fed, progress)
                    mean = fmean(
                        divergence(a.log_probs, b.log_probs)
                        for a, b in zip(truth, steps, strict=True)
                    )
                    shares = [(step.key_share, step.value_share) for step in steps]
                    found.setdefault((name, text), []).append((mean, *np.mean(shares, axis=0)))
                    print(f"{text}, seed {seed}, {name}: {mean:.4f}", file=sys.stderr)
    print("| opened | KL | of the seeds | " + " | ".join(texts) + " | keys read | values read |")
    print("|---|---|---|" + "---|" * (len(texts) + 2))
    for name in names:
        mine = np.array([found[name, text] for text in texts])
        per_seed = mine[..., 0].mean(0)
        each = " | ".join(f"{mean:.4f}" for mean in mine[..., 0].mean(1))
        print(
            f"| {name} | {per_seed.mean():.4f} | {per_seed.min():.4f} to {per_seed.max():.4f} "
            f"| {each} | {mine[..., 1].mean():.1%} | {mine[..., 2].mean():.1%} |"
        )


def passkeys(names: list[str], budget: int, seeds: int, lengths: list[int]) -> None:
    model, tokenizer = load_model()
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    found: dict[str, list[Any]] = {}
    with Progress(disable=True) as progress:
        for n in lengths:
            for depth in (0.1, 0.5, 0.9):
                hay = make_haystack(tokenizer, n, depth, kind="prose")
                context = prefill(model, hay.context, progress)
                reply = ask(Decoder(model, context, FULL), tokenizer, hay)
                found.setdefault("full attention", []).append((reply.found, reply.logprob))
                for seed in range(seeds):
                    for name, run in runs(names, budget, context, seed, group).items():
                        reply = ask(Decoder(model, context, run, seed=seed), tokenizer, hay)
                        found.setdefault(name, []).append((reply.found, reply.logprob))
    print("| opened | found | log-probability of the right answer |\n|---|---|---|")
    for name, replies in found.items():
        right = sum(r[0] for r in replies)
        print(f"| {name} | {right} of {len(replies)} | {fmean(r[1] for r in replies):.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", default="package,every node,half of each level")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--texts", type=lambda text: text.split(","), default=list(TEXTS))
    parser.add_argument("--passkey", type=numbers, help="lengths of haystacks")
    a = parser.parse_args()
    started = time.time()
    if a.passkey:
        passkeys(a.rules.split(","), a.budget, a.seeds, a.passkey)
    else:
        kl(a.rules.split(","), a.budget, a.seeds, a.tokens, a.texts)
    print(f"\n{time.time() - started:.0f} s")

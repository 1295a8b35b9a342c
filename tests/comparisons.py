"""Comparisons that were never measured, for tests of the report."""

import random

from icecache.eval.comparison import Comparison, DriftRow, HeadRow, TaskRow, TextRow

# Distance from full attention, relative to icecache's.
POLICIES = {
    "full": 0.0,
    "window": 40.0,
    "h2o": 22.0,
    "snapkv": 18.0,
    "quest": 7.0,
    "arkvale": 6.0,
    "pqcache": 2.5,
    "magicpig": 9.0,
    "omnikv": 3.3,
    "retroinfer": 2.9,
    "paper": 12.0,
    "paper-reuse": 15.0,
    "topk": 0.6,
    "icecache": 1.0,
    "icecache-reuse": 1.8,
}
TASKS = ("passkey", "needles", "variables", "frequent words", "copy", "json")


def config(policies=POLICIES, **more):
    return {
        "model": "SmolLM2-135M",
        "context": 7936,
        "tokens": 192,
        "budgets": [16, 64, 256],
        "policies": {
            name: {"what": f"What {name} does, in a sentence.", "deployable": name != "topk"}
            for name in policies
        },
        "versions": {"python": "3.13.1", "icecache": "0.7.0", "torch": "2.9"},
        **more,
    }


def text_row(policy, budget, kl, **more):
    row = {
        "policy": policy,
        "budget": budget,
        "equal": "tokens",
        "spent": budget,
        "text": "pydoc",
        "positions": 192,
        "kl": kl,
        "kl_stderr": kl / 10,
        "perplexity": 8.0 + kl,
        "agreement": max(0.0, 1 - 3 * kl),
        "exact_tokens": 96.0 + (budget or 0),
        "read_bytes": 1e6 + 1e4 * (budget or 0),
        "moved_bytes": 1e5,
        "held_bytes": 2e6,
    }
    return TextRow(**row | more)


def whole(seed=0, texts=("pydoc", "gpl", "argparse"), budgets=(16, 64, 256)):
    """Of all policies, tasks, variants, layers and heads."""
    rng = random.Random(seed)
    rows, tasks, drift, heads = [], [], [], []
    for text in texts:
        rows.append(
            text_row("full", None, 0.0, text=text, read_bytes=1.8e8, held_bytes=1.8e8, kl_stderr=0)
        )
        rows.append(text_row("window", None, 0.9 * rng.uniform(0.7, 1.4), text=text))
        for budget in budgets:
            for policy, factor in list(POLICIES.items())[2:]:
                for equal in ("tokens", "bytes"):
                    if equal == "bytes" and policy in ("topk", "icecache"):
                        continue
                    kl = 0.006 * factor * (64 / budget) ** 0.7 * rng.uniform(0.75, 1.3)
                    read = 1.1e7 * (0.5 + budget / 64) * (factor if equal == "tokens" else 1) ** 0.3
                    rows.append(
                        text_row(
                            policy, budget, kl, text=text, equal=equal, read_bytes=read,
                            spent=budget if equal == "tokens" else budget // 2,
                            moved_bytes=budget * 2e4, held_bytes=4e6 + budget * 1e5,
                        )
                    )  # fmt: skip
    for task in TASKS:
        for instance in range(4):
            full_right = task != "variables" and (task != "copy" or instance < 3)
            full = -rng.uniform(0.05, 0.5) if full_right else -rng.uniform(4, 9)
            for policy, factor in POLICIES.items():
                for budget in (None,) if policy in ("full", "window") else budgets:
                    lost = 0.02 * factor * (64 / (budget or 16)) ** 0.7 * rng.uniform(-0.1, 2)
                    tasks.append(
                        TaskRow(
                            policy=policy, budget=budget, task=task, instance=instance,
                            context=4000, right=full_right and lost < 0.4, logprob=full - lost,
                            full_right=full_right, full_logprob=full,
                        )
                    )  # fmt: skip
    for start in range(1024, 8192, 1024):
        for variant, factor in (("inserted", 1.05), ("not inserted", start / 400), ("rebuilt", 1)):
            kl = 0.005 * factor * rng.uniform(0.9, 1.1)
            drift.append(
                DriftRow(
                    variant=variant, budget=64, text=texts[0], start=start, positions=1024,
                    kl=kl, kl_stderr=kl / 12,
                )
            )  # fmt: skip
    for policy in ("icecache", "quest", "pqcache", "paper", "topk"):
        for budget in budgets:
            for layer in range(30):
                for head in range(3):
                    mass = rng.betavariate(8, 1 + POLICIES[policy] / 3)
                    heads.append(
                        HeadRow(
                            policy=policy, budget=budget, text=texts[0], layer=layer, head=head,
                            mass=mass, error=(1 - mass) * POLICIES[policy] ** 0.5 * 0.2,
                        )
                    )  # fmt: skip
    more = {"command": "icecache compare --model smollm2 --budgets 16,64,256 --json out.json"}
    return Comparison(config=config(**more), texts=rows, tasks=tasks, drift=drift, heads=heads)

"""How far a policy's next-token distributions are from full attention's, on given text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

import torch
from rich.progress import Progress

from icecache.eval.decode import Decoder, Step, prefill
from icecache.eval.runs import FULL, Run

_MASS_EVERY = 8


@dataclass(frozen=True)
class Closeness:
    """One policy at one budget on one text. Distances are to full attention."""

    policy: str
    budget: int | None
    text: str
    perplexity: float
    kl: float
    """Mean KL(full || policy) of the next-token distributions, in nats."""
    kl_stderr: float
    """Standard error of that mean, positions taken as independent."""
    agreement: float
    """Share of positions where the most probable token is the same."""
    tokens_exact: float
    """Tokens attended exactly per KV head and step: sink, window and selected."""
    key_rows_read: float
    value_rows_read: float
    """Shares of the stored rows; node rows count as rows."""
    mass_exact_true: float
    """True share of the full softmax on the tokens attended exactly, every 8th position."""
    ms_per_token: float
    """Median over the other positions."""


def evaluate_text(
    model: Any,
    name: str,
    ids: Sequence[int],
    context: int,
    runs: Iterable[Run],
    progress: Progress,
) -> list[Closeness]:
    """Prefills `ids[:context]` exactly, then feeds the others but the last, one at a time.

    Each policy's own outputs feed its later layers and keys. Full attention always runs, once.
    """
    shared = prefill(model, ids[:context], progress)
    fed, targets = ids[context:-1], ids[context + 1 :]
    reference = feed(Decoder(model, shared, FULL), fed, progress)
    rows = []
    for run in runs:
        steps = reference if run == FULL else feed(Decoder(model, shared, run), fed, progress)
        rows.append(compare(run, name, steps, reference, targets))
    return rows


def feed(decoder: Decoder, tokens: Sequence[int], progress: Progress) -> list[Step]:
    """Feeds the tokens one after another, whatever the model would have said."""
    task = progress.add_task(decoder.run.name, total=len(tokens))
    steps = []
    for i, token in enumerate(tokens):
        steps.append(decoder.step(token, measure_mass=i % _MASS_EVERY == 0))
        progress.advance(task)
    progress.remove_task(task)
    return steps


def compare(
    run: Run, name: str, steps: Sequence[Step], reference: Sequence[Step], targets: Sequence[int]
) -> Closeness:
    """Sums up the steps of a run, of which `targets` are the true next tokens."""
    pairs = list(zip(reference, steps, strict=True))
    divergences = [divergence(full.log_probs, step.log_probs) for full, step in pairs]
    losses = [-float(s.log_probs[token]) for s, token in zip(steps, targets, strict=True)]
    timed = [step.ms for step in steps if step.true_mass is None] or [step.ms for step in steps]
    return Closeness(
        policy=run.policy,
        budget=run.budget,
        text=name,
        perplexity=math.exp(fmean(losses)),
        kl=fmean(divergences),
        kl_stderr=standard_error(divergences),
        agreement=agreement(pairs),
        tokens_exact=fmean(step.tokens_exact for step in steps),
        key_rows_read=fmean(step.key_share for step in steps),
        value_rows_read=fmean(step.value_share for step in steps),
        mass_exact_true=fmean(s.true_mass for s in steps if s.true_mass is not None),
        ms_per_token=median(timed),
    )


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> float:
    """KL(p || q) of two distributions of the next token, `[vocabulary]`, in nats.

    Never below 0, as rounding would have it for equal ones.
    """
    log_p, log_q = log_p.double(), log_q.double()
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum()))


def standard_error(values: Sequence[float]) -> float:
    """Of their mean, taken as independent; NaN for one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def agreement(pairs: Iterable[tuple[Step, Step]]) -> float:
    """Share of the pairs in which the most probable next token is the same."""
    return fmean(float(one.top == other.top) for one, other in pairs)

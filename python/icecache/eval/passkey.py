"""Whether a policy finds five digits hidden in a long text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from icecache.eval.decode import Decoder, Step, prefill
from icecache.eval.runs import Run
from icecache.eval.texts import Haystack, make_haystack

_SPARE_TOKENS = 2
"""Decoded beyond the length of the right answer."""


@dataclass(frozen=True)
class Retrieval:
    """One policy at one budget, asked about one haystack with one seed of the tree."""

    policy: str
    budget: int | None
    length: int
    depth: float
    seed: int
    found: bool
    """Whether the greedily decoded answer contains the passkey."""
    answer: str
    logprob: float
    """Sum of the log-probabilities, in nats, of the right answer's tokens."""


@dataclass(frozen=True)
class Reply:
    """An answer, and the steps of the cue and the right answer, teacher-forced, for comparison."""

    answer: str
    found: bool
    logprob: float
    steps: list[Step]


def evaluate_passkeys(
    model: Any,
    tokenizer: Any,
    runs: Iterable[Run],
    *,
    lengths: Iterable[int],
    depths: Sequence[float],
    seeds: Sequence[int],
    kind: str,
    progress: Progress,
) -> list[Retrieval]:
    """One haystack per length and depth, prefilled once and shared by all runs and seeds.

    A policy that has no seed runs once, and its result stands for every seed.
    """
    rows = []
    runs = list(runs)
    haystacks = [make_haystack(tokenizer, n, d, kind=kind) for n in lengths for d in depths]
    task = progress.add_task("haystacks", total=len(haystacks))
    for hay in haystacks:
        shared = prefill(model, hay.context, progress)
        for run in runs:
            reply = None
            for seed in seeds:
                if reply is None or run.seeded:
                    reply = ask(Decoder(model, shared, run, seed=seed), tokenizer, hay)
                rows.append(
                    Retrieval(
                        run.policy,
                        run.budget,
                        hay.length,
                        hay.depth,
                        seed,
                        reply.found,
                        reply.answer,
                        reply.logprob,
                    )
                )
        progress.advance(task)
    progress.remove_task(task)
    return rows


def ask(decoder: Decoder, tokenizer: Any, hay: Haystack) -> Reply:
    """Decodes the cue token by token, then the answer greedily, then the right answer instead."""
    steps = [decoder.step(token) for token in hay.cue]
    said: list[int] = [steps[-1].top]
    for _ in range(len(hay.answer) + _SPARE_TOKENS - 1):
        said.append(decoder.step(said[-1]).top)
    decoder.crop(len(said) - 1)
    steps += [decoder.step(token) for token in hay.answer[:-1]]
    forced = steps[len(hay.cue) - 1 :]
    answer = str(tokenizer.decode(said)).strip()
    return Reply(
        answer=answer,
        found=hay.passkey in answer,
        logprob=sum(float(s.log_probs[t]) for s, t in zip(forced, hay.answer, strict=True)),
        steps=steps,
    )

"""`icecache compare`: every policy on the same texts and questions, against full attention.

A context is read once, with full attention; then each policy reads on, and its next-token
distributions are compared with those of full attention. Tokens are fed several at a time, each of
which chooses for itself; the last ones one by one, which tells what a step costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress

from icecache.eval.capture import capture
from icecache.eval.comparison import HeadRow, TaskRow, TextRow
from icecache.eval.decode import Cost, Decoder, Prefill
from icecache.eval.kl import divergence, standard_error
from icecache.eval.ledger import Ledger
from icecache.eval.runs import FULL, Run
from icecache.policies import POLICIES, Prompt

if TYPE_CHECKING:
    from icecache.eval.tasks import Question

CHUNK = 16
"""Tokens fed at a time."""
_ALONE = 8
"""Tokens at the end of a text that are fed one by one, to tell what a step costs."""
_TOLERANCE = 0.05
"""Of equal bytes."""
_WATCH_EVERY = 4
"""Chunks, of which the last position of one is compared head by head."""


@dataclass(frozen=True)
class Passage:
    """A text: `context` is read by full attention, `fed` by the policies.

    `targets[i]` is the true token after `fed[i]`; distributions are compared where `scored[i]`.
    """

    name: str
    context: list[int]
    fed: list[int]
    targets: list[int]
    scored: list[bool]

    @classmethod
    def of(cls, name: str, ids: Sequence[int], context: int) -> Passage:
        """Of `ids`, the first `context` are read, all others but the last are fed and scored."""
        fed, targets = list(ids[context:-1]), list(ids[context + 1 :])
        return cls(name, list(ids[:context]), fed, targets, [True] * len(fed))


def read_context(model: Any, ids: Sequence[int], progress: Progress) -> Prefill:
    """`decode.prefill`, and the queries of all positions."""
    captured = capture(model, ids, [len(ids)], len(ids), progress)
    queries = captured.queries[len(ids)]
    rows = zip(captured.layers, queries, captured.scales, strict=True)
    prompts = [Prompt(k, v, q, scale) for (k, v), q, scale in rows]
    return Prefill(captured.layers, len(ids), prompts)


def compare_texts(
    model: Any, passages: Iterable[Passage], runs: Sequence[Run], ledger: Ledger, progress: Progress
) -> None:
    """All `runs` on all passages, at equal exact tokens; then, at each budget that icecache ran
    with, every other deployable policy at the budget with which it reads as much as icecache."""
    for passage in passages:
        text = _Text(model, passage, ledger, progress)
        task = progress.add_task(passage.name, total=len(runs))
        for run in runs:
            text.measure(run, run.budget, "tokens")
            progress.advance(task)
        pairs = [
            (run, icecache)
            for icecache in runs
            if icecache.policy == "icecache"
            for run in runs
            if run.budget == icecache.budget
            and run.policy != "icecache"
            and POLICIES[run.policy].deployable
        ]
        progress.update(task, total=len(runs) + len(pairs))
        for run, icecache in pairs:
            text.measure_at_equal_bytes(run, icecache)
            progress.advance(task)
        progress.remove_task(task)


class _Text:
    """One passage. Its context is read, and full attention fed, when something needs them."""

    def __init__(self, model: Any, passage: Passage, ledger: Ledger, progress: Progress) -> None:
        self._model = model
        self._passage = passage
        self._ledger = ledger
        self._progress = progress
        self._context: Prefill | None = None
        self._full: _Fed | None = None

    def measure(self, run: Run, budget: int | None, equal: str) -> TextRow:
        """The row of `run`, measured unless the ledger has it; `budget` and `equal` as there."""
        known = self._ledger.text_row(self._passage.name, run.policy, budget, equal)
        if known is not None:
            return known
        row, heads = self._measured(run, budget, equal)
        self._ledger.add(texts=[row], heads=heads)
        return row

    def _measured(self, run: Run, budget: int | None, equal: str) -> tuple[TextRow, list[HeadRow]]:
        if self._context is None:
            self._context = read_context(self._model, self._passage.context, self._progress)
        if self._full is None:
            self._full = self._feed(Decoder(self._model, self._context, FULL))
        fed = self._full
        if run.policy != FULL.policy:
            fed = self._feed(Decoder(self._model, self._context, run))
        row = self._row(run, budget, equal, fed)
        heads = [
            HeadRow(
                policy=run.policy,
                budget=budget,
                text=self._passage.name,
                layer=layer,
                head=head,
                mass=fmean(float(at[layer][0][head]) for at in fed.heads),
                error=fmean(float(at[layer][1][head]) for at in fed.heads),
            )
            for layer, (mass, _) in enumerate(fed.heads[0])
            for head in range(len(mass))
        ]
        return row, heads

    def measure_at_equal_bytes(self, run: Run, icecache: Run) -> None:
        """The policy of `run` at a budget with which it reads as much as `icecache` at the budget
        of both, to 5 % if three attempts find it; nothing if, a token more being one key and one
        value, it reads more at any."""
        budget = run.budget
        assert budget is not None
        if self._ledger.text_row(self._passage.name, run.policy, budget, "bytes"):
            return
        wanted = self.measure(icecache, budget, "tokens").read_bytes
        mine = self.measure(run, budget, "tokens").read_bytes
        full = self.measure(FULL, None, "tokens")
        per_token = full.read_bytes / full.exact_tokens
        spent = budget + round((wanted - mine) / per_token)
        if spent < 1:
            return
        found = []
        for _ in range(3):
            found.append(self._measured(replace(run, budget=spent), budget, "bytes")[0])
            read = found[-1].read_bytes
            if abs(read - wanted) <= _TOLERANCE * wanted or read == mine:
                break
            per_token = (read - mine) / (spent - budget)
            spent = max(1, budget + round((wanted - mine) / per_token))
            if spent in {row.spent for row in found}:
                break
        self._ledger.add(texts=[min(found, key=lambda row: abs(row.read_bytes - wanted))])

    def _feed(self, decoder: Decoder) -> _Fed:
        fed = self._passage.fed
        together = max(0, len(fed) - _ALONE)
        starts = range(0, together, CHUNK)
        log_probs, heads, costs = [], [], []
        task = self._progress.add_task(decoder.run.name, total=len(fed))
        for number, start in enumerate(starts):
            tokens = fed[start : min(start + CHUNK, together)]
            watch = number % _WATCH_EVERY == 0
            log_probs.append(decoder.read(tokens, watch=watch))
            decoder.cost()  # what stays on a device
            if watch:
                heads.append(decoder.heads())
            self._progress.advance(task, len(tokens))
        for token in fed[together:]:
            watch = not heads
            log_probs.append(decoder.read([token], watch=watch))
            costs.append(decoder.cost())
            if watch:
                heads.append(decoder.heads())
            self._progress.advance(task)
        self._progress.remove_task(task)
        return _Fed(torch.cat(log_probs), heads, costs)

    def _row(self, run: Run, budget: int | None, equal: str, fed: _Fed) -> TextRow:
        assert self._full is not None
        scored = torch.tensor(self._passage.scored)
        full, mine = self._full.log_probs[scored], fed.log_probs[scored]
        divergences = [divergence(p, q) for p, q in zip(full, mine, strict=True)]
        targets = torch.tensor(self._passage.targets)[scored]
        loss = -mine.gather(1, targets[:, None]).double().mean()
        n = len(divergences)
        return TextRow(
            policy=run.policy,
            budget=budget,
            equal=equal,
            spent=run.budget,
            text=self._passage.name,
            positions=n,
            kl=fmean(divergences),
            kl_stderr=standard_error(divergences),
            perplexity=float(loss.exp()),
            agreement=float((full.argmax(1) == mine.argmax(1)).double().mean()),
            exact_tokens=fmean(cost.exact_tokens for cost in fed.costs),
            read_bytes=fmean(cost.read_bytes for cost in fed.costs),
            moved_bytes=fmean(cost.moved_bytes for cost in fed.costs),
            held_bytes=fmean(cost.held_bytes for cost in fed.costs),
        )


@dataclass(frozen=True)
class _Fed:
    """What came of feeding a passage: log-probabilities `[positions, vocabulary]`, the heads at
    some positions (`Decoder.heads`), the costs of the last ones."""

    log_probs: torch.Tensor
    heads: list[list[tuple[torch.Tensor, torch.Tensor]]]
    costs: list[Cost]


def compare_tasks(
    model: Any,
    questions: Iterable[Question],
    runs: Sequence[Run],
    ledger: Ledger,
    progress: Progress,
) -> None:
    """All `runs` on all questions. The right answer is fed whatever a policy would say: as long as
    that is right, greedy decoding goes the same way."""
    questions = list(questions)
    task = progress.add_task("questions", total=len(questions))
    for question in questions:
        asked = (question.task, len(question.context), question.instance)
        left = [run for run in runs if not ledger.has_task(*asked, run.policy, run.budget)]
        if left:
            context = read_context(model, question.context, progress)
            full_right, full_logprob = _answer(Decoder(model, context, FULL), question)
            inner = progress.add_task(question.task, total=len(left))
            for run in left:
                right, logprob = _answer(Decoder(model, context, run), question)
                row = TaskRow(
                    policy=run.policy,
                    budget=run.budget,
                    task=question.task,
                    instance=question.instance,
                    context=len(question.context),
                    right=right,
                    logprob=logprob,
                    full_right=full_right,
                    full_logprob=full_logprob,
                )
                ledger.add(tasks=[row])
                progress.advance(inner)
            progress.remove_task(inner)
        progress.advance(task)
    progress.remove_task(task)


def _answer(decoder: Decoder, question: Question) -> tuple[bool, float]:
    """Whether greedy decoding gives the right answer, and its log-probability in nats."""
    fed = [*question.cue, *question.answer[:-1]]
    chunks = [fed[start : start + CHUNK] for start in range(0, len(fed), CHUNK)]
    log_probs = torch.cat([decoder.read(chunk) for chunk in chunks])[len(question.cue) - 1 :]
    answer = torch.tensor(question.answer)
    right = bool((log_probs.argmax(dim=1) == answer).all())
    return right, float(log_probs.gather(1, answer[:, None]).double().sum())

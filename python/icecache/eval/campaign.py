"""What `icecache compare` is asked for, and its parts in turn: texts, chains of thought, questions,
drift."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from icecache.eval import texts
from icecache.eval.compare import Passage, compare_tasks, compare_texts
from icecache.eval.decode import check_model
from icecache.eval.drift import PREFILL, measure_drift
from icecache.eval.errors import EvalError
from icecache.eval.gsm8k import read_gsm8k
from icecache.eval.ledger import Ledger
from icecache.eval.report import describe
from icecache.eval.runs import Run, plan
from icecache.eval.tasks import make_questions
from icecache.policies import POLICIES

_ROOM = 160
"""Positions after a context for a question and its answer."""
ALIKE = ("model", "rope_theta", "weights", "seed", "options", "versions")
"""Settings that all rows of a result file share."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """One comparison. Budgets are tokens per KV head, beyond sink and window.

    texts: files, or names of `texts.TEXTS`; `context` tokens are read, then `tokens` fed. tasks:
    names, of each `instances` questions after `task_context` tokens. gsm8k: a file of worked
    solutions, of which `chains` are fed. drift: tokens decoded after a short prefill; 0 for none.
    """

    model: str
    texts: Sequence[str]
    tasks: Sequence[str]
    context: int
    tokens: int
    budgets: Sequence[int]
    policies: Sequence[str]
    task_context: int
    instances: int = 5
    gsm8k: str | None = None
    chains: int = 8
    drift: int = 0
    drift_budget: int = 64
    seed: int = 0
    rope_theta: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `IceConfig`, for icecache."""

    def runs(self) -> list[Run]:
        """Every policy at every budget, full attention first; `EvalError` for an unknown one."""
        return self._plan(dict.fromkeys(["full", *self.policies]), self.budgets)

    def _plan(self, policies: Iterable[str], budgets: Sequence[int]) -> list[Run]:
        planned = plan(policies, budgets, self.options)
        return [replace(run, options={**run.options, "seed": self.seed}) for run in planned]

    def positions(self) -> int:
        """That a model must have, but for chains of thought, whose length nobody knows yet."""
        needed = [self.context + self.tokens] if self.texts else []
        needed += [self.context + _ROOM * self.chains] if self.gsm8k else []
        needed += [self.task_context + _ROOM] if self.tasks else []
        needed += [PREFILL + self.drift] if self.drift else []
        return max(needed, default=0)

    def measure(self, model: Any, tokenizer: Any, path: Path | None, progress: Progress) -> Ledger:
        """Everything, kept in the file `path` as it goes; what that has already is left out."""
        passages = [self._text(tokenizer, name) for name in self.texts]
        passages += [self._chain(tokenizer, self.gsm8k)] if self.gsm8k is not None else []
        names = [passage.name for passage in passages]
        if twice := [name for name in names if names.count(name) > 1]:
            raise EvalError(f"two texts are called {twice[0]!r}: rename one")
        questions = [
            question
            for task in self.tasks
            for question in make_questions(
                tokenizer, task, self.task_context, self.instances, self.seed
            )
        ]
        drifting = self._drifting(tokenizer) if self.drift else None
        chains = [len(passage.context) + len(passage.fed) for passage in passages]
        check_model(model, max(self.positions(), *chains, 0))

        read = {p.name: _digest([p.context, p.fed, p.scored]) for p in passages}
        read |= {f"drift, {drifting[0]}": _digest(drifting[1])} if drifting else {}
        config = self._config(read) | {"weights": _digest([_sample(p) for p in model.parameters()])}
        ledger = Ledger(path, config, ALIKE)
        runs = self.runs()
        compare_texts(model, passages, runs, ledger, progress)
        compare_tasks(model, questions, runs, ledger, progress)
        if drifting:
            (run,) = self._plan(["icecache"], [self.drift_budget])
            measure_drift(model, *drifting, run, ledger, progress)
        return ledger

    def _text(self, tokenizer: Any, name: str) -> Passage:
        title, content = _content(name)
        ids = texts.first_tokens(tokenizer, title, content, self.context + self.tokens + 1)
        return Passage.of(title, ids, self.context)

    def _drifting(self, tokenizer: Any) -> tuple[str, list[int]]:
        title, content = _content(self.texts[0] if self.texts else texts.TEXTS[0])
        return title, texts.first_tokens(tokenizer, title, content, PREFILL + self.drift)

    def _chain(self, tokenizer: Any, path: str) -> Passage:
        chain = read_gsm8k(Path(path), tokenizer, self.context, self.chains, self.seed)
        fed, targets = chain.fed[:-1], chain.fed[1:]
        return Passage(chain.name, chain.context, fed, targets, chain.scored[:-1])

    def _config(self, read: dict[str, str]) -> dict[str, Any]:
        """How to repeat it. `read` tells apart texts of one name."""
        settings = {key: value for key, value in asdict(self).items() if key != "model"}
        described = describe(self.model, self.runs(), **settings, read=read)
        described["policies"] = {
            name: {"what": policy.what, "deployable": policy.deployable}
            for name, policy in POLICIES.items()
        }
        return described


def _content(name: str) -> tuple[str, str]:
    """Name and content of a built-in text or a file."""
    return (name, texts.built_in(name)) if name in texts.TEXTS else texts.read_text(Path(name))


def _sample(weights: torch.Tensor) -> list[float]:
    """A few of them, by which to tell one model from another."""
    return [float(weight) for weight in weights.flatten()[:: max(1, weights.numel() // 16)]]


def _digest(read: Sequence[Any]) -> str:
    return hashlib.sha256(repr(read).encode()).hexdigest()[:16]

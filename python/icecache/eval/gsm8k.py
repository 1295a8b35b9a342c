"""Chains of thought: worked examples, then questions whose worked solutions are given."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icecache.eval.errors import EvalError
from icecache.eval.texts import encode

_FIELDS = ("question", "answer")


@dataclass(frozen=True)
class Chain:
    """A few-shot prompt, and what is fed after it, token by token."""

    name: str
    context: list[int]
    fed: list[int]
    scored: list[bool]
    """For each fed token, whether the next one is part of a worked solution."""


def read_gsm8k(path: Path, tokenizer: Any, length: int, count: int, seed: int = 0) -> Chain:
    """`count` problems of a JSON-lines file with `question` and `answer`, after worked examples.

    `seed` chooses both. The context is as many whole examples as fit in `length` tokens. Raises
    `EvalError` for a file that cannot be read, and if there are too few problems.
    """
    if count < 1:
        raise EvalError(f"at least one question is needed, got {count}")
    problems = _read(path)
    random.Random(seed).shuffle(problems)
    asked, examples = problems[:count], problems[count:]
    context: list[int] = []
    for question, answer in examples:
        example = encode(tokenizer, _prompt(question)) + encode(tokenizer, _solution(answer))
        if len(context) + len(example) > length:
            break
        context += example
    else:
        raise EvalError(
            f"{path} has {len(problems)} problems; {count} questions leave too few examples for "
            f"{length} tokens"
        )
    if not context:
        raise EvalError(f"the first example has {len(example)} tokens, the context only {length}")
    fed: list[int] = []
    solved: list[bool] = []
    for question, answer in asked:
        for ids, solution in (
            (encode(tokenizer, _prompt(question)), False),
            (encode(tokenizer, _solution(answer)), True),
        ):
            fed += ids
            solved += [solution] * len(ids)
    return Chain("gsm8k", context, fed, [*solved[1:], False])


def _prompt(question: str) -> str:
    return f"\n\nQuestion: {question}\nAnswer:"


def _solution(answer: str) -> str:
    return f" {answer}"


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"cannot read {path}: {error}") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
            question, answer = (problem[field] for field in _FIELDS)
            if not (isinstance(question, str) and isinstance(answer, str)):
                raise TypeError("expected two texts")
        except (ValueError, TypeError, KeyError) as error:
            raise EvalError(
                f"line {number} of {path} is not a JSON object with {' and '.join(_FIELDS)}"
            ) from error
        problems.append((question.strip(), answer.strip()))
    return problems

"""A question about a long text, and what its generators share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from icecache.eval.errors import EvalError
from icecache.eval.texts import encode, endless


@dataclass(frozen=True)
class Question:
    """A text, the beginning of a sentence about it, and its only right end, all as tokens."""

    task: str
    instance: int
    context: list[int]
    cue: list[int]
    answer: list[int]
    """What greedy decoding after context and cue must give."""


class Draft(NamedTuple):
    """The tokens of a question, as its generator returns them."""

    context: list[int]
    cue: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Task:
    description: str
    generate: Callable[[Any, int, int, random.Random], Draft]
    """From the tokenizer, the length of the context, the instance and a source of chance."""


def flat_prose(rng: random.Random) -> Iterator[str]:
    """Sentences of Python's reference from a random one of its first 1,000 on.

    Each on one line, or models break the lines of their answers as well.
    """
    for sentence in islice(endless("prose"), rng.randrange(1000), None):
        yield " ".join(sentence.split())


def room_for(length: int, *parts: list[int]) -> int:
    """Tokens of `length` that the parts leave, one or more; `EvalError` if there is none."""
    taken = sum(map(len, parts))
    if length <= taken:
        raise EvalError(f"this context needs at least {taken + 1} tokens, got {length}")
    return length - taken


def draft(tokenizer: Any, context: list[int], cue: str, answer: str) -> Draft:
    """With `cue` and `answer` as tokenised together; `EvalError` if a token joins them."""
    start = encode(tokenizer, cue)
    both = encode(tokenizer, cue + answer)
    if both[: len(start)] != start:
        raise EvalError(f"this tokenizer has a token that spans the end of {cue!r}")
    return Draft(context, start, both[len(start) :])

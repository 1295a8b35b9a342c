"""The texts that a model is evaluated on, and haystacks with a passkey hidden in them."""

from __future__ import annotations

import argparse
import inspect
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

from icecache.eval.errors import EvalError

PYDOC = "pydoc_data.topics"
TEXTS = ("reference", "reference-60000", "argparse")
"""That every machine has: Python's reference from its start and from character 60,000 on, and the
source of a long module. Python's own version decides them."""
HAYSTACKS = ("filler", "prose")

_HEADER = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_NEEDLE = "The pass key is {0}. Remember it. {0} is the pass key."
_CUE = "What is the pass key? The pass key is"


def read_text(path: Path | None, skip_chars: int = 0) -> tuple[str, str]:
    """The name and content of a text file (UTF-8), or of Python's own reference for None."""
    if path is None:
        from pydoc_data.topics import topics

        name, text = PYDOC, "\n\n".join(topics[key].strip() for key in sorted(topics))
    else:
        try:
            name, text = path.name, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EvalError(f"cannot read {path}: {error}") from error
    return name, text[skip_chars:]


def built_in(name: str) -> str:
    """The content of one of `TEXTS`."""
    if name == "argparse":
        return inspect.getsource(argparse)
    return read_text(None, int(name.partition("-")[2] or 0))[1]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text, without special tokens and without length warnings."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def first_tokens(tokenizer: Any, name: str, text: str, count: int) -> list[int]:
    """The first `count` tokens of a text; `EvalError` if it is shorter."""
    ids = encode(tokenizer, text)
    if len(ids) < count:
        raise EvalError(f"the text {name} has {len(ids)} tokens, {count} are needed")
    return ids[:count]


@dataclass(frozen=True)
class Haystack:
    """A text of exact length that hides a passkey, and the question asked after it."""

    length: int
    depth: float
    passkey: str
    context: list[int]
    cue: list[int]
    answer: list[int]


def make_haystack(
    tokenizer: Any, length: int, depth: float, *, kind: str = "filler", seed: int = 0
) -> Haystack:
    """A haystack of exactly `length` tokens, the passkey at the sentence nearest to `depth`.

    `kind` "filler" repeats five short sentences, "prose" takes Python's reference. Depth 0 is
    the start, 1 the end. The five digits depend on `length`, `depth` and `seed` only.
    """
    if kind not in HAYSTACKS:
        raise EvalError(f"the haystack must be one of {list(HAYSTACKS)}, got {kind!r}")
    if not 0.0 <= depth <= 1.0:
        raise EvalError(f"a depth must be between 0 and 1, got {depth}")
    passkey = str(random.Random(f"{length} {depth} {seed}").randint(10_000, 99_999))
    header = encode(tokenizer, _HEADER)
    needle = encode(tokenizer, " " + _NEEDLE.format(passkey))
    room = length - len(header) - len(needle)
    if room < 1:
        raise EvalError(f"a haystack needs at least {length - room + 1} tokens, got {length}")
    hay, ends = fill(tokenizer, endless(kind), room)
    split = min(ends, key=lambda end: abs(end - depth * room))
    return Haystack(
        length=length,
        depth=depth,
        passkey=passkey,
        context=header + hay[:split] + needle + hay[split:],
        cue=encode(tokenizer, " " + _CUE),
        answer=encode(tokenizer, " " + passkey),
    )


def fill(tokenizer: Any, sentences: Iterable[str], room: int) -> tuple[list[int], list[int]]:
    """`room` tokens that end with a sentence, and the offsets at which its sentences end, with 0.

    Whole sentences rarely fit, so the surplus is cut off at the front.
    """
    hay: list[int] = []
    lengths: list[int] = []
    for sentence in sentences:
        ids = encode(tokenizer, " " + sentence)
        hay += ids
        lengths.append(len(ids))
        if len(hay) >= room:
            break
    surplus = len(hay) - room
    ends = [end - surplus for end in accumulate(lengths)]
    return hay[surplus:], [0, *(end for end in ends if end > 0)]


def endless(kind: str) -> Iterator[str]:
    """The sentences of one of `HAYSTACKS`, over and over."""
    text = _FILLER if kind == "filler" else read_text(None)[1]
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if s.strip()]
    for once in repeat(sentences):
        yield from once

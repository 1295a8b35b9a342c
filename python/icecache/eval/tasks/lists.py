"""One long list: a model has to look up an entry of it, or to weigh all of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from icecache.eval.tasks.question import Draft, draft, room_for
from icecache.eval.tasks.words import CITIES, FIRST_NAMES, LAST_NAMES
from icecache.eval.texts import encode, endless, fill

CANDIDATES, WINS = 8, 5
"""In a round of votes, one candidate gets so many, each of the others one."""
_LETTERS = "BCDEFGHJKLMNPQRSTUVWXYZ"
"""Candidates, because models expect all of them alike; A and I are words, O looks like zero."""


def frequent(tokenizer: Any, length: int, instance: int, rng: random.Random) -> Draft:
    winner, *losers = rng.sample(_LETTERS, CANDIDATES)

    def rounds() -> Iterator[str]:
        while True:
            votes = [winner] * WINS + losers
            rng.shuffle(votes)
            yield "".join(
                f" {rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)} voted for {vote}."
                for vote in votes
            )

    context, _ = _fill(tokenizer, length, "The votes:", rounds())
    return draft(tokenizer, context, " Most people voted for", f" {winner}")


def records(tokenizer: Any, length: int, instance: int, rng: random.Random) -> Draft:
    used: set[str] = set()

    def lines() -> Iterator[str]:
        while True:
            letter = chr(ord("A") + rng.randrange(26))
            name = f"{rng.choice(FIRST_NAMES)} {letter}. {rng.choice(LAST_NAMES)}"
            if name not in used:
                used.add(name)
                city, code = rng.choice(CITIES), rng.randrange(10_000, 100_000)
                yield "\n" + json.dumps({"name": name, "code": code, "city": city})

    context, taken = _fill(tokenizer, length, "Records of customers, one a line:\n", lines())
    asked = json.loads(rng.choice(taken))
    start = json.dumps(asked).split(f" {asked['code']}")[0]
    cue = f"\n\nOnce more, the record of {asked['name']}:\n{start}"
    return draft(tokenizer, context, cue, f" {asked['code']}")


def _fill(
    tokenizer: Any, length: int, head: str, entries: Iterable[str]
) -> tuple[list[int], list[str]]:
    """`length` tokens: a little filler, the head, and as many whole entries as fit; the entries."""
    context, taken = encode(tokenizer, "\n\n" + head), []
    for entry in entries:
        ids = encode(tokenizer, entry)
        if taken and len(context) + len(ids) >= length:
            break
        context += ids
        taken.append(entry)
    filler, _ = fill(tokenizer, endless("filler"), room_for(length, context))
    return filler + context, taken

"""One long list: a model has to look up an entry of it, or to weigh all of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from icecache.eval.tasks.question import Draft, draft, flat_prose, room_for
from icecache.eval.tasks.words import FIRST_NAMES, LAST_NAMES, WORDS
from icecache.eval.texts import encode, endless, fill

CANDIDATES, WINS = 6, 5
"""In a round of votes, one candidate gets so many, each of the others one."""
_LETTERS = "BCDEFGHJKLMNPQRSTUVWXYZ"
"""Models expect all of them alike. A and I are words as well, O looks like zero."""


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
    items = [f"{first} {second}" for first in WORDS for second in WORDS if first != second]
    rng.shuffle(items)
    notes = flat_prose(rng)

    def lines() -> Iterator[str]:
        for item in items:
            # A letter first: a small model that is unsure of a digit says 1.
            code = f"{rng.choice(_LETTERS)}{rng.randrange(100, 1000)}"
            record = {"item": item, "code": code, "note": f"{next(notes)} {next(notes)}"}
            yield "\n" + json.dumps(record, ensure_ascii=False)

    context, taken = _fill(tokenizer, length, "Items, one a line:\n", lines())
    asked = json.loads(rng.choice(taken))
    start = json.dumps(asked).partition(asked["code"])[0]
    cue = f"\n\nAgain, the record of the {asked['item']}:\n{start}"
    return draft(tokenizer, context, cue, f'{asked["code"]}"')


def _fill(
    tokenizer: Any, length: int, head: str, entries: Iterable[str]
) -> tuple[list[int], list[str]]:
    """`length` tokens: a little filler, the head, and as many whole entries as fit; the entries."""
    context = encode(tokenizer, "\n\n" + head)
    taken: list[str] = []
    for entry in entries:
        ids = encode(tokenizer, entry)
        if taken and len(context) + len(ids) >= length:
            break
        context += ids
        taken.append(entry)
    filler, _ = fill(tokenizer, endless("filler"), room_for(length, context))
    return filler + context, taken

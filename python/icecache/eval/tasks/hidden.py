"""Statements hidden in unrelated prose: a model has to find the few that matter."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from icecache.eval.tasks.question import Draft, draft, flat_prose, room_for
from icecache.eval.tasks.words import CITIES, FIRST_NAMES, WORDS
from icecache.eval.texts import encode, fill, make_haystack

DEPTHS = (0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6)
"""Of the pass key, one instance after another: a few of them already cover the grid."""
NEEDLES = 4
CHAINS, HOPS = 2, 3
STORY_SENTENCES, ANSWER_SENTENCES = 12, 3


def passkey(tokenizer: Any, length: int, instance: int, rng: random.Random) -> Draft:
    depth = DEPTHS[instance % len(DEPTHS)]
    hay = make_haystack(tokenizer, length, depth, seed=rng.getrandbits(32))
    return Draft(hay.context, hay.cue, hay.answer)


def needles(tokenizer: Any, length: int, instance: int, rng: random.Random) -> Draft:
    cities = rng.sample(CITIES, NEEDLES)
    numbers = rng.sample(range(10_000, 100_000), NEEDLES)
    statements = [
        f"The magic number of {city} is {number}."
        for city, number in zip(cities, numbers, strict=True)
    ]
    head = "Magic numbers of cities are hidden in this text. Remember them."
    asked = rng.randrange(NEEDLES)
    return draft(
        tokenizer,
        _hide(tokenizer, head, statements, length, rng),
        f"\n\nWhat is the magic number of {cities[asked]}? The magic number of {cities[asked]} is",
        f" {numbers[asked]}",
    )


def variables(tokenizer: Any, length: int, instance: int, rng: random.Random) -> Draft:
    """Variable tracking in words: people hold things, as variables hold values."""
    people = rng.sample(FIRST_NAMES, CHAINS * (HOPS + 1))
    things = rng.sample(WORDS, CHAINS)
    ways = [
        [f"{giver} gave the {thing} to {taker}." for giver, taker in pairwise(people[i::CHAINS])]
        for i, thing in enumerate(things)
    ]
    statements = [way[hop] for hop in range(HOPS) for way in rng.sample(ways, CHAINS)]
    head = "Things go from one person to another in this text. Remember the way of each of them."
    start = ways[0][0].rpartition(" ")[0]
    return draft(
        tokenizer,
        _hide(tokenizer, head, statements, length, rng),
        f"\n\nThe way of the {things[0]}: {start}",
        " ".join(ways[0]).removeprefix(start),
    )


def copy(tokenizer: Any, length: int, instance: int, rng: random.Random) -> Draft:
    names = rng.sample(FIRST_NAMES, 2 * STORY_SENTENCES)
    things = rng.sample(WORDS, STORY_SENTENCES)
    story = [
        f"{giver} gave the {thing} to {taker}."
        for giver, thing, taker in zip(names[::2], things, names[1::2], strict=True)
    ]
    told = "The story: "
    head = "A story is hidden in this text. Remember it."
    return draft(
        tokenizer,
        _hide(tokenizer, head, [told + " ".join(story)], length, rng),
        f"\n\n{told}{story[0]}",
        "".join(f" {sentence}" for sentence in story[1 : 1 + ANSWER_SENTENCES]),
    )


def _hide(
    tokenizer: Any, head: str, statements: list[str], length: int, rng: random.Random
) -> list[int]:
    """`length` tokens: the head, then prose with the statements in order, spread evenly."""
    start = encode(tokenizer, head)
    hidden = [encode(tokenizer, " " + statement) for statement in statements]
    room = room_for(length, start, *hidden)
    hay, ends = fill(tokenizer, flat_prose(rng), room)
    context, done = start, 0
    for i, statement in enumerate(hidden):
        place = room * (i + rng.random()) / len(hidden)
        end = min((e for e in ends if e >= done), key=lambda e: abs(e - place))
        context = context + hay[done:end] + statement
        done = end
    return context + hay[done:]

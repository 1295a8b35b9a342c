"""Tasks with right answers, made by seeded generators.

question  a question about a long text, and what the generators share
words     names and words
hidden    statements hidden in prose: passkey, needles, variables, copy
lists     one long list: frequent, json
"""

from __future__ import annotations

import random
from typing import Any

from icecache.eval.errors import EvalError
from icecache.eval.tasks.hidden import copy, needles, passkey, variables
from icecache.eval.tasks.lists import frequent, records
from icecache.eval.tasks.question import Question, Task

__all__ = ["TASKS", "Question", "make_questions"]

TASKS = {
    "passkey": Task("Five digits hidden in filler, at depths from 0.1 to 0.9.", passkey),
    "needles": Task("The number of one city, among those of others, in prose.", needles),
    "variables": Task(
        "The way of one thing from hand to hand, among those of other things, in prose.", variables
    ),
    "frequent": Task("The candidate that most of many people voted for.", frequent),
    "copy": Task("The sentences after the first one of a story that occurs once in prose.", copy),
    "json": Task("A field of one record in a long list of JSON records.", records),
}
"""By name."""


def make_questions(
    tokenizer: Any, task: str, length: int, count: int, seed: int = 0
) -> list[Question]:
    """Instances 0 to `count` - 1 of a task, each with a context of exactly `length` tokens.

    An instance depends on `task`, `length`, its number and `seed` only. Raises `EvalError` for an
    unknown task and for a length too short, which says how long it must be.
    """
    if task not in TASKS:
        raise EvalError(f"the task must be one of {list(TASKS)}, got {task!r}")
    questions = []
    for instance in range(count):
        rng = random.Random(f"{task} {instance} {seed}")
        made = TASKS[task].generate(tokenizer, length, instance, rng)
        questions.append(Question(task, instance, *made))
    return questions

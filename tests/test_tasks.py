"""Questions with right answers: each answer again, by a reader that knows the text alone."""

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import byte_tokenizer

from icecache.eval.errors import EvalError
from icecache.eval.model import load_model
from icecache.eval.tasks import TASKS, make_questions
from icecache.eval.texts import encode

TOKENIZER = byte_tokenizer()


def passkey(context, cue):
    (key,) = set(re.findall(r"[Tt]he pass key is (\d+)\.", context))
    return f" {key}"


def needles(context, cue):
    numbers = dict(re.findall(r"The magic number of (\w+) is (\d+)\.", context))
    assert len(numbers) == 4
    assert len(set(numbers.values())) == 4
    city = re.search(r"of (\w+) is$", cue)[1]
    return f" {numbers[city]}"


def variables(context, cue):
    gifts = re.findall(r"(\w+) gave the (\w+) to (\w+)\.", context)
    assert len(gifts) == 6
    holder, thing = re.search(r"(\w+) gave the (\w+) to$", cue).groups()
    sentences = []
    while following := [taker for giver, what, taker in gifts if (giver, what) == (holder, thing)]:
        (taker,) = following
        sentences.append(f"{holder} gave the {thing} to {taker}.")
        holder = taker
    assert len(sentences) == 3
    return " ".join(sentences).removeprefix(f"{cue.rpartition(': ')[2]}")


def frequent(context, cue):
    votes = Counter(re.findall(r"voted for (\w)\.", context))
    (winner, most), (_, second) = votes.most_common(2)
    assert len(votes) == 6
    assert most == 5 * second
    return f" {winner}"


def copy(context, cue):
    assert context.count(cue.strip()) == 1
    rest = context.partition(cue.strip())[2]
    return "".join(re.findall(r" \w+ gave the \w+ to \w+\.", rest)[:3])


def records(context, cue):
    rows = [json.loads(line) for line in context.splitlines() if line.startswith("{")]
    asked = re.search(r"record of the (.*):", cue)[1]
    (row,) = [row for row in rows if row["item"] == asked]
    return f'{row["code"]}"'


READERS = {
    "passkey": passkey,
    "needles": needles,
    "variables": variables,
    "frequent": frequent,
    "copy": copy,
    "json": records,
}
LEAST = 1600  # bytes, of the longest one


def text(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def check(tokenizer, question, length):
    """The answer is what the reader reads, and the parts are tokenised as their text is."""
    assert len(question.context) == length
    context, cue = text(tokenizer, question.context), text(tokenizer, question.cue)
    assert text(tokenizer, question.answer) == READERS[question.task](context, cue)
    assert encode(tokenizer, cue + text(tokenizer, question.answer)) == (
        question.cue + question.answer
    )


def test_every_task_has_a_reader_and_a_sentence():
    assert list(TASKS) == list(READERS)
    assert all(re.fullmatch(r"[A-Z].*\.", task.description) for task in TASKS.values())


@given(
    task=st.sampled_from(list(TASKS)),
    length=st.integers(LEAST, 6000),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_the_answer_follows_from_a_context_of_the_length(task, length, count, seed):
    questions = make_questions(TOKENIZER, task, length, count, seed)
    assert [(q.task, q.instance) for q in questions] == [(task, i) for i in range(count)]
    for question in questions:
        check(TOKENIZER, question, length)


@pytest.mark.parametrize("task", TASKS)
def test_questions_depend_on_their_number_and_seed_alone(task):
    questions = make_questions(TOKENIZER, task, 3000, 3, seed=5)
    assert questions[:2] == make_questions(TOKENIZER, task, 3000, 2, seed=5)
    others = questions + make_questions(TOKENIZER, task, 3000, 3, seed=6)
    assert len({tuple(q.context) for q in others}) == len(others)
    assert len({tuple(q.cue + q.answer) for q in others}) > 3


def test_pass_keys_cover_the_grid_of_depths():
    depths = []
    for question in make_questions(TOKENIZER, "passkey", 6000, 9):
        place = text(TOKENIZER, question.context).index("The pass key")
        depths.append(round(place / 6000, 1))
    assert sorted(depths) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


@pytest.mark.parametrize("task", ["needles", "frequent"])
def test_what_matters_is_spread_over_the_whole_text(task):
    (question,) = make_questions(TOKENIZER, task, 8000, 1)
    context = text(TOKENIZER, question.context)
    sign = "magic number of" if task == "needles" else f"voted for{READERS[task](context, '')}."
    quarters = Counter(found.start() // 2000 for found in re.finditer(re.escape(sign), context))
    assert min(quarters[i] for i in range(4)) >= (1 if task == "needles" else 10)


@pytest.mark.parametrize("task", TASKS)
def test_a_length_too_short_says_how_long_it_must_be(task):
    with pytest.raises(EvalError, match=r"at least (\d+) tokens, got 50") as error:
        make_questions(TOKENIZER, task, 50, 1)
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    check(TOKENIZER, make_questions(TOKENIZER, task, least, 1)[0], least)
    with pytest.raises(EvalError, match=f"at least {least} tokens, got {least - 1}"):
        make_questions(TOKENIZER, task, least - 1, 1)


def test_an_unknown_task_is_named():
    with pytest.raises(EvalError, match=r"must be one of \['passkey', .*\], got 'riddle'"):
        make_questions(TOKENIZER, "riddle", 3000, 1)


def test_a_tokenizer_that_joins_cue_and_answer_is_refused():
    class Joining:
        """Two characters a token."""

        def __call__(self, text, **options):
            return {"input_ids": [hash(text[i : i + 2]) for i in range(0, len(text), 2)]}

    with pytest.raises(EvalError, match="spans the end of"):
        for instance in range(9):  # cues of odd lengths
            make_questions(Joining(), "needles", 3000, instance)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_smollm2_tokenises_the_whole_text_as_its_parts(task):
    tokenizer = load_model()[1]
    for length in (1024, 4096):
        for question in make_questions(tokenizer, task, length, 3):
            check(tokenizer, question, length)
            # Not its beginning: prose is cut off there, at any token.
            tail = (question.context + question.cue + question.answer)[-200:]
            whole = text(tokenizer, question.context[-500:] + question.cue + question.answer)
            assert encode(tokenizer, whole)[-200:] == tail

"""Worked examples and worked solutions of a small file of problems."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import byte_tokenizer

from icecache.eval.errors import EvalError
from icecache.eval.gsm8k import read_gsm8k

TOKENIZER = byte_tokenizer()
PROBLEMS = [(f"What is {i} plus one?", f"{i}+1={i + 1}\n#### {i + 1}") for i in range(10, 50)]


def written(problem):
    return f"\n\nQuestion: {problem[0]}\nAnswer: {problem[1]}"


LONG = len(written(PROBLEMS[0]))  # of every problem


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gsm8k") / "problems.jsonl"
    rows = [{"question": question, "answer": answer} for question, answer in PROBLEMS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@given(length=st.integers(LONG, 20 * LONG), count=st.integers(1, 10), seed=st.integers(0, 99))
def test_examples_fill_the_prompt_and_solutions_are_scored(path, length, count, seed):
    chain = read_gsm8k(path, TOKENIZER, length, count, seed)
    context, fed = TOKENIZER.decode(chain.context), TOKENIZER.decode(chain.fed)
    shown = [problem for problem in PROBLEMS if written(problem) in context]
    asked = [problem for problem in PROBLEMS if written(problem) in fed]
    assert (len(shown), len(asked)) == (length // LONG, count)
    assert len(context) == len(shown) * LONG and len(fed) == count * LONG
    assert not set(shown) & set(asked)
    scored = "".join(fed[i + 1] for i, score in enumerate(chain.scored[:-1]) if score)
    solutions = [part.split("Answer:")[1] for part in fed.split("\n\nQuestion:")[1:]]
    assert scored == "".join(solutions)
    assert len(chain.scored) == len(chain.fed) and not chain.scored[-1]
    assert chain.name == "gsm8k"


def test_the_seed_chooses(path):
    assert read_gsm8k(path, TOKENIZER, 500, 2, 1) == read_gsm8k(path, TOKENIZER, 500, 2, 1)
    assert read_gsm8k(path, TOKENIZER, 500, 2, 1) != read_gsm8k(path, TOKENIZER, 500, 2, 2)


def test_errors(path, tmp_path):
    with pytest.raises(EvalError, match=r"cannot read .*none\.jsonl"):
        read_gsm8k(tmp_path / "none.jsonl", TOKENIZER, 500, 1)
    bad = tmp_path / "bad.jsonl"
    good = path.read_text().splitlines()[0]
    for line in ('{"question": "why"}', "[1, 2]", "3", "not JSON"):
        bad.write_text(f"{good}\n{line}\n")
        with pytest.raises(EvalError, match=r"line 2 of .*bad\.jsonl is not a JSON object with"):
            read_gsm8k(bad, TOKENIZER, 500, 1)
    with pytest.raises(EvalError, match="has 40 problems; 38 questions leave too few examples"):
        read_gsm8k(path, TOKENIZER, 500, 38)
    with pytest.raises(EvalError, match="40 problems; 50 questions"):
        read_gsm8k(path, TOKENIZER, 500, 50)
    with pytest.raises(EvalError, match=f"first example has {LONG} tokens, the context only 20"):
        read_gsm8k(path, TOKENIZER, 20, 1)
    with pytest.raises(EvalError, match="at least one question is needed, got 0"):
        read_gsm8k(path, TOKENIZER, 500, 0)

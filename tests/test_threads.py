"""Several Python threads at once, each with a cache of its own, answer as each of them alone."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_cache import CACHE, SPARSE
from tiny_models import MODELS, tokens
from transformers import PreTrainedModel

from icecache import IceCache

TEXTS = [tokens(300), tokens(420, seed=1)]
NEW = 16


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def answer(model: PreTrainedModel, text: torch.Tensor, cache: IceCache) -> tuple[Any, ...]:
    """Tokens and logits of `generate`, and what the last step attended to exactly."""
    options = dict(do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = model.generate(text, max_new_tokens=NEW, **options, **{CACHE: cache})
    stores = [cache.layers[index].store for index in cache.replaced_layers]
    selected = [[head.tolist() for head in store.selected()] for store in stores]
    return out.sequences.tolist(), torch.stack(out.logits), selected


def at_once(models: list[PreTrainedModel]) -> list[Any]:
    """What each thread answers, or the error that it ended with."""
    answers: list[Any] = [None] * len(models)
    barrier = threading.Barrier(len(models))

    def work(i: int) -> None:
        barrier.wait()
        try:
            answers[i] = answer(models[i], TEXTS[i], IceCache(models[i], **SPARSE))
        except Exception as error:
            answers[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize(
    "names", [["llama"], ["qwen2_mixed"], ["llama", "gemma3"]], ids=lambda names: "+".join(names)
)
def test_two_threads_with_a_cache_each_answer_as_alone(names: list[str]) -> None:
    """With one model for both, or one each."""
    models = [MODELS[name]() for name in names] * (2 // len(names))
    alone = [answer(m, text, IceCache(m, **SPARSE)) for m, text in zip(models, TEXTS, strict=True)]
    for _ in range(10):
        for got, expected in zip(at_once(models), alone, strict=True):
            assert not isinstance(got, Exception), got
            assert got[0] == expected[0]
            assert torch.equal(got[1], expected[1])
            assert got[2] == expected[2]

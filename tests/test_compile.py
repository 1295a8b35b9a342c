"""Models that `torch.compile` has compiled: the cache and its attention stay as they are, between
the compiled parts, and nothing is compiled anew from step to step."""

from typing import Any

import pytest
import torch
from test_cache import CACHE, SPARSE, forward, greedy
from tiny_models import MODELS, llama, tokens
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from transformers import PreTrainedModel

from icecache import IceCache, attach


@pytest.fixture(autouse=True)
def afresh() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: PreTrainedModel, backend: str = "eager", **options: Any) -> PreTrainedModel:
    model.forward = torch.compile(model.forward, backend=backend, **options)
    return model


def steps(model: PreTrainedModel, parts: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Logits, and the graphs that have been compiled by then, after each part of a text."""
    cache, logits, graphs = IceCache(model, **SPARSE), [], []
    for part in parts:
        logits.append(forward(model, part, cache))
        graphs.append(counters["stats"]["unique_graphs"])
    return logits, graphs


# As README.md has it: transformers calls one function for all its models, which alone takes more
# graphs than the 8 of torch; and layers do not get a graph each.
@dynamo.patch(recompile_limit=64, allow_unspec_int_on_nn_module=True)
@dynamo.patch(fail_on_recompile_limit_hit=True)
@pytest.mark.parametrize("name", ["llama", "qwen2_mixed", "gemma3"])
def test_steps_compile_nothing_after_the_first_ones(name: str) -> None:
    parts = tokens(312).split([300] + [1] * 12, dim=1)
    expected, _ = steps(MODELS[name](), parts)
    got, graphs = steps(compiled(MODELS[name]()), parts)
    assert 0 < graphs[0] < graphs[1] == graphs[-1]
    for each, wanted in zip(got, expected, strict=True):
        assert torch.equal(each, wanted)


@pytest.mark.parametrize("how", ["model.forward", "torch.compile(model)", "model.compile()"])
def test_generate_with_a_compiled_model(how: str) -> None:
    ids = tokens(300)
    model = llama()
    expected = greedy(model, ids, **{CACHE: IceCache(model, **SPARSE)})
    model = llama()
    if how == "model.forward":
        compiled(model)
    elif how == "model.compile()":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with attach(model, **SPARSE) as cache:
        assert greedy(model, ids, **{CACHE: cache}) == expected
        assert cache.stats().tokens_exact < 150
        cache.reset()  # the `generate` of torch.compile(model) calls the model that it wraps
        assert forward(model, ids, cache)[0, -1].argmax() == expected[0]
    assert counters["stats"]["unique_graphs"] > 0
    assert model.config._attn_implementation == "sdpa"


def test_inductor() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("needs a C++ compiler")
    parts = tokens(310).split([300] + [1] * 10, dim=1)
    expected, _ = steps(llama(num_hidden_layers=1), parts)
    got, _ = steps(compiled(llama(num_hidden_layers=1), "inductor"), parts)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_one_graph_for_all_is_refused_by_an_error_that_says_so() -> None:
    model = compiled(llama(), fullgraph=True)
    with pytest.raises(RuntimeError, match="outside of torch: compile without fullgraph=True"):
        forward(model, tokens(40), IceCache(model, **SPARSE))

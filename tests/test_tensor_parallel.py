"""Two processes that share a model's layers, as transformers' `tp_plan` has it: each holds its own
KV heads, and together they answer as one process does, sparse steps included."""

import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cache import SPARSE, close, forward
from tiny_models import llama, phi3, tokens
from tp_worker import SECONDS, answers

from icecache import IceCache, IceConfig, LayerCache

RANKS = 2
# The vocabulary is split too. Phi-3 has one projection for all three, whose output every rank gets.
SIZES = dict(num_attention_heads=8, num_key_value_heads=4, vocab_size=98)
MODELS = {"llama": llama, "phi3": phi3}
SPLIT = {"llama": True, "phi3": False}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By model: what each rank answers."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("needs gloo")
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        MODELS[name](**SIZES).save_pretrained(folder)
    worker = Path(__file__).with_name("tp_worker.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    where = ("--local-addr", "127.0.0.1", "--nproc-per-node", str(RANKS))
    process = subprocess.Popen(
        [*torchrun, *where, worker, *folders.values()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS + 30)
    finally:
        process.terminate()  # ends the ranks, too
        process.wait()
    assert process.returncode == 0, output
    return {
        name: [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]
        for name, folder in folders.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_answer_as_one_process(name: str, ranks: Any) -> None:
    alone = answers(MODELS[name](**SIZES))
    for budget, expected in alone.items():
        got = [rank[budget] for rank in ranks[name]]
        for each in got:
            close(each["logits"], expected["logits"])
            assert each["generated"] == expected["generated"]
        if SPLIT[name]:
            assert [each["kv_bytes"] * RANKS for each in got] == [expected["kv_bytes"]] * RANKS
            # Every head selects what it selects in one process.
            layers = zip(*(each["selected"] for each in got), strict=True)
            assert [list(chain(*heads)) for heads in layers] == expected["selected"]
        else:
            assert [each["kv_bytes"] for each in got] == [expected["kv_bytes"]] * RANKS
            assert [each["selected"] for each in got] == [expected["selected"]] * RANKS


def test_query_heads_split_without_their_kv_heads_are_refused() -> None:
    model = llama()
    cache = IceCache(model, **SPARSE)
    model.model.layers[1].self_attn.num_key_value_groups = 4  # there are two query heads for each
    with pytest.raises(ValueError, match="4 query heads per KV head, got 4 and 2"):
        forward(model, tokens(40), cache)
    assert cache.get_seq_length() == 0


def test_a_layer_of_some_heads_is_a_part_of_the_whole_layer_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(4, 700, 16, generator=generator) for _ in range(3))
    config = IceConfig(**SPARSE)
    whole = LayerCache(4, 4, 16, config, layer_index=3)
    part = LayerCache(2, 2, 16, config, layer_index=3, first_kv_head=2)
    other = LayerCache(2, 2, 16, config, layer_index=3)
    for layer, heads in ((whole, slice(0, 4)), (part, slice(2, 4)), (other, slice(2, 4))):
        layer.prefill(k[heads, :690], v[heads, :690])
    out = whole.decode(q[:, 690:], k[:, 690:], v[:, 690:])[2:]
    rows = (q[2:, 690:], k[2:, 690:], v[2:, 690:])
    assert torch.equal(part.decode(*rows), out)
    assert not torch.equal(other.decode(*rows), out)
    with pytest.raises(ValueError, match="first_kv_head"):
        LayerCache(2, 2, 16, first_kv_head=-1)

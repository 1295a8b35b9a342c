"""Two processes that split a model's heads, as transformers' `tp_plan` does: each holds the cache
of its own KV heads, and together they answer as one process does, sparse steps included."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cache import close
from tiny_models import llama
from tp_worker import SECONDS, answers
from transformers import PreTrainedModel

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs gloo",
)
RANKS = 2


def in_ranks(model: PreTrainedModel, plan: Any, folder: Path) -> list[dict[str, Any]]:
    """The answers of each rank."""
    model.save_pretrained(folder)
    worker = Path(__file__).with_name("tp_worker.py")
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(RANKS)),
            *(str(worker), str(folder), json.dumps(plan), str(folder)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = started.communicate(timeout=SECONDS + 30)
    finally:
        started.terminate()  # it ends the ranks
        started.wait(30)
    assert started.returncode == 0, output
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama(num_attention_heads=8, num_key_value_heads=4)


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> dict[str, Any]:
    return answers(model)


def test_two_ranks_answer_as_one_process(
    model: PreTrainedModel, alone: dict[str, Any], tmp_path: Path
) -> None:
    ranks = in_ranks(model, "auto", tmp_path)
    for budget, expected in alone.items():
        got = [rank[budget] for rank in ranks]
        for each in got:
            close(each["logits"], expected["logits"])
            assert each["tokens"] == expected["tokens"]
            assert each["kv_bytes"] * RANKS == expected["kv_bytes"]
        # Every tree is the one that its head has in one process.
        layers = zip(*(each["selected"] for each in got), strict=True)
        assert [sum(heads, []) for heads in layers] == expected["selected"]

"""What tests/test_tensor_parallel.py compares; as a program, one of the ranks that torchrun starts:

torchrun --nproc-per-node 2 tp_worker.py MODEL...

MODEL: a folder with a saved model; each rank leaves there, as `rank{i}.pt`, what `answers` returns.
"""

import faulthandler
import sys
from pathlib import Path
from typing import Any

import torch
from test_cache import CACHE, SPARSE, WHOLE, forward, greedy
from tiny_models import tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

from icecache import IceCache

SECONDS = 120
CONTEXT, STEPS = 600, 12


def answers(model: PreTrainedModel) -> dict[str, Any]:
    """By budget: the logits of single tokens after a prefill, what was attended, greedy tokens."""
    ids, answer = tokens(CONTEXT + STEPS), {}
    for name, options in {"whole": WHOLE, "sparse": SPARSE}.items():
        cache = IceCache(model, **options)
        parts = ids.split([CONTEXT] + [1] * STEPS, dim=1)
        logits = torch.cat([forward(model, part, cache)[0, -1:] for part in parts])
        stores = [cache.layers[index].store for index in cache.replaced_layers]
        selected = [[head.tolist() for head in store.selected()] for store in stores]
        kv_bytes = cache.stats().kv_bytes
        cache.reset()
        generated = greedy(model, ids[:, :CONTEXT], new=STEPS, **{CACHE: cache})
        answer[name] = dict(
            logits=logits, selected=selected, kv_bytes=kv_bytes, generated=generated
        )
    return answer


def main(*folders: str) -> None:
    # Whatever becomes of the parent and of the other rank, this one ends.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
        torch.save(answers(model), Path(folder) / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

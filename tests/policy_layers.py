"""Layers of one policy, and prompts for them, for the tests of policies."""

import torch

from icecache.policies import make_policy
from icecache.policies.base import Prompt
from icecache.policies.dense import WINDOW_SLACK

SINK, WINDOW = 3, 5
ALWAYS = SINK + WINDOW + WINDOW_SLACK
"""Sink and window of a decoded position, at most."""


def layers(name, budget=4, kv_heads=2, group=2, dim=8, scale=None, count=1, **options):
    """The first `count` layers of a sequence."""
    shared = {"sink_tokens": SINK, "window_tokens": WINDOW, "dense_below": 0, **options}
    factory = make_policy(name, budget, **shared)
    shape = dict(num_q_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim, scale=scale)
    return [factory(layer_index=i, **shape) for i in range(count)]


def make(name, budget=4, **options):
    return layers(name, budget, **options)[0]


def rows(heads, n, dim, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, n, dim, generator=generator).to(dtype)


def read(layer, k, v, q):
    """A prompt, read with full attention."""
    layer.prefill(k, v)
    layer.observe(Prompt(k, v, q, layer.scale))
    return layer

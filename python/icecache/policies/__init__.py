"""The systems that icecache is compared with, and icecache, behind one small interface.

base        the interface of a layer, `LayerLike`, and of a prompt
dense       what the policies over plain tensors share
full        full attention
topk        the oracle: the best possible tokens, the rest dropped
window      StreamingLLM: sink and window only
h2o         tokens by the attention they received so far
snapkv      tokens that the end of the prompt attends to
pages       bounded pages of consecutive tokens: quest, arkvale
clusters    k-means: pqcache, retroinfer
pqcache     tokens by quantized keys
magicpig    tokens sampled by hash tables
omnikv      tokens that one layer chooses for those above it
retroinfer  clusters, some exactly, some by their means
registry    names; also "pages" (the paper IceCache) and "icecache", both a `LayerCache`
"""

from icecache.policies.base import LayerFactory, LayerLike, Prompt
from icecache.policies.dense import DenseLayer
from icecache.policies.registry import POLICIES, Policy, make_policy, policy_config

__all__ = [
    "POLICIES",
    "DenseLayer",
    "LayerFactory",
    "LayerLike",
    "Policy",
    "Prompt",
    "make_policy",
    "policy_config",
]

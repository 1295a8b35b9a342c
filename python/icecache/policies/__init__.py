"""The systems that icecache is compared with, and icecache, behind one small interface.

base      the interface of a layer, `LayerLike`
dense     what the policies over plain tensors share
full      full attention
window    StreamingLLM: sink and window only
topk      the oracle: the best possible tokens, the rest dropped
registry  names; also "pages" (the paper IceCache) and "icecache", both a `LayerCache`
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

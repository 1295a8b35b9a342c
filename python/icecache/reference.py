"""The oracle of the tests: attention written out slowly in float64. Nothing else imports it.

`exact_attention` is full attention, what a decode step becomes when every node is opened down to
single tokens. `decode_step` is one step over given pages, for one KV head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FAINT = 0.1
"""The core's: nodes below an even share of this much of the softmax have one mean value."""


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Full attention of the last `t` of `n` positions, each to itself and what is before it.

    `q` is [q_heads, t, d], `k` and `v` are [kv_heads, n, d], of any dtype. Query head `h` reads KV
    head `h // (q_heads // kv_heads)`. Returns [q_heads, t, d] in float64.
    """
    q, k, v = q.double(), k.double(), v.double()
    group, t, n = len(q) // len(k), q.shape[1], k.shape[1]
    later = torch.ones(t, n, dtype=torch.bool).triu(n - t + 1)
    out = torch.empty_like(q)
    for h in range(len(q)):
        logits = q[h] @ k[h // group].T * scale
        weights = torch.softmax(logits.masked_fill(later, -torch.inf), dim=1)
        out[h] = weights @ v[h // group]
    return out


def decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    always: Sequence[int],
    pages: Sequence[Sequence[int]],
    closed: Sequence[Sequence[int]] = (),
    budget: int,
    tail: bool = True,
) -> tuple[torch.Tensor, list[int]]:
    """One position of one KV head; numbers as in section 2 of the design.

    `q` is [group, d]; `k` and `v` are [n, d]. `always` are the positions of sink and window,
    `pages` those of the pages whose keys are scored, `closed` those of the nodes left closed.
    Returns the output, [group, d] in float64, and the selected positions, ascending.
    """
    q, k, v = q.double() * scale, k.double(), v.double()
    logits = q @ k.T
    # 1. A closed node: the weight of its mean key, count times over, for its mean value.
    means = [(len(node), k[list(node)].mean(dim=0), v[list(node)].mean(dim=0)) for node in closed]
    node_logits = [q @ key + torch.tensor(count).double().log() for count, key, _ in means]
    # The weights below all have one maximum, that of everything scored.
    scored = torch.cat([logits, *(logit[:, None] for logit in node_logits)], dim=1)
    high = scored.amax(dim=1, keepdim=True)
    weights = (logits - high).exp()
    node_weights = [(logit - high[:, 0]).exp() for logit in node_logits]

    # 3. Candidates: every query's share of its own softmax, summed over the group.
    candidates = [position for page in pages for position in page]
    read = [*always, *candidates]
    total = weights[:, read].sum(dim=1)
    for weight in node_weights:
        total = total + weight
    priority = (weights / total[:, None]).sum(dim=0)
    ranked = sorted(candidates, key=lambda position: -float(priority[position]))
    selected = set(ranked[:budget])

    # 5. Exactly: sink, window and selected.
    exact = [*always, *sorted(selected)]
    numerator = weights[:, exact] @ v[exact]
    denominator = weights[:, exact].sum(dim=1)
    if tail:
        # 4. A candidate left over: its own weight for its page's mean value.
        rest = [(weight, value) for weight, (_, _, value) in zip(node_weights, means, strict=True)]
        for page in pages:
            if left := [position for position in page if position not in selected]:
                rest.append((weights[:, left].sum(dim=1), v[list(page)].mean(dim=0)))
        denominator = denominator + sum(weight for weight, _ in rest)
        # A node that hardly counts: the mean value of all of the tree.
        whole = v[[position for node in [*pages, *closed] for position in node]].mean(dim=0)
        for weight, value in rest:
            faint = (weight / denominator).sum() <= FAINT * len(q) / len(rest)
            numerator = numerator + weight[:, None] * (whole if faint else value)
    return numerator / denominator[:, None], sorted(selected)

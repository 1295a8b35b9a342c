"""The opening rules that are compared, over the view of `tree_view`.

Each is a function `(step, depth) -> mask` of upper nodes to open. Whatever a rule says, nodes are
opened until they hold enough candidates.
"""

from __future__ import annotations

import numpy as np
from tree_view import Extra, Rule, Step, View, best


def share_of_each(share: float) -> Rule:
    """The best `share` of the reached nodes of every level."""

    def rule(step: Step, depth: int) -> np.ndarray:
        reached = step.reached[depth]
        return best(step.shares(depth), reached, np.ceil(share * reached.sum(-1)))

    return rule


def share_of_lowest(share: float, spread: float = 2.0, far: float = 0.0) -> Rule:
    """All levels whole but the lowest upper one, of which the best `share` is opened. With `far`
    nodes also count for one key, as leaves do in `decode`."""

    def rule(step: Step, depth: int) -> np.ndarray:
        reached = step.reached[depth]
        if depth > 1:
            return reached
        ranked = step.shares(depth, spread)
        if far:
            ranked = np.maximum(ranked, step.far_shares(depth, far))
        return best(ranked, reached, np.ceil(share * reached.sum(-1)))

    return rule


def count_of_lowest(count: int) -> Rule:
    """All levels whole but the lowest upper one, of which the best `count` nodes are opened."""

    def rule(step: Step, depth: int) -> np.ndarray:
        reached = step.reached[depth]
        return reached if depth > 1 else best(step.shares(depth), reached, count)

    return rule


def mass_of_lowest(left: float) -> Rule:
    """All levels whole but the lowest upper one, of which nodes are opened, best first, until the
    raised shares of those left closed are at most `left` of all raised shares."""

    def rule(step: Step, depth: int) -> np.ndarray:
        reached = step.reached[depth]
        if depth > 1:
            return reached
        shares = step.shares(depth)
        held = np.cumsum(np.sort(shares, axis=-1), axis=-1)
        closed = (held <= left * held[:, -1:]).sum(-1)
        return best(shares, reached, shares.shape[-1] - closed)

    return rule


def expected_gain(threshold: float) -> Rule:
    """All levels whole but the lowest upper one, of which the nodes are opened whose estimated
    error is above `threshold`: the softmax share of their mean x deviation of their logits (1 at
    most) x spread of their values, relative to the values' norm."""

    def rule(step: Step, depth: int) -> np.ndarray:
        reached = step.reached[depth]
        if depth > 1:
            return reached
        level = step.view.levels[depth]
        doubt = np.minimum(step.deviation.mean(1) * level.radius, 1.0)
        doubt = doubt * level.value_spread / step.view.value_norm
        return reached & (step.shares(depth, 0.0) * doubt > threshold)

    return rule


def raised_share(threshold: float) -> Rule:
    """All levels whole but the lowest upper one, of which the nodes are opened whose raised share
    is above `threshold`."""

    def rule(step: Step, depth: int) -> np.ndarray:
        reached = step.reached[depth]
        return reached if depth > 1 else reached & (step.shares(depth) > threshold)

    return rule


def far_leaves(view: View, share: float) -> Extra:
    """The leaves farthest from their parent, always reached."""
    mask = view.far_leaves(share)
    return lambda step: np.broadcast_to(mask, (len(step.queries), len(mask)))


def far_keys(view: View, share: float) -> Extra:
    """The leaves that hold the keys farthest from their mean, always reached."""
    mask = view.far_keys(share)
    return lambda step: np.broadcast_to(mask, (len(step.queries), len(mask)))


def search_leaves(field: int, deviations: float = 3.0) -> Extra:
    """The leaves that an M-DCI search of each query reaches: `field` nodes opened per level, ranked
    by the inner product of their mean plus `deviations` of their spread."""

    def extra(step: Step) -> np.ndarray:
        found = np.zeros((len(step.queries), len(step.view.levels[0].count)), bool)
        for query in range(step.queries.shape[1]):
            reached = np.ones((len(found), len(step.view.levels[-1].count)), bool)
            for depth in range(len(step.view.levels) - 1, -1, -1):
                level = step.view.levels[depth]
                product = step.logits[depth][:, query] - np.log(level.count)
                reach = product + deviations * step.deviation[:, query] * level.radius
                opened = best(reach, reached, field)
                reached = opened[:, step.view.levels[depth - 1].parent] if depth else opened
            found |= reached
        return found

    return extra

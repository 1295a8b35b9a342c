"""A decode step over the tree of one KV head, written for reading, with the opening rule left open.

The other scripts compare rules with it. A rule is a function `(step, depth) -> mask`: which of the
upper nodes of level `depth` that were reached, [positions, nodes], to open. Everything is computed
for all nodes, and masks say what a rule would read: rows are counted, not saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from icecache import LayerCache

SINK, WINDOW = 32, 64
OPTIONS: dict[str, int] = {"sink_tokens": SINK, "window_tokens": WINDOW, "dense_below": 0}
SPREAD_WEIGHT = 2.0


@dataclass(frozen=True)
class Level:
    """Nodes of one level; level 0 holds the leaves."""

    parent: np.ndarray
    count: np.ndarray
    radius: np.ndarray
    """RMS distance of the keys to their mean."""
    value_spread: np.ndarray
    keys: np.ndarray
    """[nodes, dim], without the mean of all keys."""
    values: np.ndarray


class View:
    """The tree of one KV head, and all its rows. Tokens are in the order of their leaves."""

    def __init__(self, layer: LayerCache, head: int, keys: np.ndarray, values: np.ndarray) -> None:
        """`keys`, `values`: [n, dim], all rows that `layer` stores."""
        nodes = layer._core.nodes(head)
        if nodes is None:
            raise ValueError("the head has no tree yet")
        dim = keys.shape[1]
        self.mean: np.ndarray = nodes["mean"]
        self.levels = [
            Level(
                parent=level["parent"].astype(np.int64),
                count=level["count"].astype(np.int64),
                radius=level["key_radius"],
                value_spread=level["value_spread"],
                keys=level["keys"].reshape(-1, dim),
                values=level["values"].reshape(-1, dim),
            )
            for level in nodes["levels"]
        ]
        self.ids = nodes["ids"].astype(np.int64)
        self.leaf = np.repeat(np.arange(len(self.levels[0].count)), self.levels[0].count)
        self.keys, self.values = keys[self.ids], values[self.ids]
        outside = np.ones(len(keys), bool)
        outside[self.ids] = False
        self.always = np.flatnonzero(outside)
        """Positions of sink and window."""
        self.always_keys, self.always_values = keys[self.always], values[self.always]
        self.value_norm = float(np.sqrt((values**2).sum(1).mean()))

    @cached_property
    def farthest(self) -> list[np.ndarray]:
        """Per level, the distance of a node's farthest key to the node's mean."""
        farthest, node = [], self.leaf
        for level in self.levels:
            distance = np.linalg.norm(self.keys - self.mean - level.keys[node], axis=1)
            farthest.append(np.zeros(len(level.count)))
            np.maximum.at(farthest[-1], node, distance)
            if level is not self.levels[-1]:
                node = level.parent[node]
        return farthest

    def far_leaves(self, share: float) -> np.ndarray:
        """The leaves farthest from their parent's mean, a mask."""
        leaves, parents = self.levels[0], self.levels[1]
        distance = np.linalg.norm(leaves.keys - parents.keys[leaves.parent], axis=1)
        return distance >= np.quantile(distance, 1 - share)

    def far_keys(self, share: float) -> np.ndarray:
        """The leaves whose farthest key is farthest from the leaf's mean, a mask."""
        return self.farthest[0] >= np.quantile(self.farthest[0], 1 - share)


class Step:
    """The scores that a rule decides by, for some positions at once.

    `queries`: [positions, group, dim], scaled. `visible`: how many tokens each position sees.
    """

    def __init__(self, view: View, queries: np.ndarray, visible: np.ndarray) -> None:
        self.view, self.queries = view, queries
        hidden = view.always >= visible[:, None, None]
        self.always = np.where(hidden, -np.inf, queries @ view.always_keys.T)
        offset = (queries @ view.mean)[..., None]
        self.logits = [
            queries @ level.keys.T + offset + np.log(level.count) for level in view.levels
        ]
        self.deviation = np.linalg.norm(queries, axis=-1, keepdims=True) / queries.shape[-1] ** 0.5
        self.high = np.maximum(
            self.always.max(-1, keepdims=True), self.logits[0].max(-1, keepdims=True)
        )
        """[positions, group, 1]: all weights are taken under it."""
        self.always_sum = np.exp(self.always - self.high).sum(-1, keepdims=True)
        self.token_logits = queries @ view.keys.T
        self.start()

    def start(self) -> None:
        """Forgets what was reached, for another rule."""
        self.closed_sum = np.zeros_like(self.always_sum)
        self.reached: dict[int, np.ndarray] = {}
        """Per level, which nodes were reached so far, [positions, nodes]."""

    def weights(self, depth: int) -> np.ndarray:
        """[positions, group, nodes]"""
        return np.exp(self.logits[depth] - self.high)

    def total(self, depth: int) -> np.ndarray:
        """The estimated sum of all weights, [positions, group, 1], from what was reached."""
        seen = self.weights(depth) * self.reached[depth][:, None]
        return self.always_sum + self.closed_sum + seen.sum(-1, keepdims=True)

    def shares(self, depth: int, spread: float = SPREAD_WEIGHT) -> np.ndarray:
        """Share of the softmax that a node may hold, summed over the group, [positions, nodes]:
        that of its mean, `spread` deviations higher. 0 where it was not reached."""
        raised = (
            self.logits[depth]
            - self.high
            + spread * self.deviation * self.view.levels[depth].radius
        )
        shares = np.exp(np.minimum(raised, 80)) / self.total(depth)
        return np.where(self.reached[depth], shares.sum(1), 0.0)

    def far_shares(self, depth: int, weight: float) -> np.ndarray:
        """Share of the softmax that a node's farthest key alone may hold, as `shares`."""
        raised = self.logits[depth] - np.log(self.view.levels[depth].count) - self.high
        raised = raised + weight * self.deviation * self.view.farthest[depth]
        shares = np.exp(np.minimum(raised, 80)) / self.total(depth)
        return np.where(self.reached[depth], shares.sum(1), 0.0)


Rule = Callable[[Step, int], np.ndarray]
"""Which of the reached upper nodes of a level to open, [positions, nodes]."""
Extra = Callable[[Step], np.ndarray]
"""Leaves to read whatever the descent says, [positions, leaves]."""


@dataclass(frozen=True)
class Outcome:
    """What a step did. Rows include sink, window and nodes, as the package counts them."""

    out: np.ndarray
    """[positions, group, dim]"""
    selected: np.ndarray
    """[positions, tokens], in the order of `View.ids`."""
    key_rows: np.ndarray
    value_rows: np.ndarray


def best(scores: np.ndarray, allowed: np.ndarray, counts: np.ndarray | int) -> np.ndarray:
    """A mask of the `counts` allowed entries of highest score, per row."""
    order = np.argsort(np.where(allowed, -scores, np.inf), axis=-1, kind="stable")
    mask = np.zeros(scores.shape, bool)
    first = np.arange(scores.shape[-1]) < np.reshape(counts, (-1, 1))
    np.put_along_axis(mask, order, first, axis=-1)
    return mask & allowed


def enough(scores: np.ndarray, allowed: np.ndarray, sizes: np.ndarray, least: int) -> np.ndarray:
    """A mask of the allowed entries of highest score until their sizes reach `least`, per row."""
    order = np.argsort(np.where(allowed, -scores, np.inf), axis=-1, kind="stable")
    held = np.cumsum(np.take_along_axis(np.where(allowed, sizes, 0), order, -1), -1)
    counts = (held < least).sum(-1) + 1
    return best(scores, allowed, counts)


def decode(
    step: Step,
    rule: Rule,
    *,
    budget: int,
    candidates: int,
    extra: Extra | None = None,
    far: float = 0.0,
) -> Outcome:
    """A decode step under a rule: descend, score candidates, select, add the tail.

    `far`: leaves also count for one key that lies this many deviations along its query, where a
    deviation is that of the leaf's farthest key.
    """
    step.start()
    view, queries = step.view, step.queries
    top = len(view.levels) - 1
    reached = np.ones((len(queries), len(view.levels[top].count)), bool)
    numerator = np.exp(step.always - step.high) @ view.always_values
    key_rows = np.full(len(queries), len(view.always))
    value_rows = key_rows.copy()
    forced = None if extra is None else extra(step)

    for depth in range(top, 0, -1):
        step.reached[depth] = reached
        level = view.levels[depth]
        key_rows += reached.sum(-1)
        opened = rule(step, depth) & reached
        short = (level.count * opened).sum(-1) < candidates
        if short.any():
            least = enough(step.shares(depth), reached, level.count, candidates)
            opened = np.where(short[:, None], opened | least, opened)
        if forced is not None:
            opened |= reached & ancestors(view, forced, depth)
        closed = step.weights(depth) * (reached & ~opened)[:, None]
        step.closed_sum += closed.sum(-1, keepdims=True)
        numerator += closed @ level.values
        value_rows += (reached & ~opened).sum(-1)
        reached = opened[:, view.levels[depth - 1].parent]

    step.reached[0] = reached
    leaves = view.levels[0]
    key_rows += reached.sum(-1)
    ranked = step.shares(0)
    if far:
        ranked = np.maximum(ranked, step.far_shares(0, far))
    read = enough(ranked, reached, leaves.count, candidates)
    if forced is not None:
        read |= forced
    unread = step.weights(0) * (reached & ~read)[:, None]
    step.closed_sum += unread.sum(-1, keepdims=True)
    numerator += unread @ leaves.values
    value_rows += (reached & ~read).sum(-1)

    candidate = read[:, view.leaf]
    key_rows += candidate.sum(-1)
    logits = np.where(candidate[:, None], step.token_logits, -np.inf)
    high = np.maximum(step.high, logits.max(-1, keepdims=True))
    rescale = np.exp(step.high - high)
    weights = np.exp(logits - high)
    total = (step.always_sum + step.closed_sum) * rescale + weights.sum(-1, keepdims=True)
    selected = best((weights / total).sum(1), candidate, budget)
    left = weights * ~selected[:, None]
    value_rows += selected.sum(-1)
    starts = np.concatenate([[0], np.cumsum(leaves.count)[:-1]])
    whole = np.add.reduceat(selected, starts, axis=-1) == leaves.count
    value_rows += (read & ~whole).sum(-1)
    numerator = (
        numerator * rescale
        + (weights * selected[:, None]) @ view.values
        + np.add.reduceat(left, starts, axis=-1) @ leaves.values
    )
    return Outcome(numerator / total, selected, key_rows, value_rows)


def ancestors(view: View, leaves: np.ndarray, depth: int) -> np.ndarray:
    """Whether a node of level `depth` is above one of the leaves of a mask."""
    for level in range(depth):
        above = np.zeros((len(leaves), len(view.levels[level + 1].count)), bool)
        rows, nodes = np.nonzero(leaves)
        above[rows, view.levels[level].parent[nodes]] = True
        leaves = above
    return leaves


def exact(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Full attention, [positions, group, dim], and the log-sum-exp of each query's logits."""
    logits = np.concatenate([step.always, step.token_logits], axis=-1)
    high = logits.max(-1, keepdims=True)
    weights = np.exp(logits - high)
    total = weights.sum(-1, keepdims=True)
    values = np.concatenate([step.view.always_values, step.view.values])
    return weights @ values / total, (np.log(total) + high)[..., 0]

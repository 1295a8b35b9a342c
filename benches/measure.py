"""What the comparisons share: trees of one head, planted needles, errors, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from tree_view import OPTIONS, SINK, WINDOW, Extra, Rule, Step, View, decode, exact

from icecache import IceConfig, LayerCache

NEEDLES = 4
"""Planted per head, in a tree of their own: errors are measured without them."""


@dataclass(frozen=True)
class Problem:
    """One KV head: `k`, `v` [n, dim], and queries of its last positions, [positions, group, dim],
    scaled; the last query is of position n - 1, and neighbours are `stride` positions apart."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    stride: int

    @property
    def visible(self) -> np.ndarray:
        return len(self.k) - self.stride * np.arange(len(self.q))[::-1]


@dataclass(frozen=True)
class Candidate:
    """A rule under its name; `extra` makes, for a tree, the leaves that are reached besides."""

    name: str
    rule: Rule
    extra: Callable[[View], Extra] | None = None


@dataclass(frozen=True)
class Result:
    """One rule on one head and seed; the errors are relative, one per query."""

    name: str
    errors: np.ndarray
    found: np.ndarray
    key_share: float
    value_share: float


def build(problem: Problem, seed: int, **options: object) -> View:
    """The tree that the package builds over a head's rows."""
    config = IceConfig(**{**OPTIONS, "seed": seed, **options})
    layer = LayerCache(1, 1, problem.k.shape[1], config, 1.0)
    layer.prefill(problem.k[None], problem.v[None])
    return View(layer, 0, problem.k, problem.v)


def check(problem: Problem, seed: int, rule: Rule) -> None:
    """Refuses to measure if `rule` does not select what the package selects by default."""
    group = problem.q.shape[1]
    layer = LayerCache(group, 1, problem.k.shape[1], IceConfig(**OPTIONS, seed=seed), 1.0)
    layer.prefill(problem.k[None], problem.v[None])
    out = layer.attend(np.ascontiguousarray(problem.q[-1][:, None]))[:, 0]
    view = View(layer, 0, problem.k, problem.v)
    mine = decode(Step(view, problem.q[-1:], problem.visible[-1:]), rule)
    positions = np.union1d(view.always, view.ids[mine.selected[0]])
    stats = layer.stats()
    same = np.array_equal(positions, layer.selected()[0])
    rows = (mine.key_rows[0], mine.value_rows[0]) == (stats.key_rows_read, stats.value_rows_read)
    if not (same and rows and np.allclose(mine.out[0], out, rtol=1e-3, atol=1e-4)):
        raise SystemExit("the readable step disagrees with the package: nothing was measured")


def plant(problem: Problem, seed: int) -> tuple[Problem, list[tuple[int, int, int]]]:
    """Needles among the stored keys, at random positions in the tree: a key moves along one query
    until that query gives it half of its attention. Returns (position, query, query head) each."""
    random = np.random.default_rng(seed)
    keys = problem.k.copy()
    n, group = len(keys), problem.q.shape[1]
    chosen = np.linspace(0, len(problem.q) - 1, NEEDLES).round().astype(int)
    places = random.choice(np.arange(SINK, n - WINDOW - 32), NEEDLES, replace=False)
    needles = []
    for place, i in zip(places, chosen, strict=True):
        head = int(random.integers(group))
        query = problem.q[i, head]
        logits = problem.k[: problem.visible[i]] @ query
        rest = np.delete(logits, place)
        high = rest.max()
        wanted = high + np.log(np.exp(rest - high).sum())
        keys[place] += (wanted - logits[place]) * query / (query @ query)
        needles.append((int(place), int(i), head))
    return Problem(keys, problem.v, problem.q, problem.stride), needles


def measure(
    problem: Problem, seed: int, candidates: Iterable[Candidate], needles: bool = True
) -> list[Result]:
    """All rules on one head: one tree without needles, one with."""
    view = build(problem, seed)
    step = Step(view, problem.q, problem.visible)
    truth, _ = exact(step)
    hidden = None
    if needles:
        changed, planted = plant(problem, seed)
        places, queries, _ = (np.array(x) for x in zip(*planted, strict=True))
        other = build(changed, seed)
        hidden = Step(other, problem.q[queries], problem.visible[queries])
        rows = np.argsort(other.ids)[np.searchsorted(np.sort(other.ids), places)]
    results = []
    for candidate in candidates:
        extra = candidate.extra and candidate.extra(view)
        outcome = decode(step, candidate.rule, extra=extra)
        found = np.zeros(0, bool)
        if hidden is not None:
            extra = candidate.extra and candidate.extra(other)
            found = decode(hidden, candidate.rule, extra=extra).selected[np.arange(NEEDLES), rows]
        results.append(
            Result(
                candidate.name,
                relative(outcome.out, truth),
                found,
                float(outcome.key_rows.mean() / len(problem.k)),
                float(outcome.value_rows.mean() / len(problem.k)),
            )
        )
    return results


def relative(out: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The relative error of each query's output."""
    return (np.linalg.norm(out - truth, axis=-1) / np.linalg.norm(truth, axis=-1)).ravel()


def rms(errors: Iterable[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.concatenate(list(errors)) ** 2)))

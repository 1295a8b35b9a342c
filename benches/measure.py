"""What the comparisons share: trees of one head, planted needles, errors, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from tree_view import OPTIONS, SINK, WINDOW, Extra, Outcome, Rule, Step, View, decode, exact

from icecache import IceConfig, LayerCache

BUDGET, FACTOR, SHARE = 64, 8, 0.75
"""What the package does up to 8,192 tokens. Longer trees are held to the same here."""
NEEDLES = 4
"""Of each of two kinds, planted per head in a tree of their own: errors are measured without."""


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
    factor: int = FACTOR
    """Keys scored exactly, as a multiple of the budget."""
    far: float = 0.0
    """See `decode`."""


@dataclass(frozen=True)
class Result:
    """One rule on one head and seed; the errors are relative, one per query."""

    name: str
    errors: list[float]
    likely: float
    """Share of the likely needles that were selected."""
    aligned: float
    """The same of the needles that lie along their query."""
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
    config = IceConfig(**OPTIONS, seed=seed, candidate_factor=FACTOR, open_fraction=SHARE)
    layer = LayerCache(group, 1, problem.k.shape[1], config, 1.0)
    layer.prefill(problem.k[None], problem.v[None])
    out = layer.attend(np.ascontiguousarray(problem.q[-1][:, None]))[:, 0]
    view = View(layer, 0, problem.k, problem.v)
    step = Step(view, problem.q[-1:], problem.visible[-1:])
    candidates = config.token_budget * FACTOR
    mine = decode(step, rule, budget=config.token_budget, candidates=candidates)
    positions = np.union1d(view.always, view.ids[mine.selected[0]])
    stats = layer.stats()
    same = np.array_equal(positions, layer.selected()[0])
    # The readable step reads the values of faint nodes too.
    rows = mine.key_rows[0] == stats.key_rows_read and mine.value_rows[0] >= stats.value_rows_read
    if not (same and rows and relative(mine.out[0], out).max() < 0.02):
        raise SystemExit("the readable step disagrees with the package: nothing was measured")


def plant(problem: Problem, seed: int) -> tuple[Problem, np.ndarray, np.ndarray]:
    """Needles among the stored keys, at random places of the tree: a key moves until one query
    gives it half of its attention. Returns the positions of the needles and the queries' indices.

    The first half are likely needles: they move along `covariance @ query`, to the point that is
    likeliest under the distribution of the keys. The others move along the query itself, the
    shortest way, where keys hardly ever are: the worst case for a rank by mean and spread.
    """
    random = np.random.default_rng(seed)
    keys = problem.k.copy()
    n, group = len(keys), problem.q.shape[1]
    covariance = np.cov(problem.k, rowvar=False).astype(np.float32)
    chosen = np.tile(np.linspace(0, len(problem.q) - 1, NEEDLES).round().astype(int), 2)
    places = random.choice(np.arange(SINK, n - WINDOW - 32), 2 * NEEDLES, replace=False)
    for needle, (place, i) in enumerate(zip(places, chosen, strict=True)):
        query = problem.q[i, random.integers(group)]
        direction = covariance @ query if needle < NEEDLES else query
        logits = problem.k[: problem.visible[i]] @ query
        rest = np.delete(logits, place)
        wanted = rest.max() + np.log(np.exp(rest - rest.max()).sum())
        keys[place] += (wanted - logits[place]) * direction / (query @ direction)
    return Problem(keys, problem.v, problem.q, problem.stride), places, chosen


def measure(problem: Problem, seed: int, candidates: Iterable[Candidate]) -> list[Result]:
    """All rules on one head: one tree without needles, one with."""
    view = build(problem, seed)
    step = Step(view, problem.q, problem.visible)
    truth, _ = exact(step)
    changed, places, queries = plant(problem, seed)
    other = build(changed, seed)
    hidden = Step(other, problem.q[queries], problem.visible[queries])
    rows = np.argsort(other.ids)[np.searchsorted(np.sort(other.ids), places)]
    results = []
    for candidate in candidates:

        def outcome_of(step: Step, candidate: Candidate = candidate) -> Outcome:
            extra = candidate.extra and candidate.extra(step.view)
            return decode(
                step,
                candidate.rule,
                budget=BUDGET,
                candidates=BUDGET * candidate.factor,
                extra=extra,
                far=candidate.far,
            )

        outcome = outcome_of(step)
        found = outcome_of(hidden).selected[np.arange(2 * NEEDLES), rows]
        results.append(
            Result(
                name=candidate.name,
                errors=relative(outcome.out, truth).tolist(),
                likely=float(found[:NEEDLES].mean()),
                aligned=float(found[NEEDLES:].mean()),
                key_share=float(outcome.key_rows.mean() / len(problem.k)),
                value_share=float(outcome.value_rows.mean() / len(problem.k)),
            )
        )
    return results


def relative(out: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The relative error of each query's output."""
    return (np.linalg.norm(out - truth, axis=-1) / np.linalg.norm(truth, axis=-1)).ravel()

"""What the measurements rest on: the recipe of long rows, the readable step, the needles."""

import numpy as np
import pytest
import torch
from kv_arrays import make_problem
from long_rows import curves, top_mass
from measure import NEEDLES, Problem, build, check, plant
from opening import SHIPPED
from rules import share_of_lowest
from tree_view import Step, decode, exact

from icecache.bench.lengthen import FIRST, LAST, lengthen, rotate


def head(n=3000, dim=32, group=3):
    """One KV head of topics that return, queries of its last positions."""
    made = make_problem("numpy-f32", kv_heads=1, group=group, dim=dim, n=n)
    q = made.q[:, n - 32 :: 8].transpose(1, 0, 2) * made.scale
    return Problem(made.k[0], made.v[0], q, 8)


def test_the_readable_step_selects_what_the_package_selects():
    check(head(), 0, SHIPPED)
    with pytest.raises(SystemExit, match="disagrees"):
        check(head(), 0, share_of_lowest(0.1))


def test_a_step_that_scores_every_key_and_selects_it_is_exact():
    problem = head(900)
    step = Step(build(problem, 0), problem.q, problem.visible)
    outcome = decode(step, share_of_lowest(1.0), budget=900, candidates=900)
    np.testing.assert_allclose(outcome.out, exact(step)[0], rtol=1e-4, atol=1e-5)


def test_a_needle_gets_half_of_the_attention_of_its_query():
    problem = head()
    planted, places, queries = plant(problem, 0)
    changed = np.flatnonzero((planted.k != problem.k).any(1))
    assert np.array_equal(np.sort(places), changed) and len(places) == 2 * NEEDLES
    for place, i in zip(places, queries, strict=True):
        keys = problem.k.copy()
        keys[place] = planted.k[place]
        logits = problem.q[i] @ keys[: problem.visible[i]].T
        mass = np.exp(logits - logits.max(1, keepdims=True))
        mass /= mass.sum(1, keepdims=True)
        assert np.abs(mass[:, place] - 0.5).min() < 0.01


def test_rotated_keys_meet_queries_as_if_they_were_farther_away():
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 16)
    torch.testing.assert_close(rotate(rotate(k, 300), -100), rotate(k, 200), atol=1e-4, rtol=1e-4)
    products = (rotate(q, 900) * rotate(k, 500)).sum(-1)
    torch.testing.assert_close(products, (q * rotate(k, -400)).sum(-1), atol=1e-3, rtol=1e-3)


def test_long_rows_keep_their_ends_and_the_spread_of_what_is_between():
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 1000, 16) * torch.linspace(0.2, 2, 16)
    long_k, long_v = lengthen(k, v, 4500)
    assert long_k.shape == long_v.shape == (3, 4500, 16)
    for long, short in ((long_k, k), (long_v, v)):
        assert torch.equal(long[:, :FIRST], short[:, :FIRST])
        assert torch.equal(long[:, -(1000 - FIRST) :], short[:, FIRST:])
    made, real = long_v[:, FIRST : -1000 + FIRST], v[:, FIRST:-LAST]
    torch.testing.assert_close(made.std(1), real.std(1), atol=0, rtol=0.1)
    norms = [x.square().sum(-1).mean() for x in (long_k[:, FIRST : -1000 + FIRST], k)]
    torch.testing.assert_close(*norms, atol=0, rtol=0.1)
    assert len(torch.unique(long_v[0], dim=0)) >= 4490  # a row may be mixed with itself
    q = torch.randn(3, 2, 8, 16)
    assert top_mass(long_k, q) < top_mass(k, q)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_rows_spread_attention_as_real_ones_do():
    for real, made in curves(2048).values():
        ratios = np.array(made) / np.array(real)
        assert (np.abs(ratios - 1) <= 0.2).all(), ratios

"""`DciTree` against brute force in NumPy."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_arrays import KINDS, cast, dtype_of, examples, make_problem, tensor

from icecache import DciTree

EVERYTHING = 2**31 - 1


def make_keys(kind, n, dim, seed=0, content="clustered"):
    """[n, dim]"""
    return make_problem(kind, 1, 1, dim, max(n, 1), seed, content).k[0][:n]


def brute_force(keys, queries, k):
    """The k best inner products, [m, k] in float64, best first; and all of them, [m, n]."""
    products = (tensor(queries) @ tensor(keys).T).numpy()
    return -np.sort(-products, axis=1)[:, :k], products


def assert_finds_the_best(ids, scores, keys, queries, k):
    """Ids without repetition whose products are the k largest, best first; padding after."""
    n, m = len(keys), len(queries)
    best, products = brute_force(keys, queries, k)
    found = min(k, n)
    sizes = tensor(queries).norm(dim=1)[:, None] * tensor(keys).norm(dim=1)
    bound = 1e-5 * float(sizes.max()) if n else 0.0
    assert ids.shape == scores.shape == (m, k)
    assert ids.dtype == np.int64 and scores.dtype == np.float32
    assert (ids[:, found:] == -1).all() and np.isneginf(scores[:, found:]).all()
    assert ((ids[:, :found] >= 0) & (ids[:, :found] < n)).all()
    assert all(len(set(row)) == found for row in ids[:, :found].tolist())
    own = np.take_along_axis(products, ids[:, :found], axis=1)
    np.testing.assert_allclose(scores[:, :found], own, rtol=0, atol=bound)
    np.testing.assert_allclose(own, best, rtol=0, atol=bound)
    assert (np.diff(scores[:, :found], axis=1) <= 0).all()


@st.composite
def trees(draw, dim):
    page_size = draw(st.integers(1, 9))
    return DciTree(
        dim,
        seed=draw(st.integers(0, 100)),
        page_size=page_size,
        page_capacity=draw(st.one_of(st.none(), st.integers(page_size, 3 * page_size))),
        fanout=draw(st.integers(2, 13)),
        refine_passes=draw(st.integers(0, 3)),
        scan_below=draw(st.sampled_from([1, 10, 16384])),
        summary_dtype=draw(st.sampled_from(["f32", "f16", "bf16"])),
        num_threads=draw(st.sampled_from([None, 1, 2, 3])),
    )


@pytest.mark.parametrize("kind", KINDS)
@examples(0.4)
@given(
    data=st.data(),
    dim=st.sampled_from([1, 3, 16, 33]),
    batches=st.lists(st.one_of(st.integers(0, 20), st.integers(200, 500)), max_size=5),
    k=st.integers(1, 20),
    content=st.sampled_from(["normal", "clustered", "twins", "offset"]),
    seed=st.integers(0, 1000),
)
def test_it_finds_what_brute_force_finds(kind, data, dim, batches, k, content, seed):
    tree = data.draw(trees(dim))
    keys = make_keys(kind, sum(batches), dim, seed, content)
    start = 0
    for batch in batches:
        tree.insert(keys[start : start + batch])
        start += batch
        tree.check()
        assert len(tree) == start
    queries = cast(kind, np.random.default_rng(seed + 1).standard_normal((3, dim)))
    ids, scores = tree.exact_search(queries, k)
    assert_finds_the_best(ids, scores, keys, queries, k)
    assert tree.stats().last_keys_scored == len(keys)
    # A field of view over everything is brute force; a narrow one finds true keys and products.
    assert_finds_the_best(*tree.search(queries, k, field_of_view=EVERYTHING), keys, queries, k)
    ids, scores = tree.search(queries, k, field_of_view=1)
    _, products = brute_force(keys, queries, k)
    for row, (mine, given_) in enumerate(zip(ids, scores, strict=True)):
        real = mine[mine >= 0]
        assert len(set(real.tolist())) == len(real) and np.isneginf(given_[mine < 0]).all()
        np.testing.assert_allclose(given_[: len(real)], products[row, real], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["numpy-f32", "torch-bf16"])
@pytest.mark.parametrize("how", ["bulk", "batches", "one by one"])
def test_recall_on_clustered_keys_reading_little(kind, how):
    n, dim, k = 5000, 32, 10
    keys = make_keys(kind, n, dim)
    # Queries near keys, as queries in attention are.
    random = np.random.default_rng(1)
    near = tensor(keys).numpy()[random.integers(n, size=100)]
    queries = cast(kind, near + 0.4 * random.standard_normal((100, dim)))
    tree = DciTree(dim)
    batch = {"bulk": n, "batches": 700, "one by one": 1}[how]
    for start in range(0, n, batch):
        tree.insert(keys[start : start + batch])
    tree.check()
    ids, _ = tree.search(queries, k)
    stats = tree.stats()
    want, _ = tree.exact_search(queries, k)
    recall = np.mean([np.isin(b, a).mean() for a, b in zip(ids, want, strict=True)])
    assert recall >= 0.9, f"recall {recall:.3f}"
    assert 0 < stats.last_keys_scored <= 0.2 * n and 0 < stats.last_nodes_scored <= 0.25 * n
    assert tree.stats().last_keys_scored == n


@pytest.mark.parametrize("n", [1, 255, 256, 600])
def test_identical_keys(n):
    tree = DciTree(4)
    tree.insert(np.full((n, 4), 0.5, np.float32))
    tree.check()
    ids, scores = tree.search(np.ones((1, 4), np.float32), n + 3, field_of_view=EVERYTHING)
    assert sorted(ids[0].tolist()) == [-1] * 3 + list(range(n))
    assert (scores[0, :n] == 2.0).all()
    for _ in range(40):
        tree.insert(np.full((1, 4), 0.5, np.float32))
    tree.check()
    assert len(tree) == n + 40


@pytest.mark.parametrize(
    ("n", "distinct", "options"),
    [
        (256, 12, dict(page_size=1, fanout=2, refine_passes=1, seed=9)),
        (400, 20, dict(page_size=1, fanout=3, refine_passes=2, seed=1)),
        (20_000, None, dict(seed=2)),
    ],
)
def test_many_identical_keys_of_a_few_sorts(n, distinct, options):
    # Nodes at one place: all but one of them lose their children when everything is linked anew.
    random = np.random.default_rng(options["seed"])
    if distinct:
        keys = random.standard_normal((distinct, 4)).astype(np.float32)
        keys = keys[random.integers(distinct, size=n)]
    else:
        keys = random.standard_normal((n, 8)).astype(np.float32)
        keys[random.random(n) < 0.9] = 0.5
    tree = DciTree(keys.shape[1], **options)
    tree.insert(keys)
    tree.check()
    assert_finds_the_best(*tree.search(keys[:3], 5, field_of_view=EVERYTHING), keys, keys[:3], 5)


@given(n=st.integers(300, 900), threads=st.integers(2, 5), seed=st.integers(0, 99))
@examples(0.25)
def test_threads_change_nothing_and_a_seed_decides(n, threads, seed):
    keys = make_keys("numpy-f32", n, 16, seed)
    results = []
    for count in (1, threads):
        tree = DciTree(16, seed=seed, num_threads=count)
        tree.insert(keys[: n - 20])
        tree.insert(keys[n - 20 :])
        results.append((*tree.search(keys[:50], 5, field_of_view=2), tree.stats()))
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    other = DciTree(16, seed=seed + 1)
    other.insert(keys)
    other.check()
    assert len(other) == n


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_how_large_it_is(kind):
    tree = DciTree(32)
    assert len(tree) == 0 and tree.stats().key_bytes == tree.stats().index_bytes == 0
    tree.insert(make_keys(kind, 3000, 32))
    stats = tree.stats()
    item = 4 if dtype_of(kind) == "f32" else 2
    assert stats.keys == len(tree) == 3000 and stats.key_bytes == 3000 * 32 * item
    assert stats.nodes_per_level[0] == stats.pages > stats.nodes_per_level[-1] > 0
    assert stats.mean_page_fill == pytest.approx(3000 / stats.pages)
    # At least a mean key (f16) per page and an id per key.
    assert stats.index_bytes >= stats.pages * 32 * 2 + 3000 * 4
    assert stats.overhead == pytest.approx(stats.index_bytes / stats.key_bytes)
    assert stats.overhead < 0.5 * 4 / item
    assert repr(tree) == "DciTree(dim=32, keys=3000)"


def test_scores_are_products_of_the_stored_keys():
    # Of the rounded keys with the query as given: any kind of query may be asked.
    keys = make_keys("numpy-f16", 300, 8)
    tree = DciTree(8)
    tree.insert(keys)
    query = np.random.default_rng(0).standard_normal((1, 8)).astype(np.float32)
    for kind in KINDS:
        asked = cast(kind, query)
        ids, scores = tree.exact_search(asked, 5)
        assert_finds_the_best(ids, scores, keys, asked, 5)


BAD_CALLS = {
    "a vector": (lambda t: t.insert(np.zeros(8, np.float32)), ValueError, r"keys must have"),
    "rank 3": (
        lambda t: t.insert(np.zeros((1, 2, 8), np.float32)),
        ValueError,
        r"keys must have shape \[n, ",
    ),
    "another width": (
        lambda t: t.insert(np.zeros((2, 7), np.float32)),
        ValueError,
        r"keys must have shape \[n, 8\], got \[2, 7\]",
    ),
    "another dtype": (
        lambda t: t.insert(np.zeros((2, 8), np.float16)),
        TypeError,
        "keys must be f32 like what is stored, got f16",
    ),
    "float64": (lambda t: t.insert(np.zeros((2, 8))), TypeError, "got float64"),
    "bare uint16": (lambda t: t.insert(np.zeros((2, 8), np.uint16)), TypeError, "ml_dtypes"),
    "a list": (lambda t: t.insert([[0.0] * 8]), TypeError, "got list"),
    "NaN": (
        lambda t: t.insert(np.array([[0.0] * 8, [0.0] * 7 + [np.nan]], np.float32)),
        ValueError,
        "keys must be finite, got NaN in row 1",
    ),
    "an infinite query": (
        lambda t: t.search(np.full((1, 8), -np.inf, np.float32), 1),
        ValueError,
        "queries must be finite, got -inf",
    ),
    "a query of NaN": (
        lambda t: t.exact_search(np.array([[0.0] * 8] * 2 + [[np.nan] * 8], np.float32), 1),
        ValueError,
        "queries must be finite, got NaN in row 2",
    ),
    "query width": (
        lambda t: t.search(np.zeros((1, 9), np.float32), 1),
        ValueError,
        r"queries must have shape \[n, 8\]",
    ),
    "a vector of a query": (
        lambda t: t.exact_search(np.zeros(8, np.float32), 1),
        ValueError,
        "queries must have",
    ),
    "k of 0": (
        lambda t: t.search(np.zeros((1, 8), np.float32), 0),
        ValueError,
        r"\bk must be .*got 0",
    ),
    "a float k": (
        lambda t: t.search(np.zeros((1, 8), np.float32), 1.0),
        (TypeError, ValueError),
        r"\bk must be .*got 1\.0",
    ),
    "a field of view of -1": (
        lambda t: t.search(np.zeros((1, 8), np.float32), 1, field_of_view=-1),
        ValueError,
        r"field_of_view must be .*got -1",
    ),
    "no field of view": (
        lambda t: t.search(np.zeros((1, 8), np.float32), 1, field_of_view=()),
        ValueError,
        "field_of_view must have a number for the leaves, got none",
    ),
    "a field of view of 0 above": (
        lambda t: t.search(np.zeros((1, 8), np.float32), 1, field_of_view=(8, 0)),
        ValueError,
        r"field_of_view must be .*got 0",
    ),
    "gradients": (
        lambda t: t.insert(torch.zeros(2, 8, requires_grad=True)),
        ValueError,
        "keys records gradients",
    ),
    "another device": (
        lambda t: t.insert(torch.zeros(2, 8, device="meta")),
        TypeError,
        "keys must be on the CPU, got a tensor on meta",
    ),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
@pytest.mark.parametrize("n", [10, 400])
def test_bad_input_is_refused_and_changes_nothing(bad, n):
    keys = make_keys("numpy-f32", n, 8)
    tree, untouched = DciTree(8), DciTree(8)
    tree.insert(keys)
    untouched.insert(keys)
    call, error, message = BAD_CALLS[bad]
    with pytest.raises(error, match=message):
        call(tree)
    tree.check()
    for each in (tree, untouched):
        each.insert(keys[:3])
    a, b = (each.search(keys[:4], 3) for each in (tree, untouched))
    assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
    assert len(tree) == n + 3 and tree.stats() == untouched.stats()


@pytest.mark.parametrize("name", ["page_size", "page_capacity", "fanout", "num_threads"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "4"])
def test_bad_options_are_refused(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        DciTree(8, **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        dict(dim=0),
        dict(dim=-3),
        dict(dim=True),
        dict(dim=8.0),
        dict(dim=8, seed=-1),
        dict(dim=8, seed=True),
        dict(dim=8, refine_passes=-1),
        dict(dim=8, fanout=1),
        dict(dim=8, page_size=8, page_capacity=7),
        dict(dim=8, summary_dtype="f64"),
        dict(dim=8, summary_dtype=None),
    ],
    ids=str,
)
def test_other_bad_options_are_refused(options):
    with pytest.raises((ValueError, TypeError), match="|".join([*options, "dtype"])):
        DciTree(**options)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2],
        lambda x: x[:, ::2],
        lambda x: x[::-1],
        lambda x: x.T,
        np.asfortranarray,
        lambda x: np.broadcast_to(x[:1], x.shape),
    ],
    ids=["every other row", "every other column", "backwards", "transposed", "fortran", "one row"],
)
def test_views_are_as_good_as_copies(view):
    keys = view(make_keys("numpy-f32", 400, 400))
    a, b = DciTree(keys.shape[1]), DciTree(keys.shape[1])
    a.insert(keys)
    b.insert(np.array(keys, order="C"))
    for mine, theirs in zip(a.search(keys[:9], 4), b.search(keys[:9].copy(), 4), strict=True):
        assert np.array_equal(mine, theirs)


def test_several_threads_search_and_insert():
    keys = make_keys("numpy-f32", 1500, 16)
    tree = DciTree(16)
    tree.insert(keys[:300])
    failures = []

    def run(job):
        try:
            job()
        except BaseException as failure:
            failures.append(failure)

    def search():
        for _ in range(50):
            ids, scores = tree.search(keys[:3], 4)
            assert (ids >= 0).all() and np.isfinite(scores).all()

    def insert():
        for i in range(300, 1500, 100):
            tree.insert(keys[i : i + 100])

    threads = [threading.Thread(target=run, args=(job,)) for job in (search, search, insert)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    tree.check()
    ids, scores = tree.exact_search(keys[:5], 3)
    assert_finds_the_best(ids, scores, keys, keys[:5], 3)


@pytest.mark.parametrize("size", [1e20, 1e30])
def test_huge_queries_find_what_their_directions_find(size):
    keys, queries = make_keys("numpy-f32", 900, 8), make_keys("numpy-f32", 30, 8, seed=1)
    tree = DciTree(8)
    tree.insert(keys)
    for search in (tree.search, tree.exact_search):
        ids, scores = search((queries * size).astype(np.float32), 4)
        assert np.isfinite(scores).all()
        assert np.mean(ids == search(queries, 4)[0]) > 0.95  # ties may swap


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_says_that_it_cannot_be_copied(copied):
    with pytest.raises(TypeError, match="a DciTree cannot be copied or pickled"):
        copied(DciTree(8))


def test_no_queries():
    tree = DciTree(8)
    tree.insert(make_keys("numpy-f32", 10, 8))
    ids, scores = tree.search(np.zeros((0, 8), np.float32), 3)
    assert ids.shape == scores.shape == (0, 3)

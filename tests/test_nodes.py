"""The view of a tree that measurements are made on says what is stored."""

import numpy as np
from kv_arrays import make_problem, prefilled


def test_nodes_say_what_their_tokens_say():
    problem = make_problem("numpy-f32", n=900, content="offset")
    layer = prefilled(problem, 900, summary_dtype="f32", fanout=3)
    for head, (k, v) in enumerate(zip(problem.k, problem.v, strict=True)):
        nodes = layer._core.nodes(head)
        ids, mean, levels = nodes["ids"], nodes["mean"], nodes["levels"]
        assert sorted(ids) == list(range(32, 900 - 64))
        node = np.repeat(np.arange(len(levels[0]["count"])), levels[0]["count"])
        assert len(levels) > 2
        for level in levels:
            count = len(level["count"])
            assert np.array_equal(np.bincount(node, minlength=count), level["count"])
            rows = (k[ids] - mean, "keys", "key_radius"), (v[ids], "values", "value_spread")
            for stored, name, spread in rows:
                means = level[name].reshape(count, -1)
                want = np.stack([stored[node == i].mean(0) for i in range(count)])
                np.testing.assert_allclose(means, want, atol=1e-4)
                square = ((stored - means[node]) ** 2).sum(1)
                want = [np.sqrt(square[node == i].mean()) for i in range(count)]
                np.testing.assert_allclose(level[spread], want, atol=2e-3)
            if level is not levels[-1]:
                node = level["parent"][node]


def test_there_are_no_nodes_without_a_tree():
    layer = make_problem("numpy-f32").layer()
    assert layer._core.nodes(0) is None

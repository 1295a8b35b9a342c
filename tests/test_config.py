"""`IceConfig`: every option is validated, by name, and reaches the core."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_arrays import make_problem

from icecache import IceConfig, LayerCache

# The least value of every counting option.
LEAST = {
    "token_budget": 1,
    "sink_tokens": 0,
    "window_tokens": 1,
    "candidate_factor": 1,
    "page_size": 1,
    "fanout": 2,
    "field_of_view": 1,
    "refine_passes": 0,
    "dense_layers": 0,
    "dense_below": 0,
    "reuse_layers": 1,
    "sparse_max_queries": 1,
    "seed": 0,
    "num_threads": 1,
}
CHOICES = {
    "selection": ["tokens", "pages"],
    "tail": ["summary", "drop"],
    "summary_dtype": ["f32", "f16", "bf16"],
}
OPTIONS = {field.name for field in dataclasses.fields(IceConfig)}


def test_these_are_all_options():
    others = {"open_fraction", "page_capacity", "device_tokens"}
    assert {*LEAST, *CHOICES, *others} == OPTIONS


def test_the_defaults_that_are_promised():
    config = IceConfig()
    assert (config.token_budget, config.dense_layers) == (64, 0)
    assert (config.candidate_factor, config.open_fraction) == (None, None)
    assert (config.sparse_max_queries, config.seed, config.num_threads) == (32, 0, None)
    assert (config.selection, config.tail) == ("tokens", "summary")


@pytest.mark.parametrize("name", LEAST)
@given(above=st.integers(0, 1000))
def test_counts_are_taken_from_their_least(name, above):
    value = LEAST[name] + above
    assert getattr(IceConfig(**{name: value}), name) == value
    number = getattr(IceConfig(**{name: np.int64(value)}), name)
    assert number == value and type(number) is int


@pytest.mark.parametrize("name", LEAST)
def test_counts_out_of_range_are_refused(name):
    for value in (LEAST[name] - 1, -(2**40), 2**31, 2**70):
        with pytest.raises(ValueError, match=rf"{name} must be between {LEAST[name]} .*{value}"):
            IceConfig(**{name: value})


@pytest.mark.parametrize("name", [*LEAST, "page_capacity", "device_tokens"])
@pytest.mark.parametrize("value", [True, False, 2.0, np.float32(3), "4", [5], np.array([1, 2])])
def test_counts_are_integers(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
        IceConfig(**{name: value})


@pytest.mark.parametrize("name", set(LEAST) - {"num_threads", "candidate_factor"})
def test_counts_are_not_none(name):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got None"):
        IceConfig(**{name: None})


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    for value in CHOICES[name]:
        others = {"tail": "drop"} if (name, value) == ("selection", "pages") else {}
        assert getattr(IceConfig(**{name: value, **others}), name) == value
    for value in ("TOKENS", "", None, 1, ["drop"], "f64"):
        with pytest.raises(ValueError, match=rf"{name} must be one of \('.*got "):
            IceConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "least"),
    [
        (dict(token_budget=70), 70),
        (dict(token_budget=5, page_size=9), 5),
        (dict(token_budget=5, page_size=9, selection="pages", tail="drop"), 18),
        (dict(token_budget=5, page_capacity=11, selection="pages", tail="drop"), 11),
        (dict(token_budget=30, page_capacity=11, selection="pages", tail="drop"), 30),
    ],
)
def test_a_device_holds_what_one_step_selects(options, least):
    assert IceConfig(**options, device_tokens=least).device_tokens == least
    assert IceConfig(**options).device_tokens is None
    with pytest.raises(ValueError, match=f"device_tokens must be between {least} .*{least - 1}"):
        IceConfig(**options, device_tokens=least - 1)
    LayerCache(1, 1, 3, IceConfig(**options, device_tokens=least))  # the core agrees


def test_whole_pages_have_no_tail():
    with pytest.raises(ValueError, match='tail must be "drop"'):
        IceConfig(selection="pages")


@pytest.mark.parametrize(
    "value",
    [0.001, 0.5, 1, 1.0, np.float64(0.25), np.float32(0.5), np.float16(0.1), Fraction(1, 3)],
)
def test_the_open_fraction_is_a_share(value):
    fraction = IceConfig(open_fraction=value).open_fraction
    assert fraction == float(value) and type(fraction) is float
    assert LayerCache(1, 1, 3, IceConfig(open_fraction=value)).config.open_fraction == fraction


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.0001, 2, np.nan, np.inf])
def test_the_open_fraction_is_above_0_and_at_most_1(value):
    with pytest.raises(
        ValueError, match=f"open_fraction must be above 0 and at most 1, got {value}"
    ):
        IceConfig(open_fraction=value)


@pytest.mark.parametrize("value", [True, "0.5", [0.5], 0.5j, np.array([0.5])])
def test_the_open_fraction_is_a_number(value):
    with pytest.raises(TypeError, match="open_fraction must be a number"):
        IceConfig(open_fraction=value)


def test_a_page_holds_its_mean():
    assert IceConfig(page_size=5, page_capacity=5).page_capacity == 5
    with pytest.raises(ValueError, match=r"page_capacity must be between 5 .* got 4"):
        IceConfig(page_size=5, page_capacity=4)


def test_it_is_frozen_keyword_only_and_compares_by_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        IceConfig().seed = 3
    with pytest.raises(TypeError):
        IceConfig(64)
    with pytest.raises(TypeError, match="budget"):
        IceConfig(budget=64)
    assert IceConfig(seed=3) == IceConfig(seed=3) != IceConfig(seed=4)
    assert hash(IceConfig(seed=3)) == hash(IceConfig(seed=3))


def test_replace():
    config = IceConfig(seed=3)
    assert config.replace(token_budget=5) == IceConfig(seed=3, token_budget=5)
    assert config.seed == 3 and config.token_budget == 64
    with pytest.raises(
        TypeError, match=r"unknown option 'budget'; options are \['candidate_factor"
    ):
        config.replace(budget=5)
    with pytest.raises(ValueError, match="token_budget must be between"):
        config.replace(token_budget=0)


def test_the_paper():
    config = IceConfig.paper(100, seed=3)
    assert config.token_budget == 100 and config.seed == 3
    assert (config.page_size, config.page_capacity, config.refine_passes) == (16, 16, 0)
    assert (config.selection, config.tail) == ("pages", "drop")
    assert IceConfig.paper().token_budget == 64
    assert IceConfig.paper(page_size=8).page_size == 8
    with pytest.raises(ValueError, match="token_budget"):
        IceConfig.paper(0)


@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            **{
                name: st.integers(least, 2**31 - 1)
                for name, least in LEAST.items()
                if name not in ("num_threads", "refine_passes")
            },
            "refine_passes": st.integers(0, 9),  # each takes its time
            "open_fraction": st.floats(1e-30, 1.0),
            "summary_dtype": st.sampled_from(CHOICES["summary_dtype"]),
            "tail": st.sampled_from(CHOICES["tail"]),
        },
    )
)
def test_whatever_the_config_takes_the_cache_takes(options):
    problem = make_problem("numpy-f32", kv_heads=1, group=1, dim=3, n=400)
    layer = LayerCache(1, 1, 3, IceConfig(**options))
    layer.prefill(problem.k[:, :398], problem.v[:, :398])
    assert np.isfinite(layer.decode(*problem.rows(398, 400))).all()
    layer.check()


def test_long_trees_open_less_and_score_more_unless_told_otherwise():
    problem = make_problem("numpy-f32", kv_heads=1, group=2, dim=8, n=40_000)

    def key_rows(**options):
        layer = LayerCache(2, 1, 8, IceConfig(**options))
        layer.prefill(problem.k, problem.v)
        layer.attend(problem.q[:, -1:])
        return layer.stats().key_rows_read

    default, opened, scored, both = (
        key_rows(**options)
        for options in (
            {},
            {"open_fraction": 0.75},
            {"candidate_factor": 8},
            {"open_fraction": 0.75, "candidate_factor": 8},
        )
    )
    assert opened - default > 40_000 / 6 * 0.3
    more = 512 * ((40_000 / 8192) ** 0.55 - 1)
    assert default - scored == pytest.approx(more, abs=60)
    assert opened - both == pytest.approx(more, abs=60)


def test_very_long_trees_score_no_more_lowest_upper_nodes():
    n = 262_144
    problem = make_problem("numpy-f32", kv_heads=1, group=1, dim=4, n=n)

    def step(open_fraction):
        layer = LayerCache(1, 1, 4, IceConfig(open_fraction=open_fraction))
        layer.prefill(problem.k, problem.v)
        layer.attend(problem.q[:, -1:])
        return layer.stats()

    default, whole = step(None), step(0.75 / 32 * 8**0.4)
    fewer = whole.key_rows_read - default.key_rows_read
    assert fewer == pytest.approx(0.5 * whole.nodes_per_level[1], rel=0.2)


@pytest.mark.parametrize(
    ("name", "value", "shows"),
    [
        ("token_budget", 9, lambda it, base: it.tokens_exact == base.tokens_exact - 200 + 9),
        ("sink_tokens", 7, lambda it, base: it.sink_tokens == 7 and base.sink_tokens == 32),
        ("window_tokens", 90, lambda it, base: (it.window_tokens, base.window_tokens) == (92, 66)),
        ("candidate_factor", 2, lambda it, base: it.key_rows_read < base.key_rows_read - 1000),
        ("page_size", 3, lambda it, base: it.mean_page_fill < 0.6 * base.mean_page_fill),
        ("page_capacity", 6, lambda it, base: it.mean_page_fill < 0.9 * base.mean_page_fill),
        ("fanout", 4, lambda it, base: len(it.nodes_per_level) > len(base.nodes_per_level)),
        ("refine_passes", 0, lambda it, base: it.nodes_per_level != base.nodes_per_level),
        ("open_fraction", 0.05, lambda it, base: it.value_rows_read < base.value_rows_read),
        ("tail", "drop", lambda it, base: it.value_rows_read == it.tokens_exact),
        ("summary_dtype", "f32", lambda it, base: it.index_bytes > 1.4 * base.index_bytes),
        ("dense_below", 10**6, lambda it, base: it.tokens_exact == 3002),
        ("seed", 4, lambda it, base: it.nodes_per_level != base.nodes_per_level),
    ],
)
def test_every_option_reaches_the_core(name, value, shows):
    problem = make_problem("numpy-f32", kv_heads=1, group=2, dim=32, n=3002)
    base = dict(dense_below=0, token_budget=200)
    outs, stats = [], []
    for options in ({**base, name: value}, base):
        layer = LayerCache(2, 1, 32, IceConfig(**options))
        layer.prefill(problem.k[:, :3000], problem.v[:, :3000])
        outs.append(layer.decode(*problem.rows(3000, 3002)))
        stats.append(layer.stats())
    assert shows(*stats), stats
    assert not np.array_equal(*outs)

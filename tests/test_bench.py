"""The benches on a few rows: what they refuse, what they compute, what they write. Never a time."""

import json
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import llama, tokens
from typer.testing import CliRunner

from icecache import IceConfig, LayerCache
from icecache.bench import report
from icecache.bench.baselines import SDPA, exact, relative_error, scan
from icecache.bench.build import measure_model_build
from icecache.bench.generate import GenerateRow, crossover, measure_generate, shortened
from icecache.bench.heads import Heads, Shape, read_heads
from icecache.bench.libraries import measure_library, recall_of
from icecache.bench.step import WRONG, StepSetting, check, copies_needed, measure_step, turn
from icecache.cli import _progress, app
from icecache.eval.decode import prefill
from icecache.eval.errors import EvalError

STEP = [
    "tokens",
    "step_ms",
    "search_ms",
    "select_ms",
    "attend_ms",
    "tail_ms",
    "dense_ms",
    "sdpa_ms",
    "scan_ms",
    "ratio",
    "key_rows_read",
    "value_rows_read",
    "floor_ms",
    "output_error",
]
CONFIG = IceConfig(dense_below=0, num_threads=1)
SIZE = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "24", "--threads", "1")


@pytest.fixture(autouse=True)
def no_idle_waiting(monkeypatch):
    """What only a good timing needs."""
    for module in ("step", "build", "insert", "generate"):
        monkeypatch.setattr(f"icecache.bench.{module}.rest", lambda: None)
    monkeypatch.setattr("icecache.bench.timing.COLD_BYTES", 10**6)
    monkeypatch.setattr("icecache.bench.step.COLD_BYTES", 10**6)


def arrays(heads=3, group=2, n=700, dim=16, positions=4):
    """Keys of topics that return, and queries."""
    random = np.random.default_rng(0)
    topics = random.standard_normal((2, heads, 30, dim))
    rows = topics[:, :, random.integers(30, size=n)]
    k, v = rows + 0.4 * random.standard_normal((2, heads, n, dim))
    q = 2 * random.standard_normal((heads * group, positions, dim))
    return {name: x.astype(np.float32) for name, x in (("k", k), ("v", v), ("q", q))}


@pytest.fixture
def kv(tmp_path):
    np.savez(tmp_path / "rows.npz", **arrays())
    return tmp_path / "rows.npz"


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)


def test_a_file_is_read_in_every_format(tmp_path, kv):
    tensors = {name: torch.from_numpy(x).bfloat16() for name, x in arrays().items()}
    torch.save(tensors, tmp_path / "rows.pt")
    save_file(tensors, tmp_path / "rows.safetensors")
    heads = read_heads(kv)
    assert heads.k.shape == heads.v.shape == (3, 700, 16)
    assert heads.q.shape == (3, 2, 4, 16)
    assert torch.equal(heads.q[1, 0], torch.from_numpy(arrays()["q"][2]))
    for name in ("rows.pt", "rows.safetensors"):
        other = read_heads(tmp_path / name)
        assert other.name == name
        torch.testing.assert_close(other.k, heads.k, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "q is missing"),
        ({"k": np.zeros((3, 700, 16), np.int32)}, "k must be floats"),
        ({"v": np.zeros((3, 700), np.float32)}, "v must be floats"),
        ({"v": np.zeros((3, 701, 16), np.float32)}, "k and v must have one shape"),
        ({"q": np.zeros((6, 4, 8), np.float32)}, "k and v must have one shape"),
        ({"q": np.zeros((5, 4, 16), np.float32)}, "a multiple of k's heads"),
        ({"q": np.zeros((6, 0, 16), np.float32)}, "q is empty"),
        ({"q": np.zeros((6, 701, 16), np.float32)}, "no more queries than keys"),
        ({"q": np.full((6, 4, 16), np.nan, np.float32)}, "not finite"),
        ({"k": np.full((3, 700, 16), 1e16, np.float32)}, "above 1e"),
        ({x: np.zeros((3, 99, 16), np.float32) for x in "kv"}, "at least 256 keys"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, change, message):
    content = {name: x for name, x in {**arrays(), **change}.items() if x is not None}
    np.savez(tmp_path / "bad.npz", **content)
    with pytest.raises(EvalError, match=message):
        read_heads(tmp_path / "bad.npz")


def test_a_file_of_nothing_and_one_of_sparse_rows_are_refused(tmp_path):
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(EvalError, match="cannot read"):
        read_heads(tmp_path / "empty.pt")
    rows = {name: torch.from_numpy(x) for name, x in arrays().items()}
    torch.save({**rows, "k": rows["k"].to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(EvalError, match="plain tensor"):
        read_heads(tmp_path / "sparse.pt")


@pytest.mark.parametrize("name", ["missing.npz", "broken.npz", "broken.pt", "broken.safetensors"])
def test_an_unreadable_file_is_refused(tmp_path, name):
    if name.startswith("broken"):
        (tmp_path / name).write_bytes(b"no rows")
    with pytest.raises(EvalError, match=f"cannot read .*{name}"):
        read_heads(tmp_path / name)
    with pytest.raises(EvalError, match="must end in"):
        read_heads(tmp_path / "rows.csv")


def test_a_dict_of_something_else_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(EvalError, match="must hold a dict"):
        read_heads(tmp_path / "list.pt")


def test_a_layer_has_the_logits_and_outputs_of_the_real_heads(kv):
    heads = read_heads(kv)
    shape = Shape(9, 3, 40)
    layer = heads.layer(shape, 700, "f32")
    assert layer.k.shape == layer.v.shape == (3, 700, 40)
    assert layer.q.shape == (9, 4, 40)
    taken = [11 * i % 3 for i in range(3)]
    for i, real in enumerate(taken):
        # Two real query heads; the third one is the first at neighbouring positions.
        queries = [heads.q[real, 0], heads.q[real, 1], heads.q[real, 0].roll(1, 0)]
        want = torch.stack(queries) @ heads.k[real].T * 16**-0.5
        logits = layer.q[3 * i : 3 * i + 3] @ layer.k[i].T * shape.scale
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        values = layer.v[i] @ layer.v[i].T
        torch.testing.assert_close(values, heads.v[real] @ heads.v[real].T, rtol=1e-4, atol=1e-4)


def test_layers_are_cut_and_made_long_at_their_start(kv):
    heads, shape = read_heads(kv), Shape(3, 3, 16)
    whole = heads.layer(shape, 700, "f32")
    short, long = heads.layer(shape, 300, "f32"), heads.layer(shape, 2000, "f32")
    assert torch.equal(short.k, whole.k[:, -300:])
    assert long.k.shape == (3, 2000, 16)
    assert torch.equal(long.k[:, -600:], whole.k[:, -600:])
    assert torch.equal(long.q, whole.q)


def test_copies_of_a_layer_differ(kv):
    heads, shape = read_heads(kv), Shape(2, 1, 16)
    first, second = (heads.layer(shape, 700, "f32", copy) for copy in (0, 1))
    assert not torch.equal(first.k, second.k)
    assert heads.layer(shape, 700, "bf16").k.dtype == torch.bfloat16


def test_shapes_that_do_not_fit_are_refused(kv):
    with pytest.raises(EvalError, match="no multiple"):
        Shape(5, 2, 16)
    with pytest.raises(EvalError, match="do not fit"):
        read_heads(kv).layer(Shape(2, 1, 8), 700, "f32")


def test_baselines_are_attention(kv):
    shape = Shape(6, 3, 16)
    layer = read_heads(kv).layer(shape, 700, "f32")
    truth = exact(layer, shape.scale)
    torch.testing.assert_close(
        truth,
        torch.nn.functional.scaled_dot_product_attention(
            layer.q[None], layer.k[None], layer.v[None], scale=shape.scale, enable_gqa=True
        )[0],
        rtol=1e-4,
        atol=1e-4,
    )
    everything = {"scan": lambda *rows: scan(*rows, budget=700)}
    for prepare in (SDPA | everything).values():
        attend = prepare(layer.k, layer.v, shape.group, shape.scale)
        out = torch.cat([attend(q) for q in layer.queries()], 1)
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-4)
    few = scan(layer.k, layer.v, shape.group, shape.scale, budget=8)
    out = torch.cat([few(q) for q in layer.queries()], 1)
    assert 0 < relative_error(out, truth).mean() < 1


def test_a_wrong_answer_is_refused(kv):
    shape = Shape(4, 2, 16)
    layer = read_heads(kv).layer(shape, 700, "f32")
    truth, queries = exact(layer, shape.scale), layer.queries()
    right = SDPA["grouped"](layer.k, layer.v, shape.group, shape.scale)
    assert check("right", [right], [queries], [truth], WRONG) < 1e-5
    for wrong in (lambda q: -right(q), lambda q: right(q) * math.nan):
        with pytest.raises(EvalError, match="the answer of wrong is wrong, nothing was timed"):
            check("wrong", [wrong], [queries], [truth], WRONG)


def test_a_step_that_answers_wrongly_is_not_timed(kv, monkeypatch):
    monkeypatch.setattr("icecache.LayerCache.attend", lambda self, q: q)
    with pytest.raises(EvalError, match="the answer of icecache is wrong, nothing was timed"):
        run("step", "--kv", kv, *SIZE, "--tokens", 600, "--copies", 1)


def test_steps_take_turns():
    queries = [[f"{copy}{t}" for t in range(3)] for copy in range(2)]
    pairs = [turn(number, queries) for number in range(12)]
    assert [copy for copy, _ in pairs] == [0, 1] * 6
    assert [q for _, q in pairs[:6]] == ["00", "10", "01", "11", "02", "12"]
    assert all(a != b for a, b in pairwise(pairs))
    assert copies_needed(36864, 151 * 2**20, 32) == 8
    assert copies_needed(262144, 2**30, 32) == 4
    assert copies_needed(300, 10**8, 2) == 32


def test_step(kv, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    times = ("--tokens", "300,900", "--copies", 2, "--steps", 8, "--set", "page_size=5")
    result = run("step", "--kv", kv, *SIZE, *times, "--json", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "output error" in result.stdout
    assert plot.read_text().startswith("<?xml")
    document = json.loads(out.read_text())
    assert document["config"]["config"]["page_size"] == 5
    assert document["config"]["rows"] == "rows.npz"
    assert [row["tokens"] for row in document["rows"]] == [300, 900]
    for row in document["rows"]:
        assert list(row) == STEP
        more = document["config"]["lengths"][str(row["tokens"])]
        assert row["sdpa_ms"] == min(more["sdpa_ms"].values())
        assert more["copies"] == 2
        assert 0.3 < more["recall"] <= 1
        assert row["ratio"] == min(row["dense_ms"], row["sdpa_ms"]) / row["step_ms"]
        assert 0 < row["output_error"] < WRONG
        row_bytes = 2 * 2 * 24  # of both heads, bf16
        read = (row["key_rows_read"] + row["value_rows_read"]) * row_bytes
        want = 1e3 * read / document["config"]["bandwidth"]
        assert row["floor_ms"] == pytest.approx(want)


def test_parts_of_a_step_are_per_thread(kv, monkeypatch):
    parts = dict(search_ms=4.0, select_ms=2.0, attend_ms=1.0, tail_ms=0.5)
    reads = dict(key_rows_read=100.0, value_rows_read=50.0)
    real = LayerCache.stats
    monkeypatch.setattr(
        LayerCache, "stats", lambda self: SimpleNamespace(**{**vars(real(self)), **reads, **parts})
    )
    setting = StepSetting(Shape(4, 2, 16), "f32", CONFIG, 1, 4, threads=2, bandwidth=1e9)
    with _progress() as progress:
        row, _ = measure_step(read_heads(kv), 400, setting, progress)
    assert (row.search_ms, row.select_ms, row.attend_ms, row.tail_ms) == (2.0, 1.0, 0.5, 0.25)
    assert row.floor_ms == pytest.approx(1e3 * 150 * 2 * 16 * 4 / 1e9)


def test_one_query_of_one_copy_is_refused():
    rows = {name: torch.from_numpy(x) for name, x in arrays(positions=1).items()}
    heads = Heads("few", rows["k"], rows["v"], rows["q"].reshape(3, 2, 1, 16))
    setting = StepSetting(Shape(4, 2, 16), "f32", CONFIG, 1, 4, threads=1, bandwidth=1e9)
    with _progress() as progress, pytest.raises(EvalError, match="again and again"):
        measure_step(heads, 400, setting, progress)


def test_insert(kv, tmp_path):
    out = tmp_path / "out.json"
    result = run("insert", "--kv", kv, *SIZE, "--tokens", 400, "--steps", 90, "--json", out)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert list(row) == [
        "tokens",
        "append_us",
        "append_p50_us",
        "append_p99_us",
        "append_max_us",
        "decode_p50_ms",
        "decode_p99_ms",
        "decode_max_ms",
        "output_error",
    ]
    assert 0 < row["output_error"] < WRONG


def test_build_of_a_layer_alone(kv, tmp_path):
    out = tmp_path / "out.json"
    size = ("--tokens", "300,700", "--repeats", 2, "--context", 0)
    result = run("build", "--kv", kv, *SIZE, *size, "--json", out)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["tokens"] for row in rows] == [300, 700]
    fields = ["tokens", "seconds", "serial_seconds_per_head", "output_error"]
    assert all(list(row) == fields and min(row.values()) > 0 for row in rows)


def test_build_of_a_model():
    ids = tokens(600)[0].tolist()
    with _progress() as progress:
        rows = list(measure_model_build(llama(), ids, CONFIG, progress))
    assert [(row.dtype, row.tokens) for row in rows] == [("f32", 600), ("bf16", 600)]
    assert all(row.share == pytest.approx(row.index_seconds / row.prefill_seconds) for row in rows)


def test_generate_feeds_every_cache_the_same():
    model, ids = llama(), tokens(601)[0].tolist()
    with _progress() as progress:
        rows = prefill(model, ids[:-1], progress).layers
        results = measure_generate(model, rows, ids[-1], 5, CONFIG, progress)
        short = measure_generate(model, shortened(rows, 400), ids[400], 2, CONFIG, progress)
    assert [row.cache for row in results] == ["DynamicCache", "StaticCache", "icecache"]
    dynamic, static, ours = results
    assert dynamic.logit_error == 0 and static.logit_error < 1e-4
    assert 0 < ours.logit_error < WRONG
    assert max(dynamic.ratio, static.ratio) == 1
    assert {row.tokens for row in results} == {600} and {row.tokens for row in short} == {400}
    assert all(row.p50_ms <= row.p95_ms <= row.p99_ms for row in results)
    assert model.config._attn_implementation == "sdpa"


def test_generate_refuses_wrong_logits(monkeypatch):
    model, ids = llama(), tokens(401)[0].tolist()
    monkeypatch.setattr("icecache.LayerCache.decode", lambda self, q, k, v: -50 * q)
    with _progress() as progress:
        rows = prefill(model, ids[:-1], progress).layers
        with pytest.raises(EvalError, match="the logits under icecache are wrong"):
            measure_generate(model, rows, ids[-1], 2, CONFIG, progress)


def test_crossover_is_where_the_gain_begins():
    def rows(*gains):
        return [
            GenerateRow(n, "icecache", 10.0, 10.0, 10.0, 1 + gain / 10, 0.0)
            for n, gain in zip((1000, 2000, 4000), gains, strict=True)
        ]

    assert crossover(rows(1, 2, 3)) == 1000
    assert crossover(rows(-3, 1, 2)) == pytest.approx(1750)
    assert crossover(rows(1, -1, 1)) == pytest.approx(3000)
    assert crossover(rows(1, 1, -1)) is None


def test_wrong_usage():
    assert run("step", "--tokens", "100").exit_code == 2
    assert run("step", "--dtype", "f8").exit_code == 2
    assert run("generate", "--layer", "llama-70b").exit_code == 2


def test_tables_show_every_field():
    rows = [GenerateRow(1000, "icecache", 10.0, 12345.6, 10.0, 1.5, 0.0123)]
    cells = [list(column.cells) for column in report.table("a title", rows).columns]
    assert cells == [["1000"], ["icecache"], ["10"], ["12346"], ["10"], ["1.5"], ["0.0123"]]


@pytest.mark.parametrize("name", ["faiss", "hnswlib", "usearch"])
def test_libraries_find_as_much(kv, name):
    pytest.importorskip(name)
    shape = Shape(6, 3, 16)
    layer = read_heads(kv).layer(shape, 700, "bf16")
    result = measure_library(name, layer, np.arange(8), 0.95, 16, shape.scale, 1)
    assert 0.95 <= result.recall <= 1


def test_recall_counts_what_each_head_found():
    assert recall_of([np.array([3, 1]), np.array([2])], np.array([[1, 3], [1, 2]])) == 0.75

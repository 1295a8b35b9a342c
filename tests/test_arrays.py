"""What a `LayerCache` takes and what it refuses; a refusal changes nothing."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from kv_arrays import KINDS, assert_close, cast, make_problem, prefilled, same, tensor

from icecache import DciTree, IceConfig, LayerCache
from icecache.arrays import operand

HEADS, GROUP, DIM = 2, 2, 8
every_kind = pytest.mark.parametrize("kind", KINDS)
# Before the first bulk everything is in sink and window; after it there is a tree.
every_length = pytest.mark.parametrize("stored", [50, 500])


def some(shape, kind="numpy-f32"):
    return cast(kind, np.random.default_rng(0).standard_normal(shape))


def q_like(n, kind="numpy-f32"):
    return some((HEADS * GROUP, n, DIM), kind)


def kv_like(n, kind="numpy-f32"):
    return some((HEADS, n, DIM), kind)


def with_value(array, value, *at):
    array = array.copy()
    array[at] = value
    return array


RANK = "[kq] must have"

# Every way to be wrong: call(layer), the error and what its message says.
BAD_CALLS = {
    "k of another rank": (
        lambda c: c.prefill(some((3, DIM)), some((3, DIM))),
        ValueError,
        RANK,
    ),
    "k of rank 1": (lambda c: c.append(some(DIM), some(DIM)), ValueError, RANK),
    "k of rank 4": (
        lambda c: c.prefill(some((1, HEADS, 3, DIM)), some((1, HEADS, 3, DIM))),
        ValueError,
        RANK,
    ),
    "q of rank 2": (lambda c: c.attend(some((HEADS * GROUP, DIM))), ValueError, RANK),
    "too many KV heads": (
        lambda c: c.prefill(some((3, 5, DIM)), some((3, 5, DIM))),
        ValueError,
        r"k must have shape \[2, 5, 8\], got \[3, 5, 8\]",
    ),
    "no KV heads": (
        lambda c: c.prefill(some((0, 5, DIM)), some((0, 5, DIM))),
        ValueError,
        "k must have shape",
    ),
    "KV heads for v": (
        lambda c: c.append(kv_like(5), some((1, 5, DIM))),
        ValueError,
        r"v must have shape \[2, 5, 8\], got \[1, 5, 8\]",
    ),
    "query heads": (
        lambda c: c.decode(kv_like(1), kv_like(1), kv_like(1)),
        ValueError,
        r"q must have shape \[4, 1, 8\], got \[2, 1, 8\]",
    ),
    "head_dim of k": (
        lambda c: c.append(some((HEADS, 3, DIM + 1)), kv_like(3)),
        ValueError,
        r"k must have shape \[2, 3, 8\], got \[2, 3, 9\]",
    ),
    "head_dim of v": (
        lambda c: c.append(kv_like(3), some((HEADS, 3, DIM - 1))),
        ValueError,
        r"v must have shape \[2, 3, 8\], got \[2, 3, 7\]",
    ),
    "head_dim of q": (
        lambda c: c.attend_exact(some((HEADS * GROUP, 1, 4))),
        ValueError,
        r"q must have shape \[4, 1, 8\], got \[4, 1, 4\]",
    ),
    "fewer values than keys": (
        lambda c: c.prefill(kv_like(5), kv_like(4)),
        ValueError,
        r"v must have shape \[2, 5, 8\], got \[2, 4, 8\]",
    ),
    "fewer queries than keys": (
        lambda c: c.prefill(kv_like(5), kv_like(5), q_like(4)),
        ValueError,
        r"q must have shape \[4, 5, 8\], got \[4, 4, 8\]",
    ),
    "an empty prefill": (
        lambda c: c.prefill(kv_like(0), kv_like(0)),
        ValueError,
        r"k must have shape \[2, 1, 8\], got \[2, 0, 8\]",
    ),
    "an empty decode": (
        lambda c: c.decode(q_like(0), kv_like(0), kv_like(0)),
        ValueError,
        "k must have shape",
    ),
    "no queries": (lambda c: c.attend(q_like(0)), ValueError, "q must have shape"),
    "keys of another dtype": (
        lambda c: c.append(kv_like(3, "numpy-f16"), kv_like(3, "numpy-f16")),
        TypeError,
        "k must be f32 like what is stored, got f16",
    ),
    "mixed dtypes": (
        lambda c: c.decode(q_like(1), kv_like(1), kv_like(1, "numpy-bf16")),
        TypeError,
        "one dtype, got q f32, k f32, v bf16",
    ),
    "a mixed query": (
        lambda c: c.prefill(kv_like(1), kv_like(1), q_like(1, "torch-f16")),
        TypeError,
        "one dtype, got q f16, k f32, v f32",
    ),
    "float64": (
        lambda c: c.append(np.zeros((HEADS, 1, DIM)), kv_like(1)),
        TypeError,
        "k must be float32, float16 or bfloat16, got float64",
    ),
    "float64 of torch": (
        lambda c: c.append(kv_like(1), torch.zeros(HEADS, 1, DIM, dtype=torch.float64)),
        TypeError,
        "v must be float32, float16 or bfloat16, got torch.float64",
    ),
    "int32": (
        lambda c: c.append(np.zeros((HEADS, 1, DIM), np.int32), kv_like(1)),
        TypeError,
        "got int32",
    ),
    "a bare uint16 array": (
        lambda c: c.append(np.zeros((HEADS, 1, DIM), np.uint16), kv_like(1)),
        TypeError,
        "got uint16 .*ml_dtypes",
    ),
    "another byte order": (
        lambda c: c.append(kv_like(1).astype(">f4"), kv_like(1)),
        TypeError,
        "got >f4",
    ),
    "a list": (lambda c: c.append([[[0.0] * DIM]] * HEADS, kv_like(1)), TypeError, "got list"),
    "nothing": (lambda c: c.append(None, kv_like(1)), TypeError, "k must be .* got NoneType"),
    "NaN in k": (
        lambda c: c.append(with_value(kv_like(5), np.nan, 1, 3, 2), kv_like(5)),
        ValueError,
        "k must be finite, got NaN at head 1, token 3",
    ),
    "infinity in v": (
        lambda c: c.decode(q_like(5), kv_like(5), with_value(kv_like(5), np.inf, 0, 4, 7)),
        ValueError,
        "v must be finite, got inf at head 0, token 4",
    ),
    "infinity in q": (
        lambda c: c.prefill(kv_like(5), kv_like(5), with_value(q_like(5), -np.inf, 3, 1, 0)),
        ValueError,
        "q must be finite, got -inf at head 3, token 1",
    ),
    "NaN in q of attend": (
        lambda c: c.attend(with_value(q_like(2), np.nan, 2, 0, 0)),
        ValueError,
        "q must be finite, got NaN at head 2, token 0",
    ),
    "crop beyond the end": (
        lambda c: c.crop(c.seq_len + 1),
        ValueError,
        "crop keeps the first n tokens: n must be at most 5",
    ),
    "crop far beyond the end": (lambda c: c.crop(2**70), ValueError, "crop keeps the first n"),
    "a negative crop": (lambda c: c.crop(-1), ValueError, "n must be at least 0, got -1"),
    "a crop by a bool": (lambda c: c.crop(True), ValueError, "got True"),
    "a crop by a float": (lambda c: c.crop(3.0), ValueError, r"got 3\.0"),
    "more queries than tokens": (
        lambda c: c.attend_exact(q_like(c.seq_len + 1)),
        ValueError,
        "attend_exact takes the last 5",
    ),
    "gradients": (
        lambda c: c.append(torch.zeros(HEADS, 1, DIM, requires_grad=True), kv_like(1)),
        ValueError,
        "k records gradients.*no_grad",
    ),
    "gradients of q": (
        lambda c: c.attend(torch.zeros(HEADS * GROUP, 1, DIM, requires_grad=True)),
        ValueError,
        "q records gradients",
    ),
    "another device": (
        lambda c: c.append(kv_like(1), torch.zeros(HEADS, 1, DIM, device="meta")),
        TypeError,
        "v must be on the CPU, got a tensor on meta",
    ),
}


@every_length
@pytest.mark.parametrize("bad", BAD_CALLS)
def test_bad_input_is_refused_and_changes_nothing(bad, stored):
    problem = make_problem("numpy-f32", HEADS, GROUP, DIM, stored + 40)
    layer, untouched = (prefilled(problem, stored, token_budget=4) for _ in range(2))
    call, error, message = BAD_CALLS[bad]
    for _ in range(2):
        with pytest.raises(error, match=message):
            call(layer)
    assert layer.seq_len == stored and layer.dtype == "f32"
    assert layer.stats() == untouched.stats()
    for mine, theirs in zip(layer.gather(), untouched.gather(), strict=True):
        assert same(mine, theirs)
    layer.check()
    rest = problem.rows(stored, problem.n)
    assert same(layer.decode(*rest), untouched.decode(*rest))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@every_kind
def test_every_kind_of_number_that_is_not_finite(kind, value):
    layer = LayerCache(HEADS * GROUP, HEADS, DIM)
    for at in ((0, 0, 0), (1, 6, DIM - 1)):
        bad = kv_like(7, kind)
        bad[at] = value
        with pytest.raises(
            ValueError, match=f"v must be finite, got .* head {at[0]}, token {at[1]}"
        ):
            layer.prefill(kv_like(7, kind), bad)
    assert layer.seq_len == 0 and layer.dtype is None


@every_kind
def test_the_extremes_of_a_dtype_are_kept_bit_for_bit(kind):
    dtype = kind.split("-")[1]
    info = {"f32": np.finfo(np.float32), "f16": np.finfo(np.float16)}.get(dtype)
    info = info or ml_dtypes.finfo(ml_dtypes.bfloat16)
    most = min(float(info.max), 0.99e15)  # beyond 1e15 numbers are refused
    row = [most, -most, float(info.tiny), 0.0, -0.0, 1.0, -1.0]
    row.append(float(info.smallest_subnormal))
    array = cast(kind, np.broadcast_to(np.array(row, np.float32), (HEADS, 9, DIM)))
    layer = LayerCache(HEADS * GROUP, HEADS, DIM)
    layer.append(array, array)
    keys, values = layer.gather()
    assert same(keys, array) and same(values, array)


@pytest.mark.parametrize("call", ["attend", "attend_exact"])
def test_attending_to_nothing(call):
    layer = LayerCache(HEADS * GROUP, HEADS, DIM)
    with pytest.raises(ValueError, match=f"nothing is stored yet: .* before {call}"):
        getattr(layer, call)(q_like(1))
    layer.crop(0)
    with pytest.raises(ValueError, match="n must be at most 0, got 1"):
        layer.crop(1)


def test_with_one_kv_head_the_rank_counts_too():
    # [n, head_dim] could be taken for [1, n, head_dim]; it is refused like any other rank.
    layer = LayerCache(1, 1, DIM)
    for call in (
        lambda: layer.prefill(some((3, DIM)), some((3, DIM))),
        lambda: layer.append(some((3, DIM)), some((1, 3, DIM))),
        lambda: layer.append(some((1, 3, DIM)), some((3, DIM))),
    ):
        with pytest.raises(ValueError, match=r"[kv] must have"):
            call()
    with pytest.raises(ValueError, match="q must have"):
        layer.prefill(some((1, 3, DIM)), some((1, 3, DIM)), some((3, DIM)))
    assert layer.seq_len == 0


def numpy_views(array):
    """The same values in other layouts."""
    heads, n, dim = array.shape
    wide = np.zeros((heads, 2 * n, dim + 3), array.dtype)
    wide[:, ::2, :dim] = array
    spread = np.zeros((heads, n, 2 * dim), array.dtype)
    spread[..., ::2] = array
    shifted = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype)
    return {
        "read only": np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
        "rows inside wider ones": wide[:, ::2, :dim],
        "[n, heads, dim], transposed": np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1),
        "fortran": np.asfortranarray(array),
        "every other element": spread[..., ::2],
        "backwards rows": np.ascontiguousarray(array[:, ::-1])[:, ::-1],
        "backwards elements": np.ascontiguousarray(array[..., ::-1])[..., ::-1],
        "backwards heads": np.ascontiguousarray(array[::-1])[::-1],
        "not aligned": shifted.reshape(array.shape),
    }


def torch_views(tensor):
    heads, n, dim = tensor.shape
    wide = torch.zeros(heads, n, 2 * dim, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return {
        "[n, heads, dim], transposed": tensor.transpose(0, 1).contiguous().transpose(0, 1),
        "[heads, dim, n], transposed": tensor.mT.contiguous().mT,
        "every other element": wide[..., ::2],
        "part of a batch": torch.stack([tensor, tensor])[1],
        "detached": tensor.clone().requires_grad_().detach(),
        "inference": make_inference(tensor),
    }


def make_inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


@every_kind
def test_views_are_as_good_as_copies(kind):
    problem = make_problem(kind, HEADS, GROUP, DIM, 420)
    views = torch_views if kind.startswith("torch") else numpy_views
    q, k, v = (views(x) for x in (problem.q, problem.k, problem.v))
    plain = problem.layer(token_budget=4)
    want = [plain.prefill(problem.k[:, :410], problem.v[:, :410], problem.q[:, :410])]
    want.append(plain.decode(*problem.rows(410, 420)))
    for name in q:
        assert same(k[name], problem.k), name
        layer = problem.layer(token_budget=4)
        got = [layer.prefill(k[name][:, :410], v[name][:, :410], q[name][:, :410])]
        got.append(layer.decode(q[name][:, 410:], k[name][:, 410:], v[name][:, 410:]))
        if kind.startswith("torch"):  # its own products choose an order by the layout
            assert_close(got[0], problem.exact(0, 410), problem.v, roundings=2)
        else:
            assert same(got[0], want[0]), name
        assert same(got[1], want[1]), name
        assert all(same(a, b) for a, b in zip(layer.gather(), plain.gather(), strict=True)), name


@every_kind
def test_one_row_for_all(kind):
    # Expanded arrays repeat one row: strides of zero.
    row = kv_like(1, kind)
    if kind.startswith("torch"):
        repeated, copied = row.expand(HEADS, 300, DIM), row.repeat(1, 300, 1)
        every_head = row[:1].expand(HEADS, 1, DIM)
    else:
        repeated = np.broadcast_to(row, (HEADS, 300, DIM))
        copied, every_head = np.repeat(row, 300, axis=1), np.broadcast_to(row[:1], row.shape)
    layer = LayerCache(HEADS * GROUP, HEADS, DIM)
    layer.prefill(repeated, repeated)
    assert same(layer.gather()[0], copied)
    layer.append(every_head, every_head)
    assert np.array_equal(tensor(layer.gather()[0])[1, 300], tensor(row)[0, 0])


@every_kind
def test_arrays_are_not_copied_and_not_changed(kind):
    array = kv_like(5, kind)
    before = tensor(array).clone()
    prepared = operand("k", array, 3)
    assert prepared.dtype == kind.split("-")[1] and prepared.like is array
    address = array.data_ptr() if kind.startswith("torch") else array.ctypes.data
    assert prepared.array.ctypes.data == address
    layer = LayerCache(HEADS * GROUP, HEADS, DIM)
    layer.prefill(array, array, q_like(5, kind))
    assert torch.equal(tensor(array), before)
    # What is stored is a copy: the caller may go on using the array.
    stored = layer.gather()[0]
    array[:] = 0
    assert torch.equal(tensor(layer.gather()[0]), before)
    stored[:] = 0
    assert torch.equal(tensor(layer.gather()[0]), before)


def test_gradients_are_fine_where_they_are_not_recorded():
    q, k = (torch.randn(h, 3, DIM, requires_grad=True) for h in (HEADS * GROUP, HEADS))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            layer = LayerCache(HEADS * GROUP, HEADS, DIM)
            out = layer.prefill(k, k, q)
            assert not out.requires_grad and torch.equal(layer.gather()[0], k)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_numpy_and_torch_give_the_same_and_may_take_turns(dtype):
    problems = [
        make_problem(f"{lib}-{dtype}", HEADS, GROUP, DIM, 400) for lib in ("numpy", "torch")
    ]
    outs = []
    for problem in problems:
        layer = prefilled(problem, 390, token_budget=4)
        outs.append(layer.decode(*problem.rows(390, 400)))
    assert type(outs[0]) is np.ndarray and type(outs[1]) is torch.Tensor
    assert torch.equal(tensor(outs[0]), tensor(outs[1]))
    mixed = prefilled(problems[0], 390, token_budget=4)
    assert torch.equal(tensor(mixed.decode(*problems[1].rows(390, 400))), tensor(outs[0]))
    assert type(mixed.gather()[0]) is torch.Tensor


@pytest.mark.parametrize("name", ["num_q_heads", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None, 2**70])
def test_shapes_are_positive_integers(name, value):
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, name: value}
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        LayerCache(**shape)


def test_query_heads_are_shared_evenly():
    with pytest.raises(
        ValueError, match="num_q_heads must be a multiple of num_kv_heads = 2, got 3"
    ):
        LayerCache(3, 2, 8)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e300])
def test_the_scale_is_finite(scale):
    with pytest.raises(ValueError, match="scale must be finite"):
        LayerCache(4, 2, 8, scale=scale)


@pytest.mark.parametrize("scale", [1, np.float32(0.25), np.float16(0.5), np.int64(2)])
def test_the_scale_is_any_real_number(scale):
    assert LayerCache(4, 2, 8, scale=scale).scale == float(scale)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_says_that_it_cannot_be_copied(copied):
    with pytest.raises(TypeError, match="a LayerCache cannot be copied or pickled: gather"):
        copied(LayerCache(4, 2, 8))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (dict(scale="1"), "scale"),
        (dict(scale=True), "scale"),
        (dict(layer_index=-1), "layer_index"),
        (dict(layer_index=1.5), "layer_index"),
        (dict(layer_index=True), "layer_index"),
        (dict(config={}), "config"),
        (dict(config=64), "config"),
    ],
    ids=str,
)
def test_other_arguments_are_named_when_wrong(options, names):
    with pytest.raises((TypeError, ValueError), match=names):
        LayerCache(4, 2, 8, **options)


@pytest.mark.parametrize("kind", ["numpy-f32", "torch-bf16"])
@pytest.mark.parametrize("what", ["k", "v"])
def test_rows_whose_squares_overflow_are_refused(kind, what):
    layer = LayerCache(HEADS * GROUP, HEADS, DIM)
    rows = {name: np.ones((HEADS, 4, DIM), np.float32) for name in "kv"}
    layer.append(cast(kind, rows["k"]), cast(kind, rows["v"]))
    rows[what][1, 2, 0] = -1e20
    expected = rf"{what} must be at most 1e15 in size, got -\d+ at head 1, token 2"
    with pytest.raises(ValueError, match=expected):
        layer.append(cast(kind, rows["k"]), cast(kind, rows["v"]))
    assert layer.seq_len == 4
    tree = DciTree(DIM)
    with pytest.raises(ValueError, match=r"keys must be at most 1e15 in size, got .* in row 2"):
        tree.insert(cast(kind, rows[what][1]))
    assert len(tree) == 0


@pytest.mark.parametrize("size", [1e-30, 1e-24, 1e-10, 1e10, 9e14])
def test_rows_of_any_accepted_size_are_indexed_soundly(size):
    random = np.random.default_rng(0)
    k = (size * random.standard_normal((1, 1500, 16))).clip(-1e15, 1e15).astype(np.float32)
    layer = LayerCache(2, 1, 16, IceConfig(dense_below=0, token_budget=8))
    layer.prefill(k[:, :600], k[:, :600])
    for i in range(600, 1500):
        layer.append(k[:, i : i + 1], k[:, i : i + 1])
    layer.check()
    out = layer.attend(np.float32(random.standard_normal((2, 1, 16)) / size))
    stats = layer.stats()
    assert np.isfinite(out).all() and np.isfinite(stats.error_estimate)
    assert len(stats.nodes_per_level) <= 4 and stats.overhead < 1.0


def test_empty_statistics_are_zeros():
    stats = LayerCache(2, 1, 16).stats()
    assert str(stats.overhead) == str(stats.tokens_exact) == "0.0"

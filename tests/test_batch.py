"""Batches: each row must get what it would get alone, whatever the padding and the other rows."""

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from batches import Reader, divergence, generated, padded, texts
from hypothesis import given
from hypothesis import strategies as st
from kv_arrays import examples
from test_cache import (
    PLACES,
    SPARSE,
    WHOLE,
    Failure,
    close,
    every_model,
    failing,
    forward,
    recorded,
)
from tiny_models import MODELS, REPLACED, VOCABULARY, gemma3, llama, qwen2_mixed, tokens
from transformers import DynamicCache

from icecache import IceCache, IceConfig, LayerCache
from icecache.ice_layer import IceLayer
from icecache.masks import RowMask, count, cut, outside, read_mask
from icecache.reference import exact_attention
from icecache.stores import Stores

LENGTHS = (1, 37, 600, 4, 590, 64)
both_sides = pytest.mark.parametrize("side", ["left", "right"])
# Sliding layers count columns: right padding shortens what they see, whatever the cache.
FULL_MODELS = [name for name in MODELS if len(REPLACED[name]) == 4]


def alone(name: str, make_cache: Any, rows: list[torch.Tensor], *more: torch.Tensor) -> list[Any]:
    """What each row says to its text and to its part of `more` [rows, t], in a cache of its own."""
    logits = []
    for i, row in enumerate(rows):
        model = MODELS[name]()
        read = Reader(model, make_cache(model))
        parts = [row, *(part[i : i + 1] for part in more)]
        logits.append(torch.cat([read(part)[0] for part in parts]))
    return logits


def together(model: Any, cache: Any, rows: list[torch.Tensor], side: str, *more: Any) -> list[Any]:
    read = Reader(model, cache)
    parts = [read(*padded(rows, side)), *(read(part) for part in more)]
    return [torch.cat(of_row) for of_row in zip(*parts, strict=True)]


def steps(rows: int) -> list[torch.Tensor]:
    return [tokens(rows * t, seed=t).reshape(rows, t) for t in (1, 1, 7, 1, 40, 1)]


# --- The same as alone


@every_model
@both_sides
def test_with_the_whole_budget_rows_get_full_attention(name: str, side: str) -> None:
    rows, more = texts(*LENGTHS), steps(len(LENGTHS))
    model = MODELS[name]()
    got = together(model, IceCache(model, **WHOLE), rows, side, *more)
    plain = MODELS[name]()
    for a, b in zip(
        got, together(plain, DynamicCache(config=plain.config), rows, side, *more), strict=True
    ):
        close(a, b)
    if side == "left" or name in FULL_MODELS:
        expected = alone(name, lambda model: DynamicCache(config=model.config), rows, *more)
        for a, b in zip(got, expected, strict=True):
            close(a, b)


@pytest.mark.parametrize(
    ("name", "side", "reuse"),
    [
        ("llama", "left", 1),
        ("llama", "right", 1),
        ("llama", "left", 2),
        ("llama", "right", 3),
        ("qwen2_mixed", "left", 1),
        ("gemma3", "left", 2),
    ],
)
def test_sparse_rows_get_what_they_get_alone(name: str, side: str, reuse: int) -> None:
    rows, more = texts(*LENGTHS), steps(len(LENGTHS))
    options = {**SPARSE, "reuse_layers": reuse}
    model = MODELS[name]()
    cache = IceCache(model, **options)
    got = together(model, cache, rows, side, *more)
    for a, b in zip(got, alone(name, lambda m: IceCache(m, **options), rows, *more), strict=True):
        assert divergence(a, b) <= 1e-4
    stats = cache.stats()
    assert stats.rows == len(rows)
    assert stats.seq_len == 600 + 51
    for layer in cache.layers:
        if isinstance(layer, IceLayer):
            for row, text in zip(layer.rows, rows, strict=True):
                row.store.check()
                assert row.store.seq_len == text.shape[1] + 51
                assert row.store.stats().tokens_exact < 150


@both_sides
def test_rows_of_one_token_and_of_thousands(side: str) -> None:
    rows, more = texts(1, 4096, 700, 2500), steps(4)[:4]
    model = llama(max_position_embeddings=8192)
    got = together(model, IceCache(model, **SPARSE), rows, side, *more)
    expected = alone("llama", lambda m: IceCache(m, **SPARSE), rows, *more)
    for a, b in zip(got, expected, strict=True):
        assert divergence(a, b) <= 1e-4


def layer_of(config: IceConfig) -> IceLayer:
    return IceCache(llama(), config=config).layers[0]


def attended(layer: IceLayer, q: Any, k: Any, v: Any, mask: Any, exact: bool) -> torch.Tensor:
    return layer.attend(q, *layer.update(k, v, exact=exact), None, mask)


def causal(mask: torch.Tensor, t: int) -> torch.Tensor:
    """The mask `[rows, 1, t, n]` that transformers makes of `[rows, n]`."""
    n = mask.shape[1]
    return torch.ones(t, n, dtype=torch.bool).tril(n - t) & mask[:, None, None].bool()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("additive", [False, True])
def test_a_layer_of_a_batch_is_bit_for_bit_the_layers_of_its_rows(
    dtype: torch.dtype, additive: bool
) -> None:
    config = IceConfig(**SPARSE)
    layer = layer_of(config)
    alone = [LayerCache(4, 2, 16, config) for _ in range(4)]
    generator = torch.Generator().manual_seed(0)
    whole = torch.zeros(4, 0, dtype=torch.long)
    for t, exact in ((450, True), (1, False), (9, False), (60, True), (1, False), (3, False)):
        mask = torch.ones(4, t, dtype=torch.long)
        if t > 1:
            mask[1, : t // 3] = 0
            mask[2, 2:] = 0
            mask[3] = torch.randint(2, (t,), generator=generator)
        whole = torch.cat([whole, mask], dim=1)
        q, k, v = (torch.randn(4, h, t, 16, generator=generator).to(dtype) for h in (4, 2, 2))
        given = causal(whole, t)
        if additive:
            given = torch.zeros(given.shape).masked_fill(~given, torch.finfo(torch.float32).min)
        out = attended(layer, q, k, v, given, exact)
        assert out.shape == (4, t, 4, 16)
        for i, store in enumerate(alone):
            new = [x[i][:, mask[i].bool()].contiguous() for x in (q, k, v)]
            if new[0].shape[1]:
                want = store.prefill(*new[1:], new[0]) if exact else store.decode(*new)
                assert torch.equal(out[i][mask[i].bool()].transpose(0, 1), want)
            # Padding attends to the tokens before it, if there are any, and to nothing else.
            stored, later = store.gather(), whole.shape[1] - t
            for column in (mask[i] == 0).nonzero().flatten().tolist():
                n = int(whole[i, : later + column].sum())
                padding, want = out[i, column], torch.zeros(4, 16)
                if n:
                    k_before, v_before = (x[:, :n] for x in stored)
                    want = exact_attention(q[i, :, [column]], k_before, v_before, 0.25)[:, 0]
                bound = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
                assert float((padding.double() - want).abs().max()) <= bound
    assert layer.get_seq_length() == 450 + 1 + 9 + 60 + 1 + 3
    for row, store in zip(layer.rows, alone, strict=True):
        for a, b in zip(row.store.gather(), store.gather(), strict=True):
            assert torch.equal(a, b)
        assert row.store.stats() == store.stats()


def test_a_row_that_is_all_padding_gets_nothing_until_its_first_token() -> None:
    config = IceConfig(**WHOLE)
    layer = layer_of(config)
    q, k, v = (torch.randn(2, h, 12, 16) for h in (4, 2, 2))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :7] = 0
    parts = [attended(layer, *(x[:, :, :5] for x in (q, k, v)), causal(mask[:, :5], 5), True)]
    assert layer.rows[1].store is None
    for i in (5, 6, 7, 8):
        rows = (x[:, :, i : i + 1] for x in (q, k, v))
        parts.append(attended(layer, *rows, causal(mask[:, : i + 1], 1), False))
    layer.crop(8)
    rows = (x[:, :, 8:] for x in (q, k, v))
    parts[-1] = attended(layer, *rows, causal(mask, 4), False)
    out = torch.cat(parts, dim=1)
    assert not out[1, :7].any()
    for i, since in ((0, 0), (1, 7)):
        new = [x[i : i + 1, :, since:] for x in (q, k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(
            *new, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[i, since:].transpose(0, 1), want[0])
    layer.crop(7)
    assert layer.rows[1].store.seq_len == 0
    assert layer.rows[0].store.seq_len == layer.get_seq_length() == 7


# --- generate


@every_model
@pytest.mark.parametrize("budget", [WHOLE, {**WHOLE, "sparse_max_queries": 1}])
def test_a_batch_padded_on_the_right_in_generate(name: str, budget: dict[str, Any]) -> None:
    """The next token of a short row is then taken from its padding, which attends to the row."""
    ids, mask = padded(texts(40, 7, 90, 33), "right")
    expected = generated(MODELS[name](), ids, DynamicCache(), attention_mask=mask)
    model = MODELS[name]()
    assert generated(model, ids, IceCache(model, **budget), attention_mask=mask) == expected


@every_model
@pytest.mark.parametrize("chunk", [None, 50])
def test_a_padded_batch_in_generate(name: str, chunk: int | None) -> None:
    ids, mask = padded(texts(1, 37, 120, 64), "left")
    options: dict[str, Any] = dict(attention_mask=mask, pad_token_id=0)
    if chunk:
        options["prefill_chunk_size"] = chunk
    plain = MODELS[name]()
    expected = generated(plain, ids, DynamicCache(config=plain.config), **options)
    model = MODELS[name]()
    cache = IceCache(model, **WHOLE)
    assert generated(model, ids, cache, **options) == expected
    stats = cache.stats(row=1)
    assert (stats.rows, stats.seq_len) == (1, 120 + 15)
    assert {layer.seq_len for layer in stats.layers.values()} == {37 + 15}


def test_rows_finish_one_after_the_other() -> None:
    ids, mask = padded(texts(20, 37, 5), "left")
    answers = generated(llama(), ids, DynamicCache(), attention_mask=mask, max_new_tokens=30)
    ends = {0: answers[0][3], 1: answers[1][9]}  # what the first two say early
    options = dict(
        attention_mask=mask, max_new_tokens=30, eos_token_id=list(ends.values()), pad_token_id=0
    )
    expected = generated(llama(), ids, DynamicCache(), **options)
    assert len({len(row) - row[::-1].count(0) for row in expected}) > 1
    model = llama()
    assert generated(model, ids, IceCache(model, **WHOLE), **options) == expected


@pytest.mark.parametrize("name", ["llama", "qwen2_mixed", "gemma3"])
@pytest.mark.parametrize("sampling", [False, True])
def test_beams_and_several_answers_are_those_of_full_attention(name: str, sampling: bool) -> None:
    ids, mask = padded(texts(70, 33), "left")
    options: dict[str, Any] = dict(attention_mask=mask, pad_token_id=0, num_return_sequences=3)
    options |= dict(do_sample=True) if sampling else dict(num_beams=4)
    plain, model = MODELS[name](), MODELS[name]()
    torch.manual_seed(5)
    expected = generated(plain, ids, DynamicCache(config=plain.config), **options)
    cache = IceCache(model, **WHOLE)
    torch.manual_seed(5)
    assert generated(model, ids, cache, **options) == expected
    assert cache.stats().rows == (6 if sampling else 8)


def check(cache: IceCache) -> None:
    """Verifies the indexes of all rows."""
    for layer in cache.layers:
        if isinstance(layer, IceLayer):
            for row in layer.rows:
                row.store.check()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("reuse", [1, 2])
def test_sparse_beams_leave_sound_indexes(name: str, reuse: int) -> None:
    model = MODELS[name]()
    ids, mask = padded(texts(600, 450), "left")
    cache = IceCache(model, reuse_layers=reuse, **SPARSE)
    options = dict(attention_mask=mask, num_beams=4, num_return_sequences=4, pad_token_id=0)
    answers = generated(model, ids, cache, **options)
    assert len(answers) == 8
    check(cache)
    # The beams that are left hold what they said: as many caches, read alone, agree.
    again = IceCache(model, reuse_layers=reuse, **SPARSE)
    assert generated(model, ids, again, **options) == answers


def test_equal_rows_share_one_index_until_they_differ() -> None:
    model = llama()
    made: list[int] = []

    def make(*, num_q_heads, num_kv_heads, head_dim, scale, layer_index, device):  # type: ignore[no-untyped-def]
        made.append(layer_index)
        return LayerCache(num_q_heads, num_kv_heads, head_dim, IceConfig(**WHOLE), scale)

    cache = IceCache(model, layer_factory=make)
    rows = texts(50, 31)
    ids, mask = padded([rows[0]] * 3 + [rows[1]] * 2, "left")
    read = Reader(model, cache)
    first = read(ids, mask)
    assert made == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.equal(first[0], first[1]) and torch.equal(first[3], first[4])
    more = tokens(50).reshape(5, 10)
    got = read(more)
    expected = alone("llama", lambda _: DynamicCache(), [rows[0]] * 3 + [rows[1]] * 2, more)
    for a, b, c in zip(first, got, expected, strict=True):
        close(torch.cat([a, b]), c)


def test_a_second_turn_of_a_batch() -> None:
    model = llama()
    first, second = texts(60, 22, 9), [tokens(n, seed=n) for n in (5, 31, 44)]
    ids, mask = padded(first, "left")
    cache, reference = IceCache(model, **WHOLE), DynamicCache()
    turns = []
    for m, c in ((model, cache), (llama(), reference)):
        answer = torch.tensor(generated(m, ids, c, attention_mask=mask, max_new_tokens=10))
        more, more_mask = padded(second, "left")
        whole = torch.cat([ids, answer, more], dim=1)
        whole_mask = torch.cat([mask, torch.ones_like(answer), more_mask], dim=1)
        turns.append(generated(m, whole, c, attention_mask=whole_mask, max_new_tokens=10))
    assert turns[0] == turns[1]
    assert [row.store.seq_len for row in cache.layers[1].rows] == [
        a.shape[1] + 10 + b.shape[1] + 9 for a, b in zip(first, second, strict=True)
    ]
    check(cache)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_rows_said_after_their_end_can_be_hidden_from_the_second_turn(name: str) -> None:
    ids, mask = padded(texts(50, 37, 5), "left")
    plain = MODELS[name]()
    options: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=20)
    said = generated(plain, ids, DynamicCache(config=plain.config), **options)
    options |= dict(eos_token_id=[said[0][3], said[1][9]], pad_token_id=0)
    turns = []
    for cached in (False, True):
        model = MODELS[name]()
        cache = IceCache(model, **WHOLE) if cached else DynamicCache(config=model.config)
        answer = torch.tensor(generated(model, ids, cache, **options))
        ended = (answer[:, :, None] == torch.tensor(options["eos_token_id"])).any(-1).cumsum(1)
        heard = torch.cat([torch.ones(3, 1), 1 - ended.clamp(max=1)[:, :-1]], dim=1).long()
        assert 0 in heard
        more, more_mask = padded([tokens(n, seed=n) for n in (5, 31, 44)], "left")
        whole = torch.cat([ids, answer, more], dim=1)
        whole_mask = torch.cat([mask, heard, more_mask], dim=1)
        turns.append(generated(model, whole, cache, attention_mask=whole_mask, max_new_tokens=10))
    assert turns[0] == turns[1]
    check(cache)
    held = [row.store.seq_len for row in cache._replaced[0].rows]
    assert held == (whole_mask.sum(1) + 9).tolist()


def test_a_mask_of_the_new_tokens_alone_drops_nothing() -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    forward(model, tokens(60).reshape(2, 30), cache)
    for t in (1, 7):
        ids = tokens(2 * t).reshape(2, t)
        with pytest.raises(ValueError, match=r"at most the row's last tokens besides, got one"):
            forward(model, ids, cache, attention_mask=torch.ones_like(ids))
    assert [row.store.seq_len for row in cache.layers[3].rows] == [30, 30]


@pytest.mark.parametrize("options", [WHOLE, SPARSE])
@pytest.mark.parametrize("assistant", [False, True])
def test_drafts_and_crops_of_one_row(options: dict[str, Any], assistant: bool) -> None:
    model, ids = llama(), tokens(480, repeat=31)
    drafts: dict[str, Any] = (
        dict(assistant_model=llama(num_hidden_layers=2))
        if assistant
        else dict(prompt_lookup_num_tokens=9, eos_token_id=VOCABULARY)
    )
    cache = IceCache(model, **options)
    got = generated(model, ids, cache, max_new_tokens=30, **drafts)[0][:30]
    if options is WHOLE:
        assert got == generated(llama(), ids, DynamicCache(), max_new_tokens=30)[0]
    check(cache)
    cache.crop(480)
    again = generated(model, torch.cat([ids, tokens(4)], dim=1), cache, max_new_tokens=8)
    if options is WHOLE:
        whole = torch.cat([ids, tokens(4)], dim=1)
        assert again == generated(llama(), whole, DynamicCache(), max_new_tokens=8)
    check(cache)


# --- Rows are moved, repeated and forked


@pytest.mark.parametrize("model", [llama, qwen2_mixed, gemma3])
def test_rows_go_where_they_are_sent(model: Any) -> None:
    made = model()
    cache, reference = IceCache(made, **WHOLE), DynamicCache(config=made.config)
    readers = Reader(made, cache), Reader(model(), reference)
    ids, mask = padded(texts(40, 25, 31), "left")

    def compare(ids: torch.Tensor, mask: Any = None) -> None:
        for a, b in zip(*(read(ids, mask) for read in readers), strict=True):
            close(a, b)

    def both(change: Any, order: torch.Tensor) -> None:
        for read in readers:
            change(read.cache)
            read.mask = read.mask[order]
        assert cache.stats().rows == len(readers[0].mask)
        compare(tokens(2 * len(readers[0].mask)).reshape(-1, 2))

    compare(ids, mask)
    stores = [layer.rows[2].store for layer in cache._replaced]
    order = torch.tensor([2, 2, 0])
    both(lambda cache: cache.reorder_cache(order), order)
    assert stores == [layer.rows[0].store for layer in cache._replaced]
    both(lambda cache: cache.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2))
    order = torch.tensor([5, 0, 3])
    both(lambda cache: cache.batch_select_indices(order), order)
    keep = torch.tensor([True, False, True])
    both(lambda cache: cache.batch_select_indices(keep), keep)
    check(cache)


def test_the_identity_copies_nothing() -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    forward(model, tokens(60).reshape(3, 20), cache)
    before = [[row.store for row in layer.rows] for layer in cache.layers]
    cache.reorder_cache(torch.arange(3))
    cache.batch_repeat_interleave(1)
    cache.batch_select_indices(torch.tensor([True] * 3))
    assert [[row.store for row in layer.rows] for layer in cache.layers] == before


@pytest.mark.parametrize("place", PLACES)
def test_rows_are_moved_after_a_failed_forward_is_undone(place: str) -> None:
    model = llama()
    cache = IceCache(model, **{**WHOLE, "dense_layers": 1})
    ids = tokens(80).reshape(2, 40)
    forward(model, ids, cache)
    with failing(model.get_submodule(f"model.layers.{place}")), pytest.raises(Failure):
        forward(model, tokens(6).reshape(2, 3), cache)
    order = torch.tensor([1, 0, 1])
    cache.reorder_cache(order)
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * 4
    more = tokens(15).reshape(3, 5)
    expected = forward(llama(), torch.cat([ids[order], more], dim=1), DynamicCache())
    close(forward(model, more, cache), expected[:, 40:])


def test_a_store_that_fails_in_one_row_leaves_all_rows_as_they_were() -> None:
    model = llama()
    cache, _ = recorded(model, **SPARSE)
    untouched = IceCache(model, **SPARSE)
    ids, mask = padded(texts(500, 444, 10), "left")
    readers = [Reader(model, c) for c in (cache, untouched)]
    for read in readers:
        read(ids, mask)
    for layer, row in ((0, 1), (2, 2), (3, 0)):
        cache.layers[layer].rows[row].store.fail = True
        with pytest.raises(ValueError, match="told to fail"):
            whole = torch.cat([readers[0].mask, torch.ones(3, 1).long()], dim=1)
            forward(model, tokens(3).reshape(3, 1), cache, attention_mask=whole)
        for t in (1, 4):
            more = tokens(3 * t, seed=layer).reshape(3, t)
            for a, b in zip(*(read(more) for read in readers), strict=True):
                assert torch.equal(a, b)


# --- Every sequence of operations


@dataclass
class World:
    """A cache, and what it must hold: by row the tokens, and which of the columns they are in."""

    cache: IceCache
    tokens: list[list[int]] = field(default_factory=list)
    mask: list[list[int]] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return len(self.mask[0]) if self.mask else 0

    def crop(self, columns: int) -> None:
        self.mask = [row[:columns] for row in self.mask]
        self.tokens = [row[: sum(mask)] for row, mask in zip(self.tokens, self.mask, strict=True)]
        if not self.columns:
            self.tokens, self.mask = [], []

    def hide(self, row: int, last: int) -> None:
        """Makes padding of the last tokens of a row."""
        del self.tokens[row][len(self.tokens[row]) - last :]
        columns = [column for column, kept in enumerate(self.mask[row]) if kept]
        for column in columns[len(columns) - last :]:
            self.mask[row][column] = 0

    def select(self, order: list[int]) -> None:
        self.tokens = [list(self.tokens[i]) for i in order]
        self.mask = [list(self.mask[i]) for i in order]

    def check(self) -> None:
        assert [layer.get_seq_length() for layer in self.cache.layers] == [self.columns] * 3
        for layer in self.cache.layers[1:]:
            for row, held in zip(layer.rows if self.columns else [], self.tokens, strict=True):
                assert row.tokens == len(held)
                if row.store is not None:
                    row.store.check()


_MODEL = llama(num_hidden_layers=3, max_position_embeddings=1024)
_PLACES = ["0.self_attn.k_proj", "1.self_attn.v_proj", "1.mlp", "2.self_attn.q_proj"]
_TINY: dict[str, Any] = dict(
    token_budget=1024,
    sink_tokens=2,
    window_tokens=6,
    dense_below=0,
    dense_layers=1,
    sparse_max_queries=6,
    page_size=2,
    fanout=3,
)


OPERATIONS = ["grow", "grow", "grow", "fail", "refuse", "crop", "select", "repeat", "fork"]
OPERATIONS += ["drop", "reset"]


@st.composite
def new_columns(draw: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[rows, t]` with padding anywhere; now and then equal rows."""
    t = draw(st.one_of(st.integers(1, 6), st.sampled_from([11, 40])))
    mask = torch.ones(rows, t, dtype=torch.long)
    for i in range(rows):
        at, of = draw(st.sampled_from(["none", "none", "left", "right", "all", "random"])), 0
        if at in ("left", "right"):
            of = draw(st.integers(0, t))
        if at == "left":
            mask[i, :of] = 0
        elif at == "right":
            mask[i, t - of :] = 0
        elif at == "all":
            mask[i] = 0
        elif at == "random":
            bits = torch.Generator().manual_seed(draw(st.integers(0, 99)))
            mask[i] = torch.randint(2, (t,), generator=bits)
    ids = tokens(rows * t, seed=draw(st.integers(0, 999))).reshape(rows, t)
    if rows > 1 and draw(st.booleans()):
        ids[1], mask[1] = ids[0], mask[0]
    return ids, mask


def step(world: World, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows, t = ids.shape
    before = torch.tensor(world.mask or [[]] * rows, dtype=torch.long).reshape(rows, -1)
    whole = torch.cat([before, mask], dim=1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)[:, -t:]
    return forward(_MODEL, ids, world.cache, attention_mask=whole, position_ids=positions)


def grow(world: World, ids: torch.Tensor, mask: torch.Tensor) -> None:
    logits = step(world, ids, mask)
    world.mask = world.mask or [[] for _ in ids]
    world.tokens = world.tokens or [[] for _ in ids]
    for i, kept in enumerate(mask.bool()):
        world.mask[i] += mask[i].tolist()
        world.tokens[i] += ids[i][kept].tolist()
        if kept.any():
            whole = forward(_MODEL, torch.tensor([world.tokens[i]]), DynamicCache())[0]
            close(logits[i][kept], whole[-int(kept.sum()) :])


@examples(1.5)
@given(data=st.data())
def test_any_sequence_of_operations_keeps_every_row_in_full_attention(data: Any) -> None:
    draw = data.draw
    worlds = [World(IceCache(_MODEL, **_TINY))]
    for _ in range(draw(st.integers(1, 14))):
        world = draw(st.sampled_from(worlds))
        rows = len(world.mask)
        what = draw(
            st.sampled_from(
                [
                    "grow",
                    "grow",
                    "grow",
                    "fail",
                    "refuse",
                    "crop",
                    "select",
                    "repeat",
                    "fork",
                    "drop",
                    "reset",
                ]
            )
        )
        if what in ("grow", "fail"):
            ids, mask = draw(new_columns(rows or draw(st.integers(1, 3))))
            forced = draw(st.sampled_from([nullcontext, world.cache.exact, world.cache.sparse]))
            with forced():
                if what == "grow":
                    for i in range(rows):
                        if mask[i].any() and draw(st.booleans()):
                            world.hide(i, draw(st.integers(0, len(world.tokens[i]))))
                    grow(world, ids, mask)
                else:
                    place = _MODEL.get_submodule(f"model.layers.{draw(st.sampled_from(_PLACES))}")
                    with failing(place), pytest.raises(Failure):
                        step(world, ids, mask)
                    continue  # what comes next must undo it
        elif what == "refuse" and world.columns > 1 and any(map(any, world.mask)):
            # Hides a token that is not the last one, or shows what was padding.
            i = draw(st.sampled_from([i for i, row in enumerate(world.mask) if any(row)]))
            wrong = torch.tensor(world.mask)
            last = int(wrong[i].nonzero().max())
            column = draw(st.sampled_from([x for x in range(world.columns) if x != last]))
            wrong[i, column] ^= 1
            good, world.mask = world.mask, wrong.tolist()
            with pytest.raises(ValueError, match="mask that hides"):
                step(world, *(x.reshape(rows, 2) for x in (tokens(2 * rows), torch.ones(2 * rows))))
            world.mask = good
            continue
        elif what == "crop":
            n = draw(st.integers(-world.columns, world.columns))
            world.cache.crop(n)
            if n:
                world.crop(n if n > 0 else world.columns + n)
        elif what == "select" and rows:
            order = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
            move = draw(st.sampled_from(["reorder_cache", "batch_select_indices"]))
            getattr(world.cache, move)(torch.tensor(order))
            world.select(order)
        elif what == "repeat" and rows < 3:
            world.cache.batch_repeat_interleave(2)
            world.select([i for i in range(rows) for _ in range(2)])
        elif what == "fork" and len(worlds) < 3:
            fork = World(world.cache.fork())
            fork.tokens, fork.mask = world.tokens, world.mask
            fork.select(list(range(rows)))
            worlds.append(fork)
            fork.check()
            continue  # a forward that failed before is undone by what comes next
        elif what == "drop" and len(worlds) > 1:
            worlds.remove(world)
            continue
        elif what == "reset":
            world.cache.reset()
            world.crop(0)
        else:
            continue
        world.check()
    for world in worlds:
        if world.mask:
            grow(
                world, tokens(len(world.mask)).reshape(-1, 1), torch.ones(len(world.mask), 1).long()
            )
            world.check()


def test_each_forward_of_a_padded_batch_may_come_from_another_thread() -> None:
    model = llama()
    rows = texts(40, 13)
    read = Reader(model, IceCache(model, **WHOLE))
    got = []
    one = [(tokens(2, seed=i).reshape(2, 1),) for i in range(4)]
    parts = [padded(rows, "left"), *one, padded(texts(3, 9), "right"), *one]
    for part in parts:
        thread = threading.Thread(target=lambda part=part: got.append(read(*part)))
        thread.start()
        thread.join()
    plain = Reader(llama(), DynamicCache())
    for a, part in zip(got, parts, strict=True):
        for b, c in zip(a, plain(*part), strict=True):
            close(b, c)


# --- What a mask says


@given(
    bits=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4),
    t=st.integers(1, 9),
    additive=st.booleans(),
    heads=st.sampled_from([1, 3]),
)
def test_a_mask_is_read_as_runs_of_padding(
    bits: list[list[bool]], t: int, additive: bool, heads: int
) -> None:
    hidden = torch.tensor(bits)
    mask = causal(~hidden, t).expand(-1, heads, -1, -1)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    says = read_mask(mask, len(bits), t, 9)
    for row, of_row in zip(says, hidden.tolist(), strict=True):
        assert row.causal
        assert [any(a <= i < b for a, b in row.padding) for i in range(9)] == of_row
        assert all(a[1] < b[0] for a, b in zip(row.padding, row.padding[1:], strict=False))
        for columns in range(10):
            assert count(row.padding, columns) == sum(of_row[:columns])
            assert cut(row.padding, columns) == tuple(
                (a, min(b, columns)) for a, b in row.padding if a < columns
            )
        shown = outside(row.padding, 9 - t, 9)
        assert [i for a, b in shown for i in range(a, b)] == [
            i for i in range(9 - t, 9) if not of_row[i]
        ]


def test_what_padding_attends_to_is_of_no_interest() -> None:
    mask = causal(torch.tensor([[0, 0, 1, 1, 1]]), 5)
    mask[0, 0, :2] = True  # as older versions of transformers make it of rows without any True
    assert read_mask(mask, 1, 5, 5) == [RowMask(((0, 2),), True)]
    assert read_mask(mask.expand(3, -1, -1, -1), 3, 5, 5) == [RowMask(((0, 2),), True)] * 3
    mask[0, 0, 3, 2] = False
    assert read_mask(mask, 1, 5, 5) == [RowMask(((0, 2),), False)]


@pytest.mark.parametrize("additive", [False, True])
def test_exact_forwards_of_a_batch_take_any_mask_that_hides_its_padding(additive: bool) -> None:
    """As of models that read images or a prefix in both directions."""
    rows = texts(30, 12, 30, 30)
    rows[3] = rows[2]
    ids, padding = padded(rows, "left")
    whole, masks = torch.zeros(4, 0, dtype=torch.long), []
    for columns in (padding, torch.ones(4, 40, dtype=torch.long)):
        whole = torch.cat([whole, columns], dim=1)
        t = columns.shape[1]
        mask = causal(whole, t)
        both_ways = slice(whole.shape[1] - t + 5, whole.shape[1] - t + 22)
        for i in (0, 2, 3):
            mask[i, :, 5:22, both_ways] = whole[i, both_ways].bool()
        masks.append(torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if additive else mask)
    if additive:  # where padding may attend to nothing, older models let it attend to everything
        masks[0][1, :, :18] = 0
        masks[1][0, :, 7, 3] = 0.5
    parts = [ids, tokens(160).reshape(4, 40)]
    made = []

    def make(**shape: Any) -> Any:
        made.append(shape["layer_index"])
        return Stores(IceConfig(**WHOLE))(**shape)

    model = llama()
    cache, reference = IceCache(model, layer_factory=make), DynamicCache()
    for part, mask, kept in zip(parts, masks, (padding, torch.ones(4, 40)), strict=True):
        with cache.exact():
            got = forward(model, part, cache, attention_mask=mask)
        expected = forward(llama(), part, reference, attention_mask=mask)
        close(got[kept.bool()], expected[kept.bool()])
    assert made == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]  # two rows are equal
    one = torch.ones(4, 1, dtype=torch.long)
    mask = torch.cat([whole, one], dim=1)
    close(
        *(
            forward(m, one, c, attention_mask=mask)
            for m, c in ((model, cache), (llama(), reference))
        )
    )
    check(cache)


def test_a_mask_of_whole_numbers_is_refused() -> None:
    model = llama()
    with pytest.raises(ValueError, match=r"mask of bools .* got torch\.int64"):
        forward(model, tokens(3), IceCache(model), attention_mask=torch.ones(1, 1, 3, 3).long())


def test_a_mask_is_read_once_a_forward_even_if_it_is_written_to() -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    mask = torch.zeros(1, 1, 1, 31)
    forward(model, tokens(30), cache)
    forward(model, tokens(1), cache, attention_mask=mask)
    cache.crop(-1)
    mask[..., 4] = -torch.inf
    with pytest.raises(ValueError, match="got one that hides 4 to 4"):
        forward(model, tokens(1), cache, attention_mask=mask)


def test_what_a_mask_says_to_one_cache_is_not_taken_for_what_it_says_to_another() -> None:
    model = llama()
    caches = [IceCache(model, **WHOLE) for _ in range(2)]
    for cache, n in zip(caches, (30, 40), strict=True):
        forward(model, tokens(n), cache)
    mask = torch.zeros(1, 1, 1, 31)
    forward(model, tokens(1), caches[0], attention_mask=mask)
    with pytest.raises(ValueError, match=r"\[1, heads, 1, 41\].*got \[1, 1, 1, 31\]"):
        forward(model, tokens(1), caches[1], attention_mask=mask)
    caches[1].crop(30)
    mask[..., 4] = -torch.inf
    with pytest.raises(ValueError, match="got one that hides 4 to 4"):
        forward(model, tokens(1), caches[1], attention_mask=mask)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_failed_forward_hides_nothing(place: str, again: bool) -> None:
    model = llama()
    cache, untouched = (IceCache(model, **SPARSE) for _ in range(2))
    ids, mask = padded(texts(60, 40), "left")
    for c in (cache, untouched):
        forward(model, ids, c, attention_mask=mask)
    one = torch.ones(2, 1, dtype=torch.long)
    hides = torch.cat([mask, one], dim=1)
    hides[1, 57:60] = 0
    module = model.model.layers.get_submodule(place)
    with failing(module), pytest.raises(Failure):
        forward(model, one, cache, attention_mask=hides)
    seen = hides if again else torch.cat([mask, one], dim=1)
    for _ in range(2):
        got, expected = (forward(model, one, c, attention_mask=seen) for c in (cache, untouched))
        assert torch.equal(got, expected)
        seen = torch.cat([seen, one], dim=1)
    check(cache)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_was_hidden_before_comes_back_only_with_its_forward(name: str, fails: bool) -> None:
    model = MODELS[name]()
    cache, untouched = (IceCache(model, **SPARSE) for _ in range(2))
    ids, mask = padded(texts(60, 60), "left")
    one, order = torch.ones(2, 1, dtype=torch.long), torch.tensor([1, 0])
    hides = torch.cat([mask, one], dim=1)
    hides[1, 57:60] = 0
    for c in (cache, untouched):
        forward(model, ids, c, attention_mask=mask)
    failure = failing(model.model.layers[2].mlp) if fails else nullcontext()
    raises = pytest.raises(Failure) if fails else nullcontext()
    with failure, raises:
        forward(model, one, cache, attention_mask=hides)
    fork = cache.fork()
    if not fails:
        forward(model, one, untouched, attention_mask=hides)
    for c in (cache, fork, untouched):
        c.reorder_cache(order)
    with pytest.raises(ValueError, match="output_attentions"):
        forward(model, one, cache, output_attentions=True)
    seen = torch.cat([mask if fails else hides[order], one], dim=1)
    expected = forward(model, one, untouched, attention_mask=seen)
    for c in (cache, fork):
        assert torch.equal(forward(model, one, c, attention_mask=seen), expected)


def test_a_second_turn_whose_first_chunk_is_padding_of_one_row() -> None:
    first, mask = padded(texts(60, 50), "left")
    second, more = padded(texts(90, 10), "left")
    ends = torch.ones(2, 8, dtype=torch.long)
    ends[1, 3:] = 0  # what this row said after its end
    answers = []
    for cache_of in (lambda m: DynamicCache(), lambda m: IceCache(m, **WHOLE)):
        model = llama()
        cache = cache_of(model)
        said = generated(model, first, cache, attention_mask=mask, max_new_tokens=8)
        ids = torch.cat([first, torch.tensor(said), second], dim=1)
        seen = torch.cat([mask, ends, more], dim=1)
        options = dict(attention_mask=seen, prefill_chunk_size=40)
        answers.append(generated(model, ids, cache, **options))
    assert answers[0] == answers[1]


def test_a_mask_that_shows_some_what_it_hides_from_the_last_is_refused() -> None:
    model = llama()
    cache = IceCache(model, **WHOLE)
    forward(model, tokens(20), cache)
    mask = torch.ones(5, 25, dtype=torch.bool).tril(20)[None, None]
    mask[..., 4, 19] = False
    with pytest.raises(ValueError, match="shows it no column 19, and others do"):
        forward(model, tokens(5), cache, attention_mask=mask)
    assert cache.get_seq_length() == 20


def test_a_store_may_come_filled_for_one_row() -> None:
    model, ids = llama(), tokens(60)
    filled = DynamicCache()
    expected = forward(llama(), ids, filled)

    def make(*, layer_index: int, **shape: Any) -> Any:
        store = Stores(IceConfig(**WHOLE))(layer_index=layer_index, **shape)
        store.prefill(
            *(
                x[0, :, :50]
                for x in (filled.layers[layer_index].keys, filled.layers[layer_index].values)
            )
        )
        return store

    cache = IceCache(model, layer_factory=make)
    for i in range(50, 60):
        got = forward(model, ids[:, i : i + 1], cache, position_ids=torch.tensor([[i]]))
        close(got, expected[:, i : i + 1])
        assert cache.get_seq_length() == i + 1
    assert cache.stats().layers[2].steps == 10
    cache = IceCache(model, layer_factory=make)
    with pytest.raises(ValueError, match="empty stores for 2 rows, got one of 50 tokens"):
        forward(model, tokens(2).reshape(2, 1), cache)


# --- Stats


def test_stats_of_a_row_and_of_all() -> None:
    model = gemma3()
    cache = IceCache(model, **SPARSE)
    read = Reader(model, cache)
    read(*padded(texts(300, 5, 200), "left"))
    read(tokens(3).reshape(3, 1))
    whole, rows = cache.stats(), [cache.stats(row=i) for i in range(3)]
    assert (whole.rows, whole.seq_len) == (3, 301)
    assert [row.layers[1].seq_len for row in rows] == [301, 6, 201]
    assert whole.kv_bytes == sum(row.kv_bytes for row in rows) == 2 * 508 * 2 * 2 * 16 * 4
    assert whole.index_bytes == sum(row.index_bytes for row in rows)
    assert whole.layers[3].kv_bytes == sum(row.layers[3].kv_bytes for row in rows)
    assert whole.layers[3].seq_len == round(508 / 3)
    assert whole.layers[3].overhead == whole.layers[3].index_bytes / whole.layers[3].kv_bytes
    for name in ("tokens_exact", "key_rows_read", "mass_exact", "error_estimate"):
        mean = sum(getattr(row, name) for row in rows) / 3
        assert getattr(whole, name) == pytest.approx(mean)
    for bad in (3, -1):
        with pytest.raises(IndexError, match=f"a row below 3, got {bad}"):
            cache.stats(row=bad)

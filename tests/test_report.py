"""The page of a comparison: its facts, its markup, and what a browser makes of it."""

import dataclasses
import io
import math
import random
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import chromium
import matplotlib.image
import numpy as np
import pytest
from comparisons import config, text_row, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from icecache.cli import app
from icecache.eval.comparison import Comparison, DriftRow, HeadRow, TaskRow
from icecache.eval.errors import EvalError
from icecache.report import write_report
from icecache.report.numbers import NONE, TIMES, byte_count, number, percent, with_error
from icecache.report.plots import spread

SECTIONS = ["summary", "kl", "texts", "tasks", "drift", "heads", "method"]
SMALL = whole(texts=("gpl", "pydoc"), budgets=(16, 64))
SPACE = "\N{NO-BREAK SPACE}"
VOID = {"meta", "link", "input", "br"}


class Parsed(HTMLParser):
    """Balanced tags, their attributes, and the text by section."""

    def __init__(self, page):
        super().__init__()
        self.open, self.attributes, self.sections, self.tags = [], [], {}, Counter()
        self.section, self.rows, self.styles = None, [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"]
            self.sections[self.section] = ""
        elif tag == "tr":
            self.rows.append((self.section, []))
        elif tag in ("th", "td"):
            self.rows[-1][1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), tag
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "section":
            self.section = None

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.styles.append(data)
        elif self.section and "svg" not in self.open:
            text = re.sub(r"\s+", " ", data)  # no-break spaces, too
            self.sections[self.section] += text
            if set(self.open) & {"th", "td"}:
                self.rows[-1][1][-1] += text

    def table(self, section):
        """Cells of its first table's rows, by the first cell."""
        return {cells[0]: cells for where, cells in self.rows if where == section}


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_report(whole(), path)
    return path


@pytest.fixture(scope="module")
def parsed(whole_page):
    return Parsed(whole_page.read_text(encoding="utf-8"))


@pytest.fixture
def show(tmp_path):
    """A comparison as its page, parsed."""

    def show(comparison):
        path = tmp_path / "page.html"
        write_report(comparison, path)
        return Parsed(path.read_text(encoding="utf-8"))

    return show


def compare(*rows, **more):
    return Comparison(config=config(**more), texts=list(rows))


FULL_ROW = text_row("full", None, 0.0, read_bytes=1e8, held_bytes=4e8)


# What the summary says


def test_icecache_ahead(show):
    page = show(
        compare(
            FULL_ROW,
            text_row("icecache", 16, 0.02, kl_stderr=0.001),
            text_row("icecache", 64, 0.004, kl_stderr=0.0002, read_bytes=1.3e7, agreement=0.972),
            text_row("quest", 16, 0.5, kl_stderr=0.01),
            text_row("quest", 64, 0.02, kl_stderr=0.001),
            text_row("quest", 256, 0.005),
            text_row("h2o", 64, 0.3),
            text_row("topk", 64, 0.001),
        )
    )
    said = page.sections["summary"]
    assert "icecache keeps the answers from 64 tokens on; quest from 256 tokens on." in said
    assert "At no budget measured: h2o." in said
    assert "At a budget of 64 icecache agrees with full attention" in said
    assert "97.2 % of the positions. A step reads 13.0 MB (13.0 % of full attention)" in said
    assert (
        "icecache is best, KL 0.00400 ± 0.00020; the best other method, quest, has "
        "0.0200 ± 0.0010, 5.0 times as far from full attention."
    ) in said
    assert "25 times as far" in said
    assert "quest is best" in said  # at 256, alone
    assert "icecache has the lowest KL of all deployable policies in 2 of 2 pairs" in said
    table = page.table("summary")
    assert table["icecache"] == [
        "icecache", "0.0200", "0.00400 ✓", NONE, "64", "97.2 %", "13.0 MB", "13.0 %", "100 kB",
        "2.00 MB",
    ]  # fmt: skip
    assert table["topk (not deployable)"][2:5] == ["0.00100 ✓", NONE, "64"]
    assert table["h2o"][4] == "never"


def test_another_policy_ahead(show):
    page = show(
        compare(
            text_row("icecache", 64, 0.03, kl_stderr=0.001),
            text_row("pqcache", 64, 0.02, kl_stderr=0.001),
            text_row("icecache", 16, 0.2, text="pydoc", kl_stderr=0.001),
            text_row("pqcache", 16, 0.4, text="pydoc", kl_stderr=0.001),
        )
    )
    said = page.sections["summary"]
    assert "No deployable policy keeps the answers at any budget measured." in said
    assert "pqcache is best, KL 0.0200 ± 0.0010; icecache has 0.0300 ± 0.0010, 1.5 times" in said
    assert "in 1 of 2 pairs of budget and text: pqcache is at 64 tokens on pydoc, 1.5" in said


def test_a_variant_is_no_other_method(show):
    rows = [text_row(p, 64, kl) for p, kl in (("icecache", 2), ("icecache-reuse", 3), ("h2o", 8))]
    assert (
        "the best other method, h2o, has 8.00 ± 0.80, 4.0 times"
        in (show(compare(*rows)).sections["summary"])
    )


def test_a_difference_within_the_errors(show):
    rows = text_row("icecache", 64, 0.02, kl_stderr=0.004), text_row("h2o", 64, 0.025, kl_stderr=0)
    assert "less than two standard errors" in show(compare(*rows)).sections["summary"]
    rows = text_row("icecache", 64, 0.02, kl_stderr=0.002), rows[1]
    assert "less than two standard errors" not in show(compare(*rows)).sections["summary"]


def test_equal_bytes_measure_icecache_once(show):
    page = show(
        compare(
            text_row("icecache", 64, 0.02),
            text_row("quest", 64, 0.5),
            text_row("quest", 64, 0.08, equal="bytes", spent=9),
        )
    )
    said = page.sections["summary"].partition("At equal bytes read")[2]
    assert "the best other method, quest, has 0.0800 ± 0.0080, 4.0 times" in said


def test_means_are_over_all_texts_or_none(show):
    page = show(
        compare(
            text_row("icecache", 64, 0.02, text="a", kl_stderr=0.003),
            text_row("icecache", 64, 0.04, text="b", kl_stderr=0.004),
            text_row("quest", 64, 0.001, text="a"),
        )
    )
    table = page.table("summary")
    assert table["icecache"][1] == "0.0300"
    assert "quest" not in table
    assert "KL 0.0300 ± 0.0025" in page.sections["summary"]
    assert "in 1 of 1 pairs" not in page.sections["summary"]
    assert "quest is at 64 tokens on a, 20 times" in page.sections["summary"]


def test_rows_that_are_missing_are_said_to_be(show):
    rows = [text_row("icecache", 64, 0.02, text=text) for text in ("a", "b")]
    quest = [text_row("quest", 64, 0.5, text=text) for text in ("a", "b")]
    assert "Incomplete" not in show(compare(*rows, *quest)).sections["summary"]
    summary = show(compare(*rows, *quest[:1])).sections["summary"]
    assert "Incomplete: 3 of 4 rows are there." in summary
    assert "not all policies and budgets were measured on b" in summary.lower()


def test_who_attends_to_more_is_not_ranked_at_equal_tokens(show):
    rows = [text_row(name, 64, kl) for name, kl in (("icecache", 0.02), ("quest", 0.5))]
    more = text_row("omnikv", 64, 0.001, exact_tokens=1500.0)
    summary = show(compare(FULL_ROW, *rows, more)).sections["summary"]
    assert "icecache is best, KL 0.0200" in summary
    assert "omnikv (1,500 tokens)" in summary
    assert "icecache has the lowest KL of all deployable policies in 1 of 1 pairs" in summary


def test_who_reads_more_at_any_budget_is_named(show):
    rows = [text_row(name, 64, 0.5) for name in ("pages", "quest")]
    other = text_row("quest", 64, 0.08, equal="bytes", spent=9)
    summary = show(compare(text_row("icecache", 64, 0.02), *rows, other)).sections["summary"]
    said = summary.partition("At equal bytes read")[2]
    assert "Read more at any budget, or not measured: pages." in said


def test_a_tie_is_none_s_victory(show):
    rows = [text_row(name, 64, 0.0) for name in ("icecache", "quest")]
    summary = show(compare(*rows)).sections["summary"]
    assert "all are full attention" in summary
    assert "is best" not in summary and "lowest KL" not in summary


def task_row(policy, task, right, logprob, *, full_right=True, instance=0, budget=64):
    return TaskRow(
        policy=policy, budget=budget, task=task, instance=instance, context=4000, right=right,
        logprob=logprob, full_right=full_right, full_logprob=-1.0,
    )  # fmt: skip


def test_tasks_that_full_attention_fails_are_not_averaged(show):
    rows = []
    for policy, lost in (("icecache", 0.5), ("quest", 2.0)):
        rows += [
            task_row(policy, "easy", True, -1.0 - lost),
            task_row(policy, "easy", policy == "icecache", -1.0 - lost, instance=1),
            task_row(policy, "easy", False, -9.0, full_right=False, instance=2),
            task_row(policy, "hard", False, -50.0, full_right=False),
            task_row(policy, "copy", True, -1.0),
        ]
    page = show(Comparison(config=config(), tasks=rows))
    assert list(page.sections) == ["summary", "tasks", "method"]
    said = page.sections["summary"]
    assert "icecache is best: 100 % right, 0.25 nats of log-probability lost" in said
    assert "the best other method, quest: 75.0 % right, 1.0 nats" in said
    table = page.table("tasks")
    assert table["policy"][2:] == [
        "easy", "hard (full attention fails)", "copy", "mean right", "mean loss"
    ]  # fmt: skip
    assert table["quest"][2:] == [
        "1 of 2, 2.0 (0 of 1, 8.0)", "(0 of 1, 49)", "1 of 1, 0", "75.0 %", "1.0"
    ]  # fmt: skip


def test_drift(show):
    def row(variant, start, kl):
        return DriftRow(
            variant=variant, budget=64, text="gpl", start=start, positions=1024, kl=kl,
            kl_stderr=kl / 10,
        )  # fmt: skip

    rows = [row("inserted", 1024, 9.0), row("inserted", 7168, 0.006), row("rebuilt", 7168, 0.005)]
    page = show(Comparison(config=config(), drift=rows))
    assert list(page.sections) == ["summary", "drift", "method"]
    said = "gpl, from position 7,168 on, budget 64: KL 0.00600, 0.00500 with an index built anew"
    assert f"{said} (1.2 times that of the index built anew)." in page.sections["summary"]


def test_layers_and_heads(show):
    rows = [
        HeadRow(policy="icecache", budget=64, text=text, layer=layer, head=head, mass=0.5,
                error=error * (1 + head) * (1 + layer))
        for text, error in (("a", 0.1), ("b", 0.3)) for layer in range(3) for head in range(2)
    ]  # fmt: skip
    page = show(Comparison(config=config(), heads=rows))
    assert list(page.sections) == ["summary", "heads", "method"]
    assert page.tags["image"] == 4  # error and mass, each with its colours
    cells = page.table("heads")["icecache"]
    assert cells[2:] == [
        "0.600", "0.500", "1.20 (layer 2, head 1)", "50.0 %", "0.500 (layer 0, head 0)"
    ]  # fmt: skip


def test_quantities_are_explained_in_the_words_of_the_code(parsed):
    said = parsed.sections["method"]
    assert "Mean KL(full || policy) of the next-token distributions, in nats." in said
    assert "Share of positions with the same most probable token as full attention." in said
    assert "icecache compare --model smollm2" in said
    assert "torch 2.9" in said


# Markup


def test_all_sections_in_order(parsed):
    assert list(parsed.sections) == SECTIONS
    assert parsed.tags["svg"] > 20
    assert parsed.tags["script"] == 0


def test_nothing_is_loaded(parsed):
    for tag, name, value in parsed.attributes:
        if name in ("src", "href", "srcset", "action", "poster", "data") or name.endswith(":href"):
            assert value.startswith(("#", "data:")), (tag, name, value)
        for address in re.findall(r"url\(([^)]*)\)", value):
            assert address.startswith("#")
    assert not re.search(r"url\(|@import|https?:", "".join(parsed.styles))


def test_text_is_escaped(show):
    evil = "</style><script>alert(1)</script> $x_{ &amp; \x00\n\ud800"
    rows = [text_row("icecache", 16, 1.0, text=evil), text_row(evil, 16, 2.0, text=evil)]
    heads = [HeadRow(policy=evil, budget=1, text=evil, layer=0, head=0, mass=1.0, error=0.0)]
    tasks = [task_row(evil, evil, True, -1.0)]
    drift = [DriftRow(variant=evil, budget=1, text=evil, start=0, positions=1, kl=1.0, kl_stderr=1)]
    policies = {evil: {"what": evil, "deployable": True}}
    more = {"model": evil, "versions": {evil: evil}, "policies": policies, "command": evil}
    page = show(
        Comparison(config=config() | more, texts=rows, tasks=tasks, drift=drift, heads=heads)
    )
    assert page.tags["script"] == 0
    assert page.tags["style"] == 1
    assert "<script>alert(1)</script> $x_{ &amp; " in page.sections["method"]


def check_markup(page):
    ids = Counter(value for _, name, value in page.attributes if name == "id")
    assert set(ids.values()) <= {1}
    used = {
        address
        for _, name, value in page.attributes
        for address in re.findall(r"url\(#([^)]+)\)|^#(.+)$", value)
        if name != "style" or "url" in value
    }
    assert {a or b for a, b in used} <= set(ids)
    assert "nan" not in re.findall(
        r"\bnan\b",
        " ".join(said for name, said in page.sections.items() if name != "method").lower(),
    )


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([0.002, 0.02, 0.1]))
def test_any_rows_make_a_page(tmp_path_factory, seed, share):
    rng = random.Random(seed)

    def some(rows, **odd):
        kept = [row for row in rows if rng.random() < share]
        change = {name: value for name, value in odd.items() if rng.random() < 0.3}
        some_rows = [dataclasses.replace(r, **change) if rng.random() < 0.2 else r for r in kept]
        return some_rows if rng.random() < 0.7 else []

    comparison = Comparison(
        config=config() if rng.random() < 0.8 else {},
        texts=some(SMALL.texts, budget=None, kl_stderr=math.nan, kl=0.0, read_bytes=0.0),
        tasks=some(SMALL.tasks, budget=None, full_right=False, logprob=-1e9),
        drift=some(SMALL.drift, kl=math.nan, start=0),
        heads=some(SMALL.heads, budget=None, error=0.0, mass=math.nan),
    )
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_report(comparison, path)
    page = Parsed(path.read_text(encoding="utf-8"))
    check_markup(page)
    present = {
        "texts": comparison.texts, "tasks": comparison.tasks, "drift": comparison.drift,
        "heads": comparison.heads,
    }  # fmt: skip
    for section, rows in present.items():
        assert (section in page.sections) == bool(rows)


def test_the_whole_page_is_well_formed(parsed):
    check_markup(parsed)


def test_a_page_that_cannot_be_written(tmp_path):
    with pytest.raises(EvalError, match="cannot write"):
        write_report(Comparison(config=config()), tmp_path / "none" / "page.html")


# Parts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0054321, "0.00543"),
        (0.9999, "1.00"),
        (12.345, "12.3"),
        (999.6, "1,000"),
        (123456, "123,456"),
        (-0.5, "\N{MINUS SIGN}0.500"),
        (3.21e-8, f"3.2 {TIMES} 10⁻⁸"),
        (math.nan, NONE),
        (math.inf, "∞"),
        (None, NONE),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_numbers_with_units():
    assert with_error(0.01234, 0.00056).replace(SPACE, " ") == "0.01234 ± 0.00056"
    assert with_error(12.0, 3.04).replace(SPACE, " ") == "12.0 ± 3.0"
    assert with_error(0.5, math.nan) == "0.500"
    assert percent(0.1234) == f"12.3{SPACE}%"
    assert byte_count(999) == f"999{SPACE}B"
    assert byte_count(999_700) == f"1.00{SPACE}MB"


@given(st.lists(st.floats(0, 1), max_size=15), st.floats(0.01, 0.06))
def test_labels_keep_their_distance(heights, gap):
    heights.sort()
    moved = spread(heights, gap)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(moved))
    assert all(-1e-9 <= height <= 1 for height in moved)
    if all(b - a >= gap for a, b in pairwise(heights)):
        assert moved == pytest.approx(heights)


def test_the_command(tmp_path):
    file, page, same = (tmp_path / name for name in ("rows.json", "page.html", "same.html"))
    SMALL.write(file)
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(page)])
    assert result.exit_code == 0, result.output
    write_report(SMALL, same)
    assert page.read_bytes() == same.read_bytes()
    page.write_text("{}")
    with pytest.raises(EvalError, match="holds no comparison"):
        CliRunner().invoke(app, ["report", str(page), "--out", str(same)], catch_exceptions=False)


# In a browser


@pytest.fixture(scope="module")
def browser():
    path = chromium.find()
    if path is None:
        pytest.skip(f"none of {', '.join(chromium.NAMES)} is installed")
    with chromium.page(path) as page:
        yield page


# Texts of plots that leave their plot, which paper would cut off.
OUTSIDE = """[...document.querySelectorAll("svg text")].filter(text => {
    const [inner, outer] = [text, text.closest("svg")].map(e => e.getBoundingClientRect());
    return inner.left < outer.left - 1 || inner.right > outer.right + 1 ||
        inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
}).map(text => text.textContent)"""
BOXES = """[...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const lines = [...svg.querySelectorAll("path, image, use")].map(e => e.getBoundingClientRect());
    return [box.width, box.height, lines.filter(b => b.width + b.height > 0).length,
        svg.closest(".maps") !== null && getComputedStyle(svg.closest(".maps")).display == "none"];
})"""


@pytest.mark.parametrize("width", [360, 800, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(browser, whole_page, width, scheme):
    browser.look(width, scheme=scheme)
    browser.open(whole_page)
    across, height = browser.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    )
    assert across <= width
    boxes = browser.evaluate(BOXES)
    assert all(drawn for *_, drawn, hidden in boxes if not hidden)
    assert all(w > 10 and h > 5 for w, h, _, hidden in boxes if not hidden)
    assert sum(not hidden for *_, hidden in boxes) > 20
    assert browser.evaluate(OUTSIDE) == []
    pixels = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[..., :3].mean(axis=2)
    assert pixels.shape == (height, width)
    dark = np.median(pixels)
    assert dark < 0.2 if scheme == "dark" else dark > 0.95
    marked = np.abs(pixels - dark) > 0.15
    assert marked.mean() > 0.02
    # Something is drawn in every stretch of the page, and nothing at its edges.
    stretches = np.array_split(marked, height // 600)
    assert all(stretch.any() for stretch in stretches)
    assert not marked[:, 0].any()
    assert not marked[:, -1].any()
    assert not marked[-8:].any()
    assert not browser.messages
    assert {url for url in browser.requests if not url.startswith("data:")} == {whole_page.as_uri()}


def test_highlights_and_the_choice_of_a_budget(browser, whole_page):
    browser.look(1280)
    browser.open(whole_page)
    faded = """[...document.querySelectorAll("#kl .panels [class*=curve-]")]
        .map(line => getComputedStyle(line).opacity == 1)"""
    assert all(browser.evaluate(faded))
    browser.evaluate("document.querySelector('#kl input').click()")
    clear = browser.evaluate(faded)
    assert 0 < sum(clear) < len(clear) / 4
    shown = """[...document.querySelectorAll(".maps h3")].filter(h => h.offsetParent)
        .map(h => h.textContent.split(" ").at(-1))"""
    assert browser.evaluate(shown) == ["16", "16"]
    browser.evaluate("document.querySelector('select').value = 3")
    assert browser.evaluate(shown) == ["256", "256"]


def test_on_paper(browser, whole_page):
    browser.look(1280, scheme="dark")
    browser.open(whole_page)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert 5 <= pages <= 30

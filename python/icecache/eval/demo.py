"""A model answers from a long text under full attention and under icecache, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.progress import Progress
from rich.table import Table

from icecache.eval.decode import Decoder, Step, prefill
from icecache.eval.kl import agreement, divergence, feed
from icecache.eval.passkey import ask
from icecache.eval.runs import FULL, Run
from icecache.eval.texts import Haystack


@dataclass(frozen=True)
class DemoRow:
    """One policy on one of the two parts, "passkey" or "text"."""

    part: str
    policy: str
    budget: int | None
    stored: int
    """Tokens in the cache at the end."""
    answer: str | None
    found: bool | None
    tokens_exact: float
    """Tokens attended exactly per KV head: sink and window counted."""
    kl: float
    """Mean KL of the next-token distributions from full attention's, in nats."""
    agreement: float
    """Share of positions with the same most probable token as full attention."""
    kv_bytes: int
    index_bytes: int
    """Every byte stored beyond the raw keys and values."""
    ms_per_token: float


def demo_passkey(
    model: Any, tokenizer: Any, hay: Haystack, run: Run, progress: Progress
) -> list[DemoRow]:
    """Full attention and `run` are asked for the passkey of the same haystack."""
    shared = prefill(model, hay.context, progress)
    rows: list[DemoRow] = []
    reference: list[Step] = []
    for one in (FULL, run):
        decoder = Decoder(model, shared, one)
        reply = ask(decoder, tokenizer, hay)
        reference = reference or reply.steps
        rows.append(
            _row("passkey", decoder, reply.steps, reference, answer=reply.answer, found=reply.found)
        )
    return rows


def demo_text(
    model: Any, ids: Sequence[int], context: int, run: Run, progress: Progress
) -> list[DemoRow]:
    """Full attention and `run` read on after the first `context` tokens of the same text."""
    shared = prefill(model, ids[:context], progress)
    rows: list[DemoRow] = []
    reference: list[Step] = []
    for one in (FULL, run):
        decoder = Decoder(model, shared, one)
        steps = feed(decoder, ids[context:], progress)
        reference = reference or steps
        rows.append(_row("text", decoder, steps, reference))
    return rows


def _row(
    part: str,
    decoder: Decoder,
    steps: Sequence[Step],
    reference: Sequence[Step],
    answer: str | None = None,
    found: bool | None = None,
) -> DemoRow:
    pairs = list(zip(reference, steps, strict=True))
    kv_bytes, index_bytes = decoder.memory()
    return DemoRow(
        part=part,
        policy=decoder.run.policy,
        budget=decoder.run.budget,
        stored=decoder.seq_len,
        answer=answer,
        found=found,
        tokens_exact=fmean(step.tokens_exact for step in steps),
        kl=fmean(divergence(full.log_probs, step.log_probs) for full, step in pairs),
        agreement=agreement(pairs),
        kv_bytes=kv_bytes,
        index_bytes=index_bytes,
        ms_per_token=median(step.ms for step in steps),
    )


def demo_table(title: str, rows: Sequence[DemoRow]) -> Table:
    """One column per policy."""
    lines: list[tuple[str, Callable[[DemoRow], str]]] = [
        ("answer", lambda row: repr(row.answer)),
        ("pass key found", lambda row: "yes" if row.found else "no"),
        ("tokens attended exactly per KV head", _exact),
        ("KL of next-token distributions, nats", lambda row: f"{row.kl:.5f}"),
        ("same most probable token", lambda row: f"{row.agreement:.1%}"),
        ("KV-cache", lambda row: f"{row.kv_bytes / 2**20:.1f} MiB"),
        ("index and slack beyond it", _overhead),
        ("ms per token", lambda row: f"{row.ms_per_token:.0f}"),
    ]
    table = Table(title=title)
    table.add_column("")
    for row in rows:
        heading = "full attention" if row.policy == "full" else f"{row.policy} at {row.budget}"
        table.add_column(heading, justify="right")
    for label, show in lines if rows[0].answer is not None else lines[2:]:
        table.add_row(label, *(show(row) for row in rows))
    return table


def _exact(row: DemoRow) -> str:
    return f"{row.tokens_exact:.0f} of {row.stored}"


def _overhead(row: DemoRow) -> str:
    return f"{row.index_bytes / 2**20:.1f} MiB ({row.index_bytes / row.kv_bytes:.1%})"

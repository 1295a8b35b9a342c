"""The command `icecache`: `demo`, `eval`, `compare`, `report`, `purity`, and `bench`.

Heavy modules are imported when a command runs, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
except ImportError as error:
    raise SystemExit(f"icecache: {error}; install icecache[eval]") from error

if TYPE_CHECKING:
    from rich.progress import Progress

    from icecache.bench.heads import Heads
    from icecache.config import IceConfig

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

bench_app = typer.Typer(
    no_args_is_help=True, help="Times, against baselines of the same run, on a real model's rows."
)
app.add_typer(bench_app, name="bench")

ModelOption = Annotated[
    str, typer.Option("--model", help='"smollm2" (from PyPI), a directory, or a model hub name.')
]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="A text file; Python's own reference by default.")
]
BudgetOption = Annotated[int, typer.Option("--budget", min=1, help="Tokens found per KV head.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of IceConfig, for icecache."),
]


def _can_be_written(path: Path | None) -> Path | None:
    """Refuses a file that could not be written, before hours of work and not after."""
    if path is not None and not path.resolve().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    if path is not None and not os.access(path.resolve().parent, os.W_OK):
        raise typer.BadParameter(f"the folder {path.parent} cannot be written")
    return path


def _differ(*paths: str | Path | None) -> None:
    """Refuses one file for two purposes: nothing that was measured or read is overwritten."""
    files = [Path(path).resolve() for path in paths if path is not None]
    if twice := [path for path in files if files.count(path) > 1]:
        raise typer.BadParameter(f"{twice[0]} is given twice: give another file")


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        writable=True,
        callback=_can_be_written,
        help="Also write the figures to this file.",
    ),
]
QHeadsOption = Annotated[int, typer.Option("--q-heads", min=1, help="Query heads of the layer.")]
KvHeadsOption = Annotated[int, typer.Option("--kv-heads", min=1, help="Its KV heads.")]
HeadDimOption = Annotated[int, typer.Option("--head-dim", min=1, help="Elements of a key.")]
TokensOption = Annotated[str, typer.Option("--tokens", help="Lengths, 256 or more.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="f32, f16 or bf16.")]
ThreadsOption = Annotated[
    int,
    typer.Option(
        "--threads", min=1, max=1024, help="Of icecache, and of what it is compared with."
    ),
]
KvOption = Annotated[
    Path | None,
    typer.Option(
        "--kv",
        help="A .npz, .pt or .safetensors file of k, v [kv_heads, n, head_dim] and q [q_heads, "
        "positions, head_dim], unscaled queries of the last positions; SmolLM2's rows by default.",
    ),
]


def main() -> None:
    """The entry point: an `EvalError` becomes one line and exit code 1."""
    from icecache.eval.errors import EvalError

    try:
        app()
    except EvalError as error:
        print(f"icecache: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"icecache {version('icecache')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    """Long-context attention over an indexed KV-cache, measured on a real model."""


@app.command()
def demo(
    model: ModelOption = "smollm2",
    text: TextOption = None,
    budget: BudgetOption = 64,
    context: Annotated[int, typer.Option(min=256, help="Tokens of haystack and text.")] = 6500,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded on the text.")] = 48,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """A model answers from a long text under full attention and under icecache, side by side."""
    from icecache.eval import report, texts
    from icecache.eval.decode import check_model
    from icecache.eval.demo import demo_passkey, demo_table, demo_text
    from icecache.eval.model import load_model
    from icecache.eval.runs import FULL, plan

    (run,) = plan(["icecache"], [budget])
    name, content = texts.read_text(text)
    language_model, tokenizer = load_model(model)
    check_model(language_model, context + max(tokens, 64))
    hay = texts.make_haystack(tokenizer, context, 0.5)
    ids = texts.first_tokens(tokenizer, name, content, context + tokens)
    out = Console(quiet=json)
    with _progress() as progress:
        asked = demo_passkey(language_model, tokenizer, hay, run, progress)
    out.print(demo_table(f"{context} tokens hide the pass key {hay.passkey}", asked))
    if not asked[0].found:
        out.print("Full attention itself does not find it: this model cannot do the task.")
    with _progress() as progress:
        read = demo_text(language_model, ids, context, run, progress)
    out.print(demo_table(f"{tokens} tokens read after {context} tokens of {name}", read))
    if json:
        settings = {"text": name, "context": context, "tokens": tokens, "passkey": hay.passkey}
        print(report.to_json(report.describe(model, [FULL, run], **settings), [*asked, *read]))


@app.command("eval")
def evaluate(
    model: ModelOption = "smollm2",
    text: TextOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens read before measuring.")] = 7936,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens then fed one by one.")] = 192,
    budgets: Annotated[str, typer.Option(help="Tokens found per KV head.")] = "16,64,256",
    policies: Annotated[
        str, typer.Option(help="What to compare.")
    ] = "full,window,topk,pages,icecache",
    skip_chars: Annotated[int, typer.Option(min=0, help="Characters of the text to skip.")] = 0,
    passkey: Annotated[
        str | None, typer.Option(help="Look for pass keys instead, in haystacks of these lengths.")
    ] = None,
    depths: Annotated[str, typer.Option(help="Where the pass key is: 0 start, 1 end.")] = "0.5",
    seeds: Annotated[str, typer.Option(help="Seeds of the tree.")] = "0",
    haystack: Annotated[
        str, typer.Option(help='"filler" (simple sentences, repeated) or "prose".')
    ] = "filler",
    set_: SetOption = None,
    json: JsonOption = None,
) -> None:
    """How close each policy is to full attention, and what it reads; or whether it finds a key."""
    from icecache.eval import report, texts
    from icecache.eval.decode import check_model
    from icecache.eval.kl import evaluate_text
    from icecache.eval.model import load_model
    from icecache.eval.passkey import evaluate_passkeys
    from icecache.eval.runs import plan

    names = [name.strip() for name in policies.split(",")]
    runs = plan(names, _numbers(budgets, int, "--budgets"), _assignments(set_ or []))
    settings: dict[str, Any]
    rows: list[Any]
    if passkey is None:
        name, content = texts.read_text(text, skip_chars)
        language_model, tokenizer = load_model(model)
        check_model(language_model, context + tokens)
        ids = texts.first_tokens(tokenizer, name, content, context + tokens + 1)
        with _progress() as progress:
            rows = list(evaluate_text(language_model, name, ids, context, runs, progress))
        table = report.closeness_table(rows)
        settings = {"text": name, "context": context, "tokens": tokens, "skip_chars": skip_chars}
    else:
        lengths = _numbers(passkey, int, "--passkey")
        settings = {
            "lengths": lengths,
            "depths": _numbers(depths, float, "--depths"),
            "seeds": _numbers(seeds, int, "--seeds"),
            "kind": haystack,
        }
        language_model, tokenizer = load_model(model)
        check_model(language_model, max(lengths) + 64)
        with _progress() as progress:
            rows = list(
                evaluate_passkeys(language_model, tokenizer, runs, progress=progress, **settings)
            )
        table = report.passkey_table(rows)
    Console().print(table)
    if json is not None:
        report.write_json(json, report.describe(model, runs, **settings), rows)


@app.command()
def purity(
    model: ModelOption = "smollm2",
    text: TextOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens read.")] = 7936,
    budget: BudgetOption = 64,
    positions: Annotated[
        int, typer.Option(min=1, help="Last ones, whose queries are looked at.")
    ] = 32,
    skip_chars: Annotated[int, typer.Option(min=0, help="Characters of the text to skip.")] = 0,
    json: JsonOption = None,
) -> None:
    """What pages bring: pages of similar tokens, of spans of positions, and of any tokens."""
    from icecache.eval import report, texts
    from icecache.eval.calibration import calibration_table
    from icecache.eval.capture import capture
    from icecache.eval.decode import check_model
    from icecache.eval.model import load_model
    from icecache.eval.purity import measure_purity, purity_tables
    from icecache.eval.runs import Run

    name, content = texts.read_text(text, skip_chars)
    language_model, tokenizer = load_model(model)
    check_model(language_model, context)
    ids = texts.first_tokens(tokenizer, name, content, context)
    settings = {"text": name, "context": context, "positions": positions, "skip_chars": skip_chars}
    runs = [Run("pages", budget), Run("icecache", budget)]
    config = report.describe(model, runs, **settings)
    with _progress() as progress:
        captured = capture(language_model, ids, [context], positions, progress)
        measured = measure_purity(captured, context, budget, config, progress)
    Console().print(*purity_tables(measured.rows), calibration_table(measured.calibration))
    if json is not None:
        measured.write(json)


@app.command()
def compare(
    model: ModelOption = "smollm2",
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="A text file, or one of reference, reference-60000 and argparse, which every "
            "machine has; may be repeated. Those three, unless another part is asked for.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Questions with right answers: all, or some like passkey,json."),
    ] = None,
    gsm8k: Annotated[
        Path | None,
        typer.Option(help="A .jsonl file of questions and worked answers: chains of thought."),
    ] = None,
    drift: Annotated[
        int, typer.Option(min=0, help="Tokens to decode after 1,024, to see what that does.")
    ] = 0,
    context: Annotated[
        int | None, typer.Option(min=128, help="Tokens read before a text is fed; 7936.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a text that are then fed; 128.")
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(help="Tokens per KV head, or shares of the context; 16,64,256."),
    ] = None,
    policies: Annotated[str, typer.Option(help="all, or some like quest,icecache.")] = "all",
    task_context: Annotated[int, typer.Option(min=128, help="Tokens before a question.")] = 4096,
    instances: Annotated[int, typer.Option(min=1, help="Questions per task.")] = 5,
    chains: Annotated[int, typer.Option(min=1, help="Worked answers that are fed.")] = 8,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Of questions, trees and samples.")
    ] = 0,
    rope_theta: Annotated[
        float | None,
        typer.Option(min=1, help="Replaces the model's, for longer contexts; 300000 for 16k."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One text, 2,048 tokens, 16 and 64: two minutes.")
    ] = False,
    set_: SetOption = None,
    json: JsonOption = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            dir_okay=False,
            writable=True,
            callback=_can_be_written,
            help="Also write a page for a browser.",
        ),
    ] = None,
) -> None:
    """Every policy against full attention: on texts, questions, chains of thought, far decoding.

    With --json, a run that was stopped goes on where it was.
    """
    from icecache.eval.campaign import Campaign
    from icecache.eval.model import load_model
    from icecache.eval.report import comparison_tables
    from icecache.eval.tasks import TASKS
    from icecache.eval.texts import TEXTS
    from icecache.policies import POLICIES
    from icecache.report import write_report

    _differ(json, report, gsm8k, *(text or []))
    length = context or (2048 if quick else 7936)
    usual = "16,64" if quick else "16,64,256"
    asked = bool(text or task or gsm8k or drift)
    campaign = Campaign(
        model=model,
        texts=text or ([] if asked else list(TEXTS[:1] if quick else TEXTS)),
        tasks=[] if task is None else _names(task, TASKS, "--task"),
        context=length,
        tokens=tokens or (40 if quick else 128),
        budgets=_budgets(usual if budgets is None else budgets, length),
        policies=_names(policies, POLICIES, "--policies"),
        task_context=task_context,
        instances=instances,
        gsm8k=None if gsm8k is None else str(gsm8k),
        chains=chains,
        drift=drift,
        seed=seed,
        rope_theta=rope_theta,
        options=_assignments(set_ or []),
    )
    campaign.runs()  # refuses what is wrong before the model is loaded
    language_model, tokenizer = load_model(
        model, rope_theta=rope_theta, max_positions=campaign.positions() if rope_theta else None
    )
    with _progress() as progress:
        measured = campaign.measure(language_model, tokenizer, json, progress).comparison
    Console().print(*comparison_tables(measured))
    if report is not None:
        write_report(measured, report)


@app.command("report")
def report_command(
    comparison: Annotated[
        Path, typer.Argument(metavar="JSON", help="What `icecache compare --json` wrote.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", dir_okay=False, writable=True, callback=_can_be_written, help="The page."
        ),
    ],
) -> None:
    """A comparison as one HTML page that opens without a network."""
    from icecache.eval.comparison import Comparison
    from icecache.report import write_report

    _differ(comparison, out)
    write_report(Comparison.read(comparison), out)


@bench_app.command("step")
def bench_step(
    q_heads: QHeadsOption = 32,
    kv_heads: KvHeadsOption = 8,
    head_dim: HeadDimOption = 128,
    tokens: TokensOption = "4096,36864,131072,262144",
    dtype: DtypeOption = "bf16",
    threads: ThreadsOption = 2,
    budget: BudgetOption = 64,
    copies: Annotated[
        int | None,
        typer.Option(min=1, help="Of the layer, in turns; as many as cold caches need by default."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps timed per length.")] = 256,
    libraries: Annotated[
        bool,
        typer.Option(help="Compare with faiss, hnswlib and usearch, those that are installed."),
    ] = True,
    kv: KvOption = None,
    set_: SetOption = None,
    json: JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            dir_okay=False,
            writable=True,
            callback=_can_be_written,
            help="Also plot milliseconds against tokens.",
        ),
    ] = None,
) -> None:
    """One decode step of one layer against exact attention, torch's sdpa and an exact scan.

    --json also has the times of each form of sdpa, and of libraries for approximate search.
    """
    from dataclasses import asdict

    from icecache.bench import report
    from icecache.bench.heads import Shape
    from icecache.bench.libraries import installed
    from icecache.bench.step import StepSetting, measure_step
    from icecache.bench.timing import bandwidth
    from icecache.eval.report import write_json

    config, heads = _bench(threads, budget, dtype, set_, kv)
    shape, lengths = Shape(q_heads, kv_heads, head_dim), _lengths(tokens, "--tokens")
    found = installed() if libraries else []
    setting = StepSetting(shape, dtype, config, copies, steps, threads, bandwidth(), found)
    rows, details = [], {}
    with _progress() as progress:
        for n in lengths:
            row, more = measure_step(heads, n, setting, progress)
            rows.append(row)
            details[n] = asdict(more)
    Console().print(report.table("medians of one layer and step, in milliseconds", rows))
    if json is not None:
        settings = {"shape": vars(shape), "dtype": dtype, "threads": threads, "steps": steps}
        settings |= {"bandwidth": setting.bandwidth, "lengths": details}
        write_json(json, report.describe(config, rows=heads.name, **settings), rows)
    if plot is not None:
        report.plot_steps(plot, rows)


@bench_app.command("build")
def bench_build(
    q_heads: QHeadsOption = 32,
    kv_heads: KvHeadsOption = 8,
    head_dim: HeadDimOption = 128,
    tokens: TokensOption = "36864",
    dtype: DtypeOption = "bf16",
    threads: ThreadsOption = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Layers built per length.")] = 3,
    model: ModelOption = "smollm2",
    context: Annotated[
        int, typer.Option(min=0, help="Tokens that the model reads; 0 leaves it out.")
    ] = 7936,
    kv: KvOption = None,
    set_: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Indexing one layer, and all layers of a model against its prefill in f32 and bf16."""
    from icecache.bench import report
    from icecache.bench.build import measure_layer_build, measure_model_build
    from icecache.bench.heads import Shape
    from icecache.eval import texts
    from icecache.eval.decode import check_model
    from icecache.eval.model import load_model
    from icecache.eval.report import write_json

    config, heads = _bench(threads, 64, dtype, set_, kv)
    shape, lengths = Shape(q_heads, kv_heads, head_dim), _lengths(tokens, "--tokens")
    rows: list[Any] = []
    with _progress() as progress:
        for n in lengths:
            rows.append(measure_layer_build(heads, shape, n, dtype, config, repeats, progress))
    Console().print(report.table("one layer, indexed", rows))
    if context:
        language_model, tokenizer = load_model(model)
        check_model(language_model, context)
        ids = texts.first_tokens(tokenizer, *texts.read_text(None), context)
        with _progress() as progress:
            whole = list(measure_model_build(language_model, ids, config, progress))
        Console().print(report.table(f"all layers of {model}", whole))
        rows += whole
    if json is not None:
        settings = {"shape": vars(shape), "dtype": dtype, "threads": threads, "repeats": repeats}
        write_json(json, report.describe(config, rows=heads.name, model=model, **settings), rows)


@bench_app.command("insert")
def bench_insert(
    q_heads: QHeadsOption = 32,
    kv_heads: KvHeadsOption = 8,
    head_dim: HeadDimOption = 128,
    tokens: TokensOption = "36864",
    dtype: DtypeOption = "bf16",
    threads: ThreadsOption = 2,
    budget: BudgetOption = 64,
    steps: Annotated[int, typer.Option(min=1, help="Tokens appended, then decoded.")] = 2000,
    kv: KvOption = None,
    set_: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Tokens that come one by one to one layer: appending alone, and whole decode steps."""
    from icecache.bench import report
    from icecache.bench.heads import Shape
    from icecache.bench.insert import measure_insert
    from icecache.eval.report import write_json

    config, heads = _bench(threads, budget, dtype, set_, kv)
    shape, lengths = Shape(q_heads, kv_heads, head_dim), _lengths(tokens, "--tokens")
    with _progress() as progress:
        rows = [measure_insert(heads, shape, n, dtype, config, steps, progress) for n in lengths]
    Console().print(report.table("one layer, token by token", rows))
    if json is not None:
        settings = {"shape": vars(shape), "dtype": dtype, "threads": threads, "steps": steps}
        write_json(json, report.describe(config, rows=heads.name, **settings), rows)


@bench_app.command("generate")
def bench_generate(
    model: ModelOption = "smollm2",
    layer: Annotated[
        str | None,
        typer.Option(help='"llama-8b": one layer of that shape with random weights instead.'),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="Lengths; 2048,4096,7936 for a model, 36864,131072 for a layer."),
    ] = None,
    new: Annotated[int, typer.Option(min=1, help="Tokens timed per cache.")] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="f32 for a model, bf16 for a layer by default.")
    ] = None,
    threads: ThreadsOption = 2,
    budget: BudgetOption = 64,
    text: TextOption = None,
    kv: KvOption = None,
    set_: SetOption = None,
    json: JsonOption = None,
) -> None:
    """Time per token of a model with icecache, `DynamicCache` and `StaticCache`."""
    from icecache.bench import report
    from icecache.bench.generate import (
        LLAMA_8B,
        crossover,
        llama_layer,
        measure_generate,
        shortened,
    )
    from icecache.bench.heads import DTYPES
    from icecache.eval import texts
    from icecache.eval.decode import check_model, prefill
    from icecache.eval.model import load_model
    from icecache.eval.report import write_json

    if layer not in (None, "llama-8b"):
        raise typer.BadParameter(f'must be "llama-8b", got {layer!r}', param_hint="--layer")
    kind = dtype or ("bf16" if layer else "f32")
    given = context or ("36864,131072" if layer else "2048,4096,7936")
    lengths = _lengths(given, "--context")
    config = _bench_config(threads, budget, kind, set_)
    rows = []
    if layer:
        heads, language_model = _heads(kv), llama_layer(DTYPES[kind])
        for n in lengths:
            made = heads.layer(LLAMA_8B, n, kind)
            stored = [(made.k, made.v)]
            with _progress() as progress:
                rows += measure_generate(language_model, stored, 0, new, config, progress)
    else:
        name, content = texts.read_text(text)
        language_model, tokenizer = load_model(model)
        check_model(language_model, max(lengths) + new + 1)
        ids = texts.first_tokens(tokenizer, name, content, max(lengths) + 1)
        language_model.to(DTYPES[kind])
        with _progress() as progress:
            whole = prefill(language_model, ids[:-1], progress).layers
            for n in lengths:
                rows += measure_generate(
                    language_model, shortened(whole, n), ids[n], new, config, progress
                )
    Console().print(report.table(f"milliseconds per token, {layer or model}, {kind}", rows))
    crossing = crossover(rows)
    faster = "nowhere" if crossing is None else f"from {crossing:.0f} tokens on"
    Console().print(f"icecache is never slower than the faster other cache {faster}")
    if json is not None:
        settings = {"model": layer or model, "dtype": kind, "threads": threads, "new": new}
        write_json(json, report.describe(config, crossover=crossing, **settings), rows)


def _bench(
    threads: int, budget: int, dtype: str, set_: list[str] | None, kv: Path | None
) -> tuple[IceConfig, Heads]:
    """What the benches of a layer share: options, and real KV heads."""
    return _bench_config(threads, budget, dtype, set_), _heads(kv)


def _bench_config(threads: int, budget: int, dtype: str, set_: list[str] | None) -> IceConfig:
    """The options, always sparse unless `set_` says otherwise; torch gets as many threads."""
    import torch

    from icecache.bench.heads import DTYPES
    from icecache.config import IceConfig
    from icecache.eval.errors import EvalError

    if dtype not in DTYPES:
        raise typer.BadParameter(f"must be f32, f16 or bf16, got {dtype!r}", param_hint="--dtype")
    torch.set_num_threads(threads)
    try:
        config = IceConfig(token_budget=budget, dense_below=0, num_threads=threads)
        return config.replace(**_assignments(set_ or []))
    except (TypeError, ValueError) as error:
        raise EvalError(str(error)) from error


def _heads(kv: Path | None) -> Heads:
    from icecache.bench.heads import read_heads, smollm2_heads

    return smollm2_heads() if kv is None else read_heads(kv)


def _lengths(values: str, option: str) -> list[int]:
    lengths = _numbers(values, int, option)
    if min(lengths) < 256:
        raise typer.BadParameter("lengths must be at least 256", param_hint=option)
    return lengths


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


def _names(values: str, known: Iterable[str], option: str) -> list[str]:
    """`a,b`, or all that are known."""
    if values.strip() == "all":
        return list(known)
    names = [value.strip() for value in values.split(",")]
    if not all(names):
        raise typer.BadParameter(f"{values!r} is not a list of names", param_hint=option)
    return names


def _budgets(values: str, context: int) -> list[int]:
    """Numbers of tokens, `10%` being a tenth of the context."""
    shares = [value.strip().endswith("%") for value in values.split(",")]
    numbers = _numbers(values.replace("%", ""), float, "--budgets")
    pairs = zip(numbers, shares, strict=True)
    if not all(math.isfinite(number) and number < 2**31 for number in numbers):
        raise typer.BadParameter(f"{values!r} has a budget without end", param_hint="--budgets")
    budgets = [round(number * context / 100 if share else number) for number, share in pairs]
    if min(budgets) < 1:
        raise typer.BadParameter(f"{values!r} has a budget below 1", param_hint="--budgets")
    return sorted(set(budgets))


def _numbers(values: str, kind: type[Any], option: str) -> list[Any]:
    """`1,2,3` as numbers; a usage error (exit code 2) for anything else."""
    try:
        return [kind(value) for value in values.split(",")]
    except ValueError:
        message = f"{values!r} is not a list of numbers like 1,2,3"
        raise typer.BadParameter(message, param_hint=option) from None


def _assignments(pairs: list[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is an integer, a number, "none" or a word."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}", param_hint="--set")
        options[key.strip()] = _literal(value.strip())
    return options


def _literal(value: str) -> Any:
    if value.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


if __name__ == "__main__":
    main()

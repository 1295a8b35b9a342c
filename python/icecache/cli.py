"""The command `icecache`: `icecache demo` and `icecache eval`.

Heavy modules are imported when a command runs, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
except ImportError as error:
    raise SystemExit(f"icecache: {error}; install icecache[eval]") from error

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

ModelOption = Annotated[
    str, typer.Option("--model", help='"smollm2" (from PyPI), a directory, or a model hub name.')
]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="A text file; Python's own reference by default.")
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
    budget: Annotated[int, typer.Option(min=1, help="Tokens found per KV head.")] = 64,
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
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of IceConfig, for icecache."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
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


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


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

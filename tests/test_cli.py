"""The command line, on a tiny model in a directory."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from tiny_models import llama
from tiny_tokenizer import VOCABULARY, byte_tokenizer
from typer.testing import CliRunner

from icecache.cli import app
from icecache.eval.comparison import Comparison
from icecache.eval.errors import EvalError

CLOSENESS = [
    "policy",
    "budget",
    "text",
    "perplexity",
    "kl",
    "kl_stderr",
    "agreement",
    "tokens_exact",
    "key_rows_read",
    "value_rows_read",
    "mass_exact_true",
    "ms_per_token",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    llama(vocab_size=VOCABULARY).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_eval_on_text(model, tmp_path):
    out = tmp_path / "out.json"
    text = tmp_path / "story.txt"
    text.write_text("It was a dark and stormy night. " * 20)
    size = ("--context", "200", "--tokens", "9", "--skip-chars", "7")
    policies = ("--budgets", "8,16", "--policies", "full,topk,icecache", "--set", "page_size=5")
    files = ("--text", str(text), "--json", str(out))
    result = run("eval", "--model", model, *size, *policies, *files)
    assert result.exit_code == 0, result.output
    assert "story.txt" in result.stdout
    document = json.loads(out.read_text())
    assert all(list(row) == CLOSENESS for row in document["rows"])
    assert [(row["policy"], row["budget"]) for row in document["rows"]] == [
        ("full", None),
        ("topk", 8),
        ("topk", 16),
        ("icecache", 8),
        ("icecache", 16),
    ]
    assert {row["text"] for row in document["rows"]} == {"story.txt"}
    config = document["config"]
    assert (config["context"], config["tokens"], config["skip_chars"]) == (200, 9, 7)
    assert config["runs"][-1]["config"]["page_size"] == 5
    assert config["runs"][1]["config"]["page_size"] == 6


def test_eval_of_passkeys(model, tmp_path):
    out = tmp_path / "out.json"
    where = ("--passkey", "400", "--depths", "0.1,0.9", "--seeds", "5")
    policies = ("--policies", "full,icecache", "--budgets", "16")
    result = run("eval", "--model", model, *where, *policies, "--json", str(out))
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    fields = ["policy", "budget", "length", "depth", "seed", "found", "answer", "logprob"]
    assert all(list(row) == fields for row in rows)
    assert [(row["policy"], row["length"], row["depth"], row["seed"]) for row in rows] == [
        (policy, 400, depth, 5) for depth in (0.1, 0.9) for policy in ("full", "icecache")
    ]


def test_demo(model):
    size = ("demo", "--model", model, "--context", "700", "--tokens", "9", "--budget", "32")
    tables = run(*size)
    assert tables.exit_code == 0, tables.output
    for heading in ("full attention", "icecache at 32", "ms per token", "of 709"):
        assert heading in tables.stdout
    # A model with random weights cannot do it, and that is said.
    assert "Full attention itself does not find it" in tables.stdout

    rows = json.loads(run(*size, "--json").stdout)["rows"]
    assert [(row["part"], row["policy"], row["budget"]) for row in rows] == [
        ("passkey", "full", None),
        ("passkey", "icecache", 32),
        ("text", "full", None),
        ("text", "icecache", 32),
    ]
    for full, ours in (rows[:2], rows[2:]):
        assert full["kl"] == 0 and full["tokens_exact"] > 600
        assert ours["kl"] > 0 and 32 + 64 + 32 <= ours["tokens_exact"] < 300
        assert ours["kv_bytes"] == full["kv_bytes"] > 0
        assert ours["index_bytes"] > 0


def test_the_process_reports_an_error_in_one_line(tmp_path):
    command = [sys.executable, "-m", "icecache.cli", "eval", "--text", str(tmp_path / "no.txt")]
    missing = subprocess.run(command, capture_output=True, text=True)
    assert missing.returncode == 1
    assert missing.stdout == ""
    assert missing.stderr.startswith("icecache: cannot read ")
    assert len(missing.stderr.splitlines()) == 1


@pytest.mark.parametrize("wrong", [("--budgets", "a,b"), ("--set", "page_size"), ("--tokens", "1")])
def test_wrong_usage_exits_with_2(wrong):
    result = run("eval", *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.stderr


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"icecache {version('icecache')}\n")


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    path = tmp_path_factory.mktemp("chains") / "solved.jsonl"
    problems = [{"question": f"{i} + 1?", "answer": f"It is {i + 1}."} for i in range(60)]
    path.write_text("\n".join(json.dumps(problem) for problem in problems))
    return str(path)


def test_compare_measures_every_part_and_goes_on(model, solved, tmp_path):
    text, out, page = tmp_path / "story.txt", tmp_path / "out.json", tmp_path / "page.html"
    text.write_text("It was a dark and stormy night. " * 60)
    size = ("--context", "500", "--tokens", "20", "--task-context", "700", "--instances", "1")
    policies = ("--policies", "topk,quest,icecache", "--budgets", "16,10%")
    files = ("--json", str(out), "--report", str(page))
    command = ("compare", "--model", model, *size, *policies, *files, "--text", str(text))
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "at equal exact tokens" in result.stdout and "quest" in result.stdout
    found = Comparison.read(out)
    at_equal_tokens = [(row.policy, row.budget) for row in found.texts if row.equal == "tokens"]
    assert at_equal_tokens == [
        ("full", None),
        *((name, budget) for name in ("topk", "quest", "icecache") for budget in (16, 50)),
    ]
    assert {row.text for row in found.texts} == {"story.txt"}
    assert {row.policy for row in found.texts if row.equal == "bytes"} <= {"quest"}
    assert found.config["policies"]["topk"]["deployable"] is False
    assert (found.tasks, found.drift) == ([], [])
    assert "story.txt" in page.read_text()

    parts = ("--task", "passkey", "--gsm8k", solved, "--chains", "2", "--drift", "40")
    result = run(*command, *parts)
    assert result.exit_code == 0, result.output
    more = Comparison.read(out)
    assert more.texts[: len(found.texts)] == found.texts
    assert {row.text for row in more.texts} == {"story.txt", "gsm8k"}
    assert {(row.task, row.context, row.instance) for row in more.tasks} == {("passkey", 700, 0)}
    assert len(more.tasks) == len(at_equal_tokens)
    assert {(row.variant, row.text, row.start, row.positions) for row in more.drift} == {
        (variant, "story.txt", 1024, 40) for variant in ("inserted", "not inserted", "rebuilt")
    }
    with pytest.raises(EvalError, match="the text story"):  # as many tokens in all
        run(*command, "--context", "490", "--tokens", "30")
    text.write_text("It was a bright and quiet morning. " * 60)
    with pytest.raises(EvalError, match=r"the text story\.txt"):
        run(*command)
    with pytest.raises(EvalError, match=r"options \{\}, this one has \{'page_size': 5\}"):
        run(*command, "--set", "page_size=5")
    again = tmp_path / "other" / "story.txt"
    again.parent.mkdir()
    again.write_text(text.read_text())
    with pytest.raises(EvalError, match=r"two texts are called 'story\.txt'"):
        run(*command, "--text", str(again))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--budgets", "0"), "has a budget below 1"),
        (("--budgets", "0.001%"), "has a budget below 1"),
        (("--budgets", "many"), "is not a list of numbers"),
        (("--report", "/nowhere/page.html"), "there is no folder"),
        (("--context", "127"), "--context"),
        (("--seed", "3000000000"), "--seed"),
        (("--budgets", "nan"), "has a budget without end"),
        (("--budgets", "inf"), "has a budget without end"),
        (("--budgets", ""), "is not a list of numbers"),
        (("--policies", ""), "is not a list of names"),
        (("--task", ","), "is not a list of names"),
        (("--json", "a.json", "--report", "./a.json"), "is given twice"),
        (("--text", "a.txt", "--report", "a.txt"), "is given twice"),
    ],
)
def test_compare_refuses_wrong_options(model, options, error):
    result = run("compare", "--model", model, *options)
    assert result.exit_code == 2
    assert error in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--policies", "quest,best"), "a policy must be one of .* got 'best'"),
        (("--task", "chess"), "the task must be one of .* got 'chess'"),
        (("--text", "nothing.txt"), "cannot read nothing.txt"),
        (("--gsm8k", "nothing.jsonl"), "cannot read nothing.jsonl"),
        (("--context", "5000"), "5040 positions are needed, the model has 4096"),
        (("--drift", "4000"), "5024 positions are needed"),
    ],
)
def test_compare_refuses_what_it_cannot_measure(model, options, error):
    with pytest.raises(EvalError, match=error):
        run("compare", "--model", model, "--quick", *options)


def test_a_report_does_not_overwrite_its_comparison(tmp_path):
    path = tmp_path / "out.json"
    Comparison(config={"model": "m"}).write(path)
    result = run("report", str(path), "--out", str(path))
    assert result.exit_code == 2
    assert "given twice" in " ".join(result.output.split())
    assert Comparison.read(path).config == {"model": "m"}


def test_another_model_in_the_same_folder_is_noticed(tmp_path):
    folder, out, text = tmp_path / "model", tmp_path / "out.json", tmp_path / "a.txt"
    text.write_text("It was a dark and stormy night. " * 20)
    byte_tokenizer().save_pretrained(folder)
    size = ("--context", "200", "--tokens", "4", "--budgets", "8", "--policies", "window")
    command = ("compare", "--model", str(folder), "--text", str(text), *size, "--json", str(out))
    model = llama(vocab_size=VOCABULARY)
    model.save_pretrained(folder)
    assert run(*command).exit_code == 0
    model.lm_head.weight.data *= 2
    model.save_pretrained(folder)
    with pytest.raises(EvalError, match="weights"):
        run(*command)

"""What is installed agrees with the manifests, stays light, and the documented commands exist."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("module", ["icecache", "icecache.cli", "icecache.eval"])
def test_importing_is_cheap(module: str) -> None:
    """NumPy is the only base dependency; the models' libraries load when they are first needed."""
    heavy = {"torch", "transformers", "cupy"}
    code = f"import sys, {module}; print(*{heavy} & set(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []


def test_the_manifests_agree() -> None:
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version("icecache") == cargo["package"]["version"], "run `make test`: the build is old"
    assert project["dynamic"] == ["version"]
    assert project["license"] == cargo["package"]["license"]
    assert [re.match(r"\w+", d)[0] for d in project["dependencies"]] == ["numpy"]
    assert all(cargo["dependencies"][crate]["optional"] for crate in ("pyo3", "numpy"))
    assert "default" not in cargo["features"]


def test_the_commands_of_the_documents_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    readme, contributing = ((ROOT / f).read_text() for f in ("README.md", "CONTRIBUTING.md"))
    commands = set(re.findall(r"(?:^ *|`)make (\w+)", readme + contributing, re.MULTILINE))
    assert {"demo", "test", "check"} <= commands <= targets

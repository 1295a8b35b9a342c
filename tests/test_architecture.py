"""A source file uses only files above it in LAYOUT, and a dependency is named in one place only.

Tables of contents may use everything, and so may unit tests (`#[cfg(test)]`). Nothing may use a
table of contents below it: it would see everything.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTENTS = ("rust/src/lib.rs", "rust/src/python/mod.rs", "/__init__.py")
# The order in which data flows (ARCHITECTURE.md): a new file is placed here first. Files of a
# folder that is placed as a whole ("policies/") may use each other.
RUST = """
    memory rows error ids config
    threads guard random
    simd/prefetch simd/scalar simd/avx2 simd/avx512 simd/neon simd/mod
    transform
    order
    pages span
    tree/node tree/summary tree/cluster tree/project tree/mod
    tree/places tree/search tree/link tree/build tree/insert tree/regroup tree/remove tree/check
    exact
    index
    forest
    select
    attend
    select/reuse
    residency pack
    head head/stage layer layer/stage
    python/errors python/arrays python/tree python/layer python/mod
    lib
"""
PYTHON = """
    _icecache.pyi
    config.py stats.py arrays.py
    kernels.py device.py transfer.py pipeline.py
    sdpa.py
    layer.py device_layer.py tree.py
    modes.py masks.py rows.py stores.py
    ice_layer.py attention.py cache.py
    policies/
    eval/
    report/
    bench/__init__.py
    bench/lengthen.py bench/rows.py bench/heads.py
    bench/timing.py bench/baselines.py bench/libraries.py
    bench/step.py bench/build.py bench/insert.py bench/generate.py
    bench/report.py
    cli.py
    __init__.py
    reference.py
"""
LAYOUT = [f"rust/src/{file}.rs" for file in RUST.split()]
LAYOUT += [f"python/icecache/{file}" for file in PYTHON.split()]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("rust/src", "python/icecache")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".rs", ".py", ".pyi")
)
# A dependency (or a kind of code), how a source names it, and the only places that may.
ONLY = {
    "rayon": (r"\brayon\b", ("rust/src/threads.rs",)),
    "instruction sets": (r"\b(std|core)::arch\b|target_feature", ("rust/src/simd/",)),
    "python bindings": (r"\b(pyo3|numpy)\b", ("rust/src/python/",)),
    "streams": (r"torch\.cuda\b", ("python/icecache/device.py",)),
    "waits for a device": (
        r"\bsynchronize\(",
        ("python/icecache/device.py", "python/icecache/transfer.py"),
    ),
}
ONLY_IMPORTED = {
    "cupy": ("python/icecache/kernels.py",),
    "transformers": tuple(
        f"python/icecache/{f}"
        for f in ("attention.py", "cache.py", "ice_layer.py", "eval/", "bench/", "cli.py")
    ),
    "jinja2": ("python/icecache/report/page.py",),
    "icecache.reference": (),
}


def rank(name: str) -> int | None:
    """The place of a file in LAYOUT, if it has one."""
    for place, entry in enumerate(LAYOUT):
        if name == entry or (entry.endswith("/") and name.startswith(entry)):
            return place
    return None


def rust_code(name: str) -> str:
    """A Rust source without its comments and its unit tests."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", (ROOT / name).read_text(), flags=re.DOTALL)
    return re.sub(r"(?ms)^#\[cfg\(test\)\]\nmod \w+ \{.*?^\}", "", code)


def code(name: str) -> str:
    """A source file's code; of Python all of it."""
    return rust_code(name) if name.endswith(".rs") else (ROOT / name).read_text()


def expand(path: str) -> Iterator[str]:
    """`a::{b, c::{d, e}}` -> `a::b`, `a::c::d`, `a::c::e`."""
    group = re.search(r"\{([^{}]*)\}", path)
    if group is None:
        yield path
        return
    for item in group[1].split(","):
        yield from expand(path[: group.start()] + item.strip() + path[group.end() :])


def used_by_rust(name: str) -> set[str]:
    """The files of this crate that a Rust file's paths lead into."""
    module = re.sub(r"rust/src/|/mod\.rs|\.rs", "", name).split("/")
    code = re.sub(r"\bpub\([^)]*\)", "", rust_code(name))
    paths = re.findall(r"\b(?:crate|super)(?:::\w+)+", re.sub(r"\buse\s[^;]+;", "", code))
    for statement in re.findall(r"\buse\s+([^;]+);", code):
        paths += expand(statement)
    return {file for path in paths if (file := rust_file(module, path.split("::"))) is not None}


def rust_file(module: list[str], path: list[str]) -> str | None:
    """The file that a path, seen from a module, leads into; None for another crate's."""
    inside = path[0] in ("crate", "self", "super")
    start = [] if path[0] == "crate" else module[: len(module) - path.count("super")]
    path = start + [part for part in path if part not in ("crate", "self", "super")]
    for depth in range(len(path), len(start) if not inside else 0, -1):
        for end in (".rs", "/mod.rs"):
            file = f"rust/src/{'/'.join(path[:depth])}{end}"
            if file in LAYOUT or file in FILES:
                return file
    return "rust/src/lib.rs" if inside else None


def imports(name: str) -> set[str]:
    """Full dotted names of all that a Python file imports, at its top or inside a function."""
    package = name.removeprefix("python/").split("/")[:-1]
    names = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join(base + [node.module] * (node.module is not None))
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def used_by_python(name: str) -> set[str]:
    """The files of this package that a Python file imports."""
    files = set()
    for path in (i.split(".") for i in imports(name) if i.split(".")[0] == "icecache"):
        candidates = (
            f"python/{'/'.join(path[:depth])}{end}"
            for depth in range(len(path), 0, -1)
            for end in (".py", ".pyi", "/__init__.py")
        )
        placed = (file for file in candidates if file in LAYOUT or file in FILES)
        files.add(next(placed, "python/icecache/__init__.py"))
    return files


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_its_place_and_uses_only_files_above(name: str) -> None:
    place = rank(name)
    assert place is not None, f"{name} is not in LAYOUT: decide where in the flow it belongs"
    if name.endswith((*CONTENTS, ".pyi")):
        return
    used = used_by_rust(name) if name.endswith(".rs") else used_by_python(name)
    below = sorted(file for file in used if (rank(file) or 0) > place)
    assert not below, f"{name} uses {below}, which come below it in LAYOUT"


@pytest.mark.parametrize("what", ONLY)
def test_only_one_place_names(what: str) -> None:
    pattern, places = ONLY[what]
    folder = places[0].split("/")[0]
    named = {f for f in FILES if f.startswith(folder) and re.search(pattern, code(f))}
    assert not {file for file in named if not file.startswith(places)}


@pytest.mark.parametrize("what", ONLY_IMPORTED)
def test_only_one_place_imports(what: str) -> None:
    files = [f for f in FILES if f.endswith(".py") and not f.startswith(ONLY_IMPORTED[what])]
    assert not {f for f in files for i in imports(f) if f"{i}.".startswith(f"{what}.")}


def test_the_crate_lists_its_modules_in_the_same_order() -> None:
    listed = re.findall(r"^(?:pub )?mod (\w+);", rust_code("rust/src/lib.rs"), re.MULTILINE)
    order = dict.fromkeys(entry.split("/")[0] for entry in RUST.split())
    assert listed == [module for module in order if module in listed]

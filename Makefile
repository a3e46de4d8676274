# `make help` lists the targets. Everything happens in .venv, which the first target to need it makes.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help
help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml constraints.txt tools/setup
	@tools/setup $(VENV)

.PHONY: setup
setup: $(VENV)/.ready ## make the virtual environment (the other targets do it by themselves)

.PHONY: run
run: $(VENV)/.ready ## a tour: where keys live, what moves, a group sharing a durable log, and the pipeline at work on it
	@$(BIN)/shardyard tour

.PHONY: test
test: lint ## lint, types, layers and all tests
	@$(BIN)/python -m pytest -n 2

.PHONY: lint
lint: $(VENV)/.ready ## ruff, mypy (strict) and the import layers
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.ready ## let ruff put the code in order
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: chaos
chaos: $(VENV)/.ready ## 100 000 simulated histories, then real processes and Spark drivers killed and stalled (some 25 minutes)
	@$(BIN)/python -m tests.groups.simulation --histories 100000 --first 1000000
	@$(BIN)/python -m tests.groups.chaos run --seconds 60
	@KILLS=10 $(BIN)/python -m pytest -q tests/log/test_crashes.py tests/pipeline/test_crashes.py

$(VENV)/.bench: $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@touch $@

.PHONY: bench
bench: $(VENV)/.bench ## measure the speeds the README states, beside what one would pick instead (some 25 minutes)
	@$(BIN)/python -m bench.placement
	@$(BIN)/python -m bench.log
	@$(BIN)/python -m bench.groups
	@$(BIN)/python -m bench.queues
	@$(BIN)/python -m bench.pipeline
	@$(BIN)/python -m bench.balance

.PHONY: clean
clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -prune -exec rm -rf {} +

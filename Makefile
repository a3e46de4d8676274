# `make help` lists the targets. They all use .venv, which is created when a target first needs it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
# Keep what Python has compiled, whatever the environment says: several processes that run the tests load the same modules.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml constraints.txt tools/setup
	@tools/setup $(VENV)

.PHONY: setup
setup: $(VENV)/.ready delta ## create the virtual environment, and download Delta Lake (the other targets do this if needed)

.PHONY: delta
delta: $(VENV)/.ready
	@tools/install-delta $(VENV)

.PHONY: run
run: delta ## take a tour: placing keys, planning moves, a group on a durable log, and the pipeline on the same data
	@$(BIN)/shardyard tour

.PHONY: test
test: lint delta ## run lint, type checks, import layers and all tests
	@$(BIN)/python -m pytest -n 2 --dist loadgroup

# The stores wait for the disk thousands of times. Where 2 GB are free in memory, `make quick` has its files there.
QUICK_FILES = $(shell [ -w /dev/shm ] && [ $$(df --output=avail /dev/shm | tail -1) -gt 2000000 ] && echo TMPDIR=/dev/shm)

.PHONY: quick
quick: $(VENV)/.ready ## the tests without Spark, other servers, processes of their own and long runs (under two minutes)
	@$(QUICK_FILES) HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -n 6 --dist loadgroup -q -o tmp_path_retention_policy=failed -m "not spark and not server and not processes and not long"

.PHONY: lint
lint: $(VENV)/.ready ## run ruff, mypy (strict) and the import-layer check
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.ready ## fix and format the code with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: chaos
chaos: delta ## run 100 000 simulated histories, then kill and stall real processes and Spark drivers (about 40 minutes)
	@$(BIN)/python -m tests.groups.simulation --histories 100000 --first 1000000
	@$(BIN)/python -m tests.groups.chaos run --seconds 60
	@$(BIN)/python -m tests.groups.chaos run --seconds 120 --engine postgresql
	@$(BIN)/python -m tests.messaging.chaos run --seconds 120 --mirror log --audit
	@$(BIN)/python -m tests.messaging.chaos run --seconds 120 --mirror local --audit
	@$(BIN)/python -m tests.messaging.chaos run --seconds 120 --engine postgresql --audit
	@$(BIN)/python -m tests.fanout.chaos run --seconds 120 --audit
	@$(BIN)/python -m tests.fanout.chaos run --seconds 120 --engine postgresql --audit
	@$(BIN)/python -m tests.sharding.chaos run --seconds 120
	@$(BIN)/python -m tests.sharding.chaos run --seconds 120 --engine postgresql
	@$(BIN)/python -m tests.wire.frame_damage 1000000 100000
	@$(BIN)/python -m tests.messaging.frame_damage 1000000 100000
	@KILLS=10 STALL=20 $(BIN)/python -m pytest -q tests/log/test_crashes.py tests/log/test_postgresql_faults.py tests/pipeline/test_crashes.py

$(VENV)/.bench: $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@touch $@

.PHONY: bench
bench: $(VENV)/.bench delta ## measure the figures in bench/README.md, next to comparable systems (about 55 minutes)
	@$(BIN)/python -m bench.imports
	@$(BIN)/python -m bench.placement
	@$(BIN)/python -m bench.log
	@$(BIN)/python -m bench.log_growth
	@$(BIN)/python -m bench.groups
	@$(BIN)/python -m bench.queues
	@$(BIN)/python -m bench.messaging
	@$(BIN)/python -m bench.fanout
	@$(BIN)/python -m bench.fanout_table
	@$(BIN)/python -m bench.fanout_snapshot
	@$(BIN)/python -m bench.sharding
	@$(BIN)/python -m bench.sharding_queue
	@$(BIN)/python -m bench.sharding_attach
	@$(BIN)/python -m bench.pipeline
	@$(BIN)/python -m bench.pipeline_start
	@$(BIN)/python -m bench.balance

.PHONY: clean
clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -prune -exec rm -rf {} +

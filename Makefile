# Two ways in: `make demo` and `make test`. Both prepare .venv first; the second call finds its stamp and starts at once.
# `make test-sglang` has an environment of its own, .venv-sglang: SGLang brings 2 GB that nothing else here needs.
# PYTHON=python3.13 chooses the interpreter; ARGS="…" goes to what is run, e.g. make demo ARGS="--releases 3".

BIN := .venv/bin
SGLANG := .venv-sglang
SHIMS := $(CURDIR)/consumers/reef_engine/sglang/cpu  # what SGLang, and whoever imports transformers beside it, needs on a CPU
PYTHON ?=
ARGS ?=
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo demo-lora demo-sglang test test-long test-sglang test-gpu lint format kill-matrix simulate bench bench-baselines schemas clean prepare-demo prepare-lora prepare-dev prepare-bench prepare-sglang

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' Makefile

demo: prepare-demo  ## a policy that learns while it serves, every version through the log
	@$(BIN)/reef-bus demo $(ARGS)

demo-lora: prepare-lora  ## two scenarios, each with a LoRA adapter of its own over one frozen base model
	@$(BIN)/reef-bus demo --lora $(ARGS)

demo-sglang: prepare-sglang  ## the same over two real SGLang servers on this CPU; five minutes, 2.8 GB; x86-64 Linux
	@PYTHONPATH=$(SHIMS) $(SGLANG)/bin/reef-bus demo --engine sglang $(ARGS)

# A worker that ends is not replaced: pytest-xdist 3.8 would then wait for ever under loadfile. Whole deployments have too
# little of two cores beside two others; with ARGS, `make test` leaves nothing out that they name.
PYTEST := $(BIN)/python -m pytest --dist loadfile --max-worker-restart=0 --durations=20 --durations-min=5

test: lint $(if $(ARGS),,simulate)  ## lint, types, import rules, 2,000 simulated seeds, then the tests with a coverage report
	@$(PYTEST) -n 3 --cov --cov-report=term $(or $(ARGS),-m "not long")

test-long: prepare-dev  ## the tests that `make test` leaves out: whole deployments under kills, and every transport
	@$(PYTEST) -n 2 -m long $(ARGS)

test-sglang: prepare-sglang  ## an unmodified SGLang server on this CPU, driven by our engine; x86-64 Linux
	@$(SGLANG)/bin/python -m pytest -q tests/sglang $(ARGS)

test-gpu:  ## what only a GPU can show, with the python that is there: it needs the extras sglang and test; 8 minutes
	@timeout 480 $(or $(PYTHON),python3) -m pytest -q -m gpu tests/sglang tests/unit/test_torch_group.py $(ARGS)

lint: prepare-dev  ## ruff, mypy, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check reef_bus consumers tests deploy
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: prepare-dev  ## let ruff write the layout that `make lint` asks for
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format reef_bus consumers tests deploy

kill-matrix: prepare-dev  ## every role killed and stopped at every event; half an hour, resumable; prints the tables
	@$(BIN)/python -m tests.e2e.kill_matrix $(ARGS)

simulate: prepare-dev  ## 2,000 seeds of simulated faults, and 200 of adapters, alone on both cores; prints the tables
	@$(BIN)/python -m tests.simulation --seeds 2000 $(ARGS)
	@$(BIN)/python -m tests.simulation --adapters --seeds 200 $(ARGS)

bench: prepare-bench  ## the figures of docs/figures.md on this machine, in half an hour; prints the table
	@$(BIN)/python -m tests.bench.weights $(ARGS)

bench-baselines: prepare-bench  ## our deployment and three patterns that others use, killed alike; prints the table
	@$(BIN)/python -m tests.bench.baselines $(ARGS)

schemas: prepare-dev  ## write schemas/ from reef_bus/events.py
	@$(BIN)/python -m reef_bus.contracts generate $(ARGS)

clean:  ## remove the environments and what the tools left
	@rm -rf .venv $(SGLANG) build dist htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find reef_bus consumers tests deploy -name __pycache__ -prune -exec rm -rf {} +

prepare-demo:
	@sh deploy/prepare.sh demo

prepare-lora:
	@sh deploy/prepare.sh demo lora

prepare-dev:
	@sh deploy/prepare.sh demo dev

prepare-bench:
	@sh deploy/prepare.sh demo dev bench

prepare-sglang:
	@sh deploy/prepare.sh --into $(SGLANG) demo lora test --sglang

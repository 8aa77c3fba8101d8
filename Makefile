# `make demo` and `make test` are the two commands to begin with; each prepares what it needs.

VENV ?= .venv
# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Without an NVIDIA card torch's CPU wheel saves gigabytes. A pip that is told where to find packages is left alone.
PIP_ARGS ?= $(shell command -v nvidia-smi >/dev/null || $(VENV)/bin/python -m pip config list | grep -E 'index-url|find-links' >/dev/null \
	|| echo --extra-index-url https://download.pytorch.org/whl/cpu)

RUN = $(VENV)/bin
DEMO_FOLDER ?= runs/demo
DEMO_STEPS ?= 400
CLIENTS = accelerate|lightning|peft|transformers|trl
# One more than cores, as some tests wait for other processes; more than eight wait for memory.
TEST_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 3 : n > 7 ? 8 : n + 1)))

# Which tests `make unit` runs; MARKS= runs all in one go.
MARKS ?= not slow

.PHONY: help demo test lint format types unit slow float8 clients newest lowest kernels bench docs clean

help:
	@echo 'make demo     train a tiny model with offloading on this machine (about two minutes)'
	@echo 'make test     lint, format check, sizes, types, tests, but for the slow ones'
	@echo 'make slow     the tests that take seconds each: killed runs, commands, several processes'
	@echo 'make float8   the tests that need torchao, which every process would import in the others'
	@echo 'make newest   the tests of the clients with the newest releases of transformers, TRL, Accelerate and Lightning'
	@echo 'make lowest   the same tests with the oldest ones that pyproject.toml allows'
	@echo 'make kernels  compile every kernel for every target, no GPU needed'
	@echo 'make bench    run the kernel benchmarks; without a GPU they check results and time nothing'
	@echo 'make docs     build the pages of docs/ as a site in build/site'
	@echo 'make format   rewrite the sources in the format that the tests want'
	@echo 'make clean    remove the virtual environment and caches'

demo: $(VENV)/.hf
	rm -rf $(DEMO_FOLDER)
	$(RUN)/python examples/pretrain.py --device cpu --steps $(DEMO_STEPS) --folder $(DEMO_FOLDER)

test: lint types unit

lint: $(VENV)/.dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/python -m tools.size --check

format: $(VENV)/.dev
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

types: $(VENV)/.dev
	$(RUN)/mypy

unit: $(VENV)/.dev
	$(RUN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup -m "$(MARKS)"

slow:
	$(MAKE) unit MARKS=slow

float8: $(VENV)/.dev $(VENV)/.float8
	$(RUN)/python -m pytest -k "float8 or torchao" tests/engine/test_low_precision.py tests/engine/test_quantised.py

clients: $(VENV)/.dev
	$(RUN)/python -m pip list | grep -E '^($(CLIENTS)|torch) '
	$(RUN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup tests/integrations

# What is newest is asked for anew each time.
newest:
	rm -f build/newest/.dev
	$(MAKE) clients VENV=build/newest VERSIONS='--upgrade --upgrade-strategy eager'

# TRL 1.0 imports requests, and does not ask for it.
lowest:
	$(MAKE) clients VENV=build/lowest VERSIONS="requests $$(sed -nE 's/^ *"($(CLIENTS))>=([0-9.]+).*/\1==\2/p' pyproject.toml | xargs)"

kernels: $(VENV)/.dev
	$(RUN)/python -m tools.compile_kernels

bench: $(VENV)/.dev
	$(RUN)/protrain bench kernels --quick $(BENCH_ARGS)

docs: $(VENV)/.docs
	$(RUN)/mkdocs build --strict

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo 'ProTrain needs Python 3.11 or newer; none found. Set PYTHON=/path/to/python.' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# pyproject.toml decides what is installed, so a change to it installs again.
$(VENV)/.%: $(VENV)/bin/python pyproject.toml
	$(RUN)/python -m pip install $(PIP_ARGS) $(VERSIONS) --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

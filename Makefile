# Every target makes .venv and installs what it needs, once; a changed pyproject.toml or constraints.txt installs again.
PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/installed
DEV := .venv/installed-dev
INPUTS := pyproject.toml constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help demo test lint bench clean
.DEFAULT_GOAL := help
# Two installs at once would break .venv.
.NOTPARALLEL:

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s%s\n", $$1, $$2 }' Makefile

demo: $(RUN) ## train, switch, certify and report on the embedded corpus (about 5 minutes, writes runs/)
	$(BIN)/odeformer demo

test: $(DEV) ## run the test-suite
	$(BIN)/python -m pytest -q -n auto

lint: $(DEV) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(RUN) ## time a training step against a plain GPT, and the stiff solvers against torchdiffeq's (20 minutes)
	$(BIN)/python -m experiments.training_benchmark
	$(BIN)/python -m experiments.solver_benchmark

clean: ## remove .venv and caches; runs/ is kept
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find odeformer solvers experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that venv writes, so one that was interrupted is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "odeformer needs Python 3.10 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# A stamp goes before an install starts and comes back when it is done. torch comes first and alone, so that a CPU
# build that is at hand satisfies what the others ask for.
$(RUN): $(BIN)/pip $(INPUTS)
	@rm -f $(RUN) $(DEV)
	$(INSTALL) torch
	$(INSTALL) --editable .
	@touch $(RUN)

$(DEV): $(BIN)/pip $(INPUTS)
	@rm -f $(RUN) $(DEV)
	$(INSTALL) torch
	$(INSTALL) --editable '.[dev]'
	@touch $(RUN) $(DEV)

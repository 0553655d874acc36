PYTHON ?= $(firstword $(foreach name,python3.11 python3.12,$(shell command -v $(name))) python3.11)
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
PYTEST := $(BIN)/pytest --numprocesses 2 --dist worksteal
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all lint results docs clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable '.[test]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # pip would compile on one core; some files are templates
	@touch $@

setup: .venv/installed  ## create .venv with pinned versions

train: setup  ## train and evaluate the default experiment (parity); ARGS="model=lstm ..." overrides
	$(BIN)/python -m scripts.train $(ARGS)

lint: setup  ## check format, lint rules and import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

test test-all: export OMP_WAIT_POLICY = passive  # threads of one process do not spin while the other's compute
test test-all: export PYTHONDONTWRITEBYTECODE =  # or each process that tests start compiles this project again

test: setup lint  ## lint, then run the CPU tests except the slow ones; ARGS is passed to pytest
	$(PYTEST) -m 'not gpu and not slow' $(ARGS)

test-all: setup lint  ## as make test, with the slow tests
	$(PYTEST) -m 'not gpu' $(ARGS)

results: setup  ## measure the results that docs/results lacks for this GPU; ARGS="minutes=10" or "list=true"
	$(BIN)/python -m scripts.results $(ARGS)

docs: setup  ## build the documentation into site/
	$(BIN)/mkdocs build

clean:  ## remove the environment, caches and the site, but no runs and corpora
	rm -rf .venv site build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache

distclean: clean  ## make clean, then remove all runs and corpora after a question
	@printf 'delete every run and corpus (outputs, multirun, corpora)? [y/N] '; read answer; \
	if [ "$$answer" = y ]; then rm -rf outputs multirun corpora; else echo 'kept outputs, multirun, corpora'; fi

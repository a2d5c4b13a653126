# These targets need git, make and Python 3.11 or newer. They install everything else
# into $(VENV).

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?=
STRATEGY ?=
PYTEST_ARGS ?=

python := $(VENV)/bin/python
# XLA's compiler spends a fifth of its time in the C library's allocator. With jemalloc (the
# package libjemalloc2 of Debian and Ubuntu), programs compile in four fifths of the time.
jemalloc := $(shell PATH="$$PATH:/sbin" ldconfig -p 2>/dev/null | \
	awk '/libjemalloc\.so\.2.*64/ {print $$NF; exit}')
compiling := $(if $(jemalloc),LD_PRELOAD=$(jemalloc))
# Groups of tests run in the order of collection. The longest groups are in the middle, so
# both workers end at about the same time.
pytest := $(compiling) $(python) -m pytest -n 2 --own-cores --dist loadgroup --no-loadscope-reorder
install := $(python) -m pip install -qq --disable-pip-version-check --no-input \
	$(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.PHONY: help demo demo-clean setup test test-deep test-faults test-all lint docs docs-fast \
	screenshots clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "Settable: PYTHON=$(PYTHON) VENV=$(VENV) CONSTRAINTS=$(CONSTRAINTS)" \
		"STRATEGY='$(STRATEGY)' PYTEST_ARGS='$(PYTEST_ARGS)'"

demo: $(VENV)/.base  ## train a small model; STRATEGY='...' chooses how it is sharded
	$(python) -m demo$(if $(STRATEGY), --strategy '$(STRATEGY)')

demo-clean:  ## delete the demo's run, so that the next run starts from step 0
	rm -rf runs/demo

setup: $(VENV)/.dev  ## install the library and all development tools

test: $(VENV)/.dev  ## run all tests but slow, deep and fault tests; about 30 minutes
	$(pytest) -m "not slow and not faults and not deep" $(PYTEST_ARGS)

test-deep: $(VENV)/.dev  ## run more combinations than `make test`; 45 minutes
	$(pytest) -m "deep and not slow" $(PYTEST_ARGS)

test-faults: $(VENV)/.dev  ## run tests with processes that die, hang, are killed; 8 minutes
	$(compiling) $(python) -m pytest -n 2 -m "faults and not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.dev  ## run all tests
	$(pytest) $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## check style, format and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(python)

docs: $(VENV)/.docs  ## build the site in docs/_build/html; runs every tutorial
	$(compiling) $(python) -m sphinx -q -W --keep-going -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-fast: $(VENV)/.docs  ## build the site in docs/_build/fast without running tutorials; 1 minute
	$(python) -m sphinx -q -W --keep-going -D nb_execution_mode=off \
		-d docs/_build/fast-doctrees docs docs/_build/fast
	@echo "docs/_build/fast/index.html"

screenshots: $(VENV)/.dev  ## check the layout of the built site, and save pictures; 3 minutes
	@echo "Each kind of page, at 390 and 1280 px, light and dark: docs/_build/screenshots"
	$(python) -m pytest -q -m slow tests/test_site_looks.py

clean:  ## remove caches and builds, but not environments and runs/
	rm -rf build dist docs/_build docs/tutorials .pytest_cache .ruff_cache
	find . -name '.?*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

# The time of each stamp file is that of the last install that satisfied pyproject.toml.
$(VENV)/.base: pyproject.toml $(CONSTRAINTS) | $(VENV)/.python
	@echo "Installing nnx_parallel and its dependencies into $(VENV) ..."
	@$(install) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/.python
	@echo "Installing nnx_parallel and its development tools into $(VENV) ..."
	@$(install) -e '.[dev]'
	@touch $(VENV)/.base $@

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/.python
	@echo "Installing nnx_parallel and the tools for its site into $(VENV) ..."
	@$(install) -e '.[docs]'
	@touch $(VENV)/.base $@

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "'$(PYTHON)' is not installed. Name a Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "'$(PYTHON)' is $$($(PYTHON) --version 2>&1), but Python 3.11 or newer is needed." >&2; \
		echo "Name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot create virtual environments: venv or ensurepip is missing." >&2; \
		echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(python) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@touch $@

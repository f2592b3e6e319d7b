# Two commands do all the set-up from a fresh clone: `make dpo` runs the demo, `make test` passes the tests.
# `make test-all` also repeats them on every further engine; `make test-slow` does that alone.
# `make sft`, `make reward` and `make ppo` run the other recipes' demos; `make rlhf` runs all four in turn and prints one table.
# Each installs into $(VENV) first, once; it installs again only when pyproject.toml or constraints.txt change.
#   make dpo ARGS="--beta 0.2"     more arguments for the recipe (or for pytest with `make test`, names with `make mutations`)
#   make dpo VENV=/tmp/env         another virtual environment
#   make dpo PYTHON=python3.12     the interpreter that makes it (3.10 or newer)

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= accelerate_configs/ds_fp16.yaml
ARGS ?=

# On a CPU the demo's tiny matrix products gain little from more threads, and threads that wait for a busy core cost several times
# the work. `make dpo OMP_NUM_THREADS=8` for a larger model without a GPU.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: sft reward dpo ppo rlhf test test-slow test-all mutations lint install install-test

sft reward dpo ppo: $(VENV)/installed
	$(VENV)/bin/accelerate launch --config_file $(CONFIG) recipes/$@.py $(ARGS)

rlhf: $(VENV)/installed
	$(VENV)/bin/python benchmarks/rlhf.py $(CONFIG)

# tests/README.md says what is slow: tests that repeat on further engines what `make test` shows.
PYTEST = $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-test
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/installed-test
	$(PYTEST) -m slow $(ARGS)

test-all: $(VENV)/installed-test
	$(PYTEST) $(ARGS)

mutations: $(VENV)/installed-test
	$(VENV)/bin/python tests/mutations.py $(ARGS)

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

install: $(VENV)/installed

install-test: $(VENV)/installed-test

# Looked for by pip, not by python: an interrupted `venv` leaves a python without pip. What pip would compile on one core is compiled on
# all; some packages hold templates that are no Python.
$(VENV)/installed $(VENV)/installed-test: pyproject.toml constraints.txt
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.$(if $(findstring test,$(@F)),[test])'
	@$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

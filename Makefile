# From a fresh clone, each of two commands does all the set-up: `make dpo` runs the demo, `make test` runs the tests.
# `make test-all` also repeats them on every further engine; `make test-slow` does that alone. `make test-minimum` runs
# those of $(MINIMUM_TESTS) with the oldest versions that pyproject.toml allows, in an environment of their own.
# `make sft`, `make reward`, `make ppo` and `make grpo` run the other recipes' demos; `make rlhf` runs the first three
# and DPO in turn and prints one table. Each first installs into $(VENV). It installs again only when pyproject.toml or constraints.txt change.
#   make dpo ARGS="--beta 0.2"     arguments for the recipe (of `make test` for pytest, of `make mutations` names)
#   make dpo VENV=/tmp/env         another virtual environment
#   make dpo PYTHON=python3.12     the interpreter that makes the environment (3.10 or newer)

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= accelerate_configs/ds_fp16.yaml
ARGS ?=
TEST_EXTRAS = [test,peers]
MINIMUM_VENV ?= $(VENV)-minimum
MINIMUM_TESTS ?= golden configs data formats logprobs references metrics reward rewards fp16 saved_actors grpo_values

# On a CPU the demo's tiny matrix products gain little from more threads, and threads that wait for a busy core cost
# several times the work. For a larger model without a GPU use `make dpo OMP_NUM_THREADS=8`.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: sft reward dpo ppo grpo rlhf test test-slow test-all test-minimum mutations lint install install-test

sft reward dpo ppo grpo: $(VENV)/installed
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

test-minimum: $(MINIMUM_VENV)/installed-minimum
	$(MINIMUM_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" \
		$(MINIMUM_TESTS:%=tests/test_%.py) $(ARGS)

mutations: $(VENV)/installed-test
	$(VENV)/bin/python tests/mutations.py $(ARGS)

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

install: $(VENV)/installed

install-test: $(VENV)/installed-test

# We test for pip, not for python, because an interrupted `venv` leaves a python without pip. pip would compile on one
# core; compileall uses all cores. Its errors are ignored, because some packages contain templates that are not valid
# Python.
$(VENV)/installed $(VENV)/installed-test: pyproject.toml constraints.txt
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.$(if $(findstring test,$(@F)),$(TEST_EXTRAS))'
	@$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# `name>=1.2` of pyproject.toml becomes `name==1.2`. What builds this package is not installed by it.
$(MINIMUM_VENV)/installed-minimum: pyproject.toml
	test -x $(MINIMUM_VENV)/bin/pip || $(PYTHON) -m venv $(MINIMUM_VENV)
	sed '/^requires/d' pyproject.toml | grep -oE '"[a-z-]+>=[0-9.]+"' | tr -d '"' | sed 's/>=/==/' > $(MINIMUM_VENV)/minimum.txt
	$(MINIMUM_VENV)/bin/pip install --disable-pip-version-check --no-compile -c $(MINIMUM_VENV)/minimum.txt -e '.$(TEST_EXTRAS)'
	@$(MINIMUM_VENV)/bin/python -m compileall -qq -j 0 $(MINIMUM_VENV)/lib || true
	touch $@

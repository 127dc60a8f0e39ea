# The README names `make demo` and `make test`. Each target first sets up what it needs: a virtual environment in
# .venv, then the package with everything its tests use.
PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CORE ?= .venv-core
CHROMIUM ?= chromium
# Tests start hundreds of processes that import the library: its bytecode is written, whatever the environment says.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

KERNELS := src/tokenmix/kernels/cpu
LIBRARY := $(KERNELS)/libtokenmix.so

.PHONY: setup kernels demo quick test test-core test-more test-slow test-all test-browser lint docs tables clean

setup: $(VENV)/.ok kernels

$(VENV)/.ok: pyproject.toml constraints.txt hatch_build.py
	@echo "set-up 1/2: a virtual environment in $(VENV)"
	@$(PY) -m venv $(VENV) && $(BIN)/python -m pip install -q -U "pip>=25.1"
	@echo "set-up 2/2: tokenmix with its extras, what the tests need, and the C kernels; takes a few minutes, torch and transformers are large"
	@began=$$(date +%s); $(BIN)/python -m pip install -q -c constraints.txt -e ".[all]" --group dev && echo "set-up: done in $$(($$(date +%s) - began)) s"
	@touch $@

# Installation compiles the C kernels too; this recompiles them when a source has changed. Without a compiler it warns
# and everything else goes on.
kernels: $(LIBRARY)

$(LIBRARY): $(wildcard $(KERNELS)/src/*.[ch]) $(KERNELS)/build.py | $(VENV)/.ok
	$(BIN)/python $(KERNELS)/build.py --if-needed

demo: setup
	$(BIN)/python -m tokenmix.lab.demo --out runs/demo

lint: setup
	$(BIN)/ruff check --no-cache .  # no cache: which imports are first-party depends on files it does not track
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# For one mixer: lint, types, its promises without compilation and export, the tests of its family, and its page, as in
# `make quick M=hydra`.
quick: setup
	@test -n "$(M)" || { echo "make quick: give the name of a mixer, as in make quick M=hydra" >&2; exit 1; }
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	TOKENMIX_QUICK=$(M) $(PYTEST) -n 2

# The library's tests in an environment of their own, with torch and without any extra.
test-core: $(CORE)/.ok
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(CORE)/bin/python -m pytest --core -n 2 --dist worksteal -m "not more and not slow and not browser"

$(CORE)/.ok: pyproject.toml constraints.txt hatch_build.py
	@echo "set-up: a virtual environment in $(CORE) with torch alone"
	@$(PY) -m venv $(CORE) && $(CORE)/bin/python -m pip install -q -U "pip>=25.1"
	@$(CORE)/bin/python -m pip install -q -c constraints.txt -e . pytest pytest-xdist pytest-timeout
	@touch $@

# tests/suites.py lists what `make test` leaves to `make test-more`. Neither runs the tests marked slow or browser.
test: setup
	@$(MAKE) -j2 lint docs
	$(PYTEST) -n 2 --dist worksteal -m "not more and not slow and not browser"

test-more: setup
	$(PYTEST) -n 2 --dist worksteal -m "more and not slow and not browser"

test-slow: setup
	$(PYTEST) -n 2 --dist worksteal --durations 40 --durations-min 15 -m "slow and not browser"

# With `make -k test-all` the later suites run although an earlier one fails.
test-all: test test-more test-slow test-browser

test-browser: setup
	@command -v $(CHROMIUM) >/dev/null || { echo "make test-browser: '$(CHROMIUM)' was not found. Install Debian's package chromium, or set CHROMIUM=/path/to/it." >&2; exit 1; }
	CHROMIUM=$(CHROMIUM) $(PYTEST) -m browser tests/browser

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What follows from the code or from a page: the tables in the README, the page of claims, the charts and the notebooks.
tables: setup
	$(BIN)/python -m tokenmix.lab.report.taxonomy README.md
	$(BIN)/python -m tokenmix.lab.papers docs/claims.md
	$(BIN)/python -m benchmarks.charts
	$(BIN)/python -m benchmarks.notebooks

clean:
	rm -rf site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

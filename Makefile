# The README names `make demo` and `make test`. Each target first sets up what it needs: a virtual environment in
# .venv, then the package with everything its tests use.
PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CORE ?= .venv-core
OLDEST ?= .venv-oldest
RELEASE ?= .venv-release
WHEEL ?= .venv-wheel
CHROMIUM ?= chromium
# Tests start hundreds of processes that import the library: its bytecode is written, whatever the environment says.
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(RUN) $(BIN)/python -m pytest
SHORT := -n 2 --dist worksteal -m "not more and not slow and not browser"

KERNELS := src/tokenmix/kernels/cpu
LIBRARY := $(KERNELS)/libtokenmix.so

.PHONY: setup kernels demo quick test test-core test-oldest test-wheel test-more test-slow test-all test-browser lint api docs tables wheel clean

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
	$(RUN) $(CORE)/bin/python -m pytest --core $(SHORT)

$(CORE)/.ok: pyproject.toml constraints.txt hatch_build.py
	@echo "set-up: a virtual environment in $(CORE) with torch alone"
	@$(PY) -m venv $(CORE) && $(CORE)/bin/python -m pip install -q -U "pip>=25.1"
	@$(CORE)/bin/python -m pip install -q -c constraints.txt -e . pytest pytest-xdist pytest-timeout
	@touch $@

# The library's tests, and those of transformers and timm, with the oldest versions that pyproject.toml allows.
test-oldest: $(OLDEST)/.ok
	$(RUN) $(OLDEST)/bin/python -m pytest --core $(SHORT)
	$(RUN) $(OLDEST)/bin/python -m pytest $(SHORT) tests/test_huggingface*.py tests/test_host_timm*.py

$(OLDEST)/.ok: pyproject.toml constraints-oldest.txt hatch_build.py
	@echo "set-up: a virtual environment in $(OLDEST) with the oldest versions; takes minutes, torch is large"
	@$(PY) -m venv $(OLDEST) && $(OLDEST)/bin/python -m pip install -q -U "pip>=25.1"
	@$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e ".[train,hf,vision]" accelerate peft pytest pytest-xdist pytest-timeout
	@touch $@

# What an index is given, in dist: the archive of the sources, and a wheel made from it. An index refuses the tag
# linux_x86_64; auditwheel finds the oldest glibc that the C kernels load with and puts it into the tag. Without a
# compiler the wheel has no kernels and serves any platform; TOKENMIX_BUILD_KERNELS=require makes that an error.
wheel: $(RELEASE)/.ok
	rm -rf dist
	$(RELEASE)/bin/python -m build --no-isolation --outdir dist
	@set -e; export PATH="$(abspath $(RELEASE))/bin:$$PATH"; for file in dist/*-linux_*.whl; do \
	  test -e "$$file" || continue; set -x; auditwheel show "$$file"; auditwheel repair --wheel-dir dist "$$file"; rm "$$file"; done
	$(RELEASE)/bin/twine check --strict dist/*

$(RELEASE)/.ok: pyproject.toml
	@$(PY) -m venv $(RELEASE) && $(RELEASE)/bin/python -m pip install -q -U "pip>=25.1"
	@$(RELEASE)/bin/python -m pip install -q --group release
	@touch $@

# The library's tests against that wheel, in an environment of its own, from the archive without its sources.
# tests/test_new_mixer.py writes into a checkout.
test-wheel: wheel
	rm -rf $(WHEEL)
	$(PY) -m venv $(WHEEL) && $(WHEEL)/bin/python -m pip install -q -c constraints.txt dist/*.whl pytest pytest-xdist pytest-timeout
	@set -e; python=$(abspath $(WHEEL))/bin/python; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  tar -xzf dist/*.tar.gz --strip-components 1 -C "$$folder"; rm -r "$$folder/src"; cd "$$folder"; set -x; \
	  $$python -c "import tokenmix; print(tokenmix.__version__, tokenmix.__file__)"; $(RUN) $$python -m pytest --core $(SHORT) --ignore tests/test_new_mixer.py

# tests/suites.py lists what `make test` leaves to `make test-more`. Neither runs the tests marked slow or browser.
test: setup
	@$(MAKE) -j2 lint api docs
	$(PYTEST) $(SHORT)

test-more: setup
	$(PYTEST) -n 2 --dist worksteal -m "more and not slow and not browser"

test-slow: setup
	$(PYTEST) -n 2 --dist worksteal --durations 40 --durations-min 15 -m "slow and not browser"

# With `make -k test-all` the later suites run although an earlier one fails.
test-all: test test-more test-slow test-browser

test-browser: setup
	@command -v $(CHROMIUM) >/dev/null || { echo "make test-browser: '$(CHROMIUM)' was not found. Install Debian's package chromium, or set CHROMIUM=/path/to/it." >&2; exit 1; }
	CHROMIUM=$(CHROMIUM) $(PYTEST) -m browser tests/browser

# Fails where a public name changed since the last release without a line in CHANGELOG.md.
api: setup
	$(BIN)/python -m benchmarks.check_api $(SINCE)

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

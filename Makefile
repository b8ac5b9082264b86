# Needs make and Python 3.11 or newer; everything else is installed into .venv.
PYTHON ?= python3
STEPS  ?= 400000
OUT    ?= runs/3m-private-$(shell date +%Y%m%d-%H%M%S)

BIN   := .venv/bin
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
READY := .venv/ready
DOCS  := .venv/docs-ready

# An explicit PYTHON is used as it is; the default falls back on a newer version.
PYTHONS := $(PYTHON) $(if $(filter file,$(origin PYTHON)),python3.13 python3.12 python3.11)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-slow lint format bench guard docs clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

train: $(READY)  ## Train a private team (STEPS=400000 OUT=runs/...)
	$(BIN)/pevdn train pe-vdn-d --preset record-8 --steps $(STEPS) --out $(OUT)

test: $(READY)  ## Run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(READY)  ## Run the slow tests
	$(BIN)/python -m pytest -m slow

lint: $(READY)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## Measure speed (JSON=1: print one JSON document)
	$(BIN)/python benchmarks/bench.py $(if $(JSON),--json)

guard: $(READY)  ## Check speed ratios against their limits
	$(BIN)/python benchmarks/bench.py --guard

docs: $(DOCS)  ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## Remove .venv, caches and site/ (never runs/)
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is removed first and written last: an interrupted installation starts over.
$(READY): pyproject.toml constraints.txt
	@rm -f $@ $(DOCS); \
	for python in $(PYTHONS); do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	  python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "pevdn needs Python 3.11 or newer, which '$(PYTHON)' is not; try make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	echo "Installing pevdn and its tools into .venv with $$($$python --version) (once; a minute or two)"; \
	{ [ -x $(BIN)/pip ] || $$python -m venv --clear .venv; } && $(PIP) -e '.[dev,network,pettingzoo,video]'
	@touch $@

$(DOCS): $(READY)
	@echo "Installing the documentation tools into .venv"
	@$(PIP) -e '.[docs]'
	@touch $@

# On a machine with python3, a C++ compiler and make: `make demo` shows what Chord does, `make test` runs its tests.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The CPU build is enough for everything here but the kernels; set TORCH= to take the index's default instead.
TORCH  ?= torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types kernels clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/ready: pyproject.toml csrc/pack/pack.cpp
	@echo "setting up $(VENV): a minute or two ($(or $(TORCH),the index's torch), then Chord and its tools)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --upgrade pip
	@$(if $(TORCH),$(BIN)/pip install -q $(TORCH))
# setuptools calls building an extension from pyproject.toml experimental, at length.
	@PYTHONWARNINGS=ignore $(BIN)/pip install -q -e '.[dev]'
	@touch $@

setup: $(VENV)/ready  ## an environment in .venv with Chord and its development tools

demo: setup  ## write, convert, verify, load and multiply a small Kimi checkpoint on the CPU
	$(BIN)/python examples/demo.py

test: setup  ## the tests that need no GPU
	$(BIN)/python -m pytest

lint: setup  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy --strict on both packages
	$(BIN)/mypy

kernels: setup  ## compile every kernel for sm_90a, sm_100a and sm_103a; needs no GPU
	$(BIN)/chord warmup --check --arch sm_90a --arch sm_100a --arch sm_103a

clean:  ## remove the environment and build products
	rm -rf $(VENV) build dist *.egg-info

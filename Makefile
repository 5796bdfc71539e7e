# Everything an ordinary user needs; no step needs root, a GPU, Docker or a model hub.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CC_FOUND := $(shell command -v cc || command -v gcc || command -v clang)

.PHONY: setup native demo up test soak lint proto

setup: native

# Compiled where it runs. A machine without a C compiler gets one from PyPI, into the environment.
native: $(STAMP)
	@test -n "$(CC_FOUND)" || $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[compiler]'
	@$(BIN)/python -m kernels.native.build

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[worker,local,models,dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/baton demo

up: setup
	$(BIN)/baton up

# Two test processes: one per core of the smallest machine this has to run on. Tests that need the demo model obtain it once.
test: setup
	$(BIN)/baton model fetch smollm2-135m-instruct
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow and not gpu'

soak: setup
	$(BIN)/baton model fetch smollm2-135m-instruct
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: setup
	$(BIN)/python proto/generate.py

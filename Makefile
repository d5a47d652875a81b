# Verbs of the project. Each sets up .venv when it is missing or older than the files that describe it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp

.PHONY: help setup demo test lint format bench clean
help:
	@echo "make demo   set up and run the main job on the embedded default"
	@echo "make test   set up and run every check (lint, types, tests)"
	@echo "make lint | format | bench | clean"

setup: $(STAMP)
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade "pip>=24" || true
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/seps demo

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2

format: $(STAMP)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache

# Verbs of the project. Each sets up .venv when it is missing or older than the files that describe it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp

.PHONY: help setup demo demo-reid docs test test-slow lint format bench release clean
help:
	@echo "make demo   set up and run the main job on the embedded default"
	@echo "make test   set up and run what a change needs (lint, types, tests)"
	@echo "make test-slow   the tests that take longest: Ray, the release, kills, the blocks of the docs"
	@echo "make demo-reid   draw a small RGB/NIR/TIR set, train on it, measure, show"
	@echo "make docs   build the documentation site into build/site"
	@echo "make release   build the archives, check them, test them in empty environments; uploads nothing"
	@echo "make lint | format | bench | clean"

setup: $(STAMP)
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade "pip>=24" || true
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/seps demo

demo-reid: $(STAMP)
	$(BIN)/seps reid synth runs/reid-demo/data --identities 90 --images 8 --height 128 --width 64
	$(BIN)/seps reid train --config configs/reid/synthetic.yaml --out runs/reid-demo/run
	$(BIN)/seps reid eval runs/reid-demo/run --missing --cost
	$(BIN)/seps reid show runs/reid-demo/run --out runs/reid-demo/pictures

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/phrases.py

# Compiled files are kept, also where the environment says not to: each process would compile every test and module again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile=ci --durations=30 --durations-min=2

test: lint
	$(PYTEST) -m "not slow"

test-slow: $(STAMP)
	$(PYTEST) -m slow

format: $(STAMP)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.speed

release: $(STAMP)
	$(BIN)/python tools/release.py --lowest

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache

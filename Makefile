# make setup | demo | test | exhaustive | bench | bench-jax | lint. Everything is installed into .venv; PYTHON names the interpreter it is made with.
PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests fp8ref

.PHONY: setup demo test exhaustive bench bench-jax lint

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: setup
	$(BIN)/fp8ref demo configs/tiny.toml

test: setup
	$(BIN)/python -m pytest $(TESTS)

exhaustive: setup
	$(BIN)/python -m pytest -m exhaustive $(TESTS)

bench: setup
	$(BIN)/python benchmarks/sim.py --json benchmarks/results/sim.json

bench-jax: setup
	$(BIN)/python benchmarks/jax_cpu.py --json benchmarks/results/jax_cpu.json

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# make setup | demo | test | slow | gpu | exhaustive | bench | bench-jax | bench-torch | bench-data | bench-recording | bench-trainer | compile-matrix | aot | notebooks | lint.
# Everything is installed into .venv, but for aot's, into .venv-aot; PYTHON names the interpreter they are made with.
PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests fp8ref

.PHONY: setup demo test slow gpu exhaustive bench bench-jax bench-torch bench-data bench-recording bench-trainer compile-matrix aot notebooks lint

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: setup
	$(BIN)/fp8ref demo configs/tiny.toml

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --slow-stride 4 --durations 40 $(TESTS)

slow: setup
	$(BIN)/python -m pytest -m 'slow and not exhaustive' $(TESTS)

gpu: setup
	$(BIN)/python -m pytest -m gpu $(TESTS)

exhaustive: setup
	$(BIN)/python -m pytest -m exhaustive $(TESTS)

bench: setup
	$(BIN)/python benchmarks/sim.py --json benchmarks/results/sim.json

bench-jax: setup
	$(BIN)/python benchmarks/jax_cpu.py --json benchmarks/results/jax_cpu.json

bench-torch: setup
	$(BIN)/python benchmarks/torch_cpu.py --json benchmarks/results/torch_cpu.json

bench-data: setup
	$(BIN)/python benchmarks/data.py

bench-recording: setup
	$(BIN)/python benchmarks/recording.py --json benchmarks/results/recording.json

bench-trainer: setup
	$(BIN)/python benchmarks/trainer.py --json benchmarks/results/trainer.json

compile-matrix: setup
	$(BIN)/python benchmarks/compile_matrix.py

# XLA's compiler for NVIDIA's GPUs, which needs neither a GPU nor CUDA to compile.
.venv-aot/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[jax,train]' jax-cuda12-plugin
	touch $@

aot: .venv-aot/ready
	.venv-aot/bin/python benchmarks/aot.py

notebooks: setup
	$(BIN)/python notebooks/execute.py notebooks/*.ipynb

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# make setup | demo | test | slow | gpu | wheels | exhaustive | bench | bench-jax | bench-torch | bench-data | bench-recording | bench-trainer | compile-matrix | aot | notebooks | lint.
# Everything is installed into .venv, but for aot's, into .venv-aot; PYTHON names the interpreter they are made with.
PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests fp8ref

.PHONY: setup demo test slow gpu $(addprefix gpu-,probe tests bench-torch bench-jax parity) wheels exhaustive bench bench-jax bench-torch bench-data bench-recording bench-trainer compile-matrix aot notebooks lint

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

# On a machine with a GPU, where nothing is fetched: GPU_PYTHON has PyTorch and JAX, wheels/ the rest, as 'make wheels' fetched it elsewhere.
# What a part has done it does not do again: 'make gpu' goes on where it was cut off. 'make gpu PART=probe' is one part, of less than 9 minutes.
GPU_PYTHON ?= python3
ON_GPU = PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu-site$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON)
GPU_PARTS := probe tests bench-torch bench-jax parity
ifneq ($(filter-out $(GPU_PARTS),$(PART)),)
$(error PART is one of $(GPU_PARTS); got $(PART))
endif

gpu: $(addprefix gpu-,$(or $(PART),$(GPU_PARTS)))

.gpu-site/ready: $(wildcard wheels/*.whl)
	mkdir -p .gpu-site
	$(if $^,$(GPU_PYTHON) -m pip install --disable-pip-version-check -q --no-index --no-deps --upgrade --target .gpu-site $^)
	touch $@

gpu-probe: .gpu-site/ready
	$(ON_GPU) benchmarks/gpu_probe.py --budget 300

gpu-tests: .gpu-site/ready
	$(ON_GPU) -m pytest -p no:cacheprovider -m gpu $$(grep -rl pytest.mark.gpu tests)  # others may want packages that are not here

gpu-bench-torch: .gpu-site/ready
	$(ON_GPU) benchmarks/gpu_torch.py --budget 400 --resume

gpu-bench-jax: .gpu-site/ready
	$(ON_GPU) benchmarks/gpu_jax.py --budget 350 --resume

gpu-parity: .gpu-site/ready
	$(ON_GPU) benchmarks/gpu_parity.py --budget 360

wheels: setup
	$(BIN)/python -m pip download --disable-pip-version-check -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	$(foreach n,17 24 27 28 31 34 35,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
	-c constraints.txt -d wheels -r launch/gpu-wheels.txt

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

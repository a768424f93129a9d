# make setup | demo | demo-full | test | slow | faults | gpu | wheels | extras | newest | ci-example | exhaustive | bench | bench-jax | bench-torch | bench-optimizer | bench-losses | bench-attention-losses | bench-attention-first-steps | bench-attention-speed | bench-attention-rate | bench-trainer | bench-simulated | bench-larger | findings | compile-matrix | aot | aot-torch | notebooks | libraries | docs | docs-serve | clauses | house | lint | release-check.
# Everything is installed into .venv, but for aot's, aot-torch's and newest's, into .venv-aot, .venv-aot-torch and .venv-newest; PYTHON names the interpreter they are made with.
# What is imported is compiled then, and kept: most modules of these packages never are. Where the environment forbids to keep it,
# every process would compile anew what it imports: PyTorch for 8 seconds, JAX for 3.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install --disable-pip-version-check --no-compile
TESTS ?= tests fp8ref

.PHONY: setup demo demo-full test slow faults gpu $(addprefix gpu-,kernels profile bench-torch bench-jax probe tests parity) wheels extras newest ci-example exhaustive bench bench-jax bench-torch bench-optimizer bench-losses bench-attention-losses bench-attention-first-steps bench-attention-speed bench-attention-rate bench-trainer bench-simulated bench-larger findings compile-matrix aot aot-torch notebooks libraries docs docs-serve clauses support house lint release-check

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[test]'
	touch $@

demo: setup
	$(BIN)/fp8ref demo

# Longer runs, two recipes, and three seeds of both backends: about 15 minutes.
demo-full: setup
	$(BIN)/fp8ref demo --full --out demo-full

# Of the slow tests one in 64: other ones after each commit. Three workers for two cores: a worker waits for the processes that its test starts.
TURN ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)

test: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal --slow-stride 64 --slow-turn $(TURN) --durations 40 $(TESTS)

slow: setup
	$(BIN)/python -m pytest -m 'slow and not exhaustive' $(TESTS)

# Plants small faults in a copy of the package, one at a time, and shows which ones the fast tests
# do not see: all, those that MATCH, or one in EVERY. It fails unless the share LEAST is seen.
EVERY ?= 1
LEAST ?= 0.95
faults: setup
	$(BIN)/python tests/faults/plant.py --every $(EVERY) --turn $(TURN) --least $(LEAST) $(if $(MATCH),--match '$(MATCH)')

# On a machine with a GPU, where nothing is fetched: GPU_PYTHON has PyTorch and JAX, wheels/ the rest, as 'make wheels' fetched it elsewhere.
# What a part has done it does not do again, but for the tests: 'make gpu' goes on where it was cut off, and runs every part whatever became of
# those before it, the most wanted first. 'make gpu PART=probe' is one part, of less than 9 minutes; it fails with 1 where something failed, with 3
# where time ran out.
# The benchmarks write to GPU_RESULTS: figures in benchmarks/results are of another machine or other packages, and one table has one of each.
GPU_PYTHON ?= python3
GPU_RESULTS ?= build/gpu
ON_GPU = JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.gpu-jax PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu-site$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON)
GPU_PARTS := kernels profile bench-torch bench-jax probe tests parity
ifneq ($(filter-out $(GPU_PARTS),$(PART)),)
$(error PART is one of $(GPU_PARTS); got $(PART))
endif

gpu:
	@failed=; for part in $(or $(PART),$(GPU_PARTS)); do $(MAKE) --no-print-directory gpu-$$part || failed="$$failed $$part"; done; \
	if [ -n "$$failed" ]; then echo "not finished:$$failed. 'make gpu' goes on with what is left."; exit 1; fi

# Made again for other wheels or another interpreter.
GPU_SITE := .gpu-site/$(shell (ls wheels 2>/dev/null; command -v $(GPU_PYTHON)) | cksum | cut -d' ' -f1)

$(GPU_SITE):
	rm -rf .gpu-site
	mkdir -p .gpu-site
	$(if $(wildcard wheels/*.whl),$(GPU_PYTHON) -m pip install --disable-pip-version-check -q --no-index --no-deps --target .gpu-site wheels/*.whl)
	$(ON_GPU) -c 'import fp8ref.jax, fp8ref.torch, fp8ref.train.loop, gfloat, hypothesis, matplotlib, mmaemu, pytest'
	touch $@

# $(call gpu-bench,FRAMEWORK,OPTIONS,SECONDS)
gpu-bench = $(ON_GPU) benchmarks/gpu/gpu_$(1).py $(2) --budget $(3) --resume --json $(GPU_RESULTS)/gpu_$(1).json
# Both frameworks, whatever became of the first; what failed counts before time that ran out: $(call gpu-both,OPTIONS,SECONDS)
gpu-both = code=0; $(call gpu-bench,torch,$(1),$(2)) || code=$$?; $(call gpu-bench,jax,$(1),$(2)) || { last=$$?; [ $$code = 1 ] || code=$$last; }; exit $$code

gpu-kernels: $(GPU_SITE)
	@$(call gpu-both,--section bits --section kernels,230)

gpu-profile: $(GPU_SITE)
	@$(call gpu-both,--section profile,230)

gpu-probe: $(GPU_SITE)
	$(ON_GPU) benchmarks/gpu/gpu_probe.py --budget 300 --jobs 6

gpu-tests: $(GPU_SITE)  # of the files that have such tests alone: others may want packages that are not here; other versions may warn
	$(ON_GPU) -m pytest -p no:cacheprovider -W default -m gpu $$(grep -rl pytest.mark.gpu tests)

gpu-bench-torch: $(GPU_SITE)
	$(call gpu-bench,torch,,400)

gpu-bench-jax: $(GPU_SITE)
	$(call gpu-bench,jax,,350)

gpu-parity: $(GPU_SITE)
	$(ON_GPU) benchmarks/gpu/gpu_parity.py --budget 360

wheels: setup
	rm -rf wheels
	$(BIN)/python -m pip download --disable-pip-version-check -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	$(foreach n,17 24 27 28 31 34 35,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
	-c constraints.txt -d wheels -r launch/gpu-wheels.txt

# Each extra alone in a new environment: make extras EXTRAS='jax torch'; all without, or every fourth where TURN is given.
extras:
	$(PYTHON) tests/install/extras.py $(EXTRAS) $(if $(filter command,$(firstword $(origin TURN))),--turn $(TURN))

# A slice of the tests with the newest jax, flax and optax, without constraints.txt, under the newest Python that is here. TORCH=torch
# takes any build of PyTorch, such as one of gigabytes with CUDA; without it a build for CPUs, if there is one for that Python.
newest:
	$(PYTHON) tests/install/newest.py $(if $(TORCH),--torch '$(TORCH)')

# examples/ci in an empty folder, with fp8ref's wheel in a new environment, by the commands of the workflow that other projects call.
ci-example: setup
	$(BIN)/python tests/install/ci_example.py

exhaustive: setup
	$(BIN)/python -m pytest -m exhaustive $(TESTS)

bench: setup
	$(BIN)/python benchmarks/speed/sim.py --json benchmarks/results/sim.json

bench-jax: setup
	$(BIN)/python benchmarks/speed/jax_cpu.py --json benchmarks/results/jax_cpu.json

bench-torch: setup
	$(BIN)/python benchmarks/speed/torch_cpu.py --json benchmarks/results/torch_cpu.json

bench-optimizer: setup
	$(BIN)/python benchmarks/speed/optimizer_step.py --threads 1 --layouts float32 bfloat16 msamp sqrt_e5m2 sqrt_e4m3 --json benchmarks/results/optimizer_step.json

# It goes on where it was cut off. Batches are small: PyTorch's bfloat16 is slow on a CPU.
ATTENTION_LOSSES = benchmarks/losses/attention_losses.py --resume
LOSSES = benchmarks/losses/layout_losses.py --resume --steps 40 --batch-size 4 --sequence-length 64

bench-losses: setup
	$(BIN)/python $(LOSSES) --json benchmarks/results/layout_losses.json
	$(BIN)/python $(LOSSES) --width 256 --json benchmarks/results/layout_losses_larger.json
	$(BIN)/python $(LOSSES) --steps 200 --width 64 --seeds 5 --json benchmarks/results/layout_losses_longer.json

bench-attention-losses: setup
	$(BIN)/python $(ATTENTION_LOSSES) --steps 60 --batch-size 4 --json benchmarks/results/attention_losses.json
	$(BIN)/python $(ATTENTION_LOSSES) --steps 40 --batch-size 1 --sequence-length 1024 --json benchmarks/results/attention_losses_long.json
	$(BIN)/python $(ATTENTION_LOSSES) --steps 60 --batch-size 4 --variants "cudnn, delayed" --json benchmarks/results/attention_losses_delayed.json
	$(BIN)/python $(ATTENTION_LOSSES) --steps 40 --batch-size 1 --sequence-length 1024 --variants "cudnn, delayed" --json benchmarks/results/attention_losses_delayed_long.json

bench-attention-first-steps: setup
	$(BIN)/python benchmarks/losses/attention_first_steps.py

bench-attention-speed: setup
	$(BIN)/python benchmarks/speed/attention_speed.py --json benchmarks/results/attention_speed.json

bench-attention-rate: setup
	$(BIN)/python benchmarks/speed/attention_rate.py --repetitions 9 --json benchmarks/results/attention_rate.json

bench-trainer: setup
	$(BIN)/python benchmarks/training/trainer.py --json benchmarks/results/trainer.json

bench-simulated: setup
	$(BIN)/python benchmarks/speed/simulated_hardware.py --json benchmarks/results/simulated_hardware.json

findings: setup
	$(BIN)/fp8ref finding all --jobs 2 --out build/findings --json fp8ref/findings/recorded.json
	$(BIN)/python docs/scripts/findings.py

bench-larger: setup
	$(BIN)/python benchmarks/losses/larger_losses.py

compile-matrix: setup
	$(BIN)/python benchmarks/compiled/compile_matrix.py

# XLA's compiler for NVIDIA's GPUs, which needs neither a GPU nor CUDA to compile.
.venv-aot/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python $(INSTALL) -c constraints.txt -e '.[train,jax-kernels]' jax-cuda12-plugin
	touch $@

aot: .venv-aot/ready
	.venv-aot/bin/python benchmarks/compiled/aot.py

# Inductor for an H200 in torch's build for CPUs, and Triton, which compiles for a GPU without one.
.venv-aot-torch/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-aot-torch
	.venv-aot-torch/bin/python $(INSTALL) -c constraints.txt -e '.[torch,train,kernels]'
	touch $@

aot-torch: .venv-aot-torch/ready
	.venv-aot-torch/bin/python benchmarks/compiled/aot_torch.py
	.venv-aot-torch/bin/python benchmarks/compiled/aot_torch.py --gpu b200

notebooks: setup
	$(BIN)/python notebooks/execute.py notebooks/*.ipynb

libraries: setup
	$(BIN)/python docs/scripts/libraries.py

# The documentation site, in build/site: warnings and dead links are errors. Nothing is fetched but its packages, once.
.venv/docs: .venv/ready
	$(BIN)/python $(INSTALL) -q -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clauses:
	$(PYTHON) docs/scripts/clauses.py

# README.md's table of what works where, from fp8ref/spec/support.py.
support: setup
	$(BIN)/python docs/scripts/support.py

# The figures of the package's structure, to which tests/test_house.py sets limits; all that a figure counts with OF, such as OF=circles.
house: setup
	$(BIN)/python tests/house/figures.py $(OF)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# An sdist and a wheel, checked, installed into new environments of every Python that is here, and used there without a clone.
release-check: setup
	$(BIN)/python tests/install/release.py

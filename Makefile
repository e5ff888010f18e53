# Targets create the environments that they need. `make test PYTHON=python3.12` selects an interpreter.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(if $(VERSION),,$(error PYTHON=$(PYTHON) does not run: pass an interpreter, Python 3.11 or later))
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
WORKERS ?= auto

.PHONY: demo ring recall slide train test test-slow soak lint types doctest sanitize bench bench-full bench-slide million aot-tpu aot-cuda docs package clean

demo: $(VENV)/ready
	$(BIN)/python examples/first_steps.py

ring: $(VENV)/ready
	$(BIN)/python examples/ring.py

# trains two layers to recall a token from 4,096 positions back
recall: $(VENV)/ready
	$(BIN)/python examples/recall.py --out runs/recall.png

# embeds a synthetic slide with random weights of the shapes of Prov-GigaPath, and draws its heat map
slide: $(VENV)/ready
	$(BIN)/python examples/slide_encoder.py --demo runs/slide

# trains a language model on the source code of Python's standard library, on 8 simulated devices; TRAIN adds options
train: $(VENV)/ready
	$(BIN)/python examples/train_lm.py --devices 8 --out runs/train --overwrite $(TRAIN)

test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

# interrupts training runs in many ways for 30 minutes and compares their losses; prints a table, fails on any difference
SOAK ?= --minutes 30 --seed 0
soak: $(VENV)/ready
	$(BIN)/python tests/soak.py $(SOAK)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/ready
	$(BIN)/mypy

# most of the time is spent compiling, so skip optimizations
doctest: $(VENV)/ready
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --doctest-modules ringjax

# runs the CPU kernels under address, undefined-behavior and thread sanitizers, without Python; takes a few minutes.
# SANITIZE=--quick tests two dtypes and fewer shapes, in about 20 seconds
sanitize:
	$(PYTHON) tests/native/sanitize.py $(SANITIZE)

# runs all benchmarks and writes build/bench/report.md, in quick or full form; BENCH="--parts ring,decode" selects parts.
# The libraries compared with are installed separately: PyTorch in .venv-torch, ringattention in .peer
BENCH_COMMAND = $(BIN)/python benchmarks/run.py --torch-python .venv-torch/bin/python --peer .peer
bench: $(VENV)/ready .venv-torch/ready .peer/ready
	$(BENCH_COMMAND) $(BENCH)

bench-full: $(VENV)/ready .venv-torch/ready .peer/ready
	$(BENCH_COMMAND) --full $(BENCH)

# the slide encoder against PyTorch, interleaved; SLIDE="--tiles 2000 --repeats 3" changes the case
bench-slide: $(VENV)/ready .venv-torch/ready
	$(BIN)/python benchmarks/slide.py --torch-python .venv-torch/bin/python $(SLIDE)

# one million tokens, forward and backward
million: $(VENV)/ready
	$(BIN)/python benchmarks/million.py --full

# compile rings ahead of time for TPU and GPU topologies; each compiler is installed in its own environment
aot-tpu: .venv-aot-tpu-$(VERSION)/ready
	$(if $(AOT),,.venv-aot-tpu-$(VERSION)/bin/python benchmarks/tpu_costs.py)
	$(if $(AOT),,.venv-aot-tpu-$(VERSION)/bin/python benchmarks/tpu_bytes.py)
	$(if $(AOT),,.venv-aot-tpu-$(VERSION)/bin/python benchmarks/aot_sharding.py --target v5e:2x4)
	$(if $(AOT),,.venv-aot-tpu-$(VERSION)/bin/python benchmarks/aot_slide.py --target v5e:4x4 --dtype bfloat16)
	.venv-aot-tpu-$(VERSION)/bin/python benchmarks/aot.py tpu $(AOT)

# with AOT, only the rings
aot-cuda: .venv-aot-cuda-$(VERSION)/ready
	$(if $(AOT),,.venv-aot-cuda-$(VERSION)/bin/python benchmarks/gpu_costs.py)
	$(if $(AOT),,.venv-aot-cuda-$(VERSION)/bin/python benchmarks/aot_sharding.py)
	$(if $(AOT),,.venv-aot-cuda-$(VERSION)/bin/python benchmarks/aot_slide.py)
	.venv-aot-cuda-$(VERSION)/bin/python benchmarks/aot.py cuda $(AOT)

# builds the documentation site in build/site; warnings are errors
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# builds sdist and wheel in dist, and tests the wheel in an empty folder and a clean environment
package: $(VENV)/ready
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv --clear .venv-package-$(VERSION)
	.venv-package-$(VERSION)/bin/python -m pip install --quiet dist/*.whl
	folder=$$(mktemp -d) && cp tests/smoke.py $$folder && cd $$folder && \
		$(CURDIR)/.venv-package-$(VERSION)/bin/python -I smoke.py && rm -r $$folder

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test,bench,plot,dev,train]'
	touch $@

.venv-torch/ready:
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet torch==2.13.0 numpy
	.venv-torch/bin/python -m pip install --quiet --no-deps dilated-attention-pytorch==0.2.0 einops
	touch $@

.peer/ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --no-deps --target .peer ringattention==0.1.2 einops
	touch $@

.venv-aot-tpu-$(VERSION)/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -e . 'jax[tpu]'
	touch $@

# only the compilers and the disassembler; of the CUDA libraries, one that jax's own kernels ask for the version of CUDA
.venv-aot-cuda-$(VERSION)/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -e . 'jax[cuda12-local]' nvidia-cuda-nvcc nvidia-cuda-nvdisasm \
		nvidia-cuda-runtime-cu12
	touch $@

clean:
	rm -rf .venv-* .peer build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

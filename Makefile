# Two commands do all the set-up: `make demo` and `make test`. `make test PYTHON=python3.12` picks an interpreter.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(if $(VERSION),,$(error PYTHON=$(PYTHON) does not run: name an interpreter, Python 3.11 or later))
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
WORKERS ?= auto

.PHONY: demo ring recall train test test-slow soak lint types doctest sanitize bench bench-full million aot-tpu aot-cuda docs package clean

demo: $(VENV)/ready
	$(BIN)/python examples/first_steps.py

ring: $(VENV)/ready
	$(BIN)/python examples/ring.py

# two layers learn to answer from 4,096 tokens back
recall: $(VENV)/ready
	$(BIN)/python examples/recall.py --out runs/recall.png

# a language model on the sources of Python's standard library, on 8 simulated devices; TRAIN takes more options
train: $(VENV)/ready
	$(BIN)/python examples/train_lm.py --devices 8 --out runs/train --overwrite $(TRAIN)

test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

# interrupts training in every way for half an hour, and compares the losses; ends with a table, and 1 if one differs
SOAK ?= --minutes 30 --seed 0
soak: $(VENV)/ready
	$(BIN)/python tests/soak.py $(SOAK)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/ready
	$(BIN)/mypy

# compiling is most of what the examples cost
doctest: $(VENV)/ready
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -q --doctest-modules ringjax

# the CPU kernels under address, undefined-behavior and thread sanitizers, without Python; a few minutes.
# SANITIZE=--quick takes two dtypes and fewer shapes: about 20 seconds
sanitize:
	$(PYTHON) tests/native/sanitize.py $(SANITIZE)

# all benchmarks into one report, build/bench/report.md: quick, or all of it; BENCH="--parts ring,decode" runs some.
# Peers: PyTorch lives in an environment of its own, ringattention in a folder of its own
BENCH_COMMAND = $(BIN)/python benchmarks/run.py --torch-python .venv-torch/bin/python --peer .peer
bench: $(VENV)/ready .venv-torch/ready .peer/ready
	$(BENCH_COMMAND) $(BENCH)

bench-full: $(VENV)/ready .venv-torch/ready .peer/ready
	$(BENCH_COMMAND) --full $(BENCH)

# one million tokens, forward and backward
million: $(VENV)/ready
	$(BIN)/python benchmarks/million.py --full

# rings compiled by the compilers of accelerators, without the accelerators; each compiler lives in an environment of its own
aot-tpu: .venv-aot-tpu-$(VERSION)/ready
	.venv-aot-tpu-$(VERSION)/bin/python benchmarks/aot.py tpu $(AOT)

aot-cuda: .venv-aot-cuda-$(VERSION)/ready
	.venv-aot-cuda-$(VERSION)/bin/python benchmarks/aot.py cuda $(AOT)

# the site of docs/, in build/site; a warning is an error
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# sdist and wheel, in dist; the wheel, made from the sdist, is tried in a folder and an environment with nothing else
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

# the compiler and ptxas only: none of CUDA's libraries
.venv-aot-cuda-$(VERSION)/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -e . 'jax[cuda12-local]' nvidia-cuda-nvcc-cu12
	touch $@

clean:
	rm -rf .venv-* .peer build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

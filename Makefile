# Two commands do all the set-up: `make demo` and `make test`. `make test PYTHON=python3.12` picks an interpreter.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(if $(VERSION),,$(error PYTHON=$(PYTHON) does not run: name an interpreter, Python 3.11 or later))
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
WORKERS ?= auto

.PHONY: demo ring recall train test test-slow lint types doctest bench bench-ring bench-decode million aot-tpu aot-cuda docs package clean

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

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy

doctest: $(VENV)/ready
	$(BIN)/python -m pytest -q --doctest-modules ringjax

# beside PyTorch, which lives in an environment of its own
bench: $(VENV)/ready .venv-torch/ready
	$(BIN)/python benchmarks/compare.py --torch-python .venv-torch/bin/python

# rings of CPU devices, and beside ringattention, which lives in a folder of its own
bench-ring: $(VENV)/ready .peer/ready
	$(BIN)/python benchmarks/ring.py --peer .peer

# the decoding cache beside a dense one, at 32,768 and at 1,048,576 tokens of context
bench-decode: $(VENV)/ready
	$(BIN)/python benchmarks/decode.py

million: $(VENV)/ready
	$(BIN)/python benchmarks/million.py

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

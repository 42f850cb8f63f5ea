# Two commands do everything: `make demo` and `make test`. Nothing outside this folder and the user's caches is written.

PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
UV := $(BIN)/uv
UV_VERSION := 0.13.9
STAMP := $(VENV)/.ready

.PHONY: demo test test-full vllm check setup jars lock clean

setup: $(STAMP) jars  ## virtual environment, locked dependencies, Kafka's jars

demo: setup  ## the whole system on this machine: a policy learns, a run is replayed
	$(BIN)/rollmill demo

test: setup check  ## what every change must pass
	$(BIN)/python -m pytest -m "not slow" --cov --cov-report=term:skip-covered -q

test-full: setup vllm check  ## the long rest as well
	$(BIN)/python -m pytest -q

vllm: $(VLLM)/.ready  ## vLLM for processors, in an environment of its own; 6 GB

$(VLLM)/.ready: requirements/vllm.txt $(STAMP)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(UV) pip sync --quiet --require-hashes --python $(VLLM)/bin/python requirements/vllm.txt
	touch $@

check: $(STAMP)  ## formatting, lints, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

jars: $(STAMP)  ## without Java or Maven this says so: the demo then runs in memory, and tests of a real Kafka are left out
	-$(BIN)/python -m infra.broker

$(STAMP): pyproject.toml requirements/dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(UV) pip sync --quiet --require-hashes --python $(BIN)/python requirements/dev.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps uv==$(UV_VERSION) --editable .
	touch $@

COMPILE_OTHERS := $(UV) pip compile --quiet --generate-hashes --no-header --no-annotate --no-emit-index-url \
	--python-version 3.11
COMPILE := $(COMPILE_OTHERS) pyproject.toml

lock:  ## write the locks anew from pyproject.toml
	$(COMPILE) -o requirements/base.txt
	$(COMPILE) --extra train --extra local --extra board -o requirements/train.txt
	$(COMPILE) --extra train --extra local --extra board --extra tensorboard --extra dev -o requirements/dev.txt
	$(COMPILE_OTHERS) requirements/vllm.in --override requirements/vllm-overrides.txt -o requirements/vllm.txt

clean:
	rm -rf $(VENV) $(VLLM) .rollmill .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis

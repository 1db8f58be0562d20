# Every target creates .venv from constraints.txt when it is missing or out of date; nothing else is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0 triton==3.7.1
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: tune test lint fmt check install install-dev gpu-check clean

tune: $(STAMP)  ## the main job: tune the token budget of the built-in model on this machine
	$(BIN)/tilebudget tune $(ARGS)

test: $(DEV_STAMP)  ## the whole test suite
	$(BIN)/python -P -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(DEV_STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test

gpu-check: $(STAMP)  ## one validation of what needs a GPU, under eight minutes; without one, the compile matrix
	$(BIN)/python -P benchmarks/gpu_check.py $(ARGS)

install: $(STAMP)
install-dev: $(DEV_STAMP)

# torch first: everything after it then finds its matched pair already there.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	touch $@

$(STAMP): $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(DEV_STAMP): $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@ $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info

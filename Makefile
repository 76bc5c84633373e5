# Every target makes its own environment in .venv; a second run finds it there.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help demo test lint check docs clean

help:
	@echo "make demo    train a small language model with regard, next to the reference, then verify"
	@echo "make test    run every test that this machine can run"
	@echo "make lint    format check, lint, types"
	@echo "make check   lint and test: what a change must pass"
	@echo "make docs    write the generated sections of README.md and docs/ anew"
	@echo "make clean   remove .venv and caches"

demo: $(STAMP)
	$(BIN)/python examples/train_lm.py
	$(BIN)/regard verify --quick

# Three processes: TRITON_INTERPRET is read when Triton is imported, and the compiler needs it unset.
test: $(STAMP)
	@echo "== all but the compiler, on the device that is here"
	env -u TRITON_INTERPRET $(BIN)/python -m pytest --ignore=tests/test_compile.py
	@echo "== the portable kernels in Triton's interpreter"
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 2 tests/test_portable.py tests/test_scenarios.py
	@echo "== every kernel compiled for every architecture, without a GPU"
	env -u TRITON_INTERPRET $(BIN)/python -m pytest -o faulthandler_timeout=1600 tests/test_compile.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

docs: $(STAMP)
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(STAMP): requirements/test.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or sys.exit( \
	  "regard needs Python 3.10 or newer; $(PYTHON) is %s. Name another one: PYTHON=python3.12" % v)'
	@echo "== making the environment in .venv, once (PyTorch is a large download)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements/test.txt -e .
	@touch $@

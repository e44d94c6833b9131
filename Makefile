# make demo: from nothing to text from a model you trained. make test: the same set-up, then the tests. All may be run again.
# CPU-only Linux, to spare 3 GB of CUDA libraries: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
ONLY ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all check lint clean
.DELETE_ON_ERROR:

demo: .venv/run
	$(BIN)/python -m data.shakespeare.prepare
	$(BIN)/python train.py config/demo.py --init_from=auto
	$(BIN)/python -m tools.demo

test: .venv/dev
	$(BIN)/python -m pytest

test-all: .venv/dev
	$(BIN)/python -m pytest -m "$(ONLY)"

check: lint test

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# the environment: made once, brought up to date when a requirements file changes
.venv/made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 14) else f"error: needs Python 3.10 to 3.13, found {v[0]}.{v[1]}: make PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv || { echo "error: $(PYTHON) cannot make environments; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf .venv; exit 2; }
	@touch $@

.venv/run: requirements.txt .venv/made
	@echo "installing requirements.txt into .venv (torch is large: some minutes)"
	@$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) $$(grep -o '^torch==[0-9.]*' requirements.txt))
	@$(PIP) -r requirements.txt
	@touch $@

.venv/dev: requirements-dev.txt .venv/run
	@$(PIP) -r requirements-dev.txt
	@$(BIN)/python -m data.shakespeare.prepare
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache

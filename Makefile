# Two commands do everything: `make run` (install, then text from the checkpoint that ships) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard twoends/kernels/native/*)
PROMPT ?= Once upon a time

.PHONY: run test check setup native docs bench clean python

run: $(VENV)/.run
	@$(BIN)/twoends run "$(PROMPT)" -n 120

# Whole files to a worker, so that what a file's tests share is made once; in their order, for the heavy
# ones have few tests and would come last. What needs torch (and is skipped without it) runs in processes of
# its own: torch in the process is 200 MB that the small budgets of other tests have no room for.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/train --ignore tests/oracle
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile tests/train tests/oracle

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/repository

setup: $(VENV)/.dev

native: $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $(VENV)/.run

docs: $(VENV)/.dev
	$(BIN)/python docs/make_cli.py

bench: $(VENV)/.run
	$(BIN)/twoends bench kernels

clean:
	rm -rf $(VENV) build dist

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Twoends needs Python 3.11 or newer; install it (Debian, Ubuntu: apt install python3.11 python3.11-venv), then: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "Python's venv module is incomplete; install it (Debian, Ubuntu: apt install python3-venv), then run make again." >&2; exit 2; }

$(VENV)/bin/python: | python
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.run

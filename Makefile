# `make demo` and `make test` are all that a fresh machine needs; both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Their trainers take all of the machine; those of the other swarms in tests mostly wait.
BUSY = tests/swarm/test_demo.py tests/swarm/test_documents.py

.DEFAULT_GOAL := help
.PHONY: help venv demo test storm check clean

help:
	@echo "make demo    a swarm on this machine: it trains for about three minutes, then speaks"
	@echo "make test    checks, then all tests"
	@echo "make storm   a swarm under twenty kinds of faults: about four minutes"
	@echo "make check   ruff, mypy --strict and the arrows between the rooms"
	@echo "make venv    the environment only (VENV=$(VENV), PYTHON=$(PYTHON))"
	@echo "make clean   removes the environment and all caches"

# The stamp is written last, so an installation that was cut short is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt setuptools
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev,gateway]'
	touch $@

venv: $(VENV)/.installed

demo: venv
	$(BIN)/spheroid-node demo

storm: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos/test_storm.py -s

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/swarm --ignore tests/chaos
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(BUSY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/swarm tests/chaos $(BUSY:%=--ignore %)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

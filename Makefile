# make demo   trains on two local nodes, kills a worker and then a node, and compares with an undisturbed run
# make test   everything that must hold: style, types, layers, the whole suite

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

.PHONY: help setup demo test check format bench clean

help:
	@sed -n 's/^# //p' Makefile
	@echo 'make setup  the virtual environment $(VENV) alone'
	@echo 'make check  style, types and layers only (a minute)'
	@echo 'make format rewrite the sources as `make check` wants them'
	@echo 'make bench  stall per checkpoint and time to recover, against torch.save, DCP and torchrun'
	@echo 'make clean  remove $(VENV) and caches'

setup: $(READY)

$(READY): constraints.txt pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/setup.sh
	@touch $@

demo: $(READY)
	@$(BIN)/python scripts/demo.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/contracts

# Two at a time: on two cores more only takes longer.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python scripts/bench.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache gemini_run.egg-info

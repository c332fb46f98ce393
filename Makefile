# Everything lives in .venv; a fresh machine needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests run in parallel; more than a process a core makes those that watch the clock fragile.
JOBS ?= 2

.PHONY: help demo test test-slow lint bench studies clean

help:
	@echo "make demo    train on one device and on a local cluster, and compare"
	@echo "make test    style, types, and all tests but the slow ones"
	@echo "make test-slow  those: whole programs, notebooks and studies from their start"
	@echo "make lint    style and types only"
	@echo "make bench   the benchmarks that fit this machine"
	@echo "make studies every study again, data and figures: half an hour on two cores"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[dev,keras,tensorboard,plots]"
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: lint
	$(PYTEST) -m "not slow"

test-slow: $(READY)
	STRATAGEM_CHAOS_SECONDS=60 $(PYTEST) -m "slow or chaos"

bench: $(READY)
	$(BIN)/python benchmarks/one_replica/bench.py
	$(BIN)/python benchmarks/cpu_replicas/bench.py

STUDIES := rules staleness headlines sparse exercise
studies: $(READY)
	@for study in $(STUDIES); do \
		echo "== $$study"; $(BIN)/python studies/$$study/study.py || exit 1; \
	done
	@if [ "$$(id -u)" = 0 ]; then \
		echo "== saturation"; cd studies/saturation && \
		../../$(BIN)/python measure.py --json data.json && \
		../../$(BIN)/python compare.py data.json --rows --figure saturation.png; \
	else echo "== saturation: left out, only root may make network namespaces"; fi

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Everything lives in .venv; a fresh machine needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests run in parallel; more than a process a core makes those that watch the clock fragile.
JOBS ?= 2
# Tests start hundreds of interpreters: what one has compiled is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-large test test-slow test-exhaustive test-late test-versions style lint bench same-answer reliability studies docs release clean

help:
	@echo "make demo    train on one device and on a local cluster, and compare"
	@echo "make demo-large  a network that does not fit into one process trains in two stages; GPU=1: on one GPU"
	@echo "make test    style, types, and all tests but the slow ones"
	@echo "make test-slow  those: whole programs, notebooks and studies from their start"
	@echo "make test-late  the tests that a run has listed in STRATAGEM_SECOND_TRIES, once more and alone"
	@echo "make test-versions  the core under other versions of Python, torch and Keras; ONLY=newest: one of them"
	@echo "make test-exhaustive  variants of both that CI leaves out, and a minute of chaos"
	@echo "make lint    style and types only"
	@echo "make bench   the benchmarks that fit this machine"
	@echo "make same-answer  a dozen cases through DDP, Accelerate, Lightning, Trainer, Keras and this package"
	@echo "make reliability  replicas killed at random moments: the table of docs/reliability.md"
	@echo "make docs    the pages as a site, in build/site; a dead link fails"
	@echo "make release wheel and source archive in dist/, checked in an empty environment"
	@echo "make studies every study again, data and figures: three quarters of an hour on two cores"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[dev,huggingface,keras,tensorboard,plots,sweep]"
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

demo-large: $(READY)
	$(BIN)/python examples/large.py $(if $(GPU),--gpu)

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

lint: style
	$(BIN)/mypy

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Types are checked by one of the tests, beside the others.
test: style
	$(PYTEST) -m "not slow and not exhaustive"

test-slow: $(READY)
	STRATAGEM_CHAOS_SECONDS=20 $(PYTEST) -m "(slow or chaos) and not exhaustive"

test-exhaustive: $(READY)
	STRATAGEM_CHAOS_SECONDS=60 $(PYTEST) -m "exhaustive or chaos"

# Those that the run before has listed in $STRATAGEM_SECOND_TRIES, alone; late again is a failure,
# but on a virtual machine that was kept from running.
test-late: $(READY)
	@if [ -s "$(STRATAGEM_SECOND_TRIES)" ]; then \
		STRATAGEM_ALONE=1 $(BIN)/python -m pytest "@$(STRATAGEM_SECOND_TRIES)"; \
	fi

test-versions: $(READY)
	$(BIN)/python tests/versions.py $(ONLY)

reliability: $(READY)
	$(BIN)/python benchmarks/reliability/reliability.py --write

bench: $(READY)
	$(BIN)/python benchmarks/one_replica/bench.py
	$(BIN)/python benchmarks/cpu_replicas/bench.py

# The peers have an environment of their own. KERAS_WHEEL=<file>: Keras 3.16, whose DataParallel is one.
PEERS := .venv-peers
$(PEERS)/.ready: pyproject.toml constraints.txt benchmarks/same_answer/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-r benchmarks/same_answer/requirements.txt -e ".[keras]"
	$(if $(KERAS_WHEEL),$(PEERS)/bin/python -m pip install --quiet --no-deps $(KERAS_WHEEL))
	@touch $@

same-answer: $(PEERS)/.ready
	$(PEERS)/bin/python benchmarks/same_answer/same_answer.py --write

STUDIES := rules staleness headlines sparse exercise split bytes ensemble
studies: $(READY)
	@for study in $(STUDIES); do \
		echo "== $$study"; $(BIN)/python studies/$$study/study.py || exit 1; \
	done
	@if [ "$$(id -u)" = 0 ]; then \
		echo "== saturation"; cd studies/saturation && \
		../../$(BIN)/python measure.py --json data.json && \
		../../$(BIN)/python compare.py data.json --rows --figure saturation.png; \
	else echo "== saturation: left out, only root may make network namespaces"; fi

docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/python docs/site/build.py
	$(BIN)/python -m pytest tests/test_docs.py

release: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	rm -rf dist build/lib
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tests/release_check.py dist

clean:
	rm -rf $(VENV) $(PEERS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# make demo    the main job on this project's own documents
# make test    all tests that this machine can run in minutes
#              (make test-interpreter, make test-build: the Triton kernels interpreted, the CUDA sources compiled)
#
# Both work in a fresh clone: they make an environment in .venv, once, and install into it. Variables:
#   PYTHON       the Python to make it from (3.10 to 3.13). A torch that this Python has is used as it is.
#   TORCH        what to install where it has none. The release is pinned to the one that was tested; on a machine
#                without a GPU, point pip at a CPU build (PIP_ARGS or pip's own configuration) to save a download of GBs.
#   PIP_ARGS     more arguments for pip
#   DEMO_ARGS    arguments for the demo: files and options, see .venv/bin/python -m gdn_multi demo --help
#   PYTEST_ARGS  arguments for pytest: DEMO_ARGS="--device cpu", PYTEST_ARGS="tests/frontend -x"

PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?= torch==2.13.0
PIP_ARGS    ?=
DEMO_ARGS   ?=
PYTEST_ARGS ?=

# Tensors are small in the tests: threads would spend their time on waiting for each other.
test test-interpreter test-build: export OMP_NUM_THREADS ?= 1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-interpreter test-build doctor wheel lint clean distclean help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.demo
	$(BIN)/python -m gdn_multi demo $(DEMO_ARGS)

test: $(VENV)/.tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The Triton kernels on a CPU, through Triton's interpreter: a selection of the conformance suite, on small sizes.
test-interpreter: $(VENV)/.tests
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/conformance --suite=small --gdn-backend=triton $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/backends -k triton $(PYTEST_ARGS)

# The CUDA sources: compiled for every architecture that the nvcc here knows, and run on the CPU by an emulator.
# The longest of the emulated ones beside the others, since neither keeps two cores busy.
BESIDE = tests/backends/test_prefill_sm90.py
test-build: $(VENV)/.tests
	@said=$$(mktemp); $(BIN)/python -m pytest -m build --build $(BESIDE) $(PYTEST_ARGS) > $$said 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest -m build --build --ignore=$(BESIDE) $(PYTEST_ARGS); others=$$?; \
	wait $$beside; mine=$$?; cat $$said; rm -f $$said; exit $$((others + mine))

doctor: $(VENV)/.demo
	$(BIN)/python -m gdn_multi doctor

wheel: $(VENV)/.made
	$(PIP) wheel $(PIP_ARGS) --no-deps --wheel-dir dist .

lint:
	@if command -v ruff >/dev/null; then ruff check .; \
	elif [ -x $(BIN)/ruff ]; then $(BIN)/ruff check .; \
	else echo "lint: ruff is not installed (pip install ruff)"; exit 1; fi

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# --- the environment -------------------------------------------------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { \
	    echo "gdn_multi needs Python 3.10 to 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	    echo "== making $(VENV) on top of $(PYTHON), whose torch is used"; \
	    $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	    echo "== making $(VENV)"; $(PYTHON) -m venv $(VENV); \
	fi
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    echo "== installing $(TORCH): the longest step"; $(PIP) install $(PIP_ARGS) '$(TORCH)'; \
	fi
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml setup.py
	@echo "== installing gdn_multi (editable)"
	$(PIP) install $(PIP_ARGS) --quiet --editable . numpy
	@touch $@

$(VENV)/.tests: $(VENV)/.made pyproject.toml setup.py
	@echo "== installing gdn_multi (editable) and what its tests need"
	$(PIP) install $(PIP_ARGS) --quiet --editable '.[tests,triton]'
	@touch $@ $(VENV)/.demo

# Each target does its own set-up: a fresh machine needs Python >= 3.10 with venv, make and a C compiler, nothing else.
#
#   make demo    record a training run of examples/digits.py and look at it
#   make test    the whole test suite
#   make check   format, lint, types, layers, news
#   make benchmarks   measure what recording costs, and write docs/performance.md (an hour)
#   make test-python-calls  the tests of what is recorded, without the native code for plain calls
#   make test-mindspore   the tests that need MindSpore, in an environment of their own
#   make test-oldest   what hooks and statistics promise (tests/semantics, tests/stats), on the oldest torch that is
#                supported, in an environment of its own
#
# Variables:
#   PYTHON, PYTHON_MINDSPORE   the interpreters to build the environments from
#   TORCH, TORCH_ARGS          the version of torch, and more arguments for the pip that installs it. Where pip's index
#                              gives a CUDA build (PyPI does, on Linux), save gigabytes with
#                              make test TORCH_ARGS="--index-url <the CPU index of pytorch.org>"
#   PYTEST_ARGS                more arguments for pytest

PYTHON ?= python3
TORCH ?= 2.13.0
TORCH_ARGS ?=
MINDSPORE ?= 2.10.0
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
OLDEST_TORCH := 2.6.0
OLDEST_VENV := .venv-oldest
MS_VENV := .venv-mindspore
MS_BIN := $(MS_VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# The wheels of mindspore exist for these only. A name on the PATH may be a shim that cannot run: each is tried.
PYTHON_MINDSPORE ?= $(firstword $(foreach p,python3.11 python3.12 python3.10 $(PYTHON),$(shell \
	$(p) -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo $(p))))

NATIVE := setup.py $(wildcard src/tenterhook/stats/*.[ch] src/tenterhook/native/*.[ch])
MS_TESTS := $(wildcard tests/mindspore tests/contract)

.DEFAULT_GOAL := help
.PHONY: help demo test test-python-calls check format docs benchmarks test-mindspore install-oldest test-oldest clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/installed
	$(BIN)/tenterhook record examples/digits.py
	$(BIN)/tenterhook show @0

test: $(VENV)/installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-python-calls: $(VENV)/installed
	TENTERHOOK_CALLS=python $(BIN)/python -m pytest tests/semantics tests/contract tests/properties tests/test_bit_identity.py $(PYTEST_ARGS)

check: $(VENV)/lint-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/towncrier build --draft --version next >/dev/null 2>&1 || $(BIN)/towncrier build --draft --version next

format: $(VENV)/lint-installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/docs-installed
	$(BIN)/sphinx-build -W --keep-going -b html docs build/docs

benchmarks: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torchlens nnsight || echo 'the peers are left out'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.performance

test-mindspore: $(MS_VENV)/installed
	$(MS_BIN)/python -m pytest $(MS_TESTS) $(PYTEST_ARGS)

# The same rules, with other names: torch 2.6 has wheels for Python 3.9 to 3.13.
install-oldest:
	$(MAKE) $(OLDEST_VENV)/installed VENV=$(OLDEST_VENV) TORCH=$(OLDEST_TORCH)

test-oldest:
	$(MAKE) test VENV=$(OLDEST_VENV) TORCH=$(OLDEST_TORCH) \
		PYTEST_ARGS="tests/semantics tests/properties tests/stats tests/test_single_hooks.py tests/test_hook_point.py $(PYTEST_ARGS)"

clean:
	rm -rf $(VENV) $(OLDEST_VENV) $(MS_VENV) build src/*.egg-info src/tenterhook/stats/*.so src/tenterhook/native/*.so

# The environments. torch goes in first and alone, so that nothing else draws in another build of it.
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tenterhook needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": say make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/torch-$(TORCH): $(VENV)/created
	$(BIN)/python $(PIP_INSTALL) $(TORCH_ARGS) 'torch==$(TORCH)'
	@touch $@

$(VENV)/installed: $(VENV)/torch-$(TORCH) pyproject.toml $(NATIVE)
	$(BIN)/python $(PIP_INSTALL) --editable . --group test
	@touch $@

$(VENV)/lint-installed: $(VENV)/installed
	$(BIN)/python $(PIP_INSTALL) --group lint
	@touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python $(PIP_INSTALL) --group docs
	@touch $@

$(MS_VENV)/created:
	@test -n '$(PYTHON_MINDSPORE)' || { echo 'mindspore $(MINDSPORE) needs Python 3.10, 3.11 or 3.12 and none was found: say make test-mindspore PYTHON_MINDSPORE=...' >&2; exit 1; }
	$(PYTHON_MINDSPORE) -m venv --clear $(MS_VENV)
	$(MS_BIN)/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	@touch $@

$(MS_VENV)/torch-$(TORCH): $(MS_VENV)/created
	$(MS_BIN)/python $(PIP_INSTALL) $(TORCH_ARGS) 'torch==$(TORCH)' 'numpy<2'
	@touch $@

$(MS_VENV)/installed: $(MS_VENV)/torch-$(TORCH) pyproject.toml $(NATIVE)
	$(MS_BIN)/python $(PIP_INSTALL) --editable '.[mindspore]' --group test 'mindspore==$(MINDSPORE)'
	@touch $@

# Every target sets up .venv by itself: `make demo` works on a fresh clone.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help demo demo-ssh test test-full test-gpu test-ml test-matrix coverage check conformance bench dist docs clean

# Where it is set, every process of every test compiles Skyward and its tests again: 1.1 s and 20 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
MATRIX := .venv-matrix
ML := .venv-ml
CONFORMANCE := .venv-conformance

PYTEST = $(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder --ignore tests/ml
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

# What each target needs beside the library itself.
demo_needs := -e '.[sklearn]'
test_needs := -e '.[all,testing]' --group test
check_needs := -e '.[all,testing]' --group test --group check
coverage_needs := -e '.[all,testing]' --group test --group coverage
bench_needs := -e '.[all]' --group bench
docs_needs := -e . --group docs
dist_needs := --group dist
ml_needs := -e '.[all,testing]' --group test --group ml
conformance_needs := -e '.[all,testing]' --group test --group conformance

# joblib and scikit-learn in pairs, old with old and new with new, and what is tested with each.
pairs := 1.4+1.6 1.5+1.7 1.6+1.8 1.6+1.9
pair_tests := tests/unit/skyward_joblib tests/e2e/joblib tests/conformance

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/demo.installed ## a grid search on a fleet of local nodes
	$(BIN)/python examples/demo.py

demo-ssh: $(VENV)/demo.installed ## the same, on two machines that SSH servers of this one stand in for
	tools/sshd
	$(BIN)/python examples/demo_ssh.py

test: $(VENV)/test.installed ## every behaviour once, except training; about eight minutes
	-tools/browser
	tools/sshd
	$(PYTEST) -m "not full"

test-full: $(VENV)/test.installed ## every test except those that train, with random plans from a fresh SEED
	-tools/browser
	tools/sshd
	@echo "repeat the same random plans with: make test-full SEED=$(SEED)"
	HYPOTHESIS_PROFILE=full $(PYTEST) --hypothesis-seed=$(SEED)

test-gpu: ## tests on this machine's NVIDIA GPU, with PYTHON's own packages: nothing is installed
	PYTHONPATH=src $(PYTHON) tests/gpu

coverage: $(VENV)/coverage.installed ## branch coverage of src by `make test`, node processes included; FULL=1: by every test; TESTS=tests/unit
	-tools/browser
	tools/sshd
	rm -rf build/coverage && mkdir -p build/coverage
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m coverage run -m $(subst $(BIN)/python -m ,,$(PYTEST)) $(if $(FULL),,-m "not full") $(TESTS)
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m coverage combine -q
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m coverage report --skip-covered --sort=cover

test-ml: $(ML)/ml.installed ## the tests that train: torch, jax, tensorflow, keras, transformers and the examples with them
	tools/sshd
	$(ML)/bin/python -m pytest tests/ml -n 2 --dist loadfile

test-matrix: $(pairs:%=test-with-%) ## joblib and scikit-learn, old and new; one: make test-with-1.4+1.6

test-with-%: $(MATRIX)/%/installed
	$(MATRIX)/$*/bin/python -m pytest $(pair_tests)

check: $(VENV)/check.installed ## lint, format, prose, the map of modules, types, imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/prose
	$(BIN)/python tools/map --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/shellcheck --shell=sh $$(find src -name '*.sh' ! -name bootstrap.sh) # a template: its test checks it rendered

conformance: $(VENV)/test.installed $(CONFORMANCE)/conformance.installed ## other projects' own tests, on Skyward and on what it takes the place of; writes docs/conformance.md
	$(BIN)/python -m pytest -q tests/conformance/control_clusters.py
	$(BIN)/python tests/conformance/suite.py
	$(CONFORMANCE)/bin/python tests/conformance/more.py
	PYTHONPATH=tests:tests/conformance $(BIN)/python tests/conformance/clouds/judges.py

bench: $(BENCH)/bench.installed ## the numbers in the docs; ROWS="gather idle" or QUICK=1: fewer, only printed
	$(BENCH)/bin/python -m benchmarks $(if $(QUICK),--quick) $(ROWS)

dist: $(VENV)/dist.installed ## the wheel and the sdist, built and checked, in dist
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

docs: $(VENV)/docs.installed ## the site, in docs/_build
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

clean: ## remove what the other targets made
	rm -rf $(VENV) $(BENCH) $(MATRIX) $(ML) $(CONFORMANCE) build dist docs/_build .pytest_cache .ruff_cache .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/%.installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(VENV) $($*_needs)
	@touch $@

# The peers live apart from the tests. What cannot be installed is left out, and the page says so.
$(BENCH)/bench.installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(BENCH) $(bench_needs)
	-tools/install $(PYTHON) $(BENCH) --group peers
	@touch $@

# Torch comes first, alone and in this very spelling: so pip takes the build for processors where it has one at hand.
# As a requirement of others it would bring gigabytes for GPUs.
$(ML)/ml.installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(ML) torch==2.13.0
	tools/install $(PYTHON) $(ML) $(ml_needs)
	@touch $@

# Libraries on Dask; they live apart from the tests. distributed's tests come from a checkout: DISTRIBUTED=folder.
$(CONFORMANCE)/conformance.installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(CONFORMANCE) $(conformance_needs)
	@touch $@

# Precious, or make would remove the stamps, which only patterns name.
.PRECIOUS: $(MATRIX)/%/installed
$(MATRIX)/%/installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(@D) -e '.[testing]' --group test threadpoolctl $(patsubst %,'%.*',\
	    joblib==$(word 1,$(subst +, ,$*)) scikit-learn==$(word 2,$(subst +, ,$*)))
	@touch $@

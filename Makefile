# Every target sets up .venv by itself: `make demo` works on a fresh clone.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help demo demo-ssh test test-full test-gpu test-ml test-matrix coverage check check-types check-macos check-windows check-text conformance bench bench-scale dist docs clean

# Where it is set, every process of every test compiles Skyward and its tests again: 1.1 s and 20 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
MATRIX := .venv-matrix
ML := .venv-ml
CONFORMANCE := .venv-conformance

PYTEST = $(BIN)/python -m pytest --processes 5 --at-most 10 --ignore tests/ml
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

# What each target needs beside the library itself.
demo_needs := -e '.[sklearn]'
test_needs := -e '.[all,testing]' --group test
check_needs := -e '.[all,testing]' --group test --group check
coverage_needs := -e '.[all,testing]' --group test --group coverage
bench_needs := -e '.[all]' --group bench
docs_needs := -e '.[all,testing]' --group docs
dist_needs := --group dist
ml_needs := -e '.[all,testing]' --group test --group ml
conformance_needs := -e '.[all,testing]' --group test --group conformance

# joblib and scikit-learn in pairs, old with old and new with new, and what is tested with each.
pairs := 1.4+1.6 1.5+1.7 1.6+1.8 1.6+1.9
pair_tests := tests/unit/skyward_joblib tests/e2e/joblib tests/conformance --ignore tests/conformance/test_clusters.py

# Releases of dask and distributed of the last nine months, and the tests of what relies on their parts. The oldest and
# the newest are those of skyward_dask/dask_parts.py.
dasks := 2026.3.0 2026.6.0 2026.7.0 2026.7.1 2026.8.0
dask_tests := tests/unit/skyward_dask tests/unit/node tests/e2e/dask

# Every Python that Skyward supports besides PYTHON, and the tests of what differs between them, with pools of all kinds.
pythons := 3.11 3.12 3.13 3.14
python_tests := tests/unit tests/contract tests/e2e/calls tests/e2e/dask tests/e2e/joblib tests/e2e/processes

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/demo.installed ## a grid search on a fleet of local nodes
	$(BIN)/python examples/demo.py

demo-ssh: $(VENV)/demo.installed ## the same, on two machines that SSH servers of this one stand in for
	tools/sshd
	$(BIN)/python examples/demo_ssh.py

test: $(VENV)/test.installed ## every behaviour once, except training; about six minutes on two cores
	-tools/browser
	tools/sshd
	$(PYTEST) -m "not full"

test-full: $(VENV)/test.installed ## every test except those that train, with random plans from a fresh SEED
	-tools/browser
	tools/sshd
	@echo "repeat the same random plans with: make test-full SEED=$(SEED)"
	HYPOTHESIS_PROFILE=full SKYWARD_TEST_SEED=$(SEED) $(PYTEST) --hypothesis-seed=$(SEED)

test-gpu: ## tests on this machine's NVIDIA GPU, with PYTHON's own packages: nothing is installed
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) tests/gpu

coverage: $(VENV)/coverage.installed ## branch coverage of src by `make test`, node processes included; FULL=1: by every test; TESTS=tests/unit
	-tools/browser
	tools/sshd
	rm -rf build/coverage && mkdir -p build/coverage
	status=0; PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m coverage run -m $(subst $(BIN)/python -m ,,$(PYTEST)) $(if $(FULL),,-m "not full") $(TESTS) || status=$$?; \
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m coverage combine -q && \
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m coverage report --skip-covered --sort=cover && \
	exit $$status

test-ml: $(ML)/ml.installed ## the tests that train: torch, jax, tensorflow, keras, transformers and the examples with them
	tools/sshd
	$(ML)/bin/python -m pytest tests/ml --processes 2 --at-most 3

test-matrix: $(pairs:%=test-with-%) $(dasks:%=test-with-dask-%) $(pythons:%=test-with-python-%) ## joblib and scikit-learn, and Dask, old and new, and each Python; one: make test-with-1.4+1.6, test-with-dask-2026.3.0, test-with-python-3.14

test-with-%: $(MATRIX)/%/installed
	$(MATRIX)/$*/bin/python -m pytest $(pair_tests)

test-with-dask-%: $(MATRIX)/dask-%/installed
	tools/sshd
	$(MATRIX)/dask-$*/bin/python -m pytest --processes 5 -m "not full" $(dask_tests)

test-with-python-%: $(MATRIX)/python-%/installed
	tools/sshd
	$(MATRIX)/python-$*/bin/python -m pytest --processes 5 -m "not full" $(python_tests)

check: $(VENV)/check.installed ## lint, format, spelling, types, imports
	$(MAKE) --no-print-directory -j 2 --output-sync=target check-types check-macos check-windows check-text

check-types:
	$(BIN)/pyright

# Only the modules that import a part of the standard library which differs there: a third of all, and of the time.
differing := asyncio|faulthandler|fcntl|mmap|multiprocessing|os|pty|pwd|resource|select|signal|socket|termios|time
modules_differing = grep -rlE '^ *(import|from) ($(differing))\b' src --include='*.py'

check-macos:
	$(BIN)/pyright --pythonplatform Darwin $$($(modules_differing))

check-windows: # the client: nodes do not run there
	$(BIN)/pyright --pythonplatform Windows $$($(modules_differing) | grep -vE '^src/skyward/(node|testing)/')

check-text:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell src docs examples README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/lint-imports
	$(BIN)/shellcheck --shell=sh $$(find src -name '*.sh' ! -name bootstrap.sh) # a template: its test checks it rendered

conformance: $(VENV)/test.installed $(CONFORMANCE)/conformance.installed ## other projects' own tests, on Skyward and on what it takes the place of; writes docs/conformance.md
	$(BIN)/python -m pytest -q tests/conformance/control_clusters.py
	$(BIN)/python tests/conformance/suite.py
	$(CONFORMANCE)/bin/python tests/conformance/more.py
	PYTHONPATH=tests:tests/conformance $(BIN)/python tests/conformance/clouds/judges.py

bench: $(BENCH)/bench.installed ## the numbers in the docs; ROWS="gather idle" or QUICK=1: fewer, only printed
	$(BENCH)/bin/python -m benchmarks $(if $(QUICK),--quick) $(ROWS)

bench-scale: $(VENV)/test.installed ## a client of 1,000 workers, 200 SSH hosts, 1,000 rented machines; writes docs/scale.md; five minutes
	tools/sshd
	$(BIN)/python -m benchmarks.scale

dist: $(VENV)/dist.installed ## the wheel and the sdist in dist; each installed into a bare environment and tried
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	tools/try-dist $(PYTHON) dist build/dist

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
# As a requirement of others it would bring gigabytes for GPUs. The import compiles once what else four workers, starting
# at the same moment, would each compile.
$(ML)/ml.installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(ML) torch==2.13.0
	tools/install $(PYTHON) $(ML) $(ml_needs)
	TF_CPP_MIN_LOG_LEVEL=3 $(ML)/bin/python -c "import jax, keras, tensorflow, torch.distributed, transformers.trainer"
	@touch $@

# Libraries on Dask; they live apart from the tests. distributed's tests come from a checkout: DISTRIBUTED=folder.
$(CONFORMANCE)/conformance.installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(CONFORMANCE) $(conformance_needs)
	@touch $@

.PRECIOUS: $(MATRIX)/dask-%/installed
$(MATRIX)/dask-%/installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(@D) -e '.[dask,joblib,testing]' --group test dask==$* distributed==$*
	@touch $@

.PRECIOUS: $(MATRIX)/python-%/installed
$(MATRIX)/python-%/installed: pyproject.toml tools/install tools/find-python
	tools/install "$$(tools/find-python $*)" $(@D) -e '.[all,testing]' --group test
	@touch $@

# Precious, or make would remove the stamps, which only patterns name.
.PRECIOUS: $(MATRIX)/%/installed
$(MATRIX)/%/installed: pyproject.toml tools/install
	tools/install $(PYTHON) $(@D) -e '.[local,testing]' --group test threadpoolctl $(patsubst %,'%.*',\
	    joblib==$(word 1,$(subst +, ,$*)) scikit-learn==$(word 2,$(subst +, ,$*)))
	@touch $@

# Everything people and CI run. Each target first makes sure that .venv holds what it needs (demo and lab need less than the
# others); once it does, that costs nothing.
#
#   make demo        four strategies on a real data set, checked against one device; writes out/report.html
#   make lab         JupyterLab on the first notebook
#   make test        all tests but the slow ones and those for a GPU; browser tests are skipped where there is no Chromium
#   make test-full   the slow ones too, and without Chromium it fails
#   make test-gpu    what needs a CUDA device: the kernels, compiled, exchanges, and training under every strategy
#   make test-cluster  Slurm, Open MPI and torchrun on hosts that are network namespaces: needs root and Debian's packages
#   make gpu         all that one GPU can show, in under 20 minutes: one table, and a file in benchmarks/results
#   make sanitize    the kernels' tests under NVIDIA's compute-sanitizer: memcheck and racecheck
#   make check       format, lint, types, import directions, notebooks, documentation
#   make docs        the documentation as a site, in out/site
#   make zoo         hundreds of models of other libraries under five strategies; writes docs/models.md
#   make matrix      the tests on simulated ranks with several versions of Python and torch; writes docs/versions.md
#   make bench       all benchmarks and one table of them, in benchmarks/results
#   make clean       remove .venv, caches and out
#
# Variables: PYTHON=python3.12 chooses the interpreter, TORCH="torch==2.12.0" the version,
# TORCH_INDEX=<url> a package index for torch alone, ARGS="..." is passed on: make test ARGS="-k boxing".

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
STAMP_TO_RUN := $(VENV)/.installed-to-run
STAMP_OF_ZOO := $(VENV)/.installed-zoo
PYTHON ?=
TORCH ?=
TORCH_INDEX ?=
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
ifndef IN_CHECK
.NOTPARALLEL:
endif
.PHONY: help install demo lab test test-full test-gpu test-cluster gpu sanitize zoo matrix check docs format bench clean
.PHONY: check-format check-lint check-types check-user-types check-imports check-notebooks check-docs

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

INSTALL := PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" sh tools/install.sh $(VENV)

$(STAMP): pyproject.toml tools/install.sh
	@$(INSTALL) dev
	@touch $@ $(STAMP_TO_RUN)

$(STAMP_TO_RUN): pyproject.toml tools/install.sh
	@$(INSTALL) demo
	@touch $@

demo: $(STAMP_TO_RUN)
	@$(PY) -m workbench demo $(ARGS)

lab: $(STAMP_TO_RUN)
	@$(PY) -m workbench lab $(ARGS)

# Every engine, kernel and worker is a process of its own, which would compile the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

# Two parts: files of tests shared out between workers, one more than there are cores, because what starts processes, engines
# and browsers waits half of its time; and one by one what promises a time or looks at the whole machine. Before them, where they
# are wanted, slow cases of simulated ranks, which are hundreds in one file. Exit code 5 of pytest means that ARGS has chosen no
# test of that part.
PYTEST := env OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs
CASES := $(PYTEST) -n auto --dist worksteal
FILES := $(PYTEST) -n auto --dist loadfile --no-loadscope-reorder
ALONE := $(PYTEST) --files-that-say="mark\.timed"
ANYWHERE := not gpu and not types and not cluster
REAL := (engines or procs or browser)

# $(call run_tests,first,condition): a command, and both parts of the tests for which the condition holds; all of them, whatever the
# first one says.
define run_tests
	@status=0; part() { "$$@" || [ $$? -eq 5 ] || status=1; }; \
	part $(1); \
	part $(FILES) -m "$(2) and not timed" $(ARGS); \
	part $(ALONE) -m "$(2) and timed" $(ARGS); \
	exit $$status
endef

test: $(STAMP)
	$(call run_tests,true,$(ANYWHERE) and not slow)

test-full: export WORKBENCH_REQUIRE_BROWSER := 1
test-full: $(STAMP)
	$(call run_tests,$(CASES) -m "$(ANYWHERE) and slow and not timed and not $(REAL)" $(ARGS),$(ANYWHERE) and (not slow or timed or $(REAL)))

# Files without such a test stay out: some register a device of their own, which torch takes for the machine's accelerator.
test-gpu: $(STAMP)
	@status=0; $(PY) -m pytest -q -rs -m gpu tests/kernels $(ARGS) || [ $$? -eq 5 ] || status=1; \
	$(PY) -m pytest -q -rs -m gpu --files-that-say="mark\.gpu" --ignore=tests/kernels $(ARGS) || [ $$? -eq 5 ] || status=1; \
	exit $$status

test-cluster: $(STAMP)
	@$(PYTEST) -m cluster tests/cluster $(ARGS)

gpu: $(STAMP)
	@$(PY) -m benchmarks.gpu $(ARGS)

sanitize: $(STAMP)
	@$(PY) -m tools.sanitize_kernels

$(STAMP_OF_ZOO): $(STAMP)
	@$(INSTALL) zoo
	@touch $@

zoo: $(STAMP_OF_ZOO)
	@env OMP_NUM_THREADS=1 $(PY) -m tests.zoo $(ARGS)

matrix: $(STAMP)
	@$(PY) -m tools.matrix -m "$(ANYWHERE) and not slow and not $(REAL)" $(ARGS)

# All of them run, two at a time, whatever the first one says.
check: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going -j2 --output-sync=target IN_CHECK=1 check-format check-lint check-types check-user-types check-imports check-notebooks check-docs

check-format: $(STAMP)
	@$(PY) -m ruff format --check .
# Notebooks are looked at by check-notebooks, which sees the cells under %%global too.
check-lint: $(STAMP)
	@$(PY) -m ruff check . --extend-exclude notebooks
check-types: $(STAMP)
	@$(PY) -m mypy
check-user-types: $(STAMP)
	@$(PY) -m pytest -q tests/test_public_types.py
check-imports: $(STAMP)
	@$(PY) -m pytest -q tests/test_imports.py
check-notebooks: $(STAMP)
	@$(PY) -m tools.check_notebooks
check-docs: $(STAMP)
	@$(PY) -m tools.check_docs

# The variable keeps a notice about another product out of the output.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

format: $(STAMP)
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

bench: $(STAMP)
	@$(PY) -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find workbench tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +

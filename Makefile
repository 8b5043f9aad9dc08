# Everything needed is set up by the targets themselves, in $(VENV): only
# Python >= 3.10, make and, for some dependencies, a C compiler must be there.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?= --compare
PYTEST_ARGS ?=
WORKERS ?= 2
BASE ?= HEAD
ROWS ?=
DRY ?=
OUT ?= out/gpu
WORDS ?=
# Sums in another order, kernels for shorter registers, and no half precision.
PROCESSOR ?= ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2

BIN := $(abspath $(VENV))/bin
# torch looks for ninja on PATH when DeepSpeed builds an op.
RUN := PATH="$(BIN):$$PATH"
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
CHECKS := "$(BIN)/ruff" check && "$(BIN)/ruff" format --check && "$(BIN)/mypy"
PIP := "$(BIN)/python" -m pip --disable-pip-version-check
INSTALL := $(PIP) install -c constraints.txt

# Exits 0 where the interpreter can make the environment.
PYTHON_OK := import sys; sys.exit(sys.version_info < (3, 10))

# A PYTHON that was asked for is used or refused, never replaced.
ifeq ($(origin PYTHON),file)
CANDIDATES := $(PYTHON) python3.13 python3.12 python3.11 python3.10
else
CANDIDATES := $(PYTHON)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all numeric gpu-sim gpu-sim-part gpu gpu-wheels mutants check equal matrix trainers projects smoke canary dist installs docs clean

help:
	@echo "make demo    install, then run examples/lightning_gpt.py (DEMO_ARGS=$(DEMO_ARGS))"
	@echo "make test    install, then lint, check types and run the tests: few, strong cases (WORKERS=$(WORKERS) at a time, PYTEST_ARGS=...)"
	@echo "make test-all  the same with all extended cases, as products of stages, backends, budgets and nodes"
	@echo "make numeric install, then run the tests of arithmetic as on another processor ($(PROCESSOR))"
	@echo "make gpu-sim install, then run the tests on a simulated GPU: streams that are checked, NCCL's rules (gpu-sim-part: some)"
	@echo "make gpu     what GPUs have to show, one of them in ten minutes, without a network; without a GPU or with DRY=1, a trial (OUT=$(OUT))"
	@echo "make gpu-wheels  install, then gather what make gpu takes to a machine without DeepSpeed and network, in $(WHEELS)"
	@echo "make mutants install, then switch off each wait and other promises in turn, and see which test finds it (WORDS='B1 ...')"
	@echo "make check   install, then lint and check types only"
	@echo "make equal   install, then compare what is trained and sent with another revision (BASE=$(BASE))"
	@echo "make matrix  test with several releases of DeepSpeed and the others (ROWS='\"newest\" ...'), for docs/compatibility.md"
	@echo "make trainers, make projects  train with programs of others in environments of their own, for docs/compatibility.md (ROWS=...)"
	@echo "make smoke   install, then run a few tests with the oldest releases"
	@echo "make canary  test with the newest release of everything, and say what is newer than constraints.txt"
	@echo "make dist    install, then build and check the wheel and the source distribution in dist/"
	@echo "make installs  build them, install each with each extra and Python in an environment of its own, and train there (ROWS='3.12 wheel')"
	@echo "make docs    install what it takes, then build the documentation site in out/site"
	@echo "make clean   remove $(VENV), caches, build output and what examples wrote to out/"
	@echo "Variables: PYTHON=$(PYTHON) (>= 3.10), VENV=$(VENV)"

demo: $(STAMP)
	$(RUN) "$(BIN)/python" examples/lightning_gpt.py $(DEMO_ARGS)

test-all: EXTENDED := --extended all
# What is checked beside the tests, on a processor that they leave idle, is said after them.
test test-all: $(STAMP)
	{ $(CHECKS); } > "$(VENV)/checks.log" 2>&1 & \
	$(RUN) "$(BIN)/python" -m pytest -n $(WORKERS) --dist worksteal $(EXTENDED) $(PYTEST_ARGS); tests=$$?; \
	wait $$!; checks=$$?; cat "$(VENV)/checks.log"; exit $$((tests | checks))

# Where rounding would show: bounds that hold here and there do not depend on the processor.
NUMERIC := tests/harness/test_rounding.py \
	$(addprefix tests/core/test_,averaging.py fragments.py mean_over.py random_programs.py reduction.py stepping.py stripes.py) \
	$(addprefix tests/lightning/test_,averaging.py finetuning.py gradients_in_hooks.py) \
	tests/accelerate/test_semantics.py tests/fabric/test_training.py

numeric: $(STAMP)
	$(RUN) $(PROCESSOR) "$(BIN)/python" -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) $(NUMERIC)

# On the simulated device, by NCCL's rules. The part is what CI runs, with tests that alone find a mutant.
SIMULATED := $(addprefix tests/,core racecheck lightning fabric accelerate test_nodes_frameworks.py)
SIMULATED_PART := $(addprefix tests/core/test_,averaging.py edits.py fp16.py gathers.py hangs.py) \
	tests/core/test_stepping.py::test_a_step_that_raises_half_way \
	"tests/core/test_eager_frames.py::test_hooks_that_are_registered_anew[0]" \
	"tests/core/test_experts.py::test_parameters_that_some_ranks_do_not_use[4-True]" \
	"tests/core/test_nodes.py::test_random_programs[2-2-4002-3]" \
	"tests/core/test_values.py::test_what_a_module_writes_to_its_own_parameters_lasts[cpu-host-scale]" \
	"tests/core/test_values.py::test_writes_last[3, offloaded]"

gpu-sim: SIMULATE := --extended all $(SIMULATED)
gpu-sim-part: SIMULATE := $(SIMULATED_PART)
gpu-sim gpu-sim-part: $(STAMP)
	$(RUN) "$(BIN)/python" -m pytest -n $(WORKERS) --dist worksteal --simulated --timeout 900 $(PYTEST_ARGS) $(SIMULATE)

# With the environment that is there; nothing is installed, for there may be no network.
gpu:
	$(RUN) "$(firstword $(wildcard $(BIN)/python) $(PYTHON))" -m tests.gpu --wheels $(WHEELS) --out "$(OUT)" $(if $(DRY),--dry)

# DeepSpeed without its ops, and what it needs that a machine with torch and lightning may lack, for GPU_PYTHON.
WHEELS := out/gpu-wheels
GPU_PYTHON ?= 3.12
CARRIED := annotated-types einops hjson msgpack ninja py-cpuinfo pydantic pydantic_core typing-inspection \
	typing_extensions

gpu-wheels: $(STAMP)
	rm -rf $(WHEELS)
	@$(PIP) wheel -c constraints.txt --quiet --no-deps --wheel-dir $(WHEELS) deepspeed
	@$(PIP) download -c constraints.txt --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		$(addprefix --platform manylinux,_2_28_x86_64 _2_17_x86_64 2014_x86_64 1_x86_64) --dest $(WHEELS) $(CARRIED)
	@du -sh $(WHEELS)

mutants: $(STAMP)
	$(RUN) "$(BIN)/python" -m tests.mutants $(WORDS)

check: $(STAMP)
	$(CHECKS)

equal: $(STAMP)
	$(RUN) "$(BIN)/python" -m tests.equality --base "$(BASE)"

matrix: $(STAMP)
	$(RUN) "$(BIN)/python" -m trials.matrix --workers $(WORKERS) $(ROWS)

trainers projects: $(STAMP)
	$(RUN) "$(BIN)/python" -m trials.ecosystem $@ $(ROWS)

smoke: $(STAMP)
	$(RUN) "$(BIN)/python" -m trials.matrix --smoke --workers $(WORKERS)

canary: $(STAMP)
	$(RUN) "$(BIN)/python" -m trials.matrix --canary --workers $(WORKERS)

dist: $(STAMP)
	@$(INSTALL) --quiet build twine
	rm -rf dist
	"$(BIN)/python" -m build --outdir dist .
	"$(BIN)/twine" check --strict dist/*

installs: dist
	@$(INSTALL) --quiet uv
	$(RUN) "$(BIN)/python" -m trials.installs $(ROWS)

# Needs no network once $(DOCS_STAMP) is there. A broken link fails.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict

# The pages are made of text and of the source as it lies there: nothing of the package is installed or imported.
$(DOCS_STAMP): pyproject.toml constraints.txt
	$(ENVIRONMENT)
	@$(INSTALL) --quiet --group docs
	@touch "$@"

# Keeps an environment that has a good Python and pip, so that a changed pin is
# only an update. An older pip would run deepspeed's setup.py install instead of
# building a wheel, and knows no dependency groups.
define ENVIRONMENT
@if "$(BIN)/python" -c '$(PYTHON_OK)' 2>/dev/null && "$(BIN)/python" -m pip --version >/dev/null 2>&1; then exit 0; fi; \
	for python in $(CANDIDATES); do \
		if ! version=$$("$$python" -c 'import platform; print(platform.python_version())' 2>/dev/null); then \
			echo "$$python: not found, or does not run" >&2; \
		elif ! "$$python" -c '$(PYTHON_OK)'; then \
			echo "$$python: is Python $$version, and 3.10 or newer is needed" >&2; \
		elif ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
			echo "$$python: is Python $$version without venv (on Debian and Ubuntu: install python3-venv)" >&2; \
		else \
			echo "Creating $(VENV) with $$python (Python $$version)"; \
			exec "$$python" -m venv "$(VENV)"; \
		fi; \
	done; \
	echo "No usable Python was found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; \
	exit 1
@$(INSTALL) --quiet "pip>=25.1"
endef

# torch comes first, and shows its progress: it is large.
$(STAMP): pyproject.toml constraints.txt
	$(ENVIRONMENT)
	@echo "Installing the tested versions in $(VENV); torch is large, so this can take minutes"
	@$(INSTALL) torch
	@$(INSTALL) --quiet deepspeed
	@$(INSTALL) --quiet -e ".[dev]"
	@touch "$@"

clean:
	@if [ -d "$(VENV)" ] && [ ! -f "$(VENV)/pyvenv.cfg" ]; then \
		echo "VENV=$(VENV) is not a virtual environment: not removed" >&2; exit 1; fi
	rm -rf "$(VENV)" .matrix build dist out .mypy_cache .pytest_cache .ruff_cache
	find src tests trials examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

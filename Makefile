# Every command of the project. `make help` lists them.
VENV ?= .venv
IN_RANGE := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for name in python3 python3.12 python3.13 python3.11 python3.10; do \
  $$name -c '$(IN_RANGE)' 2>/dev/null && echo $$name && break; done)
# What pip installs as torch, e.g. TORCH="torch==2.13.0 --index-url <index of the build you want>".
# TORCH=skip keeps the torch that the environment in VENV already has.
TORCH ?= torch==2.13.0
# Another release of Megatron-Core than the one in train.lock, for which there is a requirements/megatron-*.lock. Use it
# with a VENV of its own, and name it in each call.
MEGATRON ?=
ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --quiet
# Every package but torch is compared with the hashes in requirements/*.lock. Nothing is resolved: a lock is complete.
LOCKED := $(PIP) --require-hashes --no-deps --no-build-isolation --use-pep517
# Stamps name the release, so that a call with another one installs it.
TRAIN := $(VENV)/installed-train$(MEGATRON:%=-%)
DEV := $(VENV)/installed-dev$(MEGATRON:%=-%)
DOCS := $(VENV)/installed-docs$(MEGATRON:%=-%)
MEGATRON_LOCK := $(MEGATRON:%=requirements/megatron-%.lock)
# After each lock, because each includes train.lock.
install_megatron = $(if $(MEGATRON),@echo "installing $(MEGATRON_LOCK)"; $(LOCKED) -r $(MEGATRON_LOCK))
UV := uv==0.13.9
STRICT := $(wildcard $(addprefix megatron_ft/,errors.py topology.py operators.py events.py membership_events.py records.py formatting.py serde.py durable.py framing.py snapshot_events.py failpoints.py expert_loads.py failures corpus config planning)) transformer_engine_ext
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
KERNELS := $(wildcard $(foreach folder,csrc/ csrc/adamw/ csrc/dispatch/,$(addprefix $(folder),*.hpp *.cuh *.cpp *.cu)))

export PIP_NO_WARN_SCRIPT_LOCATION := 1

.DEFAULT_GOAL := help
.PHONY: help install train test test-all test-again test-fast test-slurm slurm-packages checks format bench prove tables lock docs-deps gpu-site gpu-dry clean distclean

help:  ## list the commands
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

$(PY):
	@$(or $(PYTHON),false) -c '$(IN_RANGE)' 2>/dev/null || { \
	  echo "PYTHON=$(PYTHON): must be Python 3.10 to 3.13 with venv and ensurepip; install one or name it" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first; what it needs is installed before it, so that it brings nothing along that has no hash here, except
# what builds for CUDA add. No lock names torch: nothing can replace it.
$(VENV)/torch-constraint.txt: | $(PY)
ifeq ($(TORCH),skip)
	@$(PY) -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null \
	  || { echo "TORCH=skip: $(VENV) has no torch; install yours there, or point VENV at the environment that has it" >&2; exit 1; }
else
	@echo "installing $(TORCH)"
	@$(LOCKED) -r requirements/torch.lock
	@$(PIP) $(TORCH)
endif
	@$(PY) -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $@.tmp && mv $@.tmp $@

requirements/megatron-%.lock:
	@echo "MEGATRON=$*: must be empty (the release in requirements/train.lock) or one of" \
	  $(patsubst requirements/megatron-%.lock,%,$(wildcard requirements/megatron-*.lock)) >&2; exit 1

$(TRAIN): requirements/train.lock requirements/torch.lock $(MEGATRON_LOCK) $(VENV)/torch-constraint.txt
	@rm -f $(VENV)/installed-*
	@echo "installing requirements/train.lock"
	@$(LOCKED) -r requirements/torch.lock
	@$(LOCKED) -r requirements/train.lock
	$(install_megatron)
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): requirements/dev.lock requirements/docs.lock $(TRAIN)
	@echo "installing requirements/dev.lock"
	@$(LOCKED) -r requirements/dev.lock
	$(install_megatron)
	@touch $@

$(DOCS): requirements/docs.lock $(TRAIN)
	@echo "installing requirements/docs.lock"
	@$(LOCKED) -r requirements/docs.lock
	$(install_megatron)
	@touch $@

install: $(TRAIN)  ## what training needs, pinned, into VENV

train: $(TRAIN)  ## train the small default model (ARGS="model=... key=value")
	$(PY) pretrain_moe.py $(ARGS)

# Tests of the form of the source: `make checks` runs them, and `make test` does not repeat them.
FORM_TESTS := tests/unit/test_house.py tests/unit/test_language.py benchmarks/tests/test_claims.py tests/unit/tools/test_lock_requirements.py
# Much of a run is waiting, which leaves cores free: two workers more than there are cores.
WORKERS ?= $(shell expr `getconf _NPROCESSORS_ONLN` + 2)
# Jobs start an interpreter for each of their processes: none of them is to compile the same files again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(WORKERS) --durations=0 --durations-min=0.5
# Of every run its durations are kept, of all tests.
test_run = @mkdir -p .cache/tests; $(PYTEST) --junitxml=.cache/tests/$@.xml

test: $(DEV)  ## what every change has to pass (ARGS="-k name")
ifeq ($(strip $(ARGS)),)
	$(test_run) -m "not extended" $(addprefix --ignore=,$(FORM_TESTS))
else
	$(PY) -m pytest $(ARGS)
endif

# What is judged by times comes last, with no other worker beside it. (No $(MAKE) here: make -n would run it.)
test-all: $(DEV)  ## test, then what repeats it (other phases and layouts), then claims judged by times
	@mkdir -p .cache/tests; failed=0; \
	  $(PYTEST) --junitxml=.cache/tests/test.xml -m "not extended" || failed=1; \
	  $(PYTEST) --junitxml=.cache/tests/extended.xml -m "extended and not timed" || failed=1; \
	  $(PY) -m pytest --durations=0 --junitxml=.cache/tests/timed.xml -m timed || failed=1; exit $$failed

MAX_AGAIN := 5
FAILED := import json, pathlib; print(*json.loads(pathlib.Path(".pytest_cache/v/cache/lastfailed").read_text()), sep="\n")
test-again: $(DEV)  ## what failed in the last run, alone; refused where it is much
	@failed=$$($(PY) -c '$(FAILED)') && number=$$(printf '%s\n' "$$failed" | grep -c .); \
	  printf 'failed beside others, run again alone (%s):\n%s\n' "$$number" "$$failed"; \
	  [ "$$number" -le $(MAX_AGAIN) ] || { echo "more than $(MAX_AGAIN) tests failed: none is run again" >&2; exit 1; }
	$(PY) -m pytest --last-failed --last-failed-no-failures none -m "not extended"

test-fast: $(DEV)  ## unit tests that start no training
	$(PYTEST) tests/unit benchmarks/tests --ignore=benchmarks/tests/test_claims_quick.py -m "not slow and not gpu and not distributed and not wandb" $(ARGS)

test-slurm: $(DEV) slurm-packages  ## tests on a real Slurm cluster that they start on this machine (root)
	$(PY) -m pytest tests/slurm $(ARGS)

# Debian's packages start nothing by themselves where services are not run; elsewhere, stop them after this.
slurm-packages:  ## install Debian's Slurm for test-slurm, where this user may
	@(for program in slurmctld slurmd munged sbatch; do PATH=$$PATH:/usr/sbin command -v $$program >/dev/null || exit 1; done) \
	  || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing $(SLURM_PACKAGES)"; apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null; \
	  else echo "no Slurm here, and nothing that could install it (root, apt-get): tests/slurm skip themselves"; fi

checks: $(DEV)  ## format, lint, types, import rules, conventions, sizes, tables
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/clang-format --dry-run --Werror $(KERNELS)
	$(VENV)/bin/mypy $(STRICT)
	PYTHONPATH=. $(VENV)/bin/lint-imports
	$(PY) -m pytest -q $(FORM_TESTS)
	$(PY) -m tools.code_size
	$(PY) -m benchmarks.tables --check

format: $(DEV)  ## rewrite files to the project's format
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(KERNELS)

bench: $(DEV)  ## measure every claim this machine's hardware class can measure
	$(PY) -m benchmarks.prove --all $(if $(QUICK),--quick)

prove: $(DEV)  ## measure one claim: ID=<id> [QUICK=1]
	@$(PY) -m benchmarks.prove $(if $(ID),$(ID),--list) $(if $(QUICK),--quick)

tables: $(DEV)  ## write the tables of README and docs from benchmarks/results
	$(PY) -m benchmarks.tables

.cache/lock: Makefile
	rm -rf $@
	$(PYTHON) -m venv $@
	@$@/bin/python -m pip --disable-pip-version-check install --quiet --quiet $(UV)

lock: $(PY) .cache/lock  ## write requirements/*.lock from constraints.txt, with the hashes that the package index lists
	$(PY) tools/lock_requirements.py --uv .cache/lock/bin/uv

docs-deps: $(DOCS)  ## install what draws the pictures

gpu-site: | $(PY)  ## unpack what a GPU machine without a network lacks into .gpu-site, for Python 3.12
	$(PY) tools/gpu_site.py .gpu-site

# Nothing is installed into VENV: it stands for the machine, e.g. Python 3.12 with torch 2.11 and what that machine has.
gpu-dry:  ## run a GPU day's first, nccl and speed without a GPU, with the packages in .gpu-site (VENV=...)
	@[ -d .gpu-site ] || { echo "no .gpu-site: make gpu-site first" >&2; exit 1; }
	@rm -rf .cache/gpu-dry
	@status=0; for call in first nccl speed; do \
	  PYTHONPATH=.gpu-site:. $(PY) tools/gpu_day.py $$call --out .cache/gpu-dry || status=1; \
	done; exit $$status

clean:  ## remove caches; runs and the environment stay
	rm -rf .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean  ## also remove the environment
	rm -rf $(VENV)

# Everything runs in .venv; each target sets up what it needs.
PYTHON ?= python3
PIP_INSTALL = .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
SERVICES = planaria/bootstrap/enrolment.proto planaria/bootstrap/registry.proto
PROTOC = .venv/bin/python -m grpc_tools.protoc -I proto
LEAST = $(shell sed -n 's/^requires-python = ">=3\.\(.*\)"/\1/p' pyproject.toml)
CHECK = 'import sys; v = tuple(sys.version_info[:3]); v >= (3, $(LEAST)) or sys.exit( \
	"%s is Python %d.%d.%d, and planaria needs 3.$(LEAST) or newer. Name another: \
	rm -rf .venv; make PYTHON=python3.12 $(MAKECMDGOALS)" % ((sys.argv[1],) + v))'
# Tests of live swarms mostly wait: half of the workers begin with those.
WORKERS = 'import os; print(2 * len(os.sched_getaffinity(0)))'

TEST = .venv/bin/pytest -n $$(.venv/bin/python -c $(WORKERS)) --dist worksteal

.PHONY: demo test check nightly fuzz bench lint proto docs dist clean

demo: .venv/installed
	rm -rf out/demo
	.venv/bin/planaria up demo.toml --kill 2@60 --out out/demo

test: .venv/installed-dev
	$(TEST) --durations=25

# For each commit: tests of the parts that decide, compute and send, six seeds, two swarms.
PARTS = tests/recovery tests/bootstrap $(addprefix tests/node/, \
	averaging driver report stage state transaction wire)
SWARMS = $(addprefix tests/swarm/test_swarm.py::test_, \
	after_a_registry_restart_views_grow_and_losses_heal checkfree_plus_survives_every_single_loss)

check: lint
	$(TEST) $(PARTS) 'tests/simulation/test_cluster.py::test_invariants_hold_whatever_fails[0-5]' $(SWARMS)

# What takes too long for each change; what has passed at a commit is not run again.
nightly: SEEDS = 500
nightly: SECONDS = 120
nightly: .venv/installed-dev
	$(PIP_INSTALL) -e '.[fuzz]'
	PYTHONPATH=.:tests .venv/bin/python -m tests.nightly --seeds $(SEEDS) --seconds $(SECONDS)

# What reads bytes from outside, each for so many seconds; `TARGETS="frames journals"` for some.
fuzz: SECONDS = 600
fuzz: .venv/installed-dev
	$(PIP_INSTALL) -e '.[fuzz]'
	PYTHONPATH=.:tests .venv/bin/python -m tests.fuzz --seconds $(SECONDS) $(TARGETS)

bench: .venv/installed-dev
	.venv/bin/python -m planaria_lab.bench

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo --no-cache

proto: .venv/installed-dev
	$(PROTOC) --python_out=. --pyi_out=. $(SERVICES) planaria/node/wire/stage.proto

# Pages as a site, in out/site; with tools of their own.
docs: .venv-docs/installed
	.venv-docs/bin/mkdocs build --strict

dist:
	$(PYTHON) -m build
	$(PYTHON) -m build --outdir dist lab

.venv-docs/installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

.venv/bin/pip:
	@$(PYTHON) -c $(CHECK) $(PYTHON)
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/pip pyproject.toml constraints.txt
	@.venv/bin/python -c $(CHECK) .venv/bin/python
	$(PIP_INSTALL) -e '.[plots]'
	touch $@

.venv/installed-dev: .venv/installed lab/pyproject.toml
	$(PIP_INSTALL) -e '.[dev]' -e './lab[dev]'
	touch $@

clean:
	rm -rf .venv .venv-docs out dist

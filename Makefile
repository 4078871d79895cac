# The floor runs on the oldest Python of this machine, all else on the newest.
PYTHON ?= $(shell scripts/python newest)
FLOOR_PYTHON ?= $(shell scripts/python oldest)
# Another version of a framework may change what its adapter's tests find, but for these: they ask what the
# bridge decides, or break the store and the broker around it.
ONE_VERSION = canary canary_sides canvas_faults caveats faults hand_offs handoff hostile live_attempts odd_wishes \
	outages rollout successes typing waking zombies
ONE_VERSION_OF_THE_CONTRACT = dead_queues keeping parked rates
ADAPTERS_TESTS = $(filter-out $(ONE_VERSION:%=\%/test_%.py) $(ONE_VERSION_OF_THE_CONTRACT:%=tests/contract/test_%.py),\
	$(wildcard tests/contract/test_*.py tests/on_*/test_*.py))
# For two cores: with so many processes no core is idle. By file, since a file's tests share fleets;
# in the order of the files, since by the number of their tests the slowest would come last.
TEST_WORKERS ?= 6
FLOOR_WORKERS ?= 2
PARALLEL = --dist=loadfile --no-loadscope-reorder
# A loaded machine can be too slow for a test that waits for real processes. What failed runs again, one test after
# the other; a second failure counts. The report has both, and its summary names what needed this second chance.
AGAIN = --second-chance --last-failed --last-failed-no-failures=none --maxfail=3
FLOOR_CACHE = -o cache_dir=.venv-floor/.pytest_cache
MAKEFLAGS += --no-print-directory
# The tests start hundreds of processes, each of which would compile all of it anew.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help demo quick test next world lint types size model bench recovery chaos slots delays storm night lateness wheels native main floor docs docs-serve servers clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/.demo  ## watch jobs being retried, buried, and begun again after a kill -9, on a private Valkey
	.venv/bin/python examples/demo/demo.py

test:  ## run every test, and beside them the adapters' at the oldest supported versions
	@echo 'The reports follow in some minutes, each when its run has ended.'
	@$(MAKE) --jobs=2 --keep-going --output-sync=target main floor

quick: lint types  ## check style and types, and run every test that starts no other process
	.venv/bin/python -m pytest --quick -rfE $(PARALLEL) --numprocesses=5

main: .venv/.collected servers  ## run every test
	.venv/bin/python -m pytest $(PARALLEL) --numprocesses=$(TEST_WORKERS) \
		|| { [ $$? = 1 ] && .venv/bin/python -m pytest $(AGAIN); }

lint: .venv/.installed  ## check style and formatting
	.venv/bin/ruff check
	.venv/bin/ruff format --check

types: .venv/.installed  ## check types
	.venv/bin/mypy

size:  ## count the lines of code
	@$(PYTHON) scripts/size.py

bench: .venv/.installed servers  ## measure; BENCH=--write puts the rows into docs/explanation/speed.md
	.venv/bin/python -m benchmarks $(BENCH)
	.venv/bin/python -m benchmarks.operator

recovery: .venv/.installed servers  ## measure how soon the jobs of a killed worker begin elsewhere; takes hours
	.venv/bin/python -m benchmarks.recovery

chaos: .venv/.installed servers  ## kill workers, brokers and stores under a load, with the bridge and without
	.venv/bin/python -m tests.chaos $(CHAOS)

slots: .venv/.installed servers  ## kill workers that share five slots, and count how many are in use at a time
	.venv/bin/python -m tests.chaos.slots $(SLOTS)

delays: .venv/.installed servers  ## see what becomes of delayed jobs, with the bridge and without; takes half an hour
	.venv/bin/python -m tests.delays $(DELAYS)

storm: .venv/.installed servers  ## take a dependency down, and count what a fleet of both frameworks does to it
	.venv/bin/python -m tests.storm $(STORM)

night: .venv/.installed servers  ## live a night of eight faults with real workers, Prometheus and a browser; takes half an hour
	.venv/bin/python -m tests.night $(NIGHT)

lateness: .venv/.installed servers  ## measure how late delayed jobs and retries begin; takes half an hour
	.venv/bin/python -m benchmarks.lateness $(LATENESS)

wheels: .venv/.installed servers  ## install each line of the documents in a fresh environment, and run a first job
	.venv/bin/python -m pytest -m wheels --durations=0 --durations-min=1 tests/packaging/test_wheels.py

native: .venv/.installed servers  ## run the frameworks' own tests, and write docs/reference/frameworks-tests.md
	.venv/bin/python -m scripts.native

floor: .venv-floor/.installed servers  ## run the adapters' tests at the oldest supported versions
	.venv-floor/bin/python -m pytest $(FLOOR_CACHE) $(PARALLEL) --numprocesses=$(FLOOR_WORKERS) $(ADAPTERS_TESTS) \
		|| { [ $$? = 1 ] && .venv-floor/bin/python -m pytest $(FLOOR_CACHE) $(AGAIN) $(ADAPTERS_TESTS); }

next: .venv-next/.installed servers  ## run the adapters' tests at the newest pre-releases of their frameworks
	.venv-next/bin/python -m pip install --quiet --upgrade --pre billiard celery dramatiq kombu
	@.venv-next/bin/python -m pip freeze | grep --extended-regexp "^(billiard|celery|dramatiq|kombu)=="
	.venv-next/bin/python -m pytest $(PARALLEL) --numprocesses=$(TEST_WORKERS) $(ADAPTERS_TESTS)

world:  ## run the adapters' tests on today's RabbitMQ, PostgreSQL and Pythons, which it brings in; needs root
	@scripts/world

model:  ## visit every state of the models of one job and of slots, and find their broken twins
	@$(PYTHON) -m models.job
	@$(PYTHON) -m models.slots

docs: .venv/.installed  ## build the site into site/
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

docs-serve: .venv/.installed  ## show the site at http://127.0.0.1:8000, and build it anew at each change
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve --strict

servers:
	@scripts/install-servers

clean:  ## remove the environments and caches
	rm -rf .venv .venv-floor .venv-next .mypy_cache .ruff_cache .pytest_cache .hypothesis dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-floor/.pip: PYTHON = $(FLOOR_PYTHON)
.venv/.pip .venv-floor/.pip .venv-next/.pip:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

.venv/.demo: pyproject.toml | .venv/.pip
	.venv/bin/python -m pip install --quiet --editable '.[celery,dramatiq,sql]' --group demo
	@touch $@

.venv/.installed: pyproject.toml | .venv/.pip
	.venv/bin/python -m pip install --quiet --editable '.[all]' --group demo --group instruments --group lint \
		--group test --group docs --group doors --group errors --group packaging --group web
	@touch $@ .venv/.demo

# Else each process of `pytest -n` would compile all tests at the same time. The run itself tells what is wrong.
.venv/.collected: .venv/.installed
	@.venv/bin/python -m pytest --collect-only -qq >/dev/null || true
	@touch $@

.venv-floor/.installed: pyproject.toml scripts/floor-requirements.txt | .venv-floor/.pip
	.venv-floor/bin/python -m pip install --quiet --constraint scripts/floor-requirements.txt \
		--editable '.[celery,cli,dramatiq,otel,postgresql,prometheus,sentry]' --group demo --group instruments --group test
	@touch $@

.venv-next/.installed: pyproject.toml | .venv-next/.pip
	.venv-next/bin/python -m pip install --quiet --editable '.[celery,cli,dramatiq,otel,postgresql,prometheus,sentry]' --group demo --group instruments --group test
	@touch $@

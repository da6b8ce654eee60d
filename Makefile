# Two commands are all a newcomer needs: `make demo` and `make test`. Each sets up what it uses,
# and a second run reuses it. `make help` lists the rest.
PYTHON ?= python3
# What is large and outlives a checkout (engine environments) is kept here.
export KVPLUG_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvplug
SECONDS ?= 60
# Mooncake traces, JSON lines; what needs one that is not there is skipped by name.
TRACES ?= ../shared/traces
ONLY ?=

# Dozens of processes of the tests import the same modules: without bytecode each compiles them anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

.PHONY: setup
setup: $(READY)  ## make the development environment in .venv

.PHONY: demo
demo: ENGINE ?= sim
demo: $(READY)  ## round_robin against kv: four simulated engines; ENGINE=vllm or sglang: two real ones
	$(BIN)/python -m examples.demo --engine $(ENGINE)

.PHONY: check
check: $(READY)  ## lint, format, types, import contracts, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell kvplug tests examples docs README.md CHANGELOG.md

.PHONY: docs
docs: $(READY)  ## write the tables of docs/settings.md from the settings of the code
	$(BIN)/python -m tests.settings_tables

.PHONY: format
format: $(READY)  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: test-fast
test-fast: EXAMPLES ?= 15
test-fast: TESTS ?= not engine and not slow
test-fast: $(READY)  ## what needs no engine and is not slow; EXAMPLES of each property (`make test`: the slow, too, and 60)
	KVPLUG_TEST_EXAMPLES=$(EXAMPLES) $(BIN)/pytest -q -m '$(TESTS)' --durations 10

.PHONY: test-kernels
test-kernels: $(READY)  ## the kernels compiled on numba 0.65.0, and on the newest without JIT and with bounds checks
	$(BIN)/python -m tests.kernels.matrix

.PHONY: test-engines
test-engines: $(READY)  ## real vLLM: in process, served, killed and restarted; real SGLang, served
	$(BIN)/pytest -q -m engine --durations 10

.PHONY: test-releases
test-releases: RELEASES ?= 0.28.0 0.30.0 0.31.0 0.32.0
test-releases: $(READY)  ## the recorder's events beside vLLM's own in each release that it knows; RELEASES=... (3.4 GB each)
	KVPLUG_TEST_VLLM='$(RELEASES)' $(BIN)/pytest -q tests/engines/test_vllm_recorder.py --durations 5

.PHONY: bench-tokenize
bench-tokenize: $(READY)  ## what the text of a request costs, on tokenizers of real models; ONLY=family,family; bench-results/tokenize.json
	$(BIN)/python -m tests.benchmarks.tokenize $(if $(ONLY),--only $(ONLY))

.PHONY: bench-router
bench-router: $(READY)  ## routing one request beside Dynamo's select_and_reserve, 8 to 512 ranks; ONLY=metric,metric; bench-results/router.json
	$(BIN)/python -m tests.benchmarks.router $(if $(ONLY),--only $(ONLY))

.PHONY: bench-shared
bench-shared: KILLS ?= 1000
bench-shared: $(READY)  ## one index for several processes: decisions with 1 and 2, reads beside a writer at full speed, KILLS (1000) of writer and readers; bench-results/shared.json
	$(BIN)/python -m tests.benchmarks.shared --kills $(KILLS)

.PHONY: differential
differential: STATES ?= 1000
differential: $(READY)  ## cost and choice beside Dynamo's SelectionService in STATES (1000) random states of each settings; ONLY=name,name; bench-results/differential.json
	$(BIN)/python -m tests.differential --states $(STATES) $(if $(ONLY),--only $(ONLY))

.PHONY: audit
audit: $(READY)  ## predicted against reported cached tokens on two real vLLM engines under evictions
	$(BIN)/pytest -q tests/engines/test_audit.py

.PHONY: exactness
exactness: REQUESTS ?= 500
exactness: WIRE ?= vllm
exactness: $(READY)  ## predicted against reported, and blocks against blocks, on real vLLM and SGLang with models of every kind; REQUESTS WIRE=kvplug ONLY=text
	$(BIN)/python -m tests.exactness --requests $(REQUESTS) --wire $(WIRE) $(if $(ONLY),--only '$(ONLY)')

.PHONY: fuzz
fuzz: $(READY)  ## damaged event messages for SECONDS (60) each way: nothing raises, nothing refused changes the index
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS)
	$(BIN)/python -m tests.fuzz.guided --seconds $(SECONDS)

.PHONY: fuzz-service
fuzz-service: EXAMPLES ?= 300
fuzz-service: $(READY)  ## EXAMPLES (300) of each operation of /openapi.json, valid and not, to a served router: no 500, no traceback
	$(BIN)/python -m tests.fuzz.service --examples $(EXAMPLES)

.PHONY: bench-ingest
bench-ingest: $(READY)  ## raw stock frames to the index beside Dynamo's SelectionService, and queries meanwhile; bench-results/ingest.json
	$(BIN)/python -m tests.benchmarks.ingest

.PHONY: bench-index
bench-index: $(READY)  ## the index beside Dynamo's RadixTree, ratios to reach; ONLY=metric,metric TRACES=folder; bench-results/index.json
	$(BIN)/python -m tests.benchmarks.index --traces $(TRACES) $(if $(ONLY),--only $(ONLY))

.PHONY: sim-heimdall
sim-heimdall: $(READY)  ## Heimdall's published example in virtual time, calibrated on its random row; about 10 minutes; bench-results/sim-heimdall.json, .png
	$(BIN)/python -m tests.benchmarks.sim_heimdall

.PHONY: bench-relay
bench-relay: $(READY)  ## chunks and one-token requests per CPU second of the router, beside bare proxies on three stacks; ONLY=kvplug,aiohttp; bench-results/relay.json
	$(BIN)/python -m tests.benchmarks.relay $(if $(ONLY),--only $(ONLY))

.PHONY: bench-outcome
bench-outcome: SEEDS ?= 5
bench-outcome: $(READY)  ## what users see with each router, on simulated engines; hours: ONLY=name,name SEEDS=5 FIRST_SEED=N TRACES=folder; bench-results/outcome.json
	$(BIN)/python -m tests.benchmarks.outcome --traces $(TRACES) --seeds $(SEEDS) $(if $(FIRST_SEED),--first-seed $(FIRST_SEED)) $(if $(ONLY),--only $(ONLY))

.PHONY: bench-service
bench-service: ROUNDS ?= 3
bench-service: $(READY)  ## the router as a service beside vllm-router and smg: cached share, TTFT, added latency, CPU; ROUNDS=3 ONLY=router,router; 10 minutes a round; bench-results/service.json
	$(BIN)/python -m tests.benchmarks.service --rounds $(ROUNDS) $(if $(ONLY),--routers $(ONLY))

.PHONY: bench-cluster
bench-cluster: ROUNDS ?= 7
bench-cluster: $(READY)  ## routers over NATS: publish to found, blocks a second, CPU of servers, restoring, sizing; ROUNDS=7 ONLY=latency,sizing; bench-results/cluster.json
	$(BIN)/python -m tests.benchmarks.cluster --rounds $(ROUNDS) $(if $(ONLY),--only $(ONLY))

.PHONY: soak-index
soak-index: SECONDS = 180
soak-index: $(READY)  ## SECONDS (180) of churn on one index: right answers, flat memory
	$(BIN)/python -m tests.benchmarks.soak_index --seconds $(SECONDS)

.PHONY: soak-bounded
soak-bounded: SECONDS = 600
soak-bounded: $(READY)  ## SECONDS (600) of ever-new prompts through a router bounded by bytes: the process stays within 1.3 times that
	$(BIN)/python -m tests.benchmarks.soak_bounded --seconds $(SECONDS)

.PHONY: test
test: $(READY)  ## everything, real engines included
	@echo 'make test 1/3: everything that needs no engine'
	@$(MAKE) --no-print-directory test-fast EXAMPLES=60 TESTS='not engine'
	@echo 'make test 2/3: the kernels on the oldest numba, without JIT, with bounds checks'
	@$(MAKE) --no-print-directory test-kernels
	@echo 'make test 3/3: real vLLM and SGLang, and the demo (the first run installs the engines, 6.1 GB)'
	@$(MAKE) --no-print-directory test-engines

.PHONY: bench-engine
bench-engine: $(READY)  ## what publishing KV events costs the schedulers of vLLM and SGLang; minutes; bench-results/engine.json
	$(BIN)/python -m tests.benchmarks.engine
	$(BIN)/python -m tests.benchmarks.run_in_vllm tests.benchmarks.publish_call

.PHONY: bench-balancing
bench-balancing: ROUNDS ?= 3
bench-balancing: $(READY)  ## two data-parallel ranks of real vLLM and SGLang, balanced by themselves and by kvplug; ROUNDS=3 ONLY=vllm; 10 minutes; bench-results/balancing.json
	$(BIN)/python -m tests.benchmarks.dp_balancing --rounds $(ROUNDS) $(if $(ONLY),--only $(ONLY))

.PHONY: chaos
chaos: WIRE ?= vllm
chaos: $(READY)  ## lost, late and doubled events, killed engines and routers, on real vLLM and SGLang; a row per fault; WIRE=kvplug: over our own stream
	$(BIN)/python -m tests.chaos --wire $(WIRE)

.PHONY: chaos-cluster
chaos-cluster: ENGINE ?= vllm
chaos-cluster: $(READY)  ## killed, paused, cut off and rolled back: NATS servers, three router replicas, engines; a row per fault; ENGINE=sim: without vLLM
	$(BIN)/python -m tests.chaos_cluster --engine $(ENGINE)

.PHONY: resilience
resilience: $(READY)  ## an ordinary day of a served router: idle clients, thousands of streams, 26 MB bodies, 350 workers, wrong replays, a killed worker, slow clients, restarts; 4 minutes
	$(BIN)/python -m tests.resilience

.PHONY: rounds-cluster
rounds-cluster: MESSAGES ?= 100000
rounds-cluster: $(READY)  ## MESSAGES (100000) at 2000/s through a snapshot every 10000: three replicas, the one at work dies or stops at each step; a minute
	$(BIN)/python -m tests.cluster.rounds --messages $(MESSAGES)

.PHONY: soak-service
soak-service: SECONDS = 600
soak-service: $(READY)  ## SECONDS (600) of mixed requests through the served router: flat memory, no failed request
	$(BIN)/python -m tests.resilience.soak_service --seconds $(SECONDS)

.PHONY: sim-mooncake
sim-mooncake: $(READY)  ## Mooncake traces under each policy, in virtual time; TRACES=folder SEEDS=N; bench-results/sim-mooncake.json
	$(BIN)/python -m tests.benchmarks.sim_mooncake --traces $(TRACES) $(if $(SEEDS),--seeds $(SEEDS))

.PHONY: sim-outcome
sim-outcome: $(READY)  ## the requests of bench-outcome in virtual time; ONLY=name,name SEEDS=N FIRST_SEED=N TRACES=folder; bench-results/sim-outcome.json
	$(BIN)/python -m tests.benchmarks.sim_outcome --traces $(TRACES) $(if $(ONLY),--only $(ONLY)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(FIRST_SEED),--first-seed $(FIRST_SEED))

.PHONY: sim-modes
sim-modes: $(READY)  ## each router mode, credit and label against kv and turns, in virtual time; 3 minutes; ONLY=name,name SEEDS=N; bench-results/sim-modes.json
	$(BIN)/python -m tests.benchmarks.sim_modes $(if $(ONLY),--only $(ONLY)) $(if $(SEEDS),--seeds $(SEEDS))

.PHONY: sim-sync
sim-sync: SEEDS ?= 3
sim-sync: $(READY)  ## 2 and 4 routers before one fleet, with and without replica sync, late and lost messages, in virtual time; ONLY=name,name SEEDS=3; bench-results/sim-sync.json
	$(BIN)/python -m tests.benchmarks.sim_sync $(if $(ONLY),--only $(ONLY)) --seeds $(SEEDS)

.PHONY: bench-sync
bench-sync: $(READY)  ## what replica sync costs the thread that decides, and how late news is, over a real nats-server; bench-results/sync.json
	$(BIN)/python -m tests.benchmarks.sync_cost

.PHONY: sim-sweep
sim-sweep: $(READY)  ## kv against its best weight in 42 scenarios, in virtual time; ONLY=part,part SEEDS=N; an hour; bench-results/sim-sweep.json
	$(BIN)/python -m tests.benchmarks.sim_sweep $(if $(ONLY),--only '$(ONLY)') $(if $(SEEDS),--seeds $(SEEDS))

.PHONY: clean
clean:  ## remove what was built in the checkout; the engine cache stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

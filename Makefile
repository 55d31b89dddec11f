# Every target sets up what it needs in .venv; only Python 3.11+, make and bash must be there.
# `make test` has a .venv-core beside it, which never gets Spark: there it shows that a broker, its client and stages do
# without, whatever is in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Targets have all processors to themselves; `test` itself runs two at once.
.NOTPARALLEL:

# Tests start a thousand processes: none is to compile what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Four processes more than there are processors, because most tests wait half of their time; Spark takes all of them by itself.
ON_ALL_CORES := --numprocesses $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 4))) --dist worksteal

# Print how long a part took, and its processor time, which says more on a busy machine.
timed = @echo '$(1)'; TIMEFORMAT='$(1): %R s, and %U s + %S s of processor time'; time

.PHONY: help setup demo console say-what-the-demo-does generate reference texts check test test-core test-spark test-again simulate search faults load spark stage-job audit follow freeze broken guard jms stages kill kill-log proxy failover backups asan crash bench bench-backlog bench-due bench-inbox lock clean before bench-upgrade drain dist packages cluster

help: ## Say what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 15

# Tell of what takes long: downloads of 10 MB and more, builds, the copying of files.
install = $*/bin/python -m pip install --disable-pip-version-check --progress-bar off $(1) | sed -un \
	-e 's/^ *Downloading \(.*([0-9]\{2,\}[.0-9]* MB)\).*/  downloading \1/p' \
	-e 's/^ *Building wheel for \([^ ]*\) .*started/  building \1/p' \
	-e 's/^Installing collected packages.*/  writing files/p'

# The three stages of an environment.
.venv/core .venv-core/core: %/core: requirements.lock pyproject.toml setup.py src/truenext/wire/stomp/_speed.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "truenext needs Python 3.11 or later; say make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $*
	@echo "installing the broker and its client into $*"
	@$(call install,--require-hashes -r requirements.lock)
	@rm -f src/truenext/wire/stomp/_speed.*.so
	@$(call install,--no-deps --no-build-isolation -e .)
	@touch $@

# What tests never import is never compiled.
.venv/test .venv-core/test: %/test: %/core requirements-test.lock
	@echo "installing the tools of the tests into $*"
	@$(call install,--no-compile --require-hashes -r requirements-test.lock)
	@touch $@

# What the demo needs: no linter, no type checker. The tests' environment has it all, too.
.venv/demo: %/demo: %/core requirements-demo.lock
	@echo "installing Spark with a Java of its own, and the demo's client"
	@$(call install,--no-compile --require-hashes -r requirements-demo.lock)
	@touch $@

.venv/spark: %/spark: %/test requirements-spark.lock
	@echo "installing Spark with a Java of its own, where they are missing: some 550 MB to download, a minute or more"
	@$(call install,--no-compile --require-hashes -r requirements-spark.lock)
	@touch $@

.venv/browser: %/browser: %/test requirements-browser.lock
	@echo "installing what steers a browser: 50 MB to download"
	@$(call install,--no-compile --require-hashes -r requirements-browser.lock)
	@touch $@

setup: .venv/core ## Make .venv, with the truenext command in it
	@echo "done: $(BIN)/truenext --help"

dist: .venv/core ## Build the packages in dist/: an sdist, and from it the wheel (REPOSITORY=URL for the links of the README)
	$(BIN)/python -m tools.dist --repository "$(REPOSITORY)"

demo: say-what-the-demo-does $(if $(wildcard .venv/spark),.venv/spark,.venv/demo) ## Run the production case that broke ActiveMQ, and a service of stages and queries of Spark that are killed; show what came out, audited by Spark
	$(BIN)/python -m examples.demo

say-what-the-demo-does:
	@echo 'This first installs truenext, Spark and a Java into .venv, where they are missing: 550 MB to download, a minute or more.'
	@echo 'Then it runs for about five minutes on two idle cores, listens on loopback only, and writes to demo-report/:'
	@echo '  1. a broker under the case that breaks the order of ActiveMQ, killed four times'
	@echo '  2. a service of stages that processes 1,000 orders exactly once; the broker and a process are killed'
	@echo '  3. queries of Spark that read and write queues; their drivers and the broker are killed'
	@echo 'Spark audits each part. The exit status is 1 if a message is lost, doubled or out of its place.'

generate: .venv/test ## Write client/threads/connection.py anew, from client/tasks/connection.py
	$(BIN)/python -m tools.generate

reference: .venv/test ## Write docs/reference/ anew, from signatures, docstrings, settings and commands of the code
	$(BIN)/python -m tools.reference

texts: .venv/test ## Write tests/unit/texts.txt anew: the table of all texts in the code that a user can see
	$(BIN)/python -m tools.texts

check: .venv/spark ## Formatting, types, import rules, unit and property tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports
	$(PYTEST) $(ON_ALL_CORES) tests/unit tests/property tests/contract tests/client tests/stages

# Tests without Spark wait for disks and clocks, those with Spark for Java: beside one another they take four fifths of
# the time. Those with Spark, and some others once more, write to a file meanwhile, which is shown at the end. Both
# environments build the same module in C, so that is done before.
test: .venv-core/core .venv/core ## Everything that must hold, in minutes
	@output=$$(mktemp); trap 'kill $$spark 2>/dev/null || true; rm -f $$output' EXIT; trap 'exit 130' INT TERM; \
	echo "Spark is installed if it is missing (550 MB), and tests with it, and some others once more, run meanwhile;"; \
	echo "their output, in $$output, is shown at the end"; \
	{ status=0; for each in test-spark test-again; do $(MAKE) --no-print-directory $$each || status=$$?; done; exit $$status; } >$$output 2>&1 & spark=$$!; \
	status=0; $(MAKE) --no-print-directory test-core || status=$$?; \
	wait $$spark || status=$$?; cat $$output; exit $$status

CORE_TESTS := tests/unit tests/property tests/contract tests/client tests/stages tests/console tests/integration

test-core: .venv-core/test
	.venv-core/bin/truenext --version
	.venv-core/bin/ruff format --check .
	.venv-core/bin/ruff check .
	@echo 'compiling the tests, so that not every process of the next step does'
	@.venv-core/bin/python -m pytest --collect-only -qq $(CORE_TESTS) >/dev/null || true
	$(call timed,tests without Spark) .venv-core/bin/python -m pytest $(ON_ALL_CORES) $(CORE_TESTS)

# What the first run tests with the codec in C, without TLS.
test-again: .venv-core/test
	$(call timed,tests with the codec in Python) env TRUENEXT_SPEEDUPS=0 TRUENEXT_EXAMPLES=5 .venv-core/bin/python -m pytest --numprocesses 2 --dist worksteal tests/unit/test_stomp_codec.py tests/unit/test_stomp_shapes.py tests/unit/test_stomp_server.py tests/property/test_against_oracle.py
	$(call timed,tests with TLS) env TRUENEXT_TLS=1 .venv-core/bin/python -m pytest --numprocesses 2 --dist worksteal -k "not hang" tests/integration/test_acknowledgement.py tests/integration/test_release.py tests/integration/test_cut_connections.py

# Types are those of Spark, too; on a busy machine mypy's workers do not always start in time, which is status 2. With Parquet the history
# of a broker is elsewhere.
test-spark: .venv/spark
	$(BIN)/lint-imports
	$(call timed,types) $(BIN)/mypy --num-workers auto || { test $$? != 1 && $(BIN)/mypy; }
	$(call timed,tests with Spark) $(PYTEST) --numprocesses 2 --dist worksteal tests/spark tests/spark_report tests/integration/test_history.py tests/unit/test_command_logins.py tests/integration/test_command_tls.py tests/console/browser

simulate: .venv/test ## What clients, sockets and disk may do, at random, against the naive oracle: 5,000 examples of each machine (EXAMPLES=n)
	TRUENEXT_DRAW=all TRUENEXT_EXAMPLES=$${EXAMPLES:-5000} $(PYTEST) $(ON_ALL_CORES) tests/property/test_against_oracle.py tests/property/test_jms_clients.py tests/client/test_against_oracle.py tests/client/test_rollback_order.py tests/stages/outbox/test_schedules.py tests/contract/postgresql/test_log_model.py tests/contract/postgresql/test_failover_model.py

search: .venv/spark ## Every order of steps of four protocols, with more that goes wrong than in make test: exactly-once processing, a log in PostgreSQL and its failovers (minutes), and the sink of Spark (an hour)
	TRUENEXT_DRAW=all TRUENEXT_SEARCH=all $(PYTEST) -s tests/stages/outbox/test_protocol.py tests/contract/postgresql/test_log_model.py tests/contract/postgresql/test_failover_model.py
	TRUENEXT_DRAW=all TRUENEXT_SEARCH=all $(PYTEST) $(ON_ALL_CORES) tests/spark/sink/test_orders.py

faults: .venv/spark ## Every planted fault, of which make test draws one in a hundred and sixty, also those that the machines notice rarely, and short runs of all benchmarks: half an hour
	TRUENEXT_FAULTS=all TRUENEXT_DRAW=all $(PYTEST) $(ON_ALL_CORES) tests/unit/test_stomp_shapes.py tests/property/test_planted_faults.py tests/property/test_jms_clients.py tests/contract/test_planted_faults.py tests/client/test_planted_faults.py tests/integration/test_planted_holes.py tests/integration/test_planted_log_faults.py tests/stages/outbox/test_planted_faults.py tests/stages/outbox/test_planted_schedule_faults.py
	TRUENEXT_FAULTS=all TRUENEXT_DRAW=all $(PYTEST) tests/integration/test_bench.py
	TRUENEXT_FAULTS=all TRUENEXT_DRAW=all $(PYTEST) --numprocesses 2 tests/spark/test_engine_history.py tests/spark/test_client_history.py tests/spark/test_cuts.py tests/spark/test_cut_rows.py tests/spark/source/test_planted_faults.py tests/spark/sink/test_planted_faults.py

load: .venv/spark ## Everything at once for ten minutes, with two ends of the broker, and again with two takeovers, judged by the audit (DURATION=seconds)
	TRUENEXT_DRAW=all TRUENEXT_SECONDS=$(or $(DURATION),600) $(PYTEST) -s tests/spark/test_everything.py tests/spark/test_failovers.py

audit: .venv/spark ## Random histories, audited whole and in sections, and judged naively: 5,000 (EXAMPLES=n)
	TRUENEXT_DRAW=all TRUENEXT_EXAMPLES=$(or $(EXAMPLES),5000) $(PYTEST) --numprocesses 2 tests/spark/test_queue_audit.py tests/spark/test_cuts.py tests/spark/test_cut_rows.py
	TRUENEXT_DRAW=all TRUENEXT_AUDITS=5 $(PYTEST) tests/spark/test_sections.py

follow: .venv/spark ## An audit that follows, killed at each of its steps, with every planted fault: each is told once; so are findings under load while the command, its processes and the broker are killed: 20 times (KILLS=n)
	TRUENEXT_DRAW=all TRUENEXT_FOLLOW=1 TRUENEXT_KILLS=1 $(PYTEST) -s tests/spark/test_follow.py tests/spark/test_history_source.py
	TRUENEXT_DRAW=all TRUENEXT_FOLLOW_KILLS=$(or $(KILLS),20) $(PYTEST) -s tests/spark/test_follow_kills.py

spark: .venv/spark ## Queues in Spark while driver, Java, workers and broker are killed: 20 times (KILLS=n), and 500 examples of its machines (EXAMPLES=n)
	TRUENEXT_DRAW=all TRUENEXT_KILLS=$(or $(KILLS),20) TRUENEXT_EXAMPLES=$(or $(EXAMPLES),500) $(PYTEST) -s tests/spark/source tests/spark/sink tests/spark/test_queries.py

stage-job: .venv/spark ## A stage as a Spark job while driver, Java, workers, executors and broker are killed: 10 times (KILLS=n); its page
	TRUENEXT_DRAW=all TRUENEXT_KILLS=$(or $(KILLS),10) $(PYTEST) -s tests/spark/stage_job

freeze: .venv/test ## 1,000 connections that hang and are taken over (FREEZES=n)
	TRUENEXT_DRAW=all TRUENEXT_FREEZES=$${FREEZES:-1000} $(PYTEST) -s tests/integration/test_frozen_connections.py

cluster: .venv/spark ## The audit of two brokers, and queries between two brokers with TLS, on a cluster of Spark, one worker of which is killed
	TRUENEXT_DRAW=all TRUENEXT_KILLS=1 $(PYTEST) -s tests/spark/test_cluster.py

drain: .venv/spark ## 100 drains under load, while consumers, JMS clients among them, fail, pause and die (DRAINS=n); the unmodified JMS client and a running query of Spark in a drain
	TRUENEXT_DRAINS=$${DRAINS:-100} $(PYTEST) -s tests/integration/test_drain.py -k under_load
	TRUENEXT_DRAW=all $(PYTEST) -s -rs tests/integration/openwire/test_jms_drain.py tests/spark/source/test_drain.py

broken: .venv/spark ## truenext's own client through networks that break, and kills, judged by the audit: 1,000 messages (MESSAGES=n)
	TRUENEXT_DRAW=all TRUENEXT_CLIENT_MESSAGES=$${MESSAGES:-1000} $(PYTEST) -s tests/integration/test_client_breaks.py tests/spark/test_broken_connections.py

guard: .venv/spark ## 2,000 guessed passwords (GUESSES=n), 1,000 cut connections with TLS, judged by the audit (CUTS=n), and 100 reloads of users and certificates under load (RELOADS=n)
	TRUENEXT_DRAW=all TRUENEXT_GUESSES=$${GUESSES:-2000} TRUENEXT_CUTS=$${CUTS:-1000} TRUENEXT_RELOADS=$${RELOADS:-100} $(PYTEST) -s tests/integration/test_guesses.py tests/integration/test_tls_cuts.py tests/integration/test_reloads.py tests/spark/test_tls_cuts.py

console: .venv/browser ## The console in a real browser, at a real broker: an operator's ways, a hundred payloads, three widths, light and dark; needs chromium (TRUENEXT_CHROMIUM=path; TRUENEXT_PICTURES=folder keeps pictures)
	TRUENEXT_DRAW=all $(PYTEST) -s -rs tests/console/browser

jms: .venv/test ## The unmodified JMS client: 2,000 requests between two users (REQUESTS=n), and failover through 20 cuts each in 20 runs (CUTS=n); needs Java
	TRUENEXT_JMS_REQUESTS=$${REQUESTS:-2000} TRUENEXT_JMS_CUTS=$${CUTS:-20} $(PYTEST) -s -k "requests or cuts" tests/integration/openwire/test_jms_users.py tests/integration/openwire/test_jms_failures.py

stages: .venv/test ## Stages whole: who dies at each point of a message's way, a message that kills processes, poison, a database that is away for a minute, interactive flows beside 4,000 others; two services, a broker and connections that die at random for minutes
	TRUENEXT_STAGES=all TRUENEXT_DRAW=all TRUENEXT_CHAOS_S=120 TRUENEXT_KILLS=7 TRUENEXT_FLOWS=4000 TRUENEXT_AWAY_S=60 $(PYTEST) -s tests/stages/test_crashes.py tests/stages/test_killed_process.py tests/stages/test_interactive_under_load.py tests/stages/test_poison.py tests/stages/test_unavailable_database.py tests/stages/test_stalled_worker.py tests/stages/outbox/test_chaos.py

packages: .venv/test ## The packages in new environments of each Python of the machine, the image where buildah is installed (BASE=image), units, and figures of starts: some ten minutes
	TRUENEXT_DRAW=all TRUENEXT_PACKAGES=all TRUENEXT_BASE="$(BASE)" $(PYTEST) -s -rs tests/integration/test_fresh_environments.py tests/integration/test_image.py tests/integration/test_dist.py tests/integration/test_deployment.py tests/integration/test_completion.py
	$(BIN)/python -m bench.start

kill: .venv/test ## 20 cycles of kill -9 under load (CYCLES=n for more), 1,000 with COMMITs in doubt (COMMITS=n), 25 in each of nine runs of flows that fail, have keys, delays and cron (KILLS=n FLOWS=n), and 100,000 rejections on a full disk (REJECTIONS=n)
	TRUENEXT_DRAW=all TRUENEXT_KILL_CYCLES=$${CYCLES:-20} $(PYTEST) -s tests/integration/test_kill.py
	TRUENEXT_DRAW=all TRUENEXT_COMMIT_CYCLES=$${COMMITS:-1000} $(PYTEST) -s tests/integration/test_kill_commits.py
	TRUENEXT_FLOW_KILLS=$${KILLS:-25} TRUENEXT_KILLED_FLOWS=$${FLOWS:-2300} TRUENEXT_DRAW=all $(PYTEST) -s -k "although_processes_are_killed" tests/stages/test_failing_flows.py tests/stages/test_kept_replies_under_kills.py
	TRUENEXT_REJECTIONS=$${REJECTIONS:-100000} $(PYTEST) -s -k full_disk tests/integration/test_reports.py

kill-log: .venv/spark ## 500 cycles of kill -9 of broker, a session of PostgreSQL, or PostgreSQL under load, with messages in a log (CYCLES=n), 60 of them, and 60 failovers, under a query of Spark (QUERIES=n), and 200 brokers that are stopped in an append and taken over (FENCES=n)
	TRUENEXT_DRAW=all TRUENEXT_LOG_CYCLES=$${CYCLES:-500} TRUENEXT_FENCES=$${FENCES:-200} $(PYTEST) -s tests/integration/test_kill_log.py tests/integration/test_fences.py
	TRUENEXT_DRAW=all TRUENEXT_QUERY_KILLS=$${QUERIES:-60} $(PYTEST) -s tests/spark/test_log_kills.py

proxy: .venv/test ## Cuts, silences and delays between brokers and PostgreSQL, each at a message of each class: 3,200 scripts, drawn at random in their class, in half an hour (SEED=n for the same ones)
	seed=$(or $(SEED),$$RANDOM); echo "SEED=$$seed"; \
	TRUENEXT_DRAW=all TRUENEXT_PROXY=$$seed $(PYTEST) $(ON_ALL_CORES) tests/contract/postgresql/test_proxy.py

failover: .venv/test ## 500 failovers under load (FAILOVERS=n), 500 brokers that are stopped and go on after a takeover (ZOMBIES=n), 100 failovers of PostgreSQL of each kind, without and with the loss of its last rows (PAIRS=n), and 48 switchovers and kills with Patroni, if Debian's is installed (PATRONI=n)
	TRUENEXT_DRAW=all TRUENEXT_FAILOVERS=$${FAILOVERS:-500} TRUENEXT_ZOMBIES=$${ZOMBIES:-500} TRUENEXT_PAIRS=$${PAIRS:-100} TRUENEXT_PATRONI=$${PATRONI:-48} $(PYTEST) -s -rs tests/integration/test_failover_kills.py tests/integration/test_zombies.py tests/integration/test_forgotten_rows.py tests/integration/test_patroni.py

backups: .venv/spark ## 200 backups of a busy broker with stages, which is killed, or the command, in many of them, and what clients meet at each restored one (BACKUPS=n); 20 under a query of Spark (QUERY_BACKUPS=n); 200 of a store with random batches, every planted fault, and 1,000 flipped bits (FLIPS=n)
	TRUENEXT_DRAW=all TRUENEXT_BACKUPS=$${BACKUPS:-200} $(PYTEST) -s tests/integration/test_backup_kills.py
	TRUENEXT_DRAW=all TRUENEXT_QUERY_BACKUPS=$${QUERY_BACKUPS:-20} $(PYTEST) -s tests/spark/test_restored_backups.py
	TRUENEXT_BACKUPS=$${BACKUPS:-200} TRUENEXT_FLIPS=$${FLIPS:-1000} TRUENEXT_DRAW=all $(PYTEST) -s tests/contract/test_backups.py

asan: .venv/test ## The codec in C beside the one in Python, under AddressSanitizer: a million random inputs (INPUTS=n); needs gcc
	CFLAGS="-fsanitize=address -fno-omit-frame-pointer -g" $(BIN)/python setup.py --quiet build --build-base build --build-lib build/asan
	LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=build/asan $(BIN)/python -m tests.unit.speed_comparison $${INPUTS:-1000000}

crash: .venv/test ## Cut the power of the store at every operation, LMDB's included: 100,000 states of a disk (CRASHES=n)
	TRUENEXT_DRAW=all TRUENEXT_CRASHES=$${CRASHES:-100000} $(PYTEST) -s tests/contract/test_crash_points.py tests/contract/test_upgrade.py

before: .venv/test ## This version and the one before, client, broker, services and data folder in turns (BEFORE=revision of git)
	TRUENEXT_DRAW=all TRUENEXT_BEFORE=$(or $(BEFORE),HEAD) $(PYTEST) tests/integration/test_version_before.py

bench: .venv/spark ## Speed beside ActiveMQ Classic, where that is installed, and beside the bare disk; what history and syncing cost; where the time of a message goes; how long an audit takes
	$(BIN)/python -m bench $(BENCH)
	$(BIN)/python -m bench --history-cost
	$(BIN)/python -m bench --sync-cost
	$(BIN)/python -m bench --window-cost
	$(BIN)/python -m bench --floor
	$(BIN)/python -m bench.stages
	$(BIN)/python -m bench.selectors
	$(BIN)/python -m bench.spark
	$(BIN)/python -m bench.spark_sink
	$(BIN)/python -m bench.stage_job
	$(BIN)/python -m bench.many
	$(BIN)/python -m bench.extensions
	$(BIN)/python -m bench.client
	$(BIN)/python -m bench.flows
	$(BIN)/python -m bench.topics
	$(BIN)/python -m bench.openwire
	$(BIN)/python -m bench.postgresql
	$(BIN)/python -m bench.failover
	$(BIN)/python -m bench.backup
	$(BIN)/python -m bench.logins
	$(BIN)/python -m bench.wildcards
	$(BIN)/python -m bench.steps
	$(BIN)/python -m bench.audit
	$(BIN)/python -m bench.waterfalls

bench-backlog: .venv/spark ## Ten million messages that wait: speed, memory, restart; needs 30 GB of disk and a quarter of an hour (BACKLOG="--dir DIR" for another disk)
	$(BIN)/python -m bench.backlog $(BACKLOG)

bench-due: .venv/spark ## Ten million scheduled sends, and as many that expire, each at its own time: speed, memory, kill -9; needs 10 GB of disk and three quarters of an hour (DUE="--messages N")
	$(BIN)/python -m bench.due $(DUE)

bench-inbox: .venv/spark ## Flows that happen once with ten million rows in the inbox; needs 5 GB of disk (INBOX="--inbox-rows N")
	$(BIN)/python -m bench.flows --only inbox $(INBOX)

bench-upgrade: .venv/spark ## A start that converts a data folder with a million messages, beside a restart; needs 3 GB of disk (UPGRADE="--messages N")
	$(BIN)/python -m bench.upgrade $(UPGRADE)

lock: ## Write the lock files anew (needs a network)
	$(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install --quiet uv
	.lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --extra setup pyproject.toml -o requirements.lock --upgrade
	.lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --extra setup --extra test pyproject.toml -o requirements-test.lock --upgrade
	.lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --extra setup --extra test --extra spark pyproject.toml -o requirements-spark.lock --upgrade
	.lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --extra setup --extra demo --constraint requirements-spark.lock pyproject.toml -o requirements-demo.lock --upgrade
	.lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --extra browser --constraint requirements-spark.lock pyproject.toml -o requirements-browser.lock --upgrade
	rm -rf .lock-venv

clean: ## Remove what was made
	rm -rf .venv .venv-core .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

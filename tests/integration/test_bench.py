"""Short runs of the benchmarks, which must end and report their results.

The results of so short runs are no figures. The smallest benchmark is part of each run of the tests, the others, a
minute each, of `make faults`. bench.backlog has a test of its own.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.broker_process import dying_with_us

RUN_S = 600
in_make_faults = pytest.mark.skipif(os.environ.get("TRUENEXT_FAULTS") != "all", reason="up to a minute, in make faults")


@in_make_faults
@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("bench", "--only", "truenext", "--messages", "2000", "--warmup", "100", "--runs", "1"),
            r"\n5\. persistent, one at a time +[\d,]+",
        ),
        (
            ("bench", "--only", "truenext", "--messages", "2000", "--warmup", "0", "--runs", "1", "--loads", "8"),
            r"from SEND to receipt, persistent, 128 producers, .*: median \d+\.\d\d ms",
        ),
        (("bench.stages", "--messages", "400", "--rounds", "1"), r"Python functions \d+\.\d, recv 1\.\d"),
        (("bench", "--window-cost", "--messages", "2000", "--warmup", "100", "--runs", "1"), r"a window of 1000 msg/s"),
        (
            ("bench.spark", "--rows", "2000", "--rounds", "1"),
            r"of the rate of the client \(at least 1\.1\)[\s\S]* MiB, the largest Python worker",
        ),
        (
            ("bench.spark_sink", "--rows", "2000", "--rounds", "1"),
            r"of the copy's rate from queue to queue[\s\S]* MiB more in the driver",
        ),
        (
            ("bench.waterfalls", "--events", "2000", "--runs", "1"),
            r"2,000 events .*\nfound: .* \(at most 5 s\)\nnot found[\s\S]*\d events/s, .* MiB \(at most 64\)",
        ),
        (("bench.start", "--runs", "1"), r"\nready: after \d+ ms .*, \d\.\d\d of that"),
        (
            ("bench.backup", "--waiting", "20000", "--runs", "1", "--share", "0.01", "--rate", "4"),
            r"one at a time: .* without; .* \(at least 0\.8\); p99 [\s\S]*\nbackup: .* has grown by "
            r"[\s\S]*\nrestore: .* \(at most 1\.3\)\nevent loop during backups: held for at most \d+ ms",
        ),
        (
            ("bench.logins", "--clients", "40", "--users", "3", "--runs", "1"),
            r"40 clients of 3 users: back after \d+\.\d\d s .* ms by its own work",
        ),
        (
            ("bench.openwire", "--messages", "300", "--runs", "1", "--warmup", "0", "--connections", "20"),
            r"(without loads: |\npersistent, commit per 100 +[\d,]+ )"
            r"[\s\S]*\n(without users: |users, persistent, commit per 100: )"
            r"[\s\S]*\ndecoding: [\s\S]*\nidle: 20 connections of [\s\S]*\ntopics: 300 messages to 10 consumers",
        ),
        (
            (
                "bench.postgresql",
                "--messages",
                "300",
                "--runs",
                "1",
                "--warmup",
                "0",
                "--open",
                "1",
                "--waiting",
                "2000",
            ),
            r"\nbatches of 1,000: .*\n[\s\S]*32 producers, each one at a time: .* on its own disk: \d"
            r"[\s\S]*\nmemory: RssAnon ",
        ),
        (
            ("bench.failover", "--messages", "300", "--runs", "1", "--warmup", "0", "--waiting", "2000"),
            r"\nplanned: .* s to the first delivery[\s\S]*\nstopped: [\s\S]*\nPostgreSQL restarted: "
            r"[\s\S]* alone: \d[\s\S]*\nstanding by: .*% of a processor",
        ),
        (("bench.selectors", "--messages", "3000"), r"the others +p50 .* during the scan"),
        (("bench.many", "--only", "names", "--count", "500"), r"500 names used once each, .* MiB of disk in the end"),
        (("bench.many", "--messages", "600", "--runs", "1", "--count", "3"), r"3 selectors: [\d,]+ messages a second"),
        (
            ("bench.due", "--messages", "500", "--within", "2", "--only", "scheduled"),
            r"\nscheduled +500 +[\d,]+ +\d+\.\d\d s +[\d,]+ +\d+ MiB +<= 256 MiB +yes",
        ),
        (
            ("bench.upgrade", "--messages", "600", "--runs", "1"),
            r"600 messages, one in 10 marked\ntime: restart [\s\S]*\nprocessor time: .*, ratio \d",
        ),
        (("bench.due", "--messages", "500", "--within", "2", "--only", "expiring"), r"\nexpiring +500 .* yes"),
        (
            ("bench.client", "--messages", "400", "--runs", "1"),
            r"raw, a message: 2\.0[\s\S]* of the rate of stomp\.py \(at least 4\)"
            r"[\s\S]*(without NATS: .* is not installed|nats-py on JetStream \(at least 1\))",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_benchmark_ends_and_reports_its_results(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    command = dying_with_us([sys.executable, "-m", *arguments, "--dir", str(tmp_path)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout), done.stdout
    assert list(tmp_path.iterdir()) == []


@in_make_faults
@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--only", "messaging,poison,sql,interactive,dramatiq,dbos,procrastinate", "--flows", "40"),
            (
                r"of the rate of the client alone \(at least 0\.5\)",
                r"of the rate of the flows alone \(at least 0\.8\)",
                r"SQLite, 10 in each run\n.*processor time a stage.*\n.*\n.* of the rate of SQLAlchemy alone",
                r"PostgreSQL, 10 in each run\n  PostgreSQL \d.*\n.*\n.*\n.* of the rate of SQLAlchemy alone",
                r"of the 99 % when it is quiet \(at most 3\)",
                r"without dramatiq: .* is not installed|of the rate of Dramatiq \(at least 2\)",
                r"without dbos: .* is not installed|of the rate of DBOS \(at least 2\)",
                r"without procrastinate: .* is not installed|of the rate of procrastinate \(at least 1\.5\)",
            ),
        ),
        (
            ("--only", "once-sqlite", "--flows", "40", "--workers", "1,8"),
            (r"(workers of a stage: [18]\n.*\n.*\n  .* of the rate of best-effort 1PC \(at least 0\.67\)\n *){2}",),
        ),
        (
            ("--only", "once-parts-postgresql", "--flows", "40", "--workers", "8"),
            (r"of a stage: 8\n(.*\n){4}  .* of the rate of it without the numbers\n  .* of the inbox alone",),
        ),
        (
            ("--only", "inbox", "--flows", "40", "--inbox-rows", "40000"),
            (
                r"SQLite, 10 in each run\n(.*\n)+?.* of the rate of an empty one \(at least 0\.9\)",
                r"(?s)PostgreSQL, 10 in each run\n.*clean-up has removed [\d,]+ rows meanwhile.* of an empty one",
            ),
        ),
        (
            ("--only", "drain", "--units", "1500"),
            (r"(?s)send_many \(at least 0\.5\)\n.*PostgreSQL \d.*interactive flows meanwhile: median \d+ ms, longest",),
        ),
        (
            ("--only", "before,rejections,failed,keyed,delayed", "--flows", "40", "--units", "300", "--before", "."),
            (
                r"of the rate of the earlier version \(at least 0\.99\)",
                r"of the speed of ask in the earlier version \(at least 0\.97\)",
                r"of the rate of dead letters without report \(at least 0\.8\)",
                r"of the rate of dead letters without report \(at least 1\)",
                r"of the median of a reply \(at most 1\.5\)",
                r"(?s)SQLite, 2 in each run\n.* and ask \(at most 2\.5\)\n.*PostgreSQL \d.* and ask \(at most 2\.5\)",
                r"of the rate of the client's scheduled sends \(at least 0\.9\)",
            ),
        ),
        (
            ("--only", "costs", "--flows", "200"),
            (
                r"(?s)idle, \d.*PostgreSQL \d.*exactly once, a message: \d+\.\d+ statements, .* bytes of the log",
                r"idle, \d+\.\d statements a second \(1\)",
            ),
        ),
    ],
    ids=lambda value: value[1] if isinstance(value[0], str) and value[0] == "--only" else "",
)
def test_the_benchmark_of_flows_ends_and_reports_its_results(
    arguments: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    # Nobody but its owner may enter that of a test.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o711)
        command = dying_with_us([sys.executable, "-m", "bench.flows", *arguments, "--runs", "1", "--dir", name])
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        for each in expected:
            assert re.search(each, done.stdout), done.stdout
        assert list(folder.iterdir()) == []


@pytest.mark.timeout(RUN_S + 60)
def test_the_benchmark_of_the_engine_reports_its_results() -> None:
    command = dying_with_us([sys.executable, "-m", "bench.wildcards", "--messages", "50"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert re.search(r"\n +10000 +1 +1000 +200 +\d+ ms +[\d,]+\n", done.stdout), done.stderr

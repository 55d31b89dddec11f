"""Benchmark of a broker whose messages are in PostgreSQL, with the database on the same machine.

    log         appends to the log, beside a bare loop of psycopg that inserts the same bytes
    loads       rates from end to end, beside the same broker with its messages on its own disk
    foreign     the same rates while another session keeps a transaction open, beside those without it
    activemq    the same rates beside ActiveMQ with its JDBC store, in the same PostgreSQL
    waiting     many messages that wait: memory, a restart, and a restart without the data folder

python -m bench.postgresql --only log,loads --runs 3
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import psycopg

from bench import machine, report
from bench.backlog_load import Backlog, fill
from bench.brokers import ActiveMQ, Broker, BrokerError, Truenext, free_port, no_activemq_reason
from bench.load import LOADS, Load, run
from bench.memory import MEMORY_TARGET, MemoryWatch
from bench.options import not_negative, positive
from bench.postgresql_server import Postgresql, no_postgresql_reason
from bench.progress import guarded, print_line, work
from bench.workers import end_in_order
from truenext.store.log import LogPosition, MemberSettings, next_digest
from truenext.store.postgresql.log import PostgresqlLog

_PARTS = ("log", "loads", "foreign", "activemq", "waiting")
_LOADS = tuple(load for load in LOADS if load.key in ("3", "5", "7"))
_MESSAGE_BYTES = 1100
"""Bytes of a message of 1 KiB in a batch."""
_BATCHES = (1, 10, 200, 1000)
"""Numbers of messages in the batches of the part `log`."""
_LOG_TARGET = 0.9
_EMBEDDED_TARGETS = {"3": 0.6, "5": 0.6, "7": 0.8}
_FOREIGN_TARGET = 0.9
_ACTIVEMQ_TARGETS = {"3": 10.0, "5": 1.3}
_RESTART_TARGET_S = 3.0
_SEED_TARGET = 40_000
"""Messages a second at which a restart without a data folder makes it anew."""
_DATABASE_LIMIT = "200GiB"
_JDBC_DRIVER = Path("/usr/share/java/postgresql.jar")
_PATIENCE = 1200.0
_NUMBERS = count(1)


class InPostgresql(Truenext):
    """Truenext with its messages in PostgreSQL."""

    name = "in PostgreSQL"

    def __init__(self, parent: Path, server: Postgresql) -> None:
        super().__init__(parent)
        self._server = server

    def prepare(self, folder: Path) -> list[str]:
        schema = new_schema(self._server)
        place = ["--store", self._server.log_url, "--schema", schema]
        limits = ["--durability", "local", "--database-limit", _DATABASE_LIMIT]
        return [*super().prepare(folder), *place, *limits]


class _OnDisk(Truenext):
    name = "on its own disk"


class _ActiveMQInPostgresql(ActiveMQ):
    name = "ActiveMQ"
    store = '<jdbcPersistenceAdapter dataDirectory="{base}/data" dataSource="#database"/>'
    libraries = (_JDBC_DRIVER,)

    def __init__(self, parent: Path, port: int) -> None:
        super().__init__(parent)
        self.beans = f"""
  <bean id="database" class="org.postgresql.ds.PGPoolingDataSource" destroy-method="close">
    <property name="serverNames"><list><value>127.0.0.1</value></list></property>
    <property name="portNumbers"><list><value>{port}</value></list></property>
    <property name="databaseName" value="postgres"/>
    <property name="user" value="postgres"/>
    <property name="initialConnections" value="1"/>
    <property name="maxConnections" value="20"/>
  </bean>"""


def new_schema(server: Postgresql) -> str:
    """Make an empty log, and return the name of its schema."""
    schema = f"bench_{next(_NUMBERS)}"
    command = [sys.executable, "-m", "truenext", "store", "init", server.log_url, "--schema", schema]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BrokerError(f"store init failed: {done.stderr}")
    return schema


def main(arguments: Sequence[str] | None = None) -> int:
    return measure_in_folder(_parser().parse_args(arguments), _measure)


def measure_in_folder(options: argparse.Namespace, measure: Callable[[Path, argparse.Namespace], None]) -> int:
    """Call `measure` with a folder for a server of PostgreSQL, and return the exit status."""
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as name:
        folder = Path(name)
        # The server may run as another user.
        folder.chmod(0o711)
        if reason := no_postgresql_reason(folder):
            print_line(f"failed: {reason}")
            return 1
        for fact, value in [*machine.facts(folder), ("seed", str(options.seed))]:
            print_line(f"{fact}: {value}")
        return guarded(lambda: measure(folder, options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.postgresql", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_parts, default=_PARTS, metavar="PARTS", help=f"of {','.join(_PARTS)}")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs of each (default 5)")
    parser.add_argument("--messages", type=positive, metavar="N", help="messages per run of every load")
    parser.add_argument(
        "--warmup", type=not_negative, default=1, metavar="N", help="runs of each load before those (default 1)"
    )
    parser.add_argument(
        "--open",
        type=positive,
        default=60,
        metavar="S",
        help="seconds that the foreign transaction is open before the first run (default 60)",
    )
    parser.add_argument(
        "--waiting", type=positive, default=1_000_000, metavar="N", help="messages that wait (default 1000000)"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="for priorities and bodies")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where all data goes (default: temp folder)")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    if unknown := set(text.split(",")) - set(_PARTS):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}")
    return tuple(each for each in _PARTS if each in text.split(","))


def _measure(folder: Path, options: argparse.Namespace) -> None:
    parts = {
        "log": _measure_log,
        "loads": _measure_loads,
        "foreign": _measure_foreign,
        "activemq": _measure_activemq,
        "waiting": _measure_waiting,
    }
    for name in options.only:
        with Postgresql(folder, free_port()) as server:
            print_line(f"\n{name}: {server.version}")
            parts[name](server, folder, options)


# ---- The log alone ----


def _measure_log(server: Postgresql, folder: Path, options: argparse.Namespace) -> None:
    for messages in _BATCHES:
        appends = max(20, (options.messages or 60_000) // max(20, messages))
        rates: dict[str, list[float]] = {"log": [], "bare": []}
        with _appender(server, messages) as ours, _inserter(server, messages) as bare:
            for turn in range(-options.warmup, options.runs):
                for name, append in (("log", ours), ("bare", bare)):
                    started = time.monotonic()
                    for _ in range(appends):
                        append()
                    if turn >= 0:
                        rates[name].append(appends / (time.monotonic() - started))
        ratio = statistics.median(rates["log"]) / statistics.median(rates["bare"])
        print_line(
            f"batches of {messages:,}: {report.spread(rates['log'])} appends a second, a bare loop "
            f"{report.spread(rates['bare'])}: {ratio:.2f} (at least {_LOG_TARGET})"
        )


@contextmanager
def _appender(server: Postgresql, messages: int) -> Iterator[Callable[[], None]]:
    schema = new_schema(server)
    log = PostgresqlLog(
        server.log_url,
        schema,
        take_over=False,
        is_replicated=False,
        database_limit=1 << 40,
        patience_s=30,
        member=MemberSettings(name="bench", folder=Path("/bench"), failover_after_s=5.0),
    )
    position = LogPosition(0, b"")
    while log.stands_by(position) or not log.take_over(position):
        pass
    with psycopg.connect(server.log_url) as connection:
        found = connection.execute(f"SELECT number, digest FROM {schema}.log ORDER BY 1 DESC LIMIT 1").fetchone()
    assert found is not None, "there is the row of the takeover"
    number, digest = found
    log.start()
    parts = [bytes(_MESSAGE_BYTES)] * messages

    def append() -> None:
        nonlocal number, digest
        after = next_digest(digest, parts)
        number += 1
        log.append(number, digest, after, parts)
        digest = after

    yield append
    log.close()


@contextmanager
def _inserter(server: Postgresql, messages: int) -> Iterator[Callable[[], None]]:
    connection = psycopg.connect(server.log_url, autocommit=True)
    table = f"bare_{next(_NUMBERS)}"
    connection.execute(
        f"CREATE TABLE {table} (number bigint, part int, epoch int, digest bytea, payload bytea, "
        "PRIMARY KEY (number, part))"
    )
    connection.execute(f"ALTER TABLE {table} ALTER payload SET STORAGE EXTERNAL")
    parts = [bytes(_MESSAGE_BYTES)] * messages
    cursor = connection.cursor()
    statement = f"INSERT INTO {table} VALUES (%b, 0, 1, %b, %b)"
    numbers = count(1)

    def insert() -> None:
        cursor.execute(statement, (next(numbers), bytes(16), b"".join(parts)), prepare=True)

    yield insert
    connection.close()


# ---- End to end ----


def _measure_loads(server: Postgresql, folder: Path, options: argparse.Namespace) -> None:
    brokers = [InPostgresql(folder, server), _OnDisk(folder)]
    rates = measure_rates(brokers, _LOADS, options)
    print_ratios(_LOADS, brokers, rates, _EMBEDDED_TARGETS)


def _measure_activemq(server: Postgresql, folder: Path, options: argparse.Namespace) -> None:
    reason = no_activemq_reason()
    if reason is None and not _JDBC_DRIVER.exists():
        reason = f"there is no {_JDBC_DRIVER} (Debian: apt-get install libpostgresql-jdbc-java)"
    if reason is not None:
        print_line(f"without ActiveMQ: {reason}")
        return
    loads = [load for load in _LOADS if load.key in _ACTIVEMQ_TARGETS]
    brokers = [InPostgresql(folder, server), _ActiveMQInPostgresql(folder, server.port)]
    print_ratios(loads, brokers, measure_rates(brokers, loads, options, messages_max=5_000), _ACTIVEMQ_TARGETS)


def _measure_foreign(server: Postgresql, folder: Path, options: argparse.Namespace) -> None:
    """Measure the same broker without a foreign transaction, and with one."""
    broker = InPostgresql(folder, server)
    rates: dict[tuple[str, str], list[float]] = {}
    with broker:
        for turn in range(-options.warmup, options.runs):
            _run_turn([broker], _LOADS, turn, options, rates)
        before = {load.key: rates[load.key, broker.name] for load in _LOADS}
        rates = {}
        with psycopg.connect(server.log_url) as foreign:
            foreign.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            foreign.execute("SELECT count(*) FROM pg_class")
            ended = time.monotonic() + options.open
            # The broker goes on, so that the transaction has something to keep.
            while time.monotonic() < ended:
                _run_turn([broker], _LOADS[:1], -1, options, rates)
            for turn in range(options.runs):
                _run_turn([broker], _LOADS, turn, options, rates)
    for load in _LOADS:
        with_it = rates[load.key, broker.name]
        ratio = statistics.median(with_it) / statistics.median(before[load.key])
        print_line(
            f"{load.title}: {report.spread(with_it)} with a transaction open for {options.open} s, "
            f"{report.spread(before[load.key])} without: {ratio:.2f} (at least {_FOREIGN_TARGET})"
        )


def measure_rates(
    brokers: Sequence[Broker], loads: Sequence[Load], options: argparse.Namespace, messages_max: int = sys.maxsize
) -> dict[tuple[str, str], list[float]]:
    """Start the brokers, and let them take turns under each load. Return the rates of the runs, by load and broker."""
    with ExitStack() as stack:
        for broker in brokers:
            stack.enter_context(broker)
        return take_turns(brokers, loads, options, messages_max)


def take_turns(
    brokers: Sequence[Broker], loads: Sequence[Load], options: argparse.Namespace, messages_max: int = sys.maxsize
) -> dict[tuple[str, str], list[float]]:
    """Let running brokers take turns under each load. Return the rates of the runs, by load and broker."""
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(-options.warmup, options.runs):
        _run_turn(brokers, loads, turn, options, rates, messages_max)
    return rates


def _run_turn(
    brokers: Sequence[Broker],
    loads: Sequence[Load],
    turn: int,
    options: argparse.Namespace,
    rates: dict[tuple[str, str], list[float]],
    messages_max: int = sys.maxsize,
) -> None:
    for load in loads:
        for broker in brokers:
            messages = options.messages or min(load.messages, messages_max)
            before = broker.processor_seconds()
            outcome = run(load, broker.port, f"bench.{next(_NUMBERS)}", messages, options.seed + turn)
            used = (broker.processor_seconds() - before) / messages * 1e6
            when = "warm-up" if turn < 0 else f"run {turn + 1}"
            print_line(
                f"{load.title}, {broker.name}, {when}: {outcome.rate:,.0f} msg/s (broker {used:.1f} us a message)"
            )
            if turn >= 0:
                rates.setdefault((load.key, broker.name), []).append(outcome.rate)


def print_ratios(
    loads: Sequence[Load],
    brokers: Sequence[Broker],
    rates: dict[tuple[str, str], list[float]],
    targets: dict[str, float],
) -> None:
    for load in loads:
        own, other = (rates[load.key, broker.name] for broker in brokers)
        ratio = statistics.median(own) / statistics.median(other)
        print_line(
            f"{load.title}: {report.spread(own)} {brokers[0].name}, {report.spread(other)} {brokers[1].name}: "
            f"{ratio:.2f} (at least {targets[load.key]:g})"
        )


# ---- Many messages that wait ----


def _measure_waiting(server: Postgresql, folder: Path, options: argparse.Namespace) -> None:
    backlog = Backlog("bench.waiting", persistent=True, messages=options.waiting, seed=options.seed)
    broker = InPostgresql(folder, server)
    with broker, MemoryWatch(broker) as memory:
        memory.enter("waiting")
        pace = work("sent", backlog.messages, memory, _PATIENCE, fill, backlog, broker.port)
        print_line(f"{backlog.messages:,} messages sent: {pace.rate:,.0f} a second")
        _stop(broker)
        seconds = _start(broker)
        print_line(f"restart: {seconds:.1f} s (at most {_RESTART_TARGET_S:g})")
        _stop(broker)
        shutil.rmtree(broker.data)
        seconds = _start(broker)
        print_line(
            f"restart without the data folder: {seconds:.1f} s, {backlog.messages / seconds:,.0f} messages a second "
            f"(at least {_SEED_TARGET:,})"
        )
        print_line(f"memory: RssAnon {memory.peak >> 10} MiB at most (limit {MEMORY_TARGET >> 10})")


def _stop(broker: Broker) -> None:
    status = broker.end(signal.SIGTERM, _PATIENCE)
    if status:
        raise BrokerError(f"the broker ended with {status}:\n{broker.log()[-3000:]}")


def _start(broker: Broker) -> float:
    started = time.monotonic()
    broker.start(_PATIENCE)
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())

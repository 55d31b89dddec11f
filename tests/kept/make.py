"""Makes the files of this version that later versions must read, and packs them into `format-N.tar.xz`.

    python -m tests.kept.make [FOLDER]       N is the format of the data folder; an archive is never made anew

    data/            data folder with everything in it, its history included
    parquet/         the same history as Parquet
    users.toml       a users file; `password` has the password of its user
    service.db       the database of service.py, whose outbox has units that were not sent
    stages/          the events of service.py
    interface.json   what `truenext stages check --write` has written of service.py
    query.json       offsets of a query of Spark that has not ended its last batch
    expected.json    what the data folder holds, as contents.py says it

Source: docs/decisions/0105-upgrade.md
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.contract.made_formats import read_all
from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.test_raw_connections import JmsClient
from tests.kept import flows
from tests.kept.contents import contents_of
from tests.spark.sink import small_write
from tests.spark.source.small_query import SmallQuery
from truenext import blocking
from truenext.stage.sql import apply_schema
from truenext.store.checkpoint_format import FORMAT_VERSION
from truenext.store.embedded import EmbeddedStore

SEGMENT_BYTES = 16 * 1024
"""Size of a segment, so small that a small folder has messages in the checkpoint, too."""

HERE = Path(__file__).parent
YEARS = 50 * 365 * 24 * 3600.0
"""Seconds after which delayed and scheduled messages are due, and others expire."""

LEFT_OUT = ("lock", "lock.mdb", "ballast")


def main(folder: Path) -> None:
    archive = folder / f"format-{FORMAT_VERSION}.tar.xz"
    assert not archive.exists(), f"{archive} is there: what was written is not made anew"
    with tempfile.TemporaryDirectory() as place:
        make(Path(place))
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            tar.add(place, ".", filter=lambda each: None if Path(each.name).name in LEFT_OUT else each)
    print(f"{archive} has {archive.stat().st_size:,} bytes")


def make(place: Path) -> None:
    os.environ["TRUENEXT_KEPT"] = str(place)
    EmbeddedStore(place / "data", segment_bytes=SEGMENT_BYTES).close()
    with running(place, "--listen", "openwire://127.0.0.1:0") as broker:
        fill_queues(broker)
        fail_messages(broker)
        subscribe(broker)
        schedule(broker)
        send_numbered(broker)
        use_jms(broker)
        (place / "query.json").write_text(json.dumps(use_spark(broker)))
        run_service(place, broker)
    # Transient messages are stored when a broker stops.
    with running(place) as broker:
        fill_checkpoint(broker)
    databases = read_all(place / "data")
    assert all(databases.values()), (
        f"the checkpoint has nothing in {[name for name in databases if not databases[name]]}"
    )
    make_user(place)
    with running(place, "--users", str(place / "users.toml")) as broker:
        password = (place / "password").read_text().strip()
        with blocking.connect(broker.url, user="shop", password=password) as connection:
            connection.send("/queue/of.users", "of a user", producer="till", number=3)
            connection.send("/queue/of.users", "without a number")
    run(place, "history", "export", "data", "--out", "parquet")
    # Left in the outbox: no process runs that could send it.
    flows.main("initiate", f"sqlite:///{place}/service.db", "")
    run(place, "stages", "check", "tests.kept.service:app", "--against", "interface.json", "--write")
    (place / "expected.json").write_text(json.dumps(contents_of(place / "data"), indent=1))
    for each in ("broker.out", "broker.log"):
        (place / each).unlink(missing_ok=True)


@contextmanager
def running(place: Path, *options: str) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(place, options)
    broker.start()
    try:
        yield broker
        broker.stop()
    finally:
        broker.clean_up()


def run(place: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-m", "truenext", *arguments], cwd=place, env=environment, check=True)


# What is in the data folder


def fill_queues(broker: BrokerProcess) -> None:
    with blocking.connect(broker.url) as connection:
        for priority in range(10):
            connection.send("/queue/orders", f"persistent {priority}", priority=priority, headers={"Colour": "a:b\n"})
            connection.send("/queue/orders", f"transient {priority}", priority=priority, persistent=False)
        for number in range(6):
            connection.send("/queue/groups", f"of a group {number}", group=f"group {number % 3}")
        connection.send("/queue/orders", "expires late", ttl=YEARS)
        connection.send(
            "/queue/orders",
            b"\0\xff",
            reply_to="/queue/answers",
            correlation_id="c",
            content_type="image/png",
            report_to="/queue/reports",
            report_id="r",
            on_failure=["/queue/failed"],
        )
        connection.send("/queue/paused", "of a paused queue")
    broker.output_of("pause", "paused")


def fill_checkpoint(broker: BrokerProcess) -> None:
    """Send more than the journal holds, so that all that was there before is in the checkpoint."""
    with blocking.connect(broker.url) as connection:
        for number in range(25):
            connection.send_many("/queue/filled", [f"{number} {'x' * 500}" for _ in range(24)])
        with connection.consumer("/queue/filled") as consumer:
            for _ in range(50):
                consumer.receive(5)


def fail_messages(broker: BrokerProcess) -> None:
    with blocking.connect(broker.url) as connection:
        connection.send_many("/queue/failing", ["nacked", "delayed", "rejected"])
        connection.send("/queue/failing", "transient", persistent=False)
        connection.send("/queue/failing", "lost")
        with connection.consumer("/queue/failing", ack="individual", prefetch=1) as consumer:
            nacked = consumer.receive(5)
            assert nacked is not None
            nacked.nack(cause="first cause")
            again = consumer.receive(5)
            assert again is not None
            again.nack(cause="last cause", delay=6 * 24 * 3600)
            delayed = consumer.receive(5)
            assert delayed is not None
            delayed.nack(delay=7 * 24 * 3600)
            rejected = consumer.receive(5)
            assert rejected is not None
            rejected.reject(cause="no such customer")
            transient = consumer.receive(5)
            assert transient is not None
            transient.nack(delay=7 * 24 * 3600)
    client = broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "s", "destination": "/queue/failing", "ack": "client-individual"})
    assert client.message().body == b"lost"
    client.close()
    broker.await_facts("failing", consumers=0)


def subscribe(broker: BrokerProcess) -> None:
    for name in ("one", "two"):
        with (
            blocking.connect(broker.url, client_id=name) as connection,
            connection.consumer("/topic/news", durable="news"),
        ):
            pass
    with blocking.connect(broker.url) as connection:
        for number in range(3):
            connection.send("/topic/news", f"news {number} {'y' * 200}")
            connection.send("/topic/news", f"transient news {number}", persistent=False)


def schedule(broker: BrokerProcess) -> None:
    with blocking.connect(broker.url) as connection:
        connection.send("/queue/scheduled", "once", delay=YEARS)
        connection.send("/queue/scheduled", "again and again", delay=YEARS, period=3600, repeat=-1)
        connection.send("/queue/scheduled", "each leap day", cron="0 3 29 2 *", zone="Europe/Oslo")
        connection.send("/topic/news", "late news", delay=YEARS)


def send_numbered(broker: BrokerProcess) -> None:
    with blocking.connect(broker.url) as connection:
        connection.send("/queue/numbered", "send 7", producer="sender", number=7)
        with connection.session(transacted=True) as session:
            for number in (1, 2, 3):
                session.send("/queue/numbered", f"commit {number}")
                session.commit(producer="committer", number=number)


def use_jms(broker: BrokerProcess) -> None:
    client = JmsClient(broker)
    client.produce("jms", 3)
    client.close()


def use_spark(broker: Any) -> list[object]:
    """Leave bundles, a mark, drafts and a decision in the broker. Return the offsets of the query."""
    with blocking.connect(broker.url) as connection:
        connection.send_many("/queue/for.spark", [f"row {number}" for number in range(5)])
        query = SmallQuery(broker, queue="for.spark")
        reader = query.reader()
        assert len(query.run_batch(reader)) == 5
        connection.send_many("/queue/for.spark", ["row 5", "row 6"])
        # Its rows are bundles; the query dies before it writes them down.
        assert len(query.run_batch(reader)) == 2
        connection.send("/queue/for.spark", "row 7")
        query.stop()
    small_write.write_batch(broker, 0, "published 0", "published 1")
    small_write.draft(broker, 1, "only drafted")
    return list(query.offsets)


# What is beside the data folder


def make_user(place: Path) -> None:
    grants = ("--send", "of.>", "--take", "of.>")
    text = subprocess.run(
        [sys.executable, "-m", "truenext", "user", "add", "shop", "--users", "users.toml", *grants, "--generate"],
        cwd=place,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (place / "password").write_text(text)


def run_service(place: Path, broker: BrokerProcess) -> None:
    database = f"sqlite:///{place}/service.db"
    apply_schema(database)
    for action in ("initiate", "run"):
        flows.main(action, database, broker.url)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

"""Tests of queries whose user has only the grants that docs/security.md and docs/spark.md name."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.broker_process import BrokerProcess
from tests.spark.queues import run_to_end, url
from truenext import blocking

USERS = """
[role.queries]
send = ["Spark.*.demo.>"]
take = ["Spark.*.demo.>"]
browse = ["Spark.*.demo.>"]
manage = ["Spark.*.demo.>"]

[user.pipe]
password_file = "word"
roles = ["queries"]
take = ["orders"]
send = ["bills"]

[user.reader]
password_file = "word"
roles = ["queries"]
take = ["orders"]

[user.homeless]
password_file = "word"
take = ["orders"]
send = ["bills"]

[user.shop]
password_file = "word"
send = ["orders"]
take = ["bills"]
"""
COUNT = 60


@pytest.fixture
def word(tmp_path: Path) -> str:
    """Path of the file with the password of all users."""
    file = tmp_path / "word"
    file.write_text("word")
    file.chmod(0o600)
    return str(file)


@pytest.fixture
def guarded(tmp_path: Path, word: str) -> Iterator[BrokerProcess]:
    users = tmp_path / "users.toml"
    users.write_text(USERS)
    users.chmod(0o600)
    broker = BrokerProcess(tmp_path, ["--users", str(users)])
    broker.start()
    try:
        with blocking.connect(url(broker), user="shop", password="word") as connection:
            for number in range(COUNT):
                connection.send_nowait("/queue/orders", str(number))
        yield broker
        broker._log_checked = len(broker.log)
        broker.stop()
    finally:
        broker.clean_up()


@pytest.fixture
def start(spark: SparkSession, guarded: BrokerProcess, word: str, tmp_path: Path) -> Callable[[str], StreamingQuery]:
    """Start a query of a user from `orders` to `bills`."""

    def start(user: str) -> StreamingQuery:
        options = {"url": url(guarded), "space": "demo", "user": user, "passwordFile": word}
        rows = spark.readStream.format("truenext").options(**options, queue="orders").load()
        bills = rows.selectExpr("body", "'bills' AS queue")
        writer = bills.writeStream.format("truenext").options(**options)
        checkpoint = str(tmp_path / f"checkpoint-{user}")
        return writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()

    return start


def test_query_with_the_grants_of_the_page_takes_and_sends_each_message_once(
    start: Callable[[str], StreamingQuery], guarded: BrokerProcess
) -> None:
    run_to_end(start("pipe"))
    with blocking.connect(url(guarded), user="shop", password="word") as connection, connection.session() as session:
        consumer = session.consumer("/queue/bills")
        messages = [consumer.receive(timeout=20) for _ in range(COUNT)]
        found = [int(message.text) for message in messages if message is not None]
    assert sorted(found) == list(range(COUNT))


@pytest.mark.parametrize(
    ("user", "refusal"),
    [
        ("reader", "user 'reader' may not send to /queue/bills"),
        ("homeless", "user 'homeless' may not"),
    ],
)
def test_query_without_a_grant_fails_and_names_it(
    user: str, refusal: str, start: Callable[[str], StreamingQuery]
) -> None:
    query = start(user)
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(120)
    assert refusal in str(caught.value)

"""Tests of a stage as a Spark job, with a real broker: each request is answered once, or given up and told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.integration.broker_process import BrokerProcess
from tests.spark.queues import url
from tests.spark.stage_job.messages import QUEUE, request
from truenext import blocking
from truenext.errors import ConfigurationError
from truenext.flows.envelope import Envelope, ReplyTo, encode_envelope
from truenext.spark.stage_job import stage_job
from truenext.spark.stage_job.answers import NO_ANSWER

Transform = Callable[[DataFrame], DataFrame]
MESSAGE = "item string, count int"
REPLIES = ReplyTo("/queue/replies", msgspec.Raw(b'{"a":1}'), report="/queue/reports")


def price(requests: DataFrame) -> DataFrame:
    """Join the prices, and sum what is asked for; no tea has a price."""
    prices = requests.sparkSession.createDataFrame([("item 0", 5), ("item 1", 7)], "item string, cents int")
    return requests.join(F.broadcast(prices), "item").selectExpr("flow", "cents * count AS cents")


def send(broker: BrokerProcess, *bodies: bytes, queue: str = QUEUE) -> None:
    with blocking.connect(url(broker)) as connection:
        for body in bodies:
            connection.send(f"/queue/{queue}", body, ttl=3600, correlation_id="c")


def run(spark: SparkSession, broker: BrokerProcess, transform: Transform, **options: str) -> None:
    """Run the job on all messages that wait, as one batch. They stay in their queue: the source is not tested here."""
    batch = spark.read.format("truenext").options(url=url(broker), queue=QUEUE).load()
    stage_job(transform, MESSAGE, url=url(broker), txnAppId="job", **options)(batch, 0)


def browse(broker: BrokerProcess, queue: str) -> list[Any]:
    with blocking.connect(url(broker)) as connection:
        return list(connection.browse(f"/queue/{queue}"))


@pytest.mark.alternates("stage as a Spark job")
@pytest.mark.timeout(300)
def test_each_request_of_a_batch_is_answered_once_or_becomes_a_dead_letter_that_is_told(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    requests = [request(number, [REPLIES]) for number in range(6)]
    odd = [b"no JSON", encode_envelope(request(8, [REPLIES], message={"item": "item 0", "count": "two"}))]
    send(broker, *map(encode_envelope, requests), *odd)
    events = tmp_path / "events"
    run(spark, broker, price, events=str(events))
    replies = browse(broker, "replies")
    answers = {each.envelope.parent: each for each in map(Reply, replies)}
    assert {request.id: answers[request.id].cents for request in requests if request.id in answers} == {
        requests[number].id: cents for number, cents in {0: 0, 1: 7, 3: 15, 4: 28}.items()
    }
    assert len(replies) == 4 and all(bytes(each.envelope.state) == b'{"a":1}' for each in answers.values())
    assert all(each.headers.get("expires", "0") != "0" for each in replies)
    letters = {each.body: each.headers for each in browse(broker, f"DLQ.{QUEUE}")}
    assert letters.keys() == {*map(encode_envelope, (requests[2], requests[5])), *odd}
    causes = sorted(each["truenext-original-last-cause"].partition("\n")[0] for each in letters.values())
    assert causes[:2] == [NO_ANSWER, NO_ANSWER]
    assert causes[2].startswith("NotDecoded: the body is not a message of stages: ")
    assert causes[3] == "NotDecoded: the message is not an object with the fields <item:string,count:int>"
    assert {each["truenext-original-destination"] for each in letters.values()} == {f"/queue/{QUEUE}"}
    told = {each.headers["correlation-id"] for each in browse(broker, "reports")}
    assert told == {requests[2].flow.id, requests[5].flow.id, request(8).flow.id}
    (file,) = events.iterdir()
    kinds = [msgspec.json.decode(line)["kind"] for line in file.read_bytes().splitlines()]
    assert (kinds.count("started"), kinds.count("completed"), kinds.count("rejected")) == (8, 4, 4)


class Reply:
    def __init__(self, message: Any) -> None:
        self.envelope = msgspec.json.decode(message.body, type=Envelope)
        self.cents = msgspec.json.decode(self.envelope.message)["cents"]


FAULTS: list[tuple[Any, str]] = [
    (lambda requests: requests.drop("flow"), "the transform has dropped the column flow"),
    (lambda requests: None, "the transform has returned no DataFrame, but NoneType"),
    (lambda requests: requests.withColumn("flow", F.col("flow.id")), "the transform has changed the column flow"),
    (
        lambda requests: requests.unionAll(requests),
        "the transform has returned 2 rows for one request of flow 'flow 1'",
    ),
    (
        lambda requests: requests.withColumn("flow", F.when(F.col("count") < 0, F.col("flow"))),
        "whose column flow is null",
    ),
]


@pytest.mark.alternates("stage as a Spark job")
@pytest.mark.parametrize(("transform", "text"), FAULTS, ids=["dropped", "nothing", "changed", "doubled", "lost"])
def test_transform_that_does_not_keep_the_flow_fails_its_batch_by_name_and_sends_nothing(
    transform: Transform, text: str, spark: SparkSession, broker: BrokerProcess
) -> None:
    send(broker, encode_envelope(request(1, [REPLIES])))
    with pytest.raises((PySparkException, ConfigurationError), match=text):
        run(spark, broker, transform)
    assert (browse(broker, "replies"), browse(broker, f"DLQ.{QUEUE}")) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"message": "flow string"}, "a field of the message is called flow"),
        ({"next_stage": "on_failure"}, "next_stage is 'on_failure', and must be the name of a stage"),
        ({"next_stage": "a.b"}, "next_stage is 'a.b'"),
        ({"queue": "a"}, "option queue: the answers go to where their flows name"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_job_with_an_invalid_argument_is_refused_before_it_starts(
    arguments: dict[str, str], text: str, spark: SparkSession
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        stage_job(price, **{"message": MESSAGE, "url": "stomp://127.0.0.1", **arguments})

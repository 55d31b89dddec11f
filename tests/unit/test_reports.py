"""Tests of reports, handled messages and rejecting sends. Source: docs/contract.md, C11.7 to C11.13."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from truenext.engine.engine import Engine
from truenext.engine.lifecycle import topic_reports
from truenext.engine.lifecycle.redelivery import restore_original
from truenext.errors import RemoteProtocolError
from truenext.model.batch import Batch
from truenext.model.commands import Ack, AckMode, Begin, Commit, Nack, Send, Subscribe
from truenext.model.destination import parse_address
from truenext.model.failure_headers import failure_destinations, stored_handlers, stored_report_destination
from truenext.model.header_lines import DEAD_LETTER_HEADERS, decode_header_lines, encode_header_lines
from truenext.model.message import SentMessage
from truenext.model.policy import ExpiryAction, Policies, Policy
from truenext.model.selector import compile_selector

REPORTED = {"truenext-report-to": "/queue/reports", "truenext-report-id": "id 7"}
FACTS = {
    "truenext-dead-letter-cause": "rejected",
    "truenext-original-destination": "/queue/a",
    "truenext-original-attempts": "1",
    "truenext-original-first-cause": "broken",
    "truenext-original-last-cause": "broken",
}


class Driver:
    """An engine, a store that is always quick, and one client."""

    def __init__(self, policies: Policies | None = None) -> None:
        self.engine = Engine(policies=policies)
        self.engine.lifespan.start()
        self.session = self.engine.commands.connect("s")
        self.batches: list[Batch] = []
        self._subscriptions: dict[str, str] = {}

    def send(
        self,
        headers: dict[str, str],
        *,
        queue: str = "a",
        body: bytes = b"body",
        persistent: bool = True,
        expires_ms: int = 0,
    ) -> None:
        lines = {"destination": f"/queue/{queue}", "content-length": str(len(body)), "flow": "f 1"} | headers
        message = SentMessage(7, persistent, expires_ms, encode_header_lines(lines), body)
        self.engine.commands.send(self.session, Send(parse_address(f"/queue/{queue}", "s"), message))

    def send_rejected(self, headers: dict[str, str], *, persistent: bool = True, expires_ms: int = 0) -> None:
        """Send a message to the queue `a` that the SEND itself rejects, in an open transaction `t`."""
        lines = {"destination": "/queue/a", "content-length": "4", "flow": "f 1"} | headers
        message = SentMessage(7, persistent, expires_ms, encode_header_lines(lines), b"body")
        send = Send(parse_address("/queue/a", "s"), message, "t", rejected_for="broken")
        self.engine.commands.send(self.session, send)

    def write(self) -> None:
        while (batch := self.engine.take_batch()) is not None:
            self.batches.append(batch)
            self.engine.store_results.on_committed(batch)

    def take(self, address: str) -> list[tuple[int, dict[str, str], SentMessage]]:
        """Return all that a consumer of this queue or topic gets now; it holds the messages."""
        if address not in self._subscriptions:
            self._subscriptions[address] = str(len(self._subscriptions))
            name = self._subscriptions[address]
            self.engine.commands.subscribe(
                self.session, Subscribe(name, parse_address(address, "s"), AckMode.INDIVIDUAL, 1000)
            )
        name = self._subscriptions[address]
        taken: list[tuple[int, dict[str, str], SentMessage]] = []
        for _ in range(3):
            self.write()
            for consumer, entries in self.engine.turn.run().deliveries.items():
                assert consumer.subscription == name, "only one has messages"
                for entry in entries:
                    assert entry.message is not None
                    taken.append((entry.sequence, decode_header_lines(entry.message.header), entry.message))
        return taken

    def take_one(self, address: str) -> tuple[int, dict[str, str], SentMessage]:
        (one,) = self.take(address)
        return one

    def reject(self, address: str, sequence: int, cause: str = "broken") -> None:
        self.engine.commands.nack(
            self.session, Nack(self._subscriptions[address], sequence, is_rejected=True, cause=cause)
        )

    def fail(self, headers: dict[str, str], *, body: bytes = b"body", persistent: bool = True) -> None:
        """Send a message to the queue `a`, and reject it."""
        self.send(headers, body=body, persistent=persistent)
        self.reject("/queue/a", self.take_one("/queue/a")[0])

    def count(self, queue: str) -> int:
        found = self.engine.queues.by_name.get(queue)
        return 0 if found is None else found.waiting_count()


def stored_in(batch: Batch) -> list[bytes]:
    return list(batch.puts.values())


@pytest.mark.parametrize("persistent", [True, False])
def test_dead_letter_sends_a_report_in_its_own_batch(persistent: bool) -> None:
    # C11.7
    driver = Driver()
    driver.fail(REPORTED | {"expires": "99999999999999"}, persistent=persistent)
    driver.write()
    written = [
        batch for batch in driver.batches if any(b"truenext-dead-letter-cause" in each for each in stored_in(batch))
    ]
    assert [len(stored_in(batch)) for batch in written] == [2], "the dead letter and its report"
    _, headers, report = driver.take_one("/queue/reports")
    assert (report.body, report.priority, report.persistent, report.expires_ms) == (b"", 7, True, 0)
    assert headers.items() >= (FACTS | {"correlation-id": "id 7", "flow": "f 1", "truenext-failure": "report"}).items()
    assert (headers["destination"], headers["content-length"]) == ("/queue/reports", "0")
    assert not headers.keys() & {"truenext-report-to", "truenext-report-id", "expires"}
    _, headers, letter = driver.take_one("/queue/DLQ.a")
    assert headers.items() >= (FACTS | REPORTED).items()
    assert letter.body == b"body"
    assert "truenext-failure" not in headers


def test_message_that_is_requeued_or_acknowledged_sends_no_report() -> None:
    # C11.7
    driver = Driver()
    driver.send(REPORTED)
    sequence, _, _ = driver.take_one("/queue/a")
    driver.engine.commands.nack(driver.session, Nack("0", sequence))
    driver.take_one("/queue/a")
    driver.engine.commands.acknowledge(driver.session, Ack("0", sequence))
    driver.write()
    assert (driver.count("reports"), driver.count("DLQ.a")) == (0, 0)


@pytest.mark.parametrize("attempts_max", [1, 3])
def test_message_is_reported_after_its_last_attempt_only(attempts_max: int) -> None:
    # C11.7
    driver = Driver(Policies(Policy(attempts_max=attempts_max, delay_ms=0)))
    driver.send(REPORTED)
    for _ in range(attempts_max):
        assert driver.count("reports") == 0
        sequence, _, _ = driver.take_one("/queue/a")
        driver.engine.commands.nack(driver.session, Nack("0", sequence))
    assert (driver.count("reports"), driver.count("DLQ.a")) == (1, 1)


def test_expiry_to_a_dead_letter_is_reported_and_any_other_is_not() -> None:
    # C11.7
    for action in ExpiryAction:
        driver = Driver(Policies(Policy(expired=action)))
        driver.send(REPORTED | {"expires": "1000"}, expires_ms=1000)
        driver.engine.state.commit_state.tick(2_000_000, 2_000_000)
        assert driver.take("/queue/a") == []
        is_letter = action is ExpiryAction.DEAD_LETTER
        assert (driver.count("reports"), driver.count("DLQ.a")) == (is_letter, is_letter)


def test_report_to_a_topic_is_copied_to_its_subscriptions_in_a_turn() -> None:
    # C11.9
    to_topic = {"truenext-report-to": "/topic/t", "truenext-report-id": "i"}
    driver = Driver()
    driver.fail(to_topic)
    driver.engine.turn.run()
    assert driver.take("/topic/t") == [], "a subscription made later gets none"
    driver.fail(to_topic)
    assert driver.engine.turn.run().deliveries == {}, "its batch is not durable"
    _, headers, report = driver.take_one("/topic/t")
    assert (headers["destination"], report.body) == ("/topic/t", b"")


@pytest.mark.parametrize("selector", ["", "flow LIKE '%a%b%c%d%'"], ids=["plain", "selector"])
def test_reports_to_a_topic_are_sent_a_slice_in_each_turn(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # C11.9
    monkeypatch.setattr(topic_reports, "DUE_COPIES_PER_STEP", 2)
    monkeypatch.setattr(topic_reports, "ROUTING_STEP_NS", 0)
    driver = Driver()
    driver.take("/queue/a")
    for number in range(5):
        flow = {"flow": "abcd" if number % 2 else "none"} if selector else {}
        driver.send({"truenext-report-to": "/topic/t", "truenext-report-id": "i"} | flow)
    taken = driver.take("/queue/a")
    subscribe = Subscribe("t", parse_address("/topic/t", "s"), AckMode.AUTO)
    subscribe.selector = compile_selector(selector) if selector else None
    driver.engine.commands.subscribe(driver.session, subscribe)
    (queue,) = (each for each in driver.engine.queues.by_name.values() if each.destination.topic)
    for sequence, _, _ in taken:
        driver.reject("/queue/a", sequence)
    counts = [queue.waiting_count()]
    while driver.engine.tasks.can_step:
        driver.engine.tasks.step_before_dispatch()
        counts.append(queue.waiting_count())
    assert counts[0] == 0 and max(after - before for before, after in pairwise(counts)) == 1
    assert counts[-1] == (2 if selector else 5)


def test_reports_to_topics_beyond_the_memory_for_them_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # C11.9
    monkeypatch.setattr(topic_reports, "TOPIC_REPORTS_BYTES_MAX", 1)
    driver = Driver()
    driver.take("/topic/t")
    driver.take("/queue/a")
    for _ in range(3):
        driver.send({"truenext-report-to": "/topic/t", "truenext-report-id": "i"})
    for sequence, _, _ in driver.take("/queue/a"):
        driver.reject("/queue/a", sequence)
    assert len(driver.take("/topic/t")) == 1
    assert driver.count("DLQ.a") == 3


def test_message_with_handlers_moves_to_one_after_the_other_with_the_facts_of_the_first_failure() -> None:
    # C11.8 to C11.10
    driver = Driver()
    driver.fail(REPORTED | {"truenext-on-failure": "/queue/h1 /queue/h2"}, persistent=False)
    sequence, headers, message = driver.take_one("/queue/h1")
    assert headers.items() >= (FACTS | {"truenext-on-failure": "/queue/h2", "truenext-failure": "handled"}).items()
    assert (headers["destination"], message.persistent, message.body, message.priority) == (
        "/queue/h1",
        True,
        b"body",
        7,
    )
    assert (driver.count("reports"), driver.count("DLQ.a")) == (0, 0)
    driver.reject("/queue/h1", sequence, "another")
    sequence, headers, _ = driver.take_one("/queue/h2")
    assert headers.items() >= (FACTS | REPORTED | {"truenext-failure": "handled"}).items()
    assert "truenext-on-failure" not in headers
    driver.reject("/queue/h2", sequence, "a third")
    _, headers, _ = driver.take_one("/queue/DLQ.h2")
    assert headers.items() >= FACTS.items()
    _, headers, report = driver.take_one("/queue/reports")
    assert headers.items() >= (FACTS | {"truenext-failure": "report", "correlation-id": "id 7"}).items()
    assert (report.body, headers["destination"]) == (b"", "/queue/reports")


def redriven(driver: Driver, queue: str) -> tuple[str, dict[str, str]]:
    """Re-drive the only dead letter in a queue. Returns the queue to which it moves, and its headers there."""
    _, _, letter = driver.take_one(f"/queue/{queue}")
    restored = restore_original(letter, 0)
    assert restored is not None
    destination, message = restored
    return destination.name, decode_header_lines(message.header)


def test_re_driven_dead_letter_keeps_the_headers_of_its_send_and_no_facts() -> None:
    # C11.11
    driver = Driver()
    driver.fail(REPORTED)
    name, headers = redriven(driver, "DLQ.a")
    assert name == "a"
    assert headers.items() >= REPORTED.items()
    assert not headers.keys() & DEAD_LETTER_HEADERS


def test_re_driven_dead_letter_of_a_handler_goes_back_there_with_the_facts() -> None:
    # C11.10
    driver = Driver()
    driver.fail({"truenext-on-failure": "/queue/h"})
    driver.reject("/queue/h", driver.take_one("/queue/h")[0], "another")
    name, headers = redriven(driver, "DLQ.h")
    assert name == "h"
    assert headers.items() >= (FACTS | {"destination": "/queue/h", "truenext-failure": "handled"}).items()


def test_report_that_fails_is_not_reported_and_goes_back_with_the_facts() -> None:
    # C11.10
    driver = Driver()
    driver.fail(REPORTED)
    driver.reject("/queue/reports", driver.take_one("/queue/reports")[0], "another")
    assert driver.count("reports") == 0
    name, headers = redriven(driver, "DLQ.reports")
    assert name == "reports"
    assert headers.items() >= (FACTS | {"correlation-id": "id 7", "truenext-failure": "report"}).items()


def test_report_in_a_durable_subscription_goes_back_to_it() -> None:
    # C11.10, C11.4
    driver = Driver()
    subscribe = Subscribe("0", parse_address("/topic/t.>", "s"), AckMode.INDIVIDUAL, 10, durable_key="me,n")
    driver.engine.commands.subscribe(driver.session, subscribe)
    driver._subscriptions["durable"] = "0"
    driver._subscriptions["/queue/a"] = "1"
    driver.engine.commands.subscribe(
        driver.session, Subscribe("1", parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, 10)
    )
    driver.fail({"truenext-report-to": "/topic/t.x", "truenext-report-id": "i"})
    sequence, _, _ = driver.take_one("durable")
    driver.reject("durable", sequence, "another")
    name, headers = redriven(driver, "DLQ.subscription.me.n")
    assert name == "subscription,me,n,t.>"
    assert headers.items() >= (FACTS | {"destination": "/topic/t.>", "truenext-failure": "report"}).items()


@pytest.mark.parametrize("queue", ["DLQ.x", "shared"])
def test_failure_headers_have_no_effect_where_a_failed_message_stays(queue: str) -> None:
    # C11.11
    driver = Driver(Policies(by_pattern={"other": Policy(dead_letters="shared")}))
    driver.send(REPORTED | {"truenext-on-failure": "/queue/h"}, queue=queue)
    driver.reject(f"/queue/{queue}", driver.take_one(f"/queue/{queue}")[0])
    assert (driver.count("reports"), driver.count("h"), driver.count(queue)) == (0, 0, 1)


@pytest.mark.parametrize(
    "headers",
    [
        {"truenext-report-to": "/temp-queue/a", "truenext-report-id": "i"},
        {"truenext-report-to": "nonsense:", "truenext-on-failure": "/queue/DLQ.a"},
        {"truenext-on-failure": " ".join(["/queue/a"] * 9)},
        {"truenext-on-failure": ""},
    ],
)
def test_headers_that_an_earlier_version_has_stored_unchecked_have_no_effect(headers: dict[str, str]) -> None:
    driver = Driver()
    driver.fail(headers)
    assert driver.count("DLQ.a") == 1
    assert sum(queue.waiting_count() for queue in driver.engine.queues.by_name.values()) == 1


# ---- Refused headers ----

QUEUE = parse_address("/queue/a", "s")
NINE = " ".join(f"/queue/h{number}" for number in range(9))


def refused_report(address: str) -> Callable[[], object]:
    return lambda: failure_destinations(QUEUE, address, "i", None)


def refused_handler(text: str) -> Callable[[], object]:
    return lambda: failure_destinations(QUEUE, None, None, text)


def refused_target(address: str) -> Callable[[], object]:
    return lambda: failure_destinations(parse_address(address, "s"), None, None, "/queue/h")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        *((refused_target(each), "to one queue") for each in ("/topic/t", "/queue/a,/queue/b", "/temp-topic/t")),
        *(
            (refused_target(each), "where failed messages stay")
            for each in ("/temp-queue/a", "/remote-temp-queue/x/a", "/queue/DLQ.a")
        ),
        (lambda: failure_destinations(QUEUE, "/queue/r", None, None), "report-to needs truenext-report-id, which is"),
        (lambda: failure_destinations(QUEUE, None, "i", None), "report-id needs truenext-report-to, which is missing"),
        (lambda: failure_destinations(QUEUE, "/queue/r", "", None), "of 0 characters; it must have 1 to 64"),
        (lambda: failure_destinations(QUEUE, "/queue/r", "i" * 65, None), "of 65 characters; it must have 1 to 64"),
        *(
            (
                refused_report(each),
                re.escape(f"truenext-report-to {each!r}: a report goes to one queue or topic"),
            )
            for each in (
                *("/queue/>", "/topic/a.*", "/queue/a,/queue/b", "/temp-queue/a", "/remote-temp-queue/x/a"),
                *("/temp-topic/a", "/remote-temp-topic/x/a", "/control/x", "/subscription/a,b"),
                *("/queue/a /queue/b", "/queue/a b", "/topic/a b", " ", "/remote-temp-queue/a", "/remote-temp-topic/a"),
            )
        ),
        *((refused_report(each), "truenext-report-to: unknown destination") for each in ("", "nonsense:")),
        (refused_handler(NINE), "truenext-on-failure names 9 queues; at most 8"),
        *(
            (refused_handler(each), "truenext-on-failure")
            for each in (
                *("", "h", "/topic/h", "/temp-queue/h", "/queue/DLQ.h", "/queue/>", "/queue/a /queue/b.*"),
                *("/queue/a  /queue/b", "/queue/a b", " /queue/a", "/queue/a,/queue/b"),
            )
        ),
        (refused_handler("/queue/"), "has no name"),
    ],
)
def test_invalid_failure_headers_are_refused_by_name(call: Callable[[], object], text: str) -> None:
    # C11.12
    with pytest.raises(RemoteProtocolError, match=text):
        call()


def test_valid_failure_headers_name_the_report_first_and_then_each_handler() -> None:
    # C11.7, C11.8
    named = failure_destinations(QUEUE, "/topic/r", "i" * 64, NINE.rpartition(" ")[0])
    assert [each.address for each in named] == ["/topic/r", *(f"/queue/h{number}" for number in range(8))]
    assert stored_handlers("/queue/h")[0].name == "h"
    report = stored_report_destination("/queue/r")
    assert report is not None and report.name == "r"


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("handlers", [{}, {"truenext-on-failure": "/queue/h1 /queue/h2"}], ids=["letter", "handled"])
@pytest.mark.parametrize("dead_letters", ["individual", "DLQ.all"])
def test_rejecting_send_makes_what_a_rejection_by_a_consumer_makes(
    persistent: bool, handlers: dict[str, str], dead_letters: str
) -> None:
    # C11.13
    policies = Policies(Policy(dead_letters=dead_letters))
    headers = REPORTED | handlers | {"expires": "99999999999999"}
    nacked, sent = Driver(policies), Driver(policies)
    nacked.send(headers, persistent=persistent, expires_ms=99999999999999)
    nacked.reject("/queue/a", nacked.take_one("/queue/a")[0])
    sent.engine.commands.begin(sent.session, Begin("t"))
    sent.send_rejected(headers, persistent=persistent, expires_ms=99999999999999)
    sent.write()
    assert [sent.count(queue) for queue in ("DLQ.a", "DLQ.all", "h1", "reports")] == [0] * 4, "not committed"
    sent.engine.commands.commit(sent.session, Commit("t"))
    found = [
        {
            queue: [
                (headers, msgspec.structs.astuple(message)) for _, headers, message in driver.take(f"/queue/{queue}")
            ]
            for queue in ("a", "DLQ.a", "DLQ.all", "h1", "reports")
        }
        for driver in (nacked, sent)
    ]
    assert found[0] == found[1]
    assert sum(map(len, found[1].values())) == (1 if handlers else 2)


def test_rejecting_send_with_a_report_to_a_topic_sends_it_at_commit() -> None:
    # C11.13
    driver = Driver()
    driver.take("/topic/t")
    driver.engine.commands.begin(driver.session, Begin("t"))
    driver.send_rejected({"truenext-report-to": "/topic/t", "truenext-report-id": "i"})
    assert driver.take("/topic/t") == []
    driver.engine.commands.commit(driver.session, Commit("t"))
    _, headers, _ = driver.take_one("/topic/t")
    assert headers.items() >= (FACTS | {"correlation-id": "i", "truenext-failure": "report"}).items()


def test_letter_of_a_rejecting_send_is_re_driven_to_its_queue() -> None:
    # C11.13, C12.2
    driver = Driver()
    driver.engine.commands.begin(driver.session, Begin("t"))
    driver.send_rejected(REPORTED, persistent=False)
    driver.engine.commands.commit(driver.session, Commit("t"))
    restored = restore_original(driver.take_one("/queue/DLQ.a")[2], 0)
    assert restored is not None
    assert (restored[0].name, restored[1].persistent, restored[1].body) == ("a", False, b"body")

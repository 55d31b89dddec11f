"""Tests of spilled subscriptions: names, lifetime, limits, and ended subscribers. More are in tests/property."""

import pytest

from tests.property import targets
from tests.property.disk import found_of
from tests.unit.test_schedule import Run
from truenext.broker.pager import read_page
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState, QueueConsumer
from truenext.engine.state.pages import PageResult
from truenext.model.answers import Receipt
from truenext.model.commands import Abort, Ack, AckMode, Begin, Commit, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import ENDED_PREFIX, parse_address
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import CONTENT_BYTES_MIN
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy
from truenext.model.record import CONTENTS_LANE_KEY, lane_key
from truenext.store.store import UndecodedMessage

LARGE = CONTENT_BYTES_MIN
WINDOW = 2


def follow(run: Run, name: str = "1", topic: str = "/topic/t", session: ConnectionState | None = None) -> QueueConsumer:
    session = session or run.session
    command = Subscribe(name, parse_address(topic, session.id), AckMode.INDIVIDUAL, WINDOW)
    run.engine.commands.subscribe(session, command)
    run.settle()
    consumer = session.consumers[name]
    assert isinstance(consumer, QueueConsumer)
    return consumer


def publish(
    run: Run, *bodies: str, size: int = LARGE, to: str = "/topic/t", persistent: bool = False, group: str = ""
) -> None:
    sender = targets.sessions(run.engine).get("sender") or run.engine.commands.connect("sender")
    for body in bodies:
        header = b"n:%b\nJMSXGroupID:%b\n" % (body.encode(), group.encode())
        message = SentMessage(4, persistent, 0, header, body.encode().ljust(size, b"."), group=group)
        run.engine.commands.send(sender, Send(parse_address(to, "sender"), message))


def spill(run: Run) -> None:
    """Spill all messages that can be spilled."""
    run.settle()
    run.engine.state.memory.limit = 0
    for _ in range(3):
        run.engine.evict()
        run.settle()
    run.engine.state.memory.limit = 1 << 40


def stored(run: Run) -> list[UndecodedMessage]:
    """Return the stored messages of all queues."""
    return [each for number in range(1, 20) for each in run.store.read_page(lane_key(number, 5), 0, 1000).messages]


def contents(run: Run) -> list[UndecodedMessage]:
    return run.store.read_page(CONTENTS_LANE_KEY, 0, 1000).messages


def receive(run: Run, consumer: BrokerConsumer) -> list[str]:
    """Acknowledge all messages as they come; return their bodies."""
    seen = []
    while consumer.held:
        entry = next(iter(consumer.held.values()))
        if entry.message is not None:
            seen.append(entry.message.body.decode().rstrip("."))
        run.engine.commands.on_all_sent(consumer.session)
        run.engine.commands.acknowledge(consumer.session, Ack(consumer.subscription, entry.sequence))
        run.settle()
    return seen


def names(run: Run) -> list[str]:
    return list(run.store._queues.values())


def test_spilled_message_is_stored_once_for_all_subscriptions_and_comes_back_in_order() -> None:
    # C6.2
    run = Run()
    consumers = [follow(run, name) for name in "abc"]
    publish(run, *"01234567")
    spill(run)
    assert run.engine.state.memory.message_bytes == 0
    assert (len(stored(run)), len(contents(run))) == (3 * 8, 8)
    # What comes while more is on disk joins it, once for all as well.
    publish(run, "8", "9")
    run.settle()
    assert (len(stored(run)), len(contents(run))) == (3 * 10, 10)
    assert [receive(run, each) for each in consumers] == [[*"23456789"]] * 3
    assert (stored(run), contents(run)) == ([], [])


def test_small_spilled_message_is_stored_for_each_subscription() -> None:
    run = Run()
    follow(run, "a")
    follow(run, "b")
    publish(run, *"01234", size=10)
    spill(run)
    assert (len(stored(run)), contents(run)) == (10, [])


def test_a_persistent_message_costs_no_write_as_long_as_there_is_memory_and_is_transient_on_disk() -> None:
    run = Run()
    consumer = follow(run)
    publish(run, *"0123", persistent=True)
    assert not run.engine.state.commit_state.has_batch
    spill(run)
    assert len(stored(run)) == 4
    receive(run, consumer)
    publish(run, *"4567", persistent=True)
    spill(run)
    assert len(stored(run)) == 4
    run.start_engine()
    assert stored(run) == [], "the run before did not end cleanly"


def test_a_message_for_durable_subscriptions_too_has_a_content_of_either_kind() -> None:
    run = Run()
    for name in "ab":
        follow(run, name)
    for name in "mn":
        command = Subscribe(name, parse_address("/topic/t", "s"), AckMode.INDIVIDUAL, WINDOW, durable_key=f"me,{name}")
        run.engine.commands.subscribe(run.session, command)
    publish(run, *"0123", persistent=True)
    spill(run)
    publish(run, "4", persistent=True)
    run.settle()
    assert (len(stored(run)), len(contents(run))) == (4 * 5, 2 * 5)
    run.start_engine()
    assert (len(stored(run)), len(contents(run))) == (2 * 5, 5), "the durable ones have it"


@pytest.mark.parametrize("is_clean", [True, False], ids=["stop", "crash"])
def test_spilled_messages_and_the_names_of_their_queues_are_gone_after_stop_and_crash(is_clean: bool) -> None:
    run = Run()
    for _ in range(3):
        follow(run, "a")
        follow(run, "b")
        publish(run, *"0123456")
        spill(run)
        assert {name.startswith(f"{ENDED_PREFIX}/s,") for name in names(run)} == {True}
        if is_clean:
            run.engine.commands.connecting.stop()
            for batch in run.engine.lifespan.final_batches():
                run.apply(batch)
            assert len(stored(run)) == 14
        run.start_engine()
        assert list(run.engine.queues.by_name.values()) == []
        assert (stored(run), contents(run)) == ([], [])
        assert names(run) == []


def test_subscription_name_may_be_reused_while_its_spilled_messages_are_removed() -> None:
    run = Run()
    for body in "abcd":
        consumer = follow(run)
        publish(run, *(f"{body}{number}" for number in range(6)))
        spill(run)
        assert receive(run, consumer)[0] == f"{body}2", "the first two lost their bodies to the disk"
        publish(run, *(f"{body}{number}" for number in range(6)))
        spill(run)
        run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.settle()
    assert (stored(run), contents(run), run.engine.state.memory.message_bytes) == ([], [], 0)
    assert names(run) == []


@pytest.mark.parametrize("end", [Commit("x"), Abort("x")])
@pytest.mark.parametrize("way", [Ack, Nack])
def test_a_transaction_may_end_after_the_subscription_whose_messages_it_has(
    end: Commit | Abort, way: type[Ack | Nack]
) -> None:
    run = Run()
    consumer = follow(run)
    publish(run, *"0123")
    spill(run)
    run.engine.commands.begin(run.session, Begin("x"))
    for sequence in list(consumer.held):
        run.engine.commands.on_all_sent(run.session)
        command = way("1", sequence, "x")
        (run.engine.commands.acknowledge if way is Ack else run.engine.commands.nack)(run.session, command)  # type: ignore[arg-type]
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.settle()
    (run.engine.commands.commit if isinstance(end, Commit) else run.engine.commands.abort)(run.session, end)  # type: ignore[arg-type]
    run.settle()
    assert (stored(run), run.engine.state.memory.message_bytes) == ([], 0)


def test_the_receipt_of_an_acknowledgement_waits_for_no_disk() -> None:
    run = Run()
    consumer = follow(run)
    publish(run, *"0123")
    spill(run)
    run.engine.commands.on_all_sent(run.session)
    run.engine.commands.acknowledge(run.session, Ack("1", next(iter(consumer.held))))
    run.engine.state.commit_state.answer(run.session, Receipt("r"))
    assert [answer for _, answer in run.engine.turn.run().answers] == [Receipt("r")]


@pytest.mark.parametrize("group", ["", "g"])
def test_a_page_that_comes_after_its_subscription_has_ended_brings_nothing_back(group: str) -> None:
    run = Run()
    consumer = follow(run)
    publish(run, *"012345", group=group)
    spill(run)
    run.engine.commands.on_all_sent(run.session)
    run.engine.commands.acknowledge(run.session, Ack("1", next(iter(consumer.held))))
    reads = run.engine.turn.run().reads
    assert reads
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    for read in reads:
        page = read_page(run.store, read)
        run.engine.store_results.on_page_read(
            read, PageResult([found_of(one) for one in page.messages], page.as_of, page.is_end)
        )
    run.settle()
    assert (list(run.engine.queues.by_name.values()), run.engine.state.memory.message_bytes, stored(run)) == ([], 0, [])
    assert not run.engine.queues.selections.by_queue and not run.engine.state.clients.receivers_by_queue


# ---- Who must go ----

SECOND_US = 1_000_000


class Waiting:
    """A run in which seconds pass, and what each socket has taken."""

    def __init__(self, *policies: tuple[str, Policy]) -> None:
        self.run = Run()
        self.run.engine.commands.administering.change_policies(Policies(by_pattern=dict(policies)))
        self.seconds = 0
        self.bytes_sent: dict[ConnectionState, int] = {}

    def after(self, seconds: int) -> str:
        """End one stalled session a second; return each with the text it is told."""
        ended = []
        for _ in range(seconds):
            self.seconds += 1
            self.run.engine.state.commit_state.tick(self.run.now_ms * 1000, self.seconds * SECOND_US)
            stalled = self.run.engine.find_stalled_connection(lambda session: self.bytes_sent.get(session, 0))
            if stalled is not None:
                ended.append(f"{stalled[0].id} {stalled[1]}")
                self.run.engine.commands.disconnect(stalled[0], is_exempt=False)
        return "\n".join(ended)

    def follower(self, name: str, topic: str = "/topic/t") -> QueueConsumer:
        return follow(self.run, topic=topic, session=self.run.engine.commands.connect(name))


def test_stalled_subscriber_is_ended_only_when_disk_space_is_short_and_the_largest_first() -> None:
    # C24.14
    driver = Waiting()
    little, much = driver.follower("little"), driver.follower("much")
    publish(driver.run, *"012345")
    spill(driver.run)
    driver.run.engine.commands.acknowledge(little.session, Ack("1", next(iter(little.held))))
    assert driver.after(100) == ""
    driver.run.engine.state.commit_state.disk_level = DiskLevel.LITTLE
    ended = driver.after(1)
    assert ended.startswith("much the client read and acknowledged nothing for 60 s")
    assert "its subscription to t:" in ended and "stalled_subscriber_ms" in ended
    assert driver.after(1).startswith("little ")
    assert much.session.id not in targets.sessions(driver.run.engine)


@pytest.mark.parametrize("does", ["takes bytes", "acknowledges", "refuses"])
def test_subscriber_that_makes_any_progress_is_not_ended(does: str) -> None:
    # C24.14
    driver = Waiting()
    consumer = driver.follower("slow")
    publish(driver.run, *map(str, range(100)))
    spill(driver.run)
    driver.run.engine.state.commit_state.disk_level = DiskLevel.NONE
    for number in range(5):
        assert driver.after(59) == ""
        if does == "takes bytes":
            driver.bytes_sent[consumer.session] = number + 1
        else:
            sequence = next(iter(consumer.held))
            if does == "acknowledges":
                driver.run.engine.commands.acknowledge(consumer.session, Ack("1", sequence))
            else:
                driver.run.engine.commands.nack(consumer.session, Nack("1", sequence))
            driver.run.engine.commands.on_all_sent(consumer.session)
            driver.run.settle()
    assert driver.after(60) == "" and driver.after(1).startswith("slow ")


def test_stall_limit_of_a_subscriber_is_that_of_the_policy_of_its_topic() -> None:
    # C24.14
    driver = Waiting(("quick", Policy(stalled_subscriber_ms=2000)), ("never", Policy(stalled_subscriber_ms=1 << 63)))
    for topic in ("quick", "never"):
        driver.follower(topic, f"/topic/{topic}")
        publish(driver.run, *"0123", to=f"/topic/{topic}")
    spill(driver.run)
    driver.run.engine.state.commit_state.disk_level = DiskLevel.LITTLE
    assert driver.after(2) == ""
    assert driver.after(1).startswith("quick the client read and acknowledged nothing for 2 s")


def test_short_memory_is_a_need_of_room_if_nothing_else_can_leave_it() -> None:
    # C24.14
    driver = Waiting()
    driver.follower("slow")
    publish(driver.run, *"0123")
    spill(driver.run)
    assert driver.after(61) == ""
    driver.run.engine.state.memory.limit = driver.run.engine.state.memory.unsent_bytes
    assert driver.after(1) == "", "only what the sockets have is in memory, and there is room for that"
    driver.run.engine.state.memory.limit -= 1
    assert driver.after(1).startswith("slow ")


def test_memory_limit_of_a_subscription_counts_spilled_messages_and_those_held_without_body() -> None:
    # C24.15
    driver = Waiting(("t", Policy(memory_limit=9000)))
    consumer = driver.follower("slow")
    publish(driver.run, *"0123")
    spill(driver.run)
    assert consumer.queue.resident_bytes == 0 and 4 * LARGE < consumer.queue.spilled_bytes < 9000
    receive(driver.run, consumer)
    assert consumer.queue.spilled_bytes == 0
    publish(driver.run, *"012345")
    spill(driver.run)
    assert driver.run.engine.evict() == {}
    publish(driver.run, "6")
    (why,) = driver.run.engine.evict().values()
    assert "the subscription to t has" in why and "memory_limit of its policy is 9000" in why


def test_a_reply_queue_does_not_leave_memory_and_ends_its_connection_when_nothing_else_can() -> None:
    # C24.16
    run = Run()
    follow(run)
    publish(run, *"0123")
    publish(run, *"0123456789", to="/remote-temp-queue/s/r")
    run.settle()
    run.engine.state.memory.limit = 1000
    assert list(run.engine.evict().values()) == ["the client does not read the messages of its temporary queues"]
    assert all(not each.spilled_bytes for each in run.engine.queues.by_name.values() if each.is_reply_queue)

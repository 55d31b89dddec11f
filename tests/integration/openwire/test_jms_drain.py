"""Tests of JMS clients at a broker that is drained, frame by frame and with the unmodified client of ActiveMQ.

Source of what is expected: docs/contract.md, C31.2 and C31.3; docs/operations.md, "Drain a broker"
"""

import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.cutting_proxy import CuttingProxy
from tests.integration.openwire.java import Programs, missing_reason
from tests.integration.openwire.test_raw_connections import NAME, JmsClient
from tests.integration.raw_client import bodies
from truenext.wire.openwire.consumers import INDIVIDUAL
from truenext.wire.openwire.structures import ConsumerId, ExceptionResponse, MessageAck, MessageDispatch

REASON = missing_reason()


@pytest.fixture
def options() -> Sequence[str]:
    return ("--listen", "openwire://127.0.0.1:0")


@pytest.fixture
def clients() -> Iterator[list[JmsClient]]:
    found: list[JmsClient] = []
    yield found
    for client in found:
        client.close()


def drain(broker: BrokerProcess) -> None:
    """Begin a drain, and do not wait for its end."""
    assert "is still being drained" in broker.truenext("drain", "--timeout", "1ms").stderr


def ack(client: JmsClient, consumer: ConsumerId, dispatch: MessageDispatch) -> None:
    assert dispatch.message is not None
    named = dispatch.message.message_id
    client.send(MessageAck(0, False, dispatch.destination, None, consumer, INDIVIDUAL, named, named, 1))


def test_jms_producer_is_refused_during_a_drain_while_others_go_on(
    own_broker: BrokerProcess, clients: list[JmsClient]
) -> None:
    # C31.2
    producer, stage, last = (JmsClient(own_broker, name=f"ID:host-1-2-3:{number}") for number in range(3))
    clients += [producer, stage, last]
    from_first, from_second = stage.consume("first"), last.consume("second")
    producer.produce("first")
    held = stage.message()
    drain(own_broker)
    producer.send_text("first", 2)
    refused = producer.next()
    assert isinstance(refused, ExceptionResponse) and refused.correlation_id == 2
    assert refused.exception is not None and refused.exception.message is not None
    assert refused.exception.class_name == "javax.jms.ResourceAllocationException"
    assert refused.exception.message.startswith("the broker is being drained (truenext drain)")
    # This connection also consumes: it may send, and gets more messages.
    stage.send_text("second", 11)
    stage.await_response(11)
    ack(stage, from_first, held)
    ack(last, from_second, last.message())
    assert own_broker.output_of("drain", "--timeout", "1m") == "Nothing is left to wait for.\n"
    assert own_broker.queues()["first"].waiting == 0
    own_broker.output_of("drain", "--undo")
    producer.send_text("first", 2)
    producer.await_response(2)
    assert stage.message().message is not None


def test_jms_client_that_connects_during_a_drain_is_refused(
    own_broker: BrokerProcess, clients: list[JmsClient]
) -> None:
    # C31.3
    clients.append(former := JmsClient(own_broker))
    former.consume("q")
    former.produce("q")
    assert former.message().redelivery_counter == 0
    drain(own_broker)
    with pytest.raises(AssertionError) as refused:
        JmsClient(own_broker, name="ID:host-1-2-3:2")
    assert "the broker is being drained: try again later" in str(refused.value)
    # A client that has lost its connection, which the broker does not know yet.
    clients.append(again := JmsClient(own_broker, name=NAME))
    consumer = again.consume("q")
    former.await_end()
    ack(again, consumer, again.message())
    assert own_broker.output_of("drain", "--timeout", "1m") == "Nothing is left to wait for.\n"
    # Now it is known: the same id is a new connection.
    again.close()
    own_broker.await_facts("q", consumers=0)
    with pytest.raises(AssertionError, match="the broker is being drained"):
        JmsClient(own_broker, name=NAME)
    own_broker.output_of("drain", "--undo")
    clients.append(JmsClient(own_broker, name=NAME))


def lines_until(program: "subprocess.Popen[str]", last: str) -> None:
    assert program.stdout is not None
    for line in program.stdout:
        if line.strip() == last:
            return
    raise AssertionError(f"the program has ended before it said {last}")


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.alternates("transacted copies of JMS clients")
@pytest.mark.timeout(300)
def test_unmodified_jms_clients_go_on_or_try_again_during_a_drain(
    own_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A program that copies in transactions goes on. One that only sends gets exceptions, and nothing while it has lost
    its connection; its client connects again after the drain. A new program gets an exception."""
    java = Programs(tmp_path_factory.mktemp("java"))
    own_broker.output_of("pause", "q.out")
    port = int(own_broker.openwire_url.rpartition(":")[2])
    programs: list[subprocess.Popen[str]] = []
    with CuttingProxy(port) as proxy:
        try:
            programs.append(
                copying := java.start("copy_through_failures", own_broker.openwire_url, "q", "2", "100", "5000")
            )
            own_broker.await_facts("q", consumers=2)
            sender_url = f"tcp://127.0.0.1:{proxy.port}"
            programs.append(sending := java.start("send_through_refusals", sender_url, "q", "300"))
            lines_until(sending, "100")
            done = own_broker.output_of("drain", "--timeout", "1m")
            count = own_broker.queues()["q.out"].waiting
            assert done == f"Nothing is left to wait for. There are still: {count} in paused queues.\n"
            lines_until(sending, "refused")
            proxy._end_connections()
            assert java.run("connect", own_broker.openwire_url, "other") == ["ResourceAllocationException"]
            assert own_broker.queues()["q.out"].waiting == count
            assert sending.poll() is None
            own_broker.output_of("drain", "--undo")
            for program in (sending, copying):
                said, _ = program.communicate(timeout=2 * PATIENCE_SECONDS)
                assert "done" in said.splitlines(), said
        finally:
            for program in programs:
                program.kill()
                program.communicate()
    own_broker.output_of("resume", "q.out")
    found = Counter(bodies(own_broker.remaining_messages("q.out")))
    assert found == Counter(f"m{number}" for number in range(300))

"""OpenWire session: the broker's side of OpenWire on one connection.

It makes commands from what a JMS client sends, and the client's frames from messages and answers (replies.py).

    consumers.py       consumers and browsers, acknowledgements, requests for messages
    recovery.py        what a client repeats that has connected again
    transactions.py    local transactions, and what they keep
    producers.py       messages
    advisories.py      temporary destinations of other connections

A client must send its WireFormatInfo in time. It may send its ConnectionInfo much later: a pool opens connections and
uses them when it needs them. Each command is answered if the client has asked for that, and refused alone.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import (
    Command,
    CreateTemporary,
    Disconnect,
    ForgetProducers,
    InvalidFrame,
    Login,
    Pause,
    ReceiptRequest,
    RemoveTemporary,
    Send,
    SendRun,
)
from truenext.model.limits import LOGIN_BYTES_MAX, NAME_LENGTH_MAX, OPENING_SECONDS_MAX
from truenext.model.loose_fields import has_half_pair
from truenext.wire.openwire import destinations
from truenext.wire.openwire.advisories import Advisories, AdvisoryBoard, are_advisories
from truenext.wire.openwire.codec import AckedRun, OpenWireDecoder, ProducedMessage, ProducedRun, RefusedMessage
from truenext.wire.openwire.consumers import Consumer, Consumers
from truenext.wire.openwire.deliveries import (
    CONNECTION_CONTROL,
    KEEP_ALIVE,
    encode_empty_array,
    encode_exception,
    encode_producer_ack,
    encode_response,
)
from truenext.wire.openwire.fields import encode_frame
from truenext.wire.openwire.handshake import INITIAL_DELAY_MS, encode_wire_format_info, negotiate
from truenext.wire.openwire.producers import Producers
from truenext.wire.openwire.recovery import Recovery
from truenext.wire.openwire.refusals import ENDED, ENDED_CLASS, foreign_id, not_supported
from truenext.wire.openwire.replies import OpenWireReplies
from truenext.wire.openwire.structures import (
    BlobMessage,
    BrokerId,
    BrokerInfo,
    ConnectionControl,
    ConnectionId,
    ConnectionInfo,
    ConsumerControl,
    ConsumerId,
    ConsumerInfo,
    ControlCommand,
    DestinationInfo,
    FlushCommand,
    KeepAliveInfo,
    MessageAck,
    MessagePull,
    ProducerId,
    ProducerInfo,
    RemoveInfo,
    RemoveSubscriptionInfo,
    Response,
    SessionId,
    SessionInfo,
    ShutdownInfo,
    Structure,
    TransactionInfo,
    WireCommand,
    WireFormatInfo,
)
from truenext.wire.openwire.transactions import RECOVER, Transactions
from truenext.wire.openwire.verdict import Verdict
from truenext.wire.protocol_detector import ProtocolDetector, detector_of_openwire_port
from truenext.wire.session import ProtocolRules

OPENWIRE_RULES = ProtocolRules(
    protocol="OpenWire",
    opening_seconds_max=OPENING_SECONDS_MAX,
    login_bytes_max=LOGIN_BYTES_MAX,
    late_opening=f"no WireFormatInfo within {OPENING_SECONDS_MAX:g} seconds",
    unchecked_login="",
    # A client on `failover:` misses the end of its socket while it repeats its login, and would wait for ever. ActiveMQ
    # gives it two seconds. After a ShutdownInfo, a client that does not close first may warn of a lost connection.
    closing_seconds=1.0,
    displaced_login="no ConnectionInfo yet, and {newer} newer connections wait to log in: start the connection at once",
    plain_text="this port speaks TLS: connect with ssl://, not with tcp://",
    missing_end="no ShutdownInfo",
    has_takeover=False,
    has_control_requests=False,
)
_Single = TypeVar("_Single", ProducedMessage, MessageAck)
_BEATS = 3
"""Number of heart-beats in the time after which a side is taken for lost."""


class OpenWireSession:
    """Broker's side of OpenWire on one connection."""

    rules = OPENWIRE_RULES

    def __init__(
        self,
        *,
        session_id: str,
        identity: str,
        server_name: str,
        on_ineffective_header: Callable[[str, str, str], None] = lambda *_: None,
        board: AdvisoryBoard | None = None,
    ) -> None:
        """`board` is that of the broker; None makes one for this connection alone."""
        self._identity = identity
        self._server_name = server_name
        self._decoder = OpenWireDecoder()
        self.pending = self._decoder.pending
        self.outgoing = bytearray()
        self._detector: ProtocolDetector | None = detector_of_openwire_port()
        self._verdict = Verdict()
        self._consumers = Consumers(identity, self._verdict)
        self._recovery = Recovery()
        self._transactions = Transactions(self._consumers, self._recovery, self._verdict)
        self._producers = Producers(self._verdict)
        self._advisories = Advisories(identity, board or AdvisoryBoard(), self.outgoing)
        self.replies = OpenWireReplies(self._consumers, self._advisories)
        self.client_id = ""
        self.last_receipt: str | None = None
        self.is_closed = False
        self.beat_check_s = 0.0
        self.silence_limit_s = 0.0
        self._connection_id = ""
        self._has_ended = False
        """True once the client has ended the connection by a command. Then only a ShutdownInfo may come."""

    @property
    def is_opening(self) -> bool:
        return not self.replies.is_negotiated

    @property
    def is_connected(self) -> bool:
        return self._decoder.is_connected

    def attach(self, on_outgoing: Callable[[], None], on_too_large: Callable[[str], None]) -> None:
        self._advisories.on_outgoing = on_outgoing
        self.replies.on_too_large = on_too_large

    def detach(self) -> None:
        self._advisories.on_outgoing = None
        self._advisories.end()
        # It refers to the connection, which would be freed late.
        self.replies.on_too_large = lambda _: None

    # ---- What the client sends ----

    def receive(self, data: bytes) -> Iterator[Command]:
        if self._detector is not None:
            opened = self._detector.receive(data)
            if opened is None:
                return
            self._detector, data = None, opened
        decoder = self._decoder
        self.last_receipt = None
        while commands := decoder.receive(data):
            for structure in commands:
                if self.is_closed:
                    return
                if isinstance(structure, ProducedRun):
                    yield from self._send_run(structure)
                    continue
                if isinstance(structure, AckedRun):
                    yield from self._acknowledge_run(structure)
                    continue
                if self._has_ended and not isinstance(structure, ShutdownInfo | KeepAliveInfo):
                    self._refuse_after_end(structure)
                    yield Pause()
                    continue
                self._verdict.is_refused = False
                try:
                    if isinstance(structure, ProducedMessage):
                        yield from self._send(structure)
                    elif isinstance(structure, RefusedMessage):
                        self.last_receipt = str(structure.command_id) if structure.response_required else None
                        raise RemoteProtocolError(structure.error, Code.LIMIT)
                    elif type(structure) is MessageAck and not structure.response_required:
                        # A shortcut: the usual acknowledgement has no answer.
                        self.last_receipt = None
                        yield from self._acknowledge(structure)
                    else:
                        yield from self._execute(structure)
                except RemoteProtocolError as error:
                    if not self._connection_id or self._recovery.has_failed:
                        raise
                    yield from self._refuse(structure, error)
            self.last_receipt = None
            if not decoder.has_more:
                break
            data = b""
        yield from self._consumers.request()

    def accept_last(self) -> None:
        pass

    def mark_refused(self) -> int:
        self._verdict.is_refused = True
        return 0

    def _execute(self, structure: Structure) -> Iterator[Command]:
        self.last_receipt = None
        if isinstance(structure, WireCommand) and structure.response_required:
            self.last_receipt = str(structure.command_id)
        if not self._connection_id:
            yield from self._open(structure)
            return
        if isinstance(structure, ShutdownInfo):
            # Without a RemoveInfo before, the connection is lost once the client closes its socket.
            self.is_closed = self._has_ended
            return
        handler = _HANDLERS.get(type(structure))
        if handler is None:
            if isinstance(structure, WireFormatInfo | ConnectionInfo):
                raise RemoteProtocolError(f"a second {_name_of(structure)} on one connection", Code.COMMAND)
            raise RemoteProtocolError(f"{_name_of(structure)} is not for clients to send", Code.COMMAND)
        verdict = self._verdict
        for command in handler(self, structure):
            verdict.is_refused = False
            yield command
            if verdict.is_refused:
                # The client's command is answered.
                self.last_receipt = None
        yield Pause() if self.last_receipt is None else ReceiptRequest(self.last_receipt)

    def _send_run(self, run: ProducedRun) -> Iterator[Command]:
        """Send messages at once, or one by one as far as the engine does not accept the run."""
        self.last_receipt = None
        if self._has_ended:
            return
        executed = 0
        target = name = None
        if len(run.messages) > 1 and run.producer_id.connection_id == self._connection_id:
            try:
                target = self._producers.target_of_run(run)
                name = self._transactions.name_of(run.transaction_id)
            except RemoteProtocolError:
                # Each is refused for itself.
                target = None
        if target is not None and name is None:
            command = SendRun(target, run.messages)
            yield command
            executed = command.executed
        elif target is not None and name is not None:
            self._recovery.note_messages(name, run.producer_id, len(run.messages))
            for message in run.messages:
                self._verdict.is_refused = False
                yield Send(target, message, name)
                if self._verdict.is_refused:
                    self._transactions.note_refusal(name)
            return
        yield from self._execute_singly(map(run.single, range(executed, len(run.messages))), self._send)

    def _acknowledge_run(self, run: AckedRun) -> Iterator[Command]:
        """Acknowledge messages at once, or one by one as far as the engine does not accept the run."""
        self.last_receipt = None
        if self._has_ended:
            return
        executed = 0
        consumer = self._consumers.find(run.consumer_id)
        if consumer is not None and not consumer.is_browser and consumer.holds(run.sequences):
            command = self._consumers.acknowledge_run(run.sequences, consumer)
            yield command
            executed = command.executed
            consumer.remove_all(run.sequences[:executed])
        yield from self._execute_singly(map(run.single, range(executed, len(run.sequences))), self._acknowledge)

    def _execute_singly(
        self, commands: Iterable[_Single], execute: Callable[[_Single], Iterator[Command]]
    ) -> Iterator[Command]:
        """Execute commands of a run one by one."""
        for command in commands:
            self._verdict.is_refused = False
            try:
                yield from execute(command)
            except RemoteProtocolError as error:
                yield from self._refuse(command, error)

    def _send(self, produced: ProducedMessage) -> Iterator[Command]:
        self.last_receipt = str(produced.command_id) if produced.response_required else None
        if not self._connection_id:
            raise _not_logged_in(produced)
        size = self._producers.acknowledged_size(produced)
        if size:
            self.outgoing += encode_producer_ack(produced.producer_id, size)
        if produced.producer_id.connection_id != self._connection_id:
            raise foreign_id("producer")
        name = None
        if produced.transaction_id is not None:
            name = self._transactions.name_of(produced.transaction_id)
            if name is not None:
                self._recovery.note_messages(name, produced.producer_id)
        send = self._producers.send(produced, name)
        yield send
        if self._verdict.is_refused:
            if name is not None:
                self._transactions.note_refusal(name)
        elif produced.response_required:
            yield ReceiptRequest(str(produced.command_id), None if send.producer is None else send)

    def _acknowledge(self, ack: MessageAck) -> Iterator[Command]:
        consumer = self._consumers.find(ack.consumer_id)
        if consumer is None:
            if not self._advisories.is_consumer(ack.consumer_id):
                raise RemoteProtocolError("acknowledgement of a consumer that is not there", Code.NOT_FOUND)
        elif consumer.is_browser:
            self._consumers.settle_shown(ack, consumer)
        else:
            name = self._transactions.name_of(ack.transaction_id)
            if name is not None and ack.ack_type:
                self._transactions.keep(ack, name, consumer)
            elif consumer.has_received:
                # Otherwise the client acknowledges what an earlier connection has got.
                yield from self._consumers.acknowledge(ack, consumer)
                return
        yield Pause()

    def _refuse(
        self, structure: Structure | ProducedMessage | RefusedMessage, error: RemoteProtocolError
    ) -> Iterator[Command]:
        """Refuse a command that the engine does not get."""
        name = self._transaction_of(structure)
        if name is not None:
            self._transactions.note_refusal(name)
        yield InvalidFrame(str(error), error.code, name)
        self.last_receipt = None

    def _refuse_after_end(self, structure: Structure | ProducedMessage | RefusedMessage) -> None:
        """Answer a command that a client sends after it has ended the connection; nothing else is done with it."""
        if isinstance(structure, WireCommand | ProducedMessage | RefusedMessage) and structure.response_required:
            self.outgoing += encode_exception(structure.command_id, ENDED_CLASS, ENDED)

    def _transaction_of(self, structure: Structure | ProducedMessage | RefusedMessage) -> str | None:
        """Return the transaction that a refusal of this command makes rollback-only."""
        transaction_id = getattr(structure, "transaction_id", None)
        if isinstance(structure, TransactionInfo) or transaction_id is None:
            return None
        try:
            return self._transactions.name_of(transaction_id)
        except RemoteProtocolError:
            return None

    # ---- Opening ----

    def _open(self, structure: Structure) -> Iterator[Command]:
        if self.is_opening:
            if not isinstance(structure, WireFormatInfo):
                raise _not_logged_in(structure)
            self._negotiate(structure)
        elif isinstance(structure, ConnectionInfo):
            yield self._log_in(structure)
        elif isinstance(structure, ShutdownInfo):
            self.is_closed = True
        elif isinstance(structure, KeepAliveInfo):
            yield from self._keep_alive(structure)
        elif not isinstance(structure, ConnectionControl):
            raise _not_logged_in(structure)

    def _negotiate(self, info: WireFormatInfo) -> None:
        agreed = negotiate(info)
        self.outgoing += encode_wire_format_info()
        self.replies.is_negotiated = True
        self.replies.frame_bytes_max = agreed.frame_bytes_max
        self.beat_check_s = agreed.keep_alive_ms / 1000 / _BEATS
        if agreed.keep_alive_ms:
            self.silence_limit_s = (agreed.keep_alive_ms + INITIAL_DELAY_MS) / 1000

    def _log_in(self, info: ConnectionInfo) -> Login:
        connection_id = (info.connection_id.value if info.connection_id is not None else None) or ""
        if not _is_connection_id(connection_id):
            raise RemoteProtocolError(
                f"connection id {connection_id[:100]!r}: it needs a colon, and may have no comma, slash or unprintable "
                "character",
                Code.LOGIN,
            )
        if has_half_pair(f"{info.user_name}\0{info.password}\0{info.client_id}"):
            raise RemoteProtocolError(
                "login refused: user name, password or client id has half of a surrogate pair: use whole characters",
                Code.LOGIN,
            )
        if info.broker_path or info.is_broker_master_connector:
            raise not_supported("networks of brokers", "connect clients only")
        # Only now may more than a login come.
        self._decoder.is_connected = True
        self.client_id = (info.client_id or "")[:NAME_LENGTH_MAX]
        self._connection_id = self._transactions.connection_id = connection_id
        self._producers.numbers_sends = info.is_fault_tolerant
        if info.is_failover_reconnect:
            self._recovery.begin()
        return Login(
            user=info.user_name or "", passcode=info.password or "", is_jms_client=True, connection_id=connection_id
        )

    def encode_connected(
        self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool, control_only: Code | None = None
    ) -> bytes:
        self.replies.connection_id = ConnectionId(self._connection_id)
        self._advisories.log_in(self._connection_id, login.user if is_checked else "")
        broker = BrokerInfo(
            broker_id=BrokerId(f"ID:truenext-{self._identity}"),
            broker_name=self._server_name,
            # Of a client that connects again, acknowledgements may not wait at the client: it dead-letters what it has
            # received before and gets again.
            is_fault_tolerant=self._producers.numbers_sends,
        )
        frames = encode_frame(broker) + CONNECTION_CONTROL
        if self.last_receipt is not None:
            frames += encode_response(int(self.last_receipt))
        return frames

    # ---- Commands ----

    def _keep_alive(self, info: KeepAliveInfo) -> Iterator[Command]:
        yield from ()
        if info.response_required:
            self.last_receipt = None
            self.outgoing += KEEP_ALIVE
        self._recovery.note_keep_alive()

    def _add_session(self, info: SessionInfo) -> Iterator[Command]:
        yield from ()
        self._check_owner(info.session_id, "session")

    def _add_producer(self, info: ProducerInfo) -> Iterator[Command]:
        self._check_owner(info.producer_id, "producer")
        yield from self._producers.add(info)
        if not self._verdict.is_refused:
            assert info.producer_id is not None, "its owner is known"
            self._recovery.note_producer(info.producer_id, info.command_id)

    def _add_consumer(self, info: ConsumerInfo) -> Iterator[Command]:
        self._check_owner(info.consumer_id, "consumer")
        if are_advisories(info.destination):
            assert info.consumer_id is not None, "its owner is known"
            self._advisories.add(info.consumer_id)
            self._recovery.note_advisory_consumer(info.prefetch_size)
        else:
            yield from self._consumers.add(info)

    def _control_consumer(self, control: ConsumerControl) -> Iterator[Command]:
        self._recovery.note_prefetch()
        self._check_owner(control.consumer_id, "consumer")
        yield from self._consumers.control(control)

    def _pull(self, pull: MessagePull) -> Iterator[Command]:
        self._check_owner(pull.consumer_id, "consumer")
        yield from self._consumers.pull(pull)

    def _control_transaction(self, info: TransactionInfo) -> Iterator[Command]:
        if info.operation == RECOVER:
            # There are no prepared transactions.
            if self.last_receipt is not None:
                self.outgoing += encode_empty_array(info.command_id)
            self.last_receipt = None
        else:
            yield from self._transactions.control(info)

    def _control_destination(self, info: DestinationInfo) -> Iterator[Command]:
        destination, name = destinations.temporary(info.destination)
        if info.operation:
            yield RemoveTemporary(destination)
            if not self._verdict.is_refused:
                self._advisories.end_own(name)
        else:
            yield CreateTemporary(destination)
            if not self._verdict.is_refused:
                self._advisories.add_own(name)

    def _remove(self, info: RemoveInfo) -> Iterator[Command]:
        """End a consumer, a producer, a session with all that it has, or the connection."""
        removed = info.object_id
        self._check_owner(removed, "removed object")
        last = info.last_delivered_sequence_id
        if isinstance(removed, ConsumerId):
            consumer = self._consumers.find(removed)
            self._advisories.remove(removed)
            if consumer is not None:
                yield from self._close([consumer], last)
        elif isinstance(removed, ProducerId):
            self._recovery.note_end_of_producer(removed)
            yield from _forget(self._producers.remove(removed))
        elif isinstance(removed, SessionId):
            self._recovery.note_end_of_session(removed.value)
            yield from self._close(self._consumers.of_session(removed.value), last)
            yield from _forget(self._producers.remove_all(removed.value))
        else:
            yield Disconnect(self._producers.remove_all(), last if last >= 0 else None)
            self._has_ended = True
            self._consumers.forget_all()
            self._advisories.end()

    def _close(self, consumers: list[Consumer], last_delivered: int) -> Iterator[Command]:
        yield from self._transactions.take_over(consumers)
        yield from self._consumers.close(consumers, last_delivered)

    def _check_owner(self, object_id: ConnectionId | SessionId | ConsumerId | ProducerId | None, what: str) -> None:
        """Raise RemoteProtocolError if the client names an object of another connection."""
        owner = None
        if object_id is not None:
            owner = object_id.value if isinstance(object_id, ConnectionId) else object_id.connection_id
        if owner != self._connection_id:
            raise foreign_id(what)


def _is_connection_id(text: str) -> bool:
    """Return whether a text may be the id of a connection, which becomes a part of addresses. Ids of STOMP clients'
    connections have no colon."""
    return (
        ":" in text
        and len(text) <= NAME_LENGTH_MAX
        and text.isprintable()
        and not any(each in text for each in ",/*>?")
    )


def _forget(names: list[str]) -> Iterator[Command]:
    if names:
        yield ForgetProducers(names)


def _ignore(_: OpenWireSession, structure: Structure) -> Iterator[Command]:
    yield from ()


def _refuse_feature(_: OpenWireSession, structure: Structure) -> Iterator[Command]:
    yield from ()
    raise not_supported(*_REFUSED[type(structure)])


# The methods of a session, as a session that refers to its own methods is freed late.
_HANDLERS: dict[type[Structure], Callable[[OpenWireSession, Any], Iterator[Command]]] = {
    SessionInfo: OpenWireSession._add_session,
    ProducerInfo: OpenWireSession._add_producer,
    ConsumerInfo: OpenWireSession._add_consumer,
    MessageAck: OpenWireSession._acknowledge,
    MessagePull: OpenWireSession._pull,
    ConsumerControl: OpenWireSession._control_consumer,
    TransactionInfo: OpenWireSession._control_transaction,
    DestinationInfo: OpenWireSession._control_destination,
    RemoveInfo: OpenWireSession._remove,
    KeepAliveInfo: OpenWireSession._keep_alive,
    **dict.fromkeys((ConnectionControl, FlushCommand, Response), _ignore),
    **dict.fromkeys((BrokerInfo, ControlCommand, RemoveSubscriptionInfo, BlobMessage), _refuse_feature),
}
_REFUSED: dict[type[Structure], tuple[str, str]] = {
    BrokerInfo: ("networks of brokers", "connect clients only"),
    ControlCommand: ("ControlCommand", "use the command truenext"),
    RemoveSubscriptionInfo: ("durable subscriptions", "consume from a queue"),
    BlobMessage: ("BlobMessages", "send the content as a BytesMessage"),
}


def _name_of(structure: object) -> str:
    """Return the name of a command, as the protocol has it if the class has another one."""
    if isinstance(structure, ProducedMessage):
        return "message"
    return type(structure).__name__.replace("ConnectionErrorInfo", "ConnectionError")


def _not_logged_in(structure: object) -> RemoteProtocolError:
    return RemoteProtocolError(f"{_name_of(structure)} of OpenWire before ConnectionInfo", Code.MALFORMED_FRAME)

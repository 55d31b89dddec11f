"""JMS client for tests of the OpenWire session, whose commands an engine of the test accepts or refuses."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from truenext.errors import Code, RemoteProtocolError
from truenext.model.answers import ErrorAnswer, Receipt
from truenext.model.commands import AckRun, Command, Credit, InvalidFrame, Login, Pause, ReceiptRequest, SendRun
from truenext.model.loose_fields import FieldReader, Tag, TypedValue, encode_map
from truenext.model.message import SentMessage
from truenext.wire.openwire.advisories import AdvisoryBoard
from truenext.wire.openwire.fields import decode_structure, encode_frame
from truenext.wire.openwire.session import OpenWireSession
from truenext.wire.openwire.structures import (
    ConnectionId,
    ConnectionInfo,
    ConsumerId,
    ConsumerInfo,
    LocalTransactionId,
    MessageAck,
    MessageId,
    ProducerId,
    QueueName,
    Structure,
    TransactionInfo,
    WireFormatInfo,
)

CONNECTION = "ID:host-1-2-3:1"
QUEUE = QueueName("q")


class Delivered(NamedTuple):
    """Dispatch of a message."""

    sequence: int
    message: SentMessage = SentMessage(4, True, 0, b"destination:/queue/q\n", b"body")
    redelivery_count: int = 0
    is_first_of_group: bool = False
    deliveries: int = 1
    was_never_started: bool = False
    attempts: int = 0
    was_lost: bool = False
    causes: None = None
    address: str = "/queue/q"


class Client:
    def __init__(
        self,
        *,
        connection: str = CONNECTION,
        board: AdvisoryBoard | None = None,
        logs_in: bool = True,
        user: str = "",
        is_reconnect: bool = False,
        frame_bytes_max: int = 0,
    ) -> None:
        """`frame_bytes_max` is that of the client; 0 names none."""
        self.session = OpenWireSession(session_id="s", identity="b1", server_name="x", board=board)
        self.reports: list[str] = []
        """Texts about messages that are too large for the client."""
        self.session.attach(self.take_outgoing, self.reports.append)
        self.connection = connection
        self.user = user
        self.commands: list[Command] = []
        """Commands of the session since the last call of `take_commands`, without pauses and requests for receipts."""
        self.answers: list[Structure] = []
        """Frames of the session since the last call of `take_answers`."""
        self.refuses: Callable[[Command], bool] = lambda _: False
        """Function that says which commands the engine refuses."""
        self.executes_runs = True
        self.number = 0
        self.write(wire_format_info(frame_bytes_max))
        if logs_in:
            self.send(
                ConnectionInfo(
                    1,
                    True,
                    ConnectionId(connection),
                    user_name=user,
                    is_fault_tolerant=True,
                    is_failover_reconnect=is_reconnect,
                )
            )
        self.take_commands()
        self.take_answers()

    # ---- Bytes ----

    def send(self, *structures: Structure) -> None:
        self.write(b"".join(map(encode_frame, structures)))

    def write(self, data: bytes) -> None:
        for command in self.session.receive(data):
            self.execute(command)
        self.take_outgoing()

    def execute(self, command: Command) -> None:
        session = self.session
        if isinstance(command, ReceiptRequest):
            self.read(session.replies.encode_receipt(Receipt(command.receipt)))
            return
        if isinstance(command, Pause):
            return
        if isinstance(command, InvalidFrame):
            self.refuse(command.reason, command.code)
        elif self.refuses(command):
            if isinstance(command, Login):
                raise RemoteProtocolError("wrong", Code.LOGIN)
            self.refuse("refused by the engine", Code.LIMIT)
            return
        elif isinstance(command, Login):
            self.read(session.encode_connected(command, "", is_takeover=False, is_checked=self.user != ""))
        elif isinstance(command, AckRun | SendRun) and self.executes_runs:
            command.executed = len(command)
        self.commands.append(command)

    def refuse(self, reason: str, code: Code) -> None:
        self.session.mark_refused()
        self.read(self.session.replies.encode_fault(ErrorAnswer(reason, code, reason, self.session.last_receipt)))

    def take_outgoing(self) -> None:
        outgoing = bytes(self.session.outgoing)
        self.session.outgoing.clear()
        self.read(outgoing)

    def read(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            self.answers.append(decode_structure(FieldReader(data[at + 4 : at + 4 + size])))
            at += 4 + size

    # ---- What has come ----

    def take_commands(self) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def take_answers(self) -> list[Structure]:
        answers, self.answers = self.answers, []
        return answers

    def credit(self) -> int:
        """Return how many messages were requested since the last call of `take_commands`; there is no other command."""
        commands = self.take_commands()
        assert all(isinstance(command, Credit) for command in commands), commands
        return sum(command.messages for command in commands if isinstance(command, Credit))

    # ---- Commands ----

    def consumer_id(self, value: int = 1, session: int = 1) -> ConsumerId:
        return ConsumerId(self.connection, session, value)

    def consume(self, prefetch: int = 10, *, value: int = 1, session: int = 1, **options: Any) -> None:
        consumer_id = self.consumer_id(value, session)
        options.setdefault("destination", QUEUE)
        self.send(ConsumerInfo(5, True, consumer_id, prefetch_size=prefetch, **options))
        self.take_commands()
        self.take_answers()

    def deliver(self, *sequences: int, subscription: str = "1:1", **options: Any) -> None:
        parts: list[bytes] = []
        self.session.replies.encode_deliveries(subscription, [Delivered(each, **options) for each in sequences], parts)
        assert len(parts) == len(sequences)
        self.read(b"".join(parts))

    def ack(self, kind: int, first: int | None, last: int, count: int = 1, **options: Any) -> None:
        transaction = options.pop("transaction", None)
        self.send(
            MessageAck(
                9,
                options.pop("response_required", False),
                QUEUE,
                None if transaction is None else self.transaction(transaction),
                options.pop("consumer_id", self.consumer_id()),
                kind,
                None if first is None else message_id(first),
                message_id(last),
                count,
                **options,
            )
        )

    def transaction(self, value: int = 1) -> LocalTransactionId:
        return LocalTransactionId(value, ConnectionId(self.connection))

    def control(self, operation: int, value: int = 1, *, response_required: bool = True) -> None:
        self.send(
            TransactionInfo(8, response_required, ConnectionId(self.connection), self.transaction(value), operation)
        )


def wire_format_info(frame_bytes_max: int) -> bytes:
    """Return the first frame of a client. `frame_bytes_max` 0 names none."""
    size = {"MaxFrameSize": TypedValue(Tag.LONG, frame_bytes_max)} if frame_bytes_max else {}
    return encode_frame(WireFormatInfo(12, encode_map(size)))


def message_id(sequence: int) -> MessageId:
    return MessageId(None, ProducerId("ID:other-1:1", 1, 1), sequence, sequence)


def refusals(answers: Sequence[Structure]) -> list[tuple[str, str]]:
    """Return class and text of the exceptions among answers."""
    return [
        (exception.class_name, exception.message)
        for answer in answers
        if (exception := getattr(answer, "exception", None)) is not None
    ]

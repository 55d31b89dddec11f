"""Advisories of temporary destinations: what the broker tells JMS clients of those of other connections.

A client sends to a temporary destination of another connection only once an advisory has told it. ActiveMQ tells each
client of all of them. Their names can be guessed, so here a client is told just before it gets a message with that
reply-to. All connections of its process are told at once, as a program may send its reply through another one; their
later connections are told when they subscribe to the advisories. The process of the owner is told from the start.
"""

from collections.abc import Callable
from typing import NamedTuple

from truenext.errors import Code, RemoteProtocolError
from truenext.model.header_lines import decode_header_lines
from truenext.model.limits import ADVISORY_CONSUMERS_MAX, NAME_LENGTH_MAX
from truenext.model.message import OPENWIRE_FORM, SentMessage
from truenext.model.openwire_message import (
    TEMPORARY_QUEUE,
    TEMPORARY_TOPIC,
    PhysicalName,
    has_reply_to,
    physical_name,
    reply_to_name,
)
from truenext.wire.openwire.deliveries import encode_advisory
from truenext.wire.openwire.destinations import ADVISORY_PREFIX
from truenext.wire.openwire.structures import (
    ConnectionId,
    ConsumerId,
    DestinationInfo,
    PhysicalDestination,
    ProducerId,
    TemporaryQueueName,
    TemporaryTopicName,
    TopicName,
)

ANNOUNCED_MAX = 1000
ALL_ANNOUNCED_MAX = 100 * ANNOUNCED_MAX
"""Numbers of temporary destinations that one process, and all of them, are remembered to have been told. A process may
be told twice."""
_NAME_LENGTH_MAX = 2 * NAME_LENGTH_MAX
"""Characters of the longest name that is told: no destination has a longer one."""
_TOPICS = {f"{ADVISORY_PREFIX}TempQueue", f"{ADVISORY_PREFIX}TempTopic"}
_REMOTE_PREFIX = b"/remote-temp-"


class Process(NamedTuple):
    """Process of a client, as far as the broker can tell: connections of one user, whose ids differ in their ends
    only."""

    user: str
    id_start: str

    @classmethod
    def of(cls, user: str, connection_id: str) -> "Process":
        return cls(user, connection_id.rpartition("-")[0])


class AdvisoryBoard:
    """Temporary destinations that each process was told, on all connections of one broker."""

    def __init__(self) -> None:
        self._members: dict[Process, dict[Advisories, None]] = {}
        """Connections of each process that get advisories."""
        self._announced: dict[Process, dict[PhysicalName, None]] = {}
        """Temporary destinations that each process was told, the oldest first."""
        self._ended: dict[PhysicalName, list[Process]] = {}
        """Processes that were told of the end of a temporary destination, the oldest end first."""
        self._announced_count = 0
        self._owned: dict[Process, dict[PhysicalName, None]] = {}
        """Temporary destinations that each process has made."""

    def add_own(self, process: Process, name: PhysicalName) -> None:
        """Add a temporary destination that a process has made."""
        self._owned.setdefault(process, {})[name] = None

    def remove_own(self, process: Process, name: PhysicalName) -> None:
        owned = self._owned[process]
        del owned[name]
        if not owned:
            del self._owned[process]

    def add(self, process: Process, advisories: "Advisories") -> None:
        """Add a connection, and tell it what its process was told, or has made itself."""
        self._members.setdefault(process, {})[advisories] = None
        if process not in self._announced:
            announced = self._announced[process] = {}
            for name in self._owned.get(process, ()):
                self._remember(announced, name)
        for name in self._announced[process]:
            advisories.outgoing += advisories.encode(name)

    def remove(self, process: Process, advisories: "Advisories") -> None:
        """Remove a connection. What its process was told is forgotten with its last connection."""
        members = self._members.get(process)
        if members is not None:
            members.pop(advisories, None)
            if not members:
                self._announced_count -= len(self._announced.pop(process))
                del self._members[process]

    def announce(self, process: Process, announcer: "Advisories", name: PhysicalName) -> bytes:
        """Tell a process of a temporary destination, if it was not told before. Returns the frames for `announcer`; the
        frames for other connections are sent at once."""
        announced = self._announced.get(process)
        if announced is None or name in announced:
            return b""
        self._remember(announced, name)
        for member in list(self._members[process]):
            if member is not announcer:
                member.send(member.encode(name))
        return announcer.encode(name)

    def end(self, name: PhysicalName) -> None:
        """Tell of the end of a temporary destination, wherever it was told."""
        processes = [process for process, announced in self._announced.items() if name in announced]
        for process in processes:
            del self._announced[process][name]
            self._announced_count -= 1
            self._send(process, name, is_removed=True)
        if processes:
            self._ended[name] = processes
            if len(self._ended) > ANNOUNCED_MAX:
                del self._ended[next(iter(self._ended))]

    def begin_again(self, name: PhysicalName) -> None:
        """Tell of a temporary destination that its client has made again on a new connection, wherever its end was
        told: an answer may still be on its way."""
        for process in self._ended.pop(name, ()):
            announced = self._announced.get(process)
            if announced is not None and name not in announced:
                self._remember(announced, name)
                self._send(process, name)

    def _remember(self, announced: dict[PhysicalName, None], name: PhysicalName) -> None:
        """Remember that a process was told, in place of its oldest name or, if it has none, of another's."""
        if len(announced) >= ANNOUNCED_MAX or self._announced_count >= ALL_ANNOUNCED_MAX:
            names = announced or next(each for each in self._announced.values() if each)
            del names[next(iter(names))]
            self._announced_count -= 1
        announced[name] = None
        self._announced_count += 1

    def _send(self, process: Process, name: PhysicalName, *, is_removed: bool = False) -> None:
        for member in list(self._members[process]):
            member.send(member.encode(name, is_removed=is_removed))


class Advisories:
    """Advisory consumers of one connection, and its temporary destinations."""

    def __init__(self, identity: str, board: AdvisoryBoard, outgoing: bytearray) -> None:
        """`outgoing` are the bytes that the session sends on its own."""
        self._producer_id = ProducerId(f"ID:truenext-{identity}", 0, -1)
        self._board = board
        self.outgoing = outgoing
        self._consumers: dict[ConsumerId, None] = {}
        self._own: dict[PhysicalName, None] = {}
        """Temporary destinations of this connection."""
        self._number = 0
        self._connection_id = ""
        self._process = Process("", "")
        self.on_outgoing: Callable[[], None] | None = None
        """Function that sends `outgoing`; None if the connection has ended."""

    def log_in(self, connection_id: str, user: str) -> None:
        self._connection_id = connection_id
        self._process = Process.of(user, connection_id)

    @property
    def has_consumers(self) -> bool:
        return bool(self._consumers)

    def is_consumer(self, consumer_id: ConsumerId | None) -> bool:
        return consumer_id in self._consumers

    def add(self, consumer_id: ConsumerId) -> None:
        """Add an advisory consumer.

        Raises: RemoteProtocolError if there are too many
        """
        if len(self._consumers) >= ADVISORY_CONSUMERS_MAX:
            raise RemoteProtocolError(
                f"this connection has {ADVISORY_CONSUMERS_MAX} consumers of advisories, the most allowed: close some",
                Code.LIMIT,
            )
        self._consumers[consumer_id] = None
        self._board.add(self._process, self)

    def remove(self, consumer_id: ConsumerId) -> None:
        """Remove an advisory consumer, if it is one."""
        if self._consumers.pop(consumer_id, 0) is None and not self._consumers:
            self._board.remove(self._process, self)

    def add_own(self, name: PhysicalName) -> None:
        """Add a temporary destination of this connection. The other connections of its process are told now: the client
        may ask and answer on two of them, and would read the message on one before the advisory on the other."""
        if name not in self._own:
            self._own[name] = None
            self._board.add_own(self._process, name)
            self._board.begin_again(name)
            self._board.announce(self._process, self, name)

    def end_own(self, name: PhysicalName) -> None:
        """Tell of the end of a temporary destination of this connection."""
        if self._own.pop(name, 0) is None:
            self._board.remove_own(self._process, name)
            self._board.end(name)

    def end(self) -> None:
        """Tell of the end of this connection."""
        if self._consumers:
            self._consumers.clear()
            self._board.remove(self._process, self)
        for name in list(self._own):
            self.end_own(name)

    def announce_reply_to(self, message: SentMessage) -> bytes:
        """Return the frames that must come before a message, if its reply-to is a temporary destination that the client
        was not told yet."""
        if message.form == OPENWIRE_FORM and not has_reply_to(message):
            # A shortcut: most messages have none.
            return b""
        name = _temporary_reply_to(message)
        return b"" if name is None else self._board.announce(self._process, self, name)

    def encode(self, name: PhysicalName, *, is_removed: bool = False) -> bytes:
        """Return the frames that tell the client of a temporary destination, or of its end. The owner of a destination
        needs none."""
        owner = name.name.rpartition(":")[0]
        if owner == self._connection_id:
            return b""
        kind = TemporaryQueueName if name.type == TEMPORARY_QUEUE else TemporaryTopicName
        info = DestinationInfo(
            connection_id=ConnectionId(owner), destination=kind(name.name), operation=1 if is_removed else 0
        )
        frames = []
        for consumer_id in self._consumers:
            self._number += 1
            frames.append(encode_advisory(consumer_id, self._producer_id, self._number, info))
        return b"".join(frames)

    def send(self, frames: bytes) -> None:
        """Send frames that another connection has caused."""
        if frames and self.on_outgoing is not None:
            self.outgoing += frames
            self.on_outgoing()


def are_advisories(destination: PhysicalDestination | None) -> bool:
    """Return whether a consumer's destination names only advisories of temporary destinations."""
    if not isinstance(destination, TopicName) or destination.name is None:
        return False
    return all(part.strip().removeprefix("topic://") in _TOPICS for part in destination.name.split(","))


def _temporary_reply_to(message: SentMessage) -> PhysicalName | None:
    """Return the reply-to of a message of either form if it is a temporary destination; else None."""
    reply_to = None
    if message.form == OPENWIRE_FORM:
        reply_to = reply_to_name(message)
    elif _REMOTE_PREFIX in message.header:
        reply_to = physical_name(decode_header_lines(message.header).get("reply-to", ""))
    if reply_to is None or reply_to.type not in (TEMPORARY_QUEUE, TEMPORARY_TOPIC):
        return None
    return reply_to if len(reply_to.name) <= _NAME_LENGTH_MAX else None

"""Advisories of temporary destinations: what the broker tells JMS clients of those of other connections.

A client sends to a temporary destination of another connection only once an advisory has told it. ActiveMQ tells each
client of all of them. Their names can be guessed, so here a client is told just before it gets a message with that
reply-to. All connections of its process are told at once, as a program may send its reply through another one; their
later connections are told when they subscribe to the advisories. The process of the owner is told from the start.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from truenext.errors import Code, RemoteProtocolError
from truenext.model.forms import may_name_temporary, reply_to_name
from truenext.model.limits import ADVISORY_CONSUMERS_MAX, NAME_LENGTH_MAX
from truenext.model.message import SentMessage
from truenext.model.openwire_message import TEMPORARY_QUEUE, TEMPORARY_TOPIC, PhysicalName
from truenext.wire.openwire.deliveries import ADVISORY_TOPICS, AdvisoryEncoder
from truenext.wire.openwire.fields import encode_nested
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
from truenext.wire.session import Delivery

ANNOUNCED_MAX = 1000
ALL_ANNOUNCED_MAX = 100 * ANNOUNCED_MAX
"""Most temporary destinations that the broker remembers to have told one process, and all processes together. A process
may be told twice of one that is forgotten."""
_NAME_LENGTH_MAX = 2 * NAME_LENGTH_MAX
"""Characters of the longest name that is told: no destination has a longer one."""


class Process(NamedTuple):
    """Process of a client, as far as the broker can tell: connections of one user, whose ids differ in their ends
    only."""

    user: str
    id_start: str

    @classmethod
    def of(cls, user: str, connection_id: str) -> "Process":
        return cls(user, connection_id.rpartition("-")[0])


class _Advisory(NamedTuple):
    """Command that tells of a temporary destination, or of its end."""

    owner: str
    """Id of the connection that the destination belongs to."""
    is_topic: bool
    encoded: bytes


class AdvisoryBoard:
    """Temporary destinations that each process was told, on all connections of one broker."""

    def __init__(self) -> None:
        self._members: dict[Process, dict[Advisories, None]] = {}
        """Connections of each process that get advisories."""
        self._announced: dict[Process, dict[PhysicalName, None]] = {}
        """Temporary destinations that each process was told, the oldest first."""
        self._processes: dict[PhysicalName, dict[Process, None]] = {}
        """Processes that were told of a temporary destination."""
        self._ended: dict[PhysicalName, tuple[Process, ...]] = {}
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

    def add(self, process: Process, advisories: "Advisories") -> Iterable[PhysicalName]:
        """Add a connection. Returns what its process was told, or has made itself."""
        self._members.setdefault(process, {})[advisories] = None
        if process not in self._announced:
            self._announced[process] = {}
            newest = list(islice(reversed(self._owned.get(process, {})), ANNOUNCED_MAX))
            for name in reversed(newest):
                self._remember(process, name)
        return self._announced[process]

    def remove(self, process: Process, advisories: "Advisories") -> None:
        """Remove a connection. What its process was told is forgotten with its last connection."""
        members = self._members.get(process)
        if members is not None:
            members.pop(advisories, None)
            if not members:
                for name in list(self._announced[process]):
                    self._forget(process, name)
                del self._announced[process], self._members[process]

    def announce(self, process: Process, names: Iterable[PhysicalName]) -> None:
        """Tell a process of temporary destinations, apart from those that it was told before."""
        announced = self._announced.get(process)
        if announced is None:
            return
        new = dict.fromkeys(name for name in names if name not in announced)
        if new:
            for name in new:
                self._remember(process, name)
            self._send(process, list(map(_advisory, new)))

    def end(self, names: Iterable[PhysicalName]) -> None:
        """Tell of the ends of temporary destinations, wherever they were told."""
        ends: dict[Process, list[_Advisory]] = {}
        for name in names:
            processes = tuple(self._processes.get(name, ()))
            if processes:
                self._ended[name] = processes
                if len(self._ended) > ANNOUNCED_MAX:
                    del self._ended[next(iter(self._ended))]
                end = _advisory(name, is_removed=True)
                for process in processes:
                    self._forget(process, name)
                    ends.setdefault(process, []).append(end)
        for process, advisories in ends.items():
            self._send(process, advisories)

    def begin_again(self, name: PhysicalName) -> None:
        """Tell of a temporary destination that its client has made again on a new connection, wherever its end was
        told: an answer may still be on its way."""
        for process in self._ended.pop(name, ()):
            self.announce(process, (name,))

    def _remember(self, process: Process, name: PhysicalName) -> None:
        """Remember that a process was told, in place of its oldest name or, if it has none, of another's."""
        announced = self._announced[process]
        if len(announced) >= ANNOUNCED_MAX or self._announced_count >= ALL_ANNOUNCED_MAX:
            other = process if announced else next(each for each, names in self._announced.items() if names)
            self._forget(other, next(iter(self._announced[other])))
        announced[name] = None
        self._processes.setdefault(name, {})[process] = None
        self._announced_count += 1

    def _forget(self, process: Process, name: PhysicalName) -> None:
        del self._announced[process][name]
        processes = self._processes[name]
        del processes[process]
        if not processes:
            del self._processes[name]
        self._announced_count -= 1

    def _send(self, process: Process, advisories: list[_Advisory]) -> None:
        # Connections may end meanwhile.
        for member in list(self._members.get(process, ())):
            member.send(advisories)


class Advisories:
    """Advisory consumers of one connection, and its temporary destinations."""

    def __init__(self, identity: str, board: AdvisoryBoard, outgoing: bytearray) -> None:
        """`outgoing` are the bytes that the session sends on its own."""
        self._producer_id = ProducerId(f"ID:truenext-{identity}", 0, -1)
        self._board = board
        self._outgoing = outgoing
        self._encoders: dict[ConsumerId, AdvisoryEncoder] = {}
        """Encoder of each advisory consumer."""
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

    def is_consumer(self, consumer_id: ConsumerId | None) -> bool:
        return consumer_id in self._encoders

    def add(self, consumer_id: ConsumerId) -> None:
        """Add an advisory consumer, and tell it what its process was told. Nothing happens if there is one with this
        id.

        Raises: RemoteProtocolError if there are too many
        """
        if consumer_id in self._encoders:
            return
        if len(self._encoders) >= ADVISORY_CONSUMERS_MAX:
            raise RemoteProtocolError(
                f"this connection has {ADVISORY_CONSUMERS_MAX} consumers of advisories, the most allowed: close some",
                Code.LIMIT,
            )
        encoder = self._encoders[consumer_id] = AdvisoryEncoder(consumer_id, self._producer_id)
        known = self._board.add(self._process, self)
        self._outgoing += self._encode([encoder], map(_advisory, known))

    def remove(self, consumer_id: ConsumerId) -> None:
        """Remove an advisory consumer, if it is one."""
        if self._encoders.pop(consumer_id, None) is not None and not self._encoders:
            self._board.remove(self._process, self)

    def add_own(self, name: PhysicalName) -> None:
        """Add a temporary destination of this connection. The other connections of its process are told now: the client
        may ask and answer on two of them, and would read the message on one before the advisory on the other."""
        if name not in self._own:
            self._own[name] = None
            self._board.add_own(self._process, name)
            self._board.begin_again(name)
            self._board.announce(self._process, (name,))

    def end_own(self, name: PhysicalName) -> None:
        """Tell of the end of a temporary destination of this connection."""
        if name in self._own:
            self._end_own([name])

    def end(self) -> None:
        """Tell of the end of this connection."""
        if self._encoders:
            self._encoders.clear()
            self._board.remove(self._process, self)
        self._end_own(list(self._own))

    def _end_own(self, names: list[PhysicalName]) -> None:
        for name in names:
            del self._own[name]
            self._board.remove_own(self._process, name)
        self._board.end(names)

    def announce_reply_to(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the client of the temporary destinations that messages have as reply-to, unless it was told before. This
        is sent at once, before the messages, and not with them: a message that is cancelled before it is sent may be
        dispatched to the client again."""
        if not self._encoders:
            return
        names: list[PhysicalName] = []
        for delivery in deliveries:
            message = delivery.message
            # Most messages have none.
            if message is not None and may_name_temporary(message):
                name = _temporary_reply_to(message)
                if name is not None:
                    names.append(name)
        if names:
            self._board.announce(self._process, names)

    def send(self, advisories: list[_Advisory]) -> None:
        """Send advisories at once, if the connection has not ended."""
        if self.on_outgoing is not None:
            frames = self._encode(self._encoders.values(), advisories)
            if frames:
                self._outgoing += frames
                self.on_outgoing()

    def _encode(self, encoders: Collection[AdvisoryEncoder], advisories: Iterable[_Advisory]) -> bytes:
        """Return the frames of advisories to consumers. The owner of a temporary destination needs none."""
        frames: list[bytes] = []
        for advisory in advisories:
            if advisory.owner != self._connection_id:
                for encoder in encoders:
                    self._number += 1
                    frames.append(encoder.encode(self._number, advisory.encoded, is_topic=advisory.is_topic))
        return b"".join(frames)


def are_advisories(destination: PhysicalDestination | None) -> bool:
    """Return whether a consumer's destination names only advisories of temporary destinations."""
    if not isinstance(destination, TopicName) or destination.name is None:
        return False
    return all(part.strip().removeprefix("topic://") in ADVISORY_TOPICS for part in destination.name.split(","))


def _advisory(name: PhysicalName, *, is_removed: bool = False) -> _Advisory:
    owner = name.name.rpartition(":")[0]
    is_topic = name.type == TEMPORARY_TOPIC
    destination = TemporaryTopicName(name.name) if is_topic else TemporaryQueueName(name.name)
    info = DestinationInfo(connection_id=ConnectionId(owner), destination=destination, operation=int(is_removed))
    return _Advisory(owner, is_topic, encode_nested(info))


def _temporary_reply_to(message: SentMessage) -> PhysicalName | None:
    """Return the reply-to of a message if it is a temporary destination; else None."""
    name = reply_to_name(message)
    if name is None or name.type not in (TEMPORARY_QUEUE, TEMPORARY_TOPIC):
        return None
    return name if len(name.name) <= _NAME_LENGTH_MAX else None

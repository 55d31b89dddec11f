"""Producers of one JMS client: makes commands of their messages.

A persistent message outside a transaction has a number if the client is on `failover:`, which may send it again
(C26.10).
"""

from collections.abc import Iterator

from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Command, OpenProducer, Send
from truenext.model.destination import Destination
from truenext.model.header_lines import SCHEDULE_PREFIX
from truenext.model.limits import JMS_PRODUCERS_MAX
from truenext.model.openwire_message import properties_of, window_bytes
from truenext.wire.openwire.codec import SCHEDULE, ProducedMessage, ProducedRun
from truenext.wire.openwire.destinations import Destinations
from truenext.wire.openwire.refusals import not_supported
from truenext.wire.openwire.structures import ProducerId, ProducerInfo
from truenext.wire.openwire.verdict import Verdict


class Producers:
    """Producers of one connection."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._destinations = Destinations()
        self._windows: dict[ProducerId, int] = {}
        """Window of each producer, in bytes; 0 is none."""
        self.numbers_sends = False
        """True if persistent messages have numbers."""

    def add(self, info: ProducerInfo) -> Iterator[Command]:
        """Add a producer. Nothing happens if there is one with this id.

        Raises: RemoteProtocolError if JMS clients cannot send to its destination, or there are too many producers
        """
        assert info.producer_id is not None, "the session checks ids"
        if info.producer_id in self._windows:
            return
        if len(self._windows) >= JMS_PRODUCERS_MAX:
            raise RemoteProtocolError(
                f"this connection has {JMS_PRODUCERS_MAX} producers, the most allowed: close some", Code.LIMIT
            )
        if info.destination is not None:
            yield OpenProducer(self._destinations.target(info.destination))
            if self._verdict.is_refused:
                return
        self._windows[info.producer_id] = max(info.window_size, 0)

    def remove(self, producer_id: ProducerId) -> list[str]:
        """Remove a producer. Returns the names under which the broker knows it."""
        was_known = self._windows.pop(producer_id, None) is not None
        return [_name(producer_id)] if was_known and self.numbers_sends else []

    def remove_all(self, session_id: int | None = None) -> list[str]:
        """Remove the producers of a session, or all. Returns the names under which the broker knows them."""
        ended = [each for each in self._windows if session_id in (None, each.session_id)]
        return [name for each in ended for name in self.remove(each)]

    def acknowledged_size(self, produced: ProducedMessage) -> int:
        """Return the size of the ProducerAck for a message; 0 sends none."""
        if produced.response_required or not self._windows.get(produced.producer_id):
            return 0
        return window_bytes(produced.message)

    def target_of_run(self, run: ProducedRun) -> Destination | None:
        """Return the destination to which the messages of a run are sent; None if each must be sent for itself.

        Raises: RemoteProtocolError if JMS clients cannot send to it
        """
        is_numbered = self.numbers_sends and run.transaction_id is None and run.messages[0].persistent
        if is_numbered or self._windows.get(run.producer_id):
            return None
        return self._destinations.target(run.destination)

    def send(self, produced: ProducedMessage, transaction: str | None) -> Send:
        """Return the command that sends a message.

        Raises: RemoteProtocolError if JMS clients cannot send it
        """
        message = produced.message
        if SCHEDULE in message.body:
            _check_not_scheduled(produced)
        send = Send(
            self._destinations.target(produced.destination),
            message,
            transaction,
            names_destinations=produced.has_reply_to,
        )
        if self.numbers_sends and message.persistent and transaction is None:
            send.producer, send.number = _name(produced.producer_id), produced.sequence
        return send


def _name(producer_id: ProducerId) -> str:
    return f"{producer_id.connection_id}:{producer_id.session_id}:{producer_id.value}"


def _check_not_scheduled(produced: ProducedMessage) -> None:
    scheduled = [name for name in properties_of(produced.message) if name.startswith(SCHEDULE_PREFIX)]
    if scheduled:
        raise not_supported(f"scheduled messages by {scheduled[0]}", "send the message when it is due")

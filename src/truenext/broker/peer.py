"""Peer: the functions of a client's connection that the broker calls, and the reasons for which commands wait.

broker --answers, messages, ends--> Peer          `server.connection.ServerConnection`, or a test's
broker --PendingCommand--> its connection         the commands that must wait, and the reason
"""

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple, Protocol

from truenext.broker.control import ClientInfo
from truenext.engine.background.browsing import BrowseSlice
from truenext.engine.lifecycle.pull_requests import EndedPullRequest
from truenext.engine.state.consumer import BrokerConsumer, Subscriber
from truenext.engine.state.queue import Entry
from truenext.errors import Code, RemoteProtocolError
from truenext.model.answers import Answer
from truenext.model.commands import Command, Login
from truenext.model.restriction import Restriction


class Peer(Protocol):
    """Client's connection, as far as the broker uses it."""

    def answer(self, answer: Answer) -> None:
        """Add an answer to the next flush."""

    def deliver(self, consumer: BrokerConsumer, entries: list[Entry]) -> None:
        """Add messages to the next flush."""

    def deliver_browse_slice(self, browse_slice: BrowseSlice) -> None:
        """Add messages for a browser to the next flush."""

    def flush(self) -> None:
        """Write all added answers and messages. The connection calls `Broker.on_all_sent` once the socket has taken all
        bytes."""

    def send_connected(self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool) -> None:
        """Answer an accepted login. `secret` is "" if the client is no truenext client. `is_checked` is False if the
        broker has no users, so that login and passcode were ignored."""

    def send_error(self, error: RemoteProtocolError) -> None:
        """Send an ERROR for the last command, and keep the connection open."""

    def close_for_takeover(self, *, is_exempt: bool) -> None:
        """Close the connection at once: another connection takes this one over, or needs the durable subscription that
        this parked connection still uses. If `is_exempt`, the end counts no attempt."""

    def end_pull_request(self, ended: EndedPullRequest) -> None:
        """Add the end of a pull request to the next flush."""

    def cancel_unsent(
        self, consumers: Collection[BrokerConsumer] | None
    ) -> tuple[dict[BrokerConsumer, int], list[Subscriber]]:
        """Drop the unsent messages of these consumers; None stands for all consumers. Returns two results. The first
        is, for each consumer in auto mode, the number of messages that the socket has taken since the last call of
        `Broker.on_all_sent`. The second has, in order, the subscriber of each message that was sent in part, or
        encrypted. The rest of these messages is still sent if the connection stays open. The connection then calls
        `ConnectionEnds.partial_frame_sent` for each."""

    def assign_place(self, *, may_exceed: bool, restriction: Restriction | None = None) -> Restriction | None:
        """Count the connection towards the listener's limit of connections, at its login. Returns None if the
        connection may do everything. If the limit is reached, a few more connections that `may_exceed` the limit are
        admitted. For such a connection the result names the limit. The connection may only send control requests, and
        ends when it is idle (`idle_time_left`). With a `restriction` the connection is treated so although there is a
        place.

        Raises: RemoteProtocolError if the connection is not admitted
        """

    def resume_reading(self) -> None:
        """Execute the commands that wait, and read the socket again. Called when the reason for waiting has ended."""

    def end_slow_client(self, reason: str) -> None:
        """End the connection with an ERROR: its client reads or sends so slowly that it takes too much memory."""

    def end_exempt(self, reason: str, code: Code) -> None:
        """End the connection with an ERROR, without an attempt: a reload has taken rights from its user, or an operator
        has closed it."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that the socket has taken since the start of the connection."""

    @property
    def client_info(self) -> ClientInfo:
        """Address and client id of the client."""

    @property
    def certificate_names(self) -> Collection[str]:
        """Names and fingerprint of the client's checked certificate; empty if the client has shown none."""


class WaitsFor(Enum):
    """Reason for which a command waits."""

    DISK = "disk space"
    OTHERS = "other connections to be served"
    ROUTES = "the queues of its messages to be found"
    LOGIN = "its password to be checked"
    SILENCE = "the silence of the broker to end"


class PendingCommand(NamedTuple):
    """Point at which `Broker.execute` has stopped, because the next command must wait, and the reason."""

    command: Command | None
    """Command that must wait, if it was taken from the iterator already; None if it is still the next one in the
    iterator."""
    waits_for: WaitsFor

"""Peer: a client's connection as the broker uses it, and what a connection waits for.

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
from truenext.errors import RemoteProtocolError
from truenext.model.answers import Answer
from truenext.model.commands import Command, Login


class Peer(Protocol):
    """Client's connection as the broker uses it."""

    def answer(self, answer: Answer) -> None:
        """Add an answer to the next flush."""

    def deliver(self, consumer: BrokerConsumer, entries: list[Entry]) -> None:
        """Add messages to the next flush."""

    def deliver_browse_slice(self, browse_slice: BrowseSlice) -> None:
        """Add messages for a browser to the next flush."""

    def flush(self) -> None:
        """Write all that was added; call `Broker.on_all_sent` once the socket has taken all of it."""

    def send_connected(self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool) -> None:
        """Answer an accepted login; `secret` is "" if the client requested none. `is_checked` tells whether there are
        users."""

    def send_error(self, error: RemoteProtocolError) -> None:
        """Send an ERROR for the last command, and keep the connection open."""

    def close_for_takeover(self, *, is_exempt: bool) -> None:
        """Close the connection at once, as another connection of the client takes it over."""

    def end_pull_request(self, ended: EndedPullRequest) -> None:
        """Add the end of a pull request to the next flush."""

    def cancel_unsent(
        self, consumers: Collection[BrokerConsumer] | None
    ) -> tuple[dict[BrokerConsumer, int], list[Subscriber]]:
        """Drop unsent messages of some consumers (None: of all).

        Returns how many messages of each consumer in auto mode the socket has taken since the last call of
        `Broker.on_all_sent`, and the subscriber of each message that is partially sent or encrypted, in order. If the
        connection goes on, these messages are sent, and `Broker.partial_frame_sent` called for each.
        """

    def assign_place(self, *, may_exceed: bool) -> str:
        """Assign a place to the connection at its login. Returns the limit that it exceeds, if it `may_exceed` one, and
        because of which it may only send control requests and must not be idle (`idle_time_left`); "" if none.

        Raises: RemoteProtocolError if there is no place
        """

    def resume_reading(self) -> None:
        """Read the socket again: there is capacity, see `Broker.wait_for_capacity`."""

    def end_slow_client(self, reason: str) -> None:
        """End the connection of a client that reads or sends so slowly that the broker keeps too much for it."""

    def end_user(self, reason: str) -> None:
        """End the connection of a user that may not do any more what it may have done."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that the socket has taken since the connection began."""

    @property
    def client_info(self) -> ClientInfo:
        """Address and client id of the client."""

    @property
    def certificate_names(self) -> Collection[str]:
        """Names and fingerprint of the checked certificate that the client has shown; none without TLS."""


class WaitsFor(Enum):
    """Reason for which a command waits."""

    DISK = "disk space"
    OTHERS = "other connections to be served"
    ROUTES = "the queues of its messages to be found"
    LOGIN = "its password to be checked"


class PendingCommand(NamedTuple):
    """Commands of a connection that `Broker.execute` could not execute yet, and the reason."""

    command: Command | None
    """First of them; None if it is the next of those that `Broker.execute` was given."""
    waits_for: WaitsFor

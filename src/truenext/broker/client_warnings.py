"""Client warnings: log mistakes of clients, each once or a few times, however often the client repeats it."""

import logging
from collections.abc import Callable, Container

from truenext.engine.engine import Engine
from truenext.errors import OtherProtocolError
from truenext.wire.stomp.headers import OWN_PREFIX

logger = logging.getLogger(__name__)

OTHER_PROTOCOL_SECONDS = 60.0
"""Seconds after a warning about a client of another protocol during which further clients of the same protocol are
logged only at level debug."""

UNSUPPORTED_MAX = 1000
"""Number of refusals of unsupported features that are remembered and logged as warnings."""

DRAINING_SECONDS = 60.0
"""Seconds after the warning about a client that is refused during a drain in which it is not logged again."""

DRAINING_MAX = 1000
"""Number of addresses whose warnings about a drain are remembered. Of others nothing is logged."""

_UNSUPPORTED = "frame refused: the broker does not support it"
_FOREIGN_HEADER = "a header of another broker has no effect here"
_UNKNOWN_HEADER = "an unknown header that begins with truenext- has no effect"
_OTHER_PROTOCOL = "client refused: it speaks another protocol"


class ClientWarnings:
    def __init__(self, time: Callable[[], float]) -> None:
        """`time` returns the seconds of a monotonic clock."""
        self._time = time
        self._has_logged_login = False
        self._other_protocols: dict[str, float] = {}
        """Time from which on the next such client is logged as a warning again, by the reason of its refusal. The
        reason names the protocols of client and port."""
        self._drained: dict[str, float] = {}
        """Time of the last warning about each address that was refused during a drain, the oldest first."""
        self._ineffective_headers: set[tuple[str, str]] = set()
        """User and header of each warning that was logged; the user is "" if the broker has no users."""
        self._unsupported: set[tuple[str, str]] = set()
        """User and reason of each warning about an unsupported feature."""

    def warn_of_other_protocol(self, client: str, error: OtherProtocolError) -> None:
        """Log a client of another protocol. Each protocol has one warning a minute for all ports of one protocol, as a
        port scan would cause many."""
        now, reason = self._time(), str(error)
        fields = {"client": client, "protocol": error.protocol, "reason": reason}
        if now < self._other_protocols.get(reason, now):
            logger.debug(_OTHER_PROTOCOL, extra=fields)
            return
        self._other_protocols[reason] = now + OTHER_PROTOCOL_SECONDS
        logger.warning(_OTHER_PROTOCOL, extra=fields)

    def warn_of_drain(self, client: str, reason: str) -> None:
        """Log a client that is refused during a drain. Clients try again until it ends, so each address has one warning
        a minute."""
        now, address = self._time(), client.rpartition(":")[0]
        while self._drained and now - next(iter(self._drained.values())) >= DRAINING_SECONDS:
            del self._drained[next(iter(self._drained))]
        if address not in self._drained and len(self._drained) < DRAINING_MAX:
            self._drained[address] = now
            logger.warning("client refused", extra={"client": client, "reason": reason})

    def warn_of_ineffective_header(self, client: str, user: str, frame: str, header: str, instead: str) -> None:
        """Log that a header has no effect, once for each header and user. All unknown headers that begin with
        `truenext-` count as one header, as clients may invent any number of them."""
        is_unknown = header.startswith(OWN_PREFIX)
        key = (user, OWN_PREFIX if is_unknown else header)
        if key not in self._ineffective_headers:
            self._ineffective_headers.add(key)
            fields = {"header": header, "frame": frame, "user": user, "client": client, "instead": instead}
            logger.warning(_UNKNOWN_HEADER if is_unknown else _FOREIGN_HEADER, extra=fields)

    def warn_of_unsupported(self, client: str, user: str, reason: str) -> None:
        """Log that a feature that a client has asked for is not supported, once for each reason and user."""
        key = (user, reason)
        if key not in self._unsupported and len(self._unsupported) < UNSUPPORTED_MAX:
            self._unsupported.add(key)
            logger.warning(_UNSUPPORTED, extra={"client": client, "user": user, "reason": reason})

    def keep_users(self, users: Container[str]) -> None:
        """Forget the warnings of all users but these."""
        self._ineffective_headers = {(user, header) for user, header in self._ineffective_headers if user in users}
        self._unsupported = {(user, reason) for user, reason in self._unsupported if user in users}

    def warn_of_unchecked_login(self, client: str) -> None:
        """Log that logins are not checked. Only the first call logs, as many clients send a login on each CONNECT."""
        if not self._has_logged_login:
            self._has_logged_login = True
            logger.warning("login and passcode are not checked: the broker has no users", extra={"client": client})


def warn_of_discarded_messages(engine: Engine) -> None:
    """Log how many messages the last SUBSCRIBE to a durable subscription has discarded, if any."""
    discarded = engine.commands.subscribing.take_discarded_subscription()
    if discarded is None:
        return
    client, _, name = discarded.durable_key.partition(",")
    logger.warning(
        "messages discarded: a SUBSCRIBE has changed the topic or selector of a durable subscription",
        extra={
            "client_id": client,
            "subscription": name,
            "messages": discarded.message_count,
            "topic": discarded.old_destination.topic,
            "selector": discarded.old_destination.selector,
            "new_topic": discarded.new_destination.topic,
            "new_selector": discarded.new_destination.selector,
        },
    )


def warn_of_forgotten_producers(engine: Engine) -> None:
    """Log how many producers the broker has forgotten before their time since the last call, if any."""
    forgotten, last = engine.state.producers.take_forgotten()
    if forgotten:
        logger.warning(
            "producers forgotten early, as there are too many: their repeats are not recognized",
            extra={"producers": forgotten, "last": last},
        )

"""Actions: control requests that change only their own connection. An action has no answer but a RECEIPT.

    started, credit, wake   headers
    release                 JSON, as it may name more messages than a header can hold

Source: docs/protocol.md
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Credit, Release, Started, Wake, decode_client_json
from truenext.model.limits import KEPT_MAX, SUBSCRIPTIONS_MAX, WINDOW_MAX
from truenext.wire.stomp.frame import Frame
from truenext.wire.stomp.values import read_ack_id, read_boolean, read_name, read_number, require_header

_EXTRA_QUOTES_MAX = 100
"""Number of quotation marks that a release may have besides those around names and ids, for keys, for other values, and
inside names."""

ConnectionAction = Started | Credit | Release | Wake


class ReleaseBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a SEND to /control/release, in JSON."""

    subscriptions: list[str]
    """Subscriptions whose messages are released; may be empty."""
    keep: list[str] = []
    """Values of the `ack` headers of messages that are not released. Values of messages that these subscriptions do not
    hold have no effect."""
    suspend: bool = False
    """If true, the subscriptions are suspended from then on."""
    abort: str | None = None
    """Transaction that is aborted in the same step; null aborts none."""
    count_attempts: Literal["all", "nacked"] = "all"
    """Messages of the aborted transaction for which an attempt counts. `all`: those that the transaction has
    acknowledged or nacked. `nacked`: only those that it has nacked."""


def _started(frame: Frame) -> Started:
    """Report that the client has passed a message to its program, unless an ACK has reported it. The report causes no
    write to disk.

    - `id`: the `ack` of the MESSAGE.
    """
    subscription, sequence, dispatch = read_ack_id(
        "started", require_header("SEND to /control/started", frame.headers, "id")
    )
    return Started(subscription, sequence, dispatch)


def _credit(frame: Frame) -> Credit:
    """Request more messages for a subscription that pulls, and wake the subscription.

    - `id`: the subscription.
    - `messages`: number of messages, 0 to {WINDOW_MAX}. 0 withdraws the messages that were requested and have not come.
    - `wait`: `true` (default), or `false` to end the request when no message is ready.
    - `correlation-id`: text that the end of the request repeats.
    """
    headers = frame.headers
    correlation = headers.get("correlation-id")
    return Credit(
        read_name("id", require_header("SEND to /control/credit", headers, "id")),
        read_number(
            "messages", require_header("SEND to /control/credit", headers, "messages"), WINDOW_MAX, " messages"
        ),
        read_boolean("wait", headers.get("wait", "true")),
        None if correlation is None else read_name("correlation-id", correlation),
    )


def _wake(frame: Frame) -> Wake:
    """Wake a suspended subscription. The request has no effect on a subscription that is not suspended, and is refused
    for one in `auto` mode.

    - `id`: the subscription.
    """
    return Wake(read_name("id", require_header("SEND to /control/wake", frame.headers, "id")))


def _release(frame: Frame) -> Release:
    """Release the messages that subscriptions hold. The body is JSON."""
    # Each name has two quotation marks. A list of millions would take long to parse, only to be refused.
    quotes = frame.body.count(b'"') - frame.body.count(b'\\"')
    if quotes > 2 * (KEPT_MAX + SUBSCRIPTIONS_MAX) + _EXTRA_QUOTES_MAX:
        raise _too_much()
    request = decode_client_json("release", frame.body, ReleaseBody)
    if len(request.keep) > KEPT_MAX or len(request.subscriptions) > SUBSCRIPTIONS_MAX:
        raise _too_much()
    names = [read_name("a name in subscriptions", name) for name in request.subscriptions]
    kept = [read_ack_id("release", text) for text in request.keep]
    transaction = None if request.abort is None else read_name("abort", request.abort)
    return Release(names, kept, request.suspend, transaction, request.count_attempts == "all")


def _too_much() -> RemoteProtocolError:
    return RemoteProtocolError(
        f"release of more than {SUBSCRIPTIONS_MAX} subscriptions, or with more than {KEPT_MAX} messages to keep",
        Code.LIMIT,
    )


ACTION_PARSERS: dict[str, Callable[[Frame], ConnectionAction]] = {
    "started": _started,
    "credit": _credit,
    "release": _release,
    "wake": _wake,
}
"""Functions that parse the frame of an action, by verb."""

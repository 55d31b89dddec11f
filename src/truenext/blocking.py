"""truenext for programs with threads.

    from truenext import blocking

    with blocking.connect("stomp://127.0.0.1:61613") as connection:
        connection.send("/queue/orders", b"{}", priority=9)
        with connection.consumer("/queue/orders") as orders:
            for message in orders:
                print(message.text)

docs/client.md has the guarantees. Classes and functions have the same names as in the client for asyncio, and are
called without `await`. Several threads may use one connection at once."""

from truenext.client.core.health import ConsumerHealth, Health
from truenext.client.core.message import Content
from truenext.client.core.send_options import Outgoing
from truenext.client.core.transaction_state import Outcome
from truenext.client.threads.connection import (
    Connection,
    Consumer,
    Message,
    Processing,
    Sent,
    Session,
    Transaction,
    connect,
)

__all__ = [
    "Connection",
    "Consumer",
    "ConsumerHealth",
    "Content",
    "Health",
    "Message",
    "Outcome",
    "Outgoing",
    "Processing",
    "Sent",
    "Session",
    "Transaction",
    "connect",
]

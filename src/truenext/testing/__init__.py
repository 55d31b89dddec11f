"""A broker in the test's own process: the real one, with the real contract, and with faults that a test can order.

    async with broker() as here:          in the running event loop
    with blocking_broker() as here:       on a thread of its own, for programs that block
    def test(truenext_broker): ...        the same, as a fixture of pytest

The broker keeps nothing on disk. docs/testing.md says exactly what each fault does.
"""

from truenext.testing.blocking import BlockingBroker, blocking_broker
from truenext.testing.contents import QueueContents, WaitingMessage
from truenext.testing.faults import NeverReached
from truenext.testing.local import HasSession, LocalBroker, broker

__all__ = [
    "BlockingBroker",
    "HasSession",
    "LocalBroker",
    "NeverReached",
    "QueueContents",
    "WaitingMessage",
    "blocking_broker",
    "broker",
]

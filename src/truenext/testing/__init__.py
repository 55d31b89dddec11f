"""Test kit: runs the real broker in the test's own process, with faults that the test chooses.

    async with broker() as here:          a broker in the running event loop
    with blocking_broker() as here:       a broker on a thread of its own, for programs that block
    def test(truenext_broker): ...        the broker of `blocking_broker`, as a fixture of pytest

The broker stores nothing on disk. docs/testing.md describes each fault.
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

"""A broker process whose clock is ahead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from unittest import mock

from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import Forked
from truenext.broker.broker import Broker
from truenext.cli import serve
from truenext.cli.main import main as truenext


class ShiftedBroker(BrokerProcess):
    ahead_s = 0
    """Seconds that the broker's clock is ahead, from the next start on."""

    def _started(self, command: list[str]) -> Forked:
        return Forked([str(self.ahead_s), *command], stdout=self._out, stderr=self._log, run=serve_ahead)


def serve_ahead(arguments: Sequence[str]) -> None:
    """Run a command line of `truenext`, after the seconds that the broker's clock is ahead."""
    ahead_s, *command = arguments
    ahead_ns = int(ahead_s) * 10**9
    with mock.patch.object(serve, "Broker", partial(Broker, clock_ns=lambda: time.time_ns() + ahead_ns)):
        truenext(command)

"""A broker process with faults: now and then it dispatches messages of the lowest priority first, counts an attempt
that is none, or records an ACK of a connection that has ended."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import Forked
from tests.spark import test_client_history
from truenext.cli.main import main as truenext
from truenext.engine.commands.connecting import Connecting
from truenext.engine.dispatch.plain import Dispatcher
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.state.queue import Queue

SHARE = 0.03
"""Share of the calls of a faulty method that are wrong."""
Patch = pytest.MonkeyPatch


class FaultyBroker(BrokerProcess):
    def _started(self, command: list[str]) -> Forked:
        return Forked(command, stdout=self._out, stderr=self._log, run=serve_with_faults)


def serve_with_faults(command: Sequence[str]) -> None:
    """Run a command line of `truenext`."""
    with Patch.context() as patch:
        _plant(patch, Dispatcher, "dispatch", _lowest_priority_first)
        _plant(patch, Settlement, "requeue", test_client_history.a_release_counts_as_an_attempt)
        late_ack = test_client_history.the_last_ack_of_a_taken_over_connection_is_executed
        _plant(patch, Connecting, "disconnect", late_ack)
        truenext(command)


def _plant(patch: Patch, owner: type, method: str, fault: Callable[[Patch], None]) -> None:
    """Plant a fault of a method, which then shows in some calls."""
    right: Callable[..., Any] = getattr(owner, method)
    fault(patch)
    wrong: Callable[..., Any] = getattr(owner, method)

    def sometimes_wrong(*arguments: Any, **options: Any) -> Any:
        return (wrong if random.random() < SHARE else right)(*arguments, **options)

    patch.setattr(owner, method, sometimes_wrong)


def _lowest_priority_first(patch: Patch) -> None:
    dispatch = Dispatcher.dispatch

    def dispatch_backwards(dispatcher: Dispatcher, queue: Queue, deliveries: Any) -> Any:
        lanes, queue.lanes = queue.lanes, queue.lanes[::-1]
        try:
            return dispatch(dispatcher, queue, deliveries)
        finally:
            queue.lanes = lanes

    patch.setattr(Dispatcher, "dispatch", dispatch_backwards)

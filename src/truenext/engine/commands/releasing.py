"""Release: releases messages, and suspends and wakes subscriptions. Source: docs/contract.md, "Release"."""

from __future__ import annotations

from collections.abc import Collection

from truenext.engine.commands.transactions import Transactions
from truenext.engine.lifecycle.pull_requests import PullRequests
from truenext.engine.lifecycle.settlement import Settlement, by_queue
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Entry, RequeueReason
from truenext.engine.writing.commit_state import CommitState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Release, Wake


class Releasing:
    def __init__(
        self,
        commit_state: CommitState,
        selections: Selections,
        settlement: Settlement,
        transactions: Transactions,
        pull_requests: PullRequests,
    ) -> None:
        self._commit_state = commit_state
        self._events = commit_state.events
        self._selections = selections
        self._settlement = settlement
        self._transactions = transactions
        self._pull_requests = pull_requests

    def check_request(self, session: ConnectionState, request: Release) -> list[BrokerConsumer]:
        """Check a release request, and return the consumers that it names.

        Raises: RemoteProtocolError if the client is no truenext client, or a named subscription or transaction is
        missing or cannot be released.
        """
        if not session.is_truenext_client:
            raise RemoteProtocolError(
                "SEND to /control/release is only for a connection whose CONNECT had truenext-client",
                Code.NOT_SUPPORTED,
            )
        consumers = [session.consumer(name) for name in dict.fromkeys(request.subscriptions)]
        if request.transaction is not None:
            session.transaction_to_abort(request.transaction)
        return consumers

    def release(self, session: ConnectionState, request: Release) -> None:
        """Release the messages of the named subscriptions, and suspend or wake these subscriptions. The named
        transaction is aborted in the same step.

        Raises: RemoteProtocolError if the client is no truenext client, or a named subscription or transaction is
        missing or cannot be released.
        """
        consumers = self.check_request(session, request)
        if not request.suspends:
            # Wake before the release: waking frees the groups of which a suspended consumer holds no message.
            for consumer in consumers:
                self.wake_consumer(consumer)
        if request.transaction is not None:
            self._transactions.abort_open(session, request.transaction, counts_all=request.counts_all)
        retained = set(request.kept)
        for consumer in consumers:
            self._release_held(consumer, retained)
            self._commit_state.touch(consumer)
            if request.suspends:
                self._suspend(consumer)
        session.release_count += 1

    def release_all_but(self, consumer: BrokerConsumer, retained: Collection[Entry]) -> None:
        """Release all messages that the consumer holds except `retained`, and suspend the consumer."""
        self._release_held(consumer, {(consumer.subscription, entry.sequence, entry.deliveries) for entry in retained})
        self._commit_state.touch(consumer)
        self._suspend(consumer)

    def wake(self, session: ConnectionState, wake: Wake) -> None:
        """Wake a subscription, if it is suspended.

        Raises: RemoteProtocolError if there is no such subscription.
        """
        consumer = session.consumer(wake.subscription)
        self.wake_consumer(consumer)
        self._commit_state.touch(consumer)

    def _release_held(self, consumer: BrokerConsumer, retained: set[tuple[str, int, int]]) -> None:
        """Release all messages that the consumer holds except `retained`. Each item of `retained` has the subscription,
        sequence and number of deliveries of a message."""
        held, name = consumer.held, consumer.subscription
        for entry in by_queue(held.values()):
            if retained and (name, entry.sequence, entry.deliveries) in retained:
                continue
            del held[entry.sequence]
            self._settlement.requeue(entry, RequeueReason.RELEASED, reports_started=consumer.reports_started)
        consumer.restart_auto_window(self._commit_state.now_ms)
        self._pull_requests.end_without_notice(consumer)

    def _suspend(self, consumer: BrokerConsumer) -> None:
        if not consumer.is_suspended:
            consumer.suspend()
            self._log_window(consumer, 0)
        for queue in consumer.all_queues():
            if queue.has_groups:
                self._selections.existing_groups_of(queue).suspend_owner(consumer, queue)
                self._commit_state.touched_queues[queue] = None

    def wake_consumer(self, consumer: BrokerConsumer) -> None:
        if consumer.is_suspended:
            consumer.wake(self._commit_state.now_ms)
            self._log_window(consumer, consumer.window)
            for queue in consumer.all_queues():
                if queue.has_groups:
                    self._selections.existing_groups_of(queue).wake_owner(consumer, queue)

    def _log_window(self, consumer: BrokerConsumer, window: int) -> None:
        if consumer.queue is not None and consumer.pull_request is None:
            self._events.window_changed(consumer, consumer.queue, window)

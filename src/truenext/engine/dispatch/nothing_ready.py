"""When has a wish ended that does not wait: is no message ready for the subscription, wherever?

It is asked right behind a dispatch, so what is ready was given. What is left: something has to be read or compared
before anybody can know, or the connection has no room. Then the wish stays, and is looked at again when anything
happens in its queue, as that brings the page or the comparison on. Source: docs/contract.md, "Pulling"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.dispatch.selective import BLOCKED_BY_RETRY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from truenext.engine.dispatch.plain import Dispatcher
    from truenext.engine.dispatch.wildcard import WildcardDispatch
    from truenext.engine.lifecycle.pull_requests import PullRequests
    from truenext.engine.state.clients import ClientRegistry
    from truenext.engine.state.consumer import BrokerConsumer
    from truenext.engine.state.queue import Queue


class NoWaitPullEnder:
    __slots__ = ("_clients", "_dispatcher", "_pull_requests")

    def __init__(self, clients: ClientRegistry, dispatcher: Dispatcher, pull_requests: PullRequests) -> None:
        self._clients = clients
        self._dispatcher = dispatcher
        self._pull_requests = pull_requests

    def end_unsatisfied(self, touched: Iterable[Queue], wildcard_dispatch: WildcardDispatch | None) -> None:
        """End the wishes that have ended, where something has happened; `wildcard_dispatch` is what wildcards took
        part in, if they did."""
        pull_requests = self._pull_requests
        for queue in touched:
            for consumer in list(pull_requests.no_wait_by_queue.get(queue, ())):
                if self._has_nothing_ready_for(consumer, queue):
                    pull_requests.end_with_notice(consumer)
        if wildcard_dispatch is not None:
            for wildcard in wildcard_dispatch.queried_wildcards():
                if wildcard in pull_requests.no_wait_by_queue and wildcard_dispatch.has_nothing_ready_for(wildcard):
                    pull_requests.end_with_notice(wildcard)

    def _has_nothing_ready_for(self, consumer: BrokerConsumer, queue: Queue) -> bool:
        if queue.is_paused or self._clients.receivers_of(queue).exclusive not in (None, consumer):
            return True
        queue_dispatch = self._dispatcher.new_queue_dispatch(queue)
        for lane in queue.lanes:
            head = queue_dispatch.head_for(consumer, lane.rank)
            if head is not None:
                return head == BLOCKED_BY_RETRY
        return True

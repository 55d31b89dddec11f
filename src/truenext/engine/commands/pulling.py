"""Pull requests: requests messages, and withdraws requests. Source: docs/contract.md, "Pull"."""

from __future__ import annotations

from truenext.engine.commands.releasing import Releasing
from truenext.engine.lifecycle.pull_requests import EndedPullRequest, PullRequests
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.writing.commit_state import CommitState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Credit
from truenext.model.limits import WINDOW_MAX


class Pulling:
    def __init__(self, commit_state: CommitState, pull_requests: PullRequests, releasing: Releasing) -> None:
        self._commit_state = commit_state
        self._pull_requests = pull_requests
        self._releasing = releasing

    def pull(self, session: ConnectionState, credit: Credit) -> EndedPullRequest | None:
        """Request messages for a consumer or browser, or withdraw a consumer's open request if `credit.messages` is 0.

        Returns the notice of a withdrawal, to be sent to the client before anything is dispatched; else None.

        Raises: RemoteProtocolError if there is no such subscription, the subscription does not pull, or it requests too
        many messages.
        """
        browser = session.browsers.get(credit.subscription)
        if browser is not None and browser.requested is not None:
            browser.requested = min(browser.requested + credit.messages, WINDOW_MAX)
            return None
        consumer = session.consumer(credit.subscription)
        pull_request = consumer.pull_request
        if pull_request is None:
            raise RemoteProtocolError(
                f"subscription {credit.subscription!r} does not pull: set truenext-pull:true on its SUBSCRIBE",
                Code.NOT_SUPPORTED,
            )
        requested = pull_request.remaining + credit.messages
        if requested > WINDOW_MAX:
            raise RemoteProtocolError(
                f"subscription {credit.subscription!r} has requested {requested} messages that are not delivered yet, "
                f"more than {WINDOW_MAX}: request fewer at once",
                Code.LIMIT,
            )
        pull_request.correlation = credit.correlation
        if not credit.messages:
            return self._pull_requests.withdraw(consumer)
        self._releasing.wake_consumer(consumer)
        pull_request.remaining, pull_request.waits_for_messages = requested, credit.waits
        self._pull_requests.add(consumer, credit.wait_ms)
        self._commit_state.touch(consumer)
        return None

"""Grants that a service needs at a broker with users. Source: docs/security.md, "Grants of a service or a query"

The grants are derived from the definitions of the service and the code of its stages. Grants for other calls, such as
`ask` in a program, may be missing. Grants for replies, failures and reports may be missing, too, since callers name the
queues to which the service sends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from truenext.model.grants import Pattern, Right, User, parse_pattern
from truenext.model.process_report import STAGES_TOPIC
from truenext.stage.core.definitions import Endpoint, LocalEndpoint, Topic
from truenext.stage.core.names import kept_topic, replies_queue
from truenext.stage.introspection.references import references_of


def needed_grants(
    endpoints: Iterable[LocalEndpoint[Any, Any]],
    remotes: Iterable[Endpoint[Any, Any]],
    topics: Iterable[Topic[Any]],
    keeper: str | None,
) -> dict[Right, list[Pattern]]:
    """Return the patterns that the service needs for each right: the queues and topics that it takes from, and those
    that it sends to, sorted. Each pattern is a single name. `keeper` is the name of a service that keeps replies; None
    if the service keeps none. A service needs STAGES_TOPIC only so that operators see its processes."""
    own = list(endpoints)
    stages = [stage for each in own for stage in each.all_stages]
    taken = {stage.destination for stage in stages}
    # A later stage gets what the stage before passes on with `flow.next`.
    sent = {stage.destination for each in own for stage in each.stages_in_order[1:]}
    # A request names the queue of `on_failure`, and the broker asks for the grant.
    sent |= {each.failure_destination for each in own if each.failure_stage is not None}
    sent |= {to.destination for stage in stages for to, _ in references_of(stage.function)}
    sent |= {each.destination for each in remotes}
    # A topic is declared for a subscriber, or to be published to.
    sent |= {each.destination for each in topics} - taken
    taken.add(STAGES_TOPIC)
    if keeper is not None:
        taken.add(f"/queue/{replies_queue(keeper)}")
        sent |= {f"/queue/{replies_queue(keeper)}", f"/topic/{kept_topic(keeper)}"}
    return {
        right: [parse_pattern(each) for each in sorted(destinations)]
        for right, destinations in ((Right.SEND, sent), (Right.TAKE, taken))
    }


def missing_grants(needed: Mapping[Right, Iterable[Pattern]], user: User) -> dict[Right, list[Pattern]]:
    """Return the needed grants that a user lacks, by right. The result has only rights of which a grant is missing."""
    missing = {right: [each for each in patterns if not user.may(right, each)] for right, patterns in needed.items()}
    return {right: patterns for right, patterns in missing.items() if patterns}

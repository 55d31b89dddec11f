"""Graph of a service, for display: its endpoints, their stages, and the endpoints and topics that the stages name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from truenext.model.service_graph import (
    EndpointNode,
    GraphEdge,
    RemoteNode,
    ServiceGraph,
    StageNode,
    TopicNode,
)
from truenext.stage.core.codec import type_name
from truenext.stage.core.definitions import Endpoint, LocalEndpoint, Stage, Topic
from truenext.stage.introspection.references import references_of


def graph_of(
    service: str,
    endpoints: Iterable[LocalEndpoint[Any, Any]],
    remotes: Iterable[Endpoint[Any, Any]],
    topics: Iterable[Topic[Any]],
) -> ServiceGraph:
    """Return the graph of a service. Its endpoints are in the order of their definition. Remote endpoints and topics
    are included if they are declared, or if a stage names them."""
    own = list(endpoints)
    referenced = [to for each in own for stage in each.all_stages for to, _ in references_of(stage.function)]
    others = {each.name: each for each in referenced if isinstance(each, Endpoint)}
    known = {each.name: each for each in remotes}
    subscribed = [each.subscribed_topic for each in own if each.subscribed_topic is not None]
    published = [each for each in referenced if isinstance(each, Topic)]
    own_names = {each.name for each in own}
    not_own = [each for each in (others | known).values() if each.name not in own_names]
    all_topics = {each.name: each for each in [*topics, *subscribed, *published]}.values()
    return ServiceGraph(
        service,
        [_endpoint(each) for each in own],
        [RemoteNode(each.name, type_name(each.takes.type), _replies(each)) for each in not_own],
        [TopicNode(each.name, type_name(each.takes.type)) for each in all_topics],
    )


def _endpoint(endpoint: LocalEndpoint[Any, Any]) -> EndpointNode:
    state = None if endpoint.state is None else type_name(endpoint.state.type)
    topic = "" if endpoint.subscribed_topic is None else endpoint.subscribed_topic.name
    stages = [_stage(each) for each in endpoint.all_stages]
    return EndpointNode(endpoint.name, type_name(endpoint.takes.type), _replies(endpoint), state, topic, stages)


def _stage(stage: Stage) -> StageNode:
    references = [
        GraphEdge(to.name, "topic" if isinstance(to, Topic) else "endpoint", how)
        for to, how in references_of(stage.function)
    ]
    queue = stage.queue if stage.endpoint.subscribed_topic is None else ""
    return StageNode(stage.name, queue, type_name(stage.takes.type), references)


def _replies(endpoint: Endpoint[Any, Any]) -> str | None:
    return None if endpoint.replies is None else type_name(endpoint.replies.type)

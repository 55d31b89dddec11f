"""Graph of a service of stages, for display: its endpoints, their stages, and the endpoints and topics that the stages
name."""

from __future__ import annotations

import msgspec


class GraphEdge(msgspec.Struct, frozen=True):
    to: str
    kind: str
    """Kind of the target: endpoint or topic."""
    how: str


class StageNode(msgspec.Struct, frozen=True):
    name: str
    queue: str
    """Queue of the stage; empty if the stage consumes from a topic."""
    takes: str
    references: list[GraphEdge]


class EndpointNode(msgspec.Struct, frozen=True):
    name: str
    takes: str
    replies: str | None
    state: str | None
    topic: str
    """Topic to which the endpoint subscribes; empty if it does not subscribe."""
    stages: list[StageNode]


class RemoteNode(msgspec.Struct, frozen=True):
    name: str
    takes: str
    replies: str | None


class TopicNode(msgspec.Struct, frozen=True):
    name: str
    takes: str


class ServiceGraph(msgspec.Struct, frozen=True):
    service: str
    endpoints: list[EndpointNode]
    remotes: list[RemoteNode]
    topics: list[TopicNode]

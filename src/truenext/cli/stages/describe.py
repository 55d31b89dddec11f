"""`truenext stages describe`: endpoints and stages of a service, as text, as JSON, or for Mermaid or Graphviz."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec
from rich.tree import Tree

from truenext.cli import terminal
from truenext.cli.connection import (
    URL_VARIABLE,
    BrokerOptions,
    connected,
    credentials_options,
    send_control_request,
    timeout_option,
)
from truenext.cli.exit_status import CommandFailure
from truenext.cli.stages.drawing import draw_dot, draw_mermaid, signature_text
from truenext.cli.stages.service_loader import load_service, service_argument
from truenext.cli.terminal import count_noun
from truenext.cli.values import URL, UrlOption
from truenext.client.core.credentials import Credentials
from truenext.errors import ConfigurationError
from truenext.model.destination import DEAD_LETTER_PREFIX
from truenext.stage.introspection.graph import EndpointNode, ServiceGraph, StageNode, graph_of


class QueueCounts(msgspec.Struct, frozen=True):
    """Counts of one queue, as the broker reports them; `describe` adds them to the stage or endpoint of the queue."""

    waiting: int = 0
    unacknowledged: int = 0
    scheduled: int = 0
    consumers: int = 0
    dead_letters: int = 0

    def __str__(self) -> str:
        parts = [f"{self.waiting:,} waiting"]
        if self.unacknowledged:
            parts.append(f"{self.unacknowledged:,} unacknowledged")
        if self.scheduled:
            parts.append(f"{self.scheduled:,} scheduled")
        if self.dead_letters:
            parts.append(count_noun(self.dead_letters, "dead letter"))
        return ", ".join(parts)


@click.command()
@service_argument
@click.option(
    "--url",
    cls=UrlOption,
    type=URL,
    help="Address of a broker: show how many messages wait in each queue there. Without this option no broker is "
    f"needed, and {URL_VARIABLE} is ignored.",
)
@credentials_options
@timeout_option
@click.option("--mermaid", "as_mermaid", is_flag=True, help="Print a drawing in Mermaid's language.")
@click.option("--dot", "as_dot", is_flag=True, help="Print a drawing in Graphviz's language.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def describe(
    target: str,
    url: str | None,
    credentials: Credentials,
    connect_timeout_s: float,
    as_mermaid: bool,
    as_dot: bool,
    as_json: bool,
) -> None:
    """Show the endpoints and stages of a service.

    Shows the stages in order, their queues, the types that each takes and replies, and the endpoints that each sends
    to. These endpoints are read from the code of the stage: those that its function itself names in a call.
    """
    if as_mermaid + as_dot + as_json > 1:
        raise click.UsageError("--mermaid, --dot and --json exclude each other")
    try:
        service = load_service(target)
    except ConfigurationError as error:
        raise CommandFailure(error) from error
    graph = graph_of(service.name, service.endpoints.values(), service.remotes.values(), service.topics.values())
    counts = None if url is None else _counts(BrokerOptions(url, credentials, connect_timeout_s))
    notes = _queue_notes(graph, counts)
    if as_mermaid:
        terminal.echo(draw_mermaid(graph, notes))
    elif as_dot:
        terminal.echo(draw_dot(graph, notes))
    elif as_json:
        terminal.write_json(_graph_json(graph, counts))
    else:
        terminal.print_drawn(_tree(graph, notes))


def _counts(broker: BrokerOptions) -> dict[str, QueueCounts]:
    with connected(broker) as connection:
        queues = {each["name"]: each for each in send_control_request(connection, "queues")}
    return {
        name: QueueCounts(
            facts["waiting"],
            facts["unacknowledged"],
            facts["scheduled"],
            facts["consumers"],
            queues.get(f"{DEAD_LETTER_PREFIX}{name}", {}).get("waiting", 0),
        )
        for name, facts in {**dict.fromkeys(_originals(queues), _NONE), **queues}.items()
    }


_NONE = {"waiting": 0, "unacknowledged": 0, "scheduled": 0, "consumers": 0}


def _originals(queues: Mapping[str, Any]) -> list[str]:
    """Return the original queues of the dead-letter queues; they need not exist any more."""
    return [name.removeprefix(DEAD_LETTER_PREFIX) for name in queues if name.startswith(DEAD_LETTER_PREFIX)]


def _queue_notes(graph: ServiceGraph, counts: Mapping[str, QueueCounts] | None) -> dict[str, str]:
    """Return a text for each queue; none without `counts` from a broker."""
    if counts is None:
        return {}
    queues = [stage.queue for endpoint in graph.endpoints for stage in endpoint.stages if stage.queue]
    return {queue: str(counts.get(queue, QueueCounts())) for queue in [*queues, *(each.name for each in graph.remotes)]}


def _graph_json(graph: ServiceGraph, counts: Mapping[str, QueueCounts] | None) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(graph)
    if counts is not None:
        facts["queues"] = {queue: counts.get(queue, QueueCounts()) for queue in _queue_notes(graph, counts)}
    return facts


# ---- As text ----


def _tree(graph: ServiceGraph, notes: Mapping[str, str]) -> Tree:
    tree = Tree(terminal.table_cell(graph.service))
    for endpoint in graph.endpoints:
        branch = tree.add(terminal.table_cell(_endpoint(endpoint)))
        for stage in endpoint.stages:
            leaf = branch.add(terminal.table_cell(_stage_text(stage, notes)))
            for each in stage.references:
                topic = "topic " if each.kind == "topic" else ""
                leaf.add(terminal.table_cell(f"{each.how} {topic}{each.to}"))
    if graph.remotes:
        branch = tree.add("endpoints of other services")
        for remote in graph.remotes:
            branch.add(
                terminal.table_cell(
                    f"{signature_text(remote.name, remote.takes, remote.replies)}{_note(remote.name, notes)}"
                )
            )
    if graph.topics:
        branch = tree.add("topics")
        for node in graph.topics:
            branch.add(terminal.table_cell(signature_text(node.name, node.takes, None)))
    return tree


def _endpoint(endpoint: EndpointNode) -> str:
    text = signature_text(endpoint.name, endpoint.takes, endpoint.replies)
    if endpoint.topic:
        text += f", subscribes to topic {endpoint.topic}"
    return text if endpoint.state is None else f"{text}, state {endpoint.state}"


def _stage_text(stage: StageNode, notes: Mapping[str, str]) -> str:
    return f"{stage.name}({stage.takes}){f' at {stage.queue}' if stage.queue else ''}{_note(stage.queue, notes)}"


def _note(queue: str, notes: Mapping[str, str]) -> str:
    return f": {notes[queue]}" if queue in notes else ""

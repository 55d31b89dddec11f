"""`truenext stages describe`: show endpoints and stages of a service as text, as JSON, or as a drawing by Mermaid or
Graphviz."""

from __future__ import annotations

from collections.abc import Mapping

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
from truenext.cli.stages.drawing import draw_dot, draw_mermaid, signature_text
from truenext.cli.stages.service_loader import load_service, service_argument
from truenext.cli.values import URL, UrlOption
from truenext.client.core.credentials import Credentials
from truenext.model.destination import DEAD_LETTER_PREFIX
from truenext.model.numerals import count_noun
from truenext.model.service_graph import EndpointNode, ServiceGraph, StageNode
from truenext.stage.introspection.graph import graph_of


class QueueCounts(msgspec.Struct, frozen=True):
    """Counts of one queue, as the broker reports them. `describe` shows them at the stage or endpoint of the queue."""

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
    "urls",
    cls=UrlOption,
    type=URL,
    help="Address of a broker: show how many messages wait in each queue there. May be repeated: the first broker that "
    f"answers is used. Without this option no broker is needed, and {URL_VARIABLE} is ignored.",
)
@credentials_options
@timeout_option
@click.option(
    "--mermaid", "as_mermaid", is_flag=True, help="Print the stages and queues as a diagram in Mermaid's language."
)
@click.option("--dot", "as_dot", is_flag=True, help="Print the stages and queues as a diagram in Graphviz's language.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def describe(
    target: str,
    urls: tuple[str, ...],
    credentials: Credentials,
    connect_timeout_s: float,
    as_mermaid: bool,
    as_dot: bool,
    as_json: bool,
) -> None:
    """Show the endpoints and stages of a service.

    Shows the stages in order, their queues, the types that each takes and replies, and the endpoints to which each
    sends. These endpoints are found in the code of a stage's function; other functions that it calls are not read.
    """
    if as_mermaid + as_dot + as_json > 1:
        raise click.UsageError("--mermaid, --dot and --json exclude each other: use one of them")
    service = load_service(target)
    graph = graph_of(service.name, service.endpoints.values(), service.remotes.values(), service.topics.values())
    counts = _counts(graph, BrokerOptions(urls, credentials, connect_timeout_s)) if urls else {}
    notes = {queue: str(each) for queue, each in counts.items()}
    if as_mermaid:
        terminal.echo(draw_mermaid(graph, notes))
    elif as_dot:
        terminal.echo(draw_dot(graph, notes))
    elif as_json:
        queues = {"queues": counts} if urls else {}
        terminal.write_json(msgspec.to_builtins(graph) | queues)
    else:
        terminal.print_drawn(_tree(graph, notes))


def _counts(graph: ServiceGraph, broker: BrokerOptions) -> dict[str, QueueCounts]:
    """Return the counts of the queues of this service's stages, and of other services' endpoints that it names."""
    with connected(broker) as connection:
        facts = {each["name"]: each for each in send_control_request(connection, "queues")}
    names = [stage.queue for endpoint in graph.endpoints for stage in endpoint.stages if stage.queue]
    counts = {}
    for name in [*names, *(each.name for each in graph.remotes)]:
        own = {key: facts.get(name, {}).get(key, 0) for key in ("waiting", "unacknowledged", "scheduled", "consumers")}
        dead_letters = facts.get(f"{DEAD_LETTER_PREFIX}{name}", {}).get("waiting", 0)
        counts[name] = QueueCounts(**own, dead_letters=dead_letters)
    return counts


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

"""Drawing of a service, in the language of Graphviz or of Mermaid.

Each endpoint of the service is drawn as a group of its stages, in order. Endpoints of other services, and topics, are
drawn outside. An arrow goes from each stage to each endpoint or topic that it names. The label of the arrow is the kind
of call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from truenext.model.service_graph import EndpointNode, ServiceGraph, StageNode


class _Arrow(NamedTuple):
    start: str
    end: str
    how: str = ""
    is_order: bool = False
    """True if the arrow goes from a stage to the next stage of its endpoint."""


def draw_dot(graph: ServiceGraph, notes: Mapping[str, str]) -> str:
    """Draw the service for Graphviz. `notes` are texts by queue. Source: Graphviz, "DOT Language"."""
    lines = [f"digraph {_quoted(graph.service)} {{", "  rankdir=LR; node [shape=box];"]
    for number, endpoint in enumerate(graph.endpoints):
        label = signature_text(endpoint.name, endpoint.takes, endpoint.replies)
        lines.append(f"  subgraph cluster_{number} {{ label={_quoted(label)};")
        for key, label in _stage_labels(endpoint, notes):
            lines.append(f"    {_quoted(key)} [label={_quoted(label)}];")
        lines.append("  }")
    for key, label in _remote_labels(graph, notes):
        lines.append(f"  {_quoted(key)} [label={_quoted(label)} style=filled];")
    for key, label in _topic_labels(graph):
        lines.append(f"  {_quoted(key)} [label={_quoted(label)} shape=ellipse];")
    for arrow in _arrows(graph):
        style = " [style=dotted]" if arrow.is_order else f" [label={_quoted(arrow.how)}]" if arrow.how else ""
        lines.append(f"  {_quoted(arrow.start)} -> {_quoted(arrow.end)}{style};")
    return "\n".join([*lines, "}"])


def draw_mermaid(graph: ServiceGraph, notes: Mapping[str, str]) -> str:
    """Draw the service for Mermaid. `notes` are texts by queue. Source: Mermaid, "Flowcharts Syntax".

    The ids in the drawing are numbers. A word such as `end` is not a valid id, and `o` or `x` after an arrow changes
    its tip.
    """
    lines = ["flowchart LR"]
    ids: dict[str, str] = {}

    def node(key: str) -> str:
        return ids.setdefault(key, f"n{len(ids)}")

    for number, endpoint in enumerate(graph.endpoints):
        label = signature_text(endpoint.name, endpoint.takes, endpoint.replies)
        lines.append(f"  subgraph g{number} [{mermaid_label(label)}]")
        for key, label in _stage_labels(endpoint, notes):
            lines.append(f"    {node(key)}[{mermaid_label(label)}]")
        lines.append("  end")
    for key, label in _remote_labels(graph, notes):
        lines.append(f"  {node(key)}[[{mermaid_label(label)}]]")
    for key, label in _topic_labels(graph):
        lines.append(f"  {node(key)}([{mermaid_label(label)}])")
    for arrow in _arrows(graph):
        line = "-.->" if arrow.is_order else f"-->|{mermaid_label(arrow.how)}|" if arrow.how else "-->"
        lines.append(f"  {node(arrow.start)} {line} {node(arrow.end)}")
    return "\n".join(lines)


# ---- What is drawn ----


def _stage_labels(endpoint: EndpointNode, notes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for stage in endpoint.stages:
        yield _stage_key(endpoint, stage), _with_note(signature_text(stage.name, stage.takes, None), stage.queue, notes)


def _remote_labels(graph: ServiceGraph, notes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for remote in graph.remotes:
        label = signature_text(remote.name, remote.takes, remote.replies)
        yield f"endpoint {remote.name}", _with_note(label, remote.name, notes)


def _topic_labels(graph: ServiceGraph) -> Iterator[tuple[str, str]]:
    for topic in graph.topics:
        yield f"topic {topic.name}", signature_text(topic.name, topic.takes, None)


def _arrows(graph: ServiceGraph) -> Iterator[_Arrow]:
    first = {f"endpoint {each.name}": _stage_key(each, each.stages[0]) for each in graph.endpoints}
    for endpoint in graph.endpoints:
        for before, after in pairwise(endpoint.stages):
            yield _Arrow(_stage_key(endpoint, before), _stage_key(endpoint, after), is_order=True)
        for stage in endpoint.stages:
            for each in stage.references:
                end = f"{each.kind} {each.to}"
                yield _Arrow(_stage_key(endpoint, stage), first.get(end, end), each.how)
        if endpoint.topic:
            yield _Arrow(f"topic {endpoint.topic}", first[f"endpoint {endpoint.name}"])


def _stage_key(endpoint: EndpointNode, stage: StageNode) -> str:
    return f"stage {endpoint.name} {stage.name}"


def signature_text(name: str, takes: str, replies: str | None) -> str:
    return f"{name}({takes})" if replies is None else f"{name}({takes}) -> {replies}"


def _with_note(label: str, queue: str, notes: Mapping[str, str]) -> str:
    return f"{label}\n{notes[queue]}" if queue in notes else label


# ---- Texts ----


def _quoted(text: str) -> str:
    r"""Quote a text for Graphviz.

    >>> _quoted('a "b"\nc')
    '"a \\"b\\"\\nc"'
    """
    return json.dumps(text, ensure_ascii=False)


def mermaid_label(text: str) -> str:
    r"""Quote a text as a label for Mermaid. Letters, digits and harmless punctuation stay. Each other character becomes
    an entity, because even in quotes Mermaid reads Markdown, HTML, names of icons, and its own entities.

    >>> mermaid_label('end[list] -> "Grün"\n2 waiting')
    '"end#91;list#93; #45;#62; #34;Grün#34;<br/>2 waiting"'
    """
    escaped = (each if each.isalnum() or each in " .,()\n" else f"#{ord(each)};" for each in text)
    return '"' + "".join(escaped).replace("\n", "<br/>") + '"'

"""How does a service look as a picture: as SVG, and in the language of Graphviz?

In the picture the endpoints of the service stand below one another, each with its stages in order; endpoints of others
and topics stand to the right. An arrow goes from each stage to whom it names, and says how.
"""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from truenext.stage.core.graph import EndpointNode, ServiceGraph

ROW = 22
"""Pixels, as all of these."""
PAD = 10
GAP = 26
LETTER = 7.2
"""Width of one letter of the type that is used."""
ARROWS = 220
"""Room for arrows to the right, and half of it to the left."""
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #222 }
.name { font-weight: bold } .note, .how { fill: #666; font-size: 11px }
rect { fill: #fff; stroke: #888 } .other { fill: #f2f2f2 } .topic { fill: #eef4fb }
path { fill: none; stroke: #446; stroke-width: 1.2; marker-end: url(#tip) }
""".strip()


class _Box:
    def __init__(self, kind: str, key: tuple[str, str], lines: list[tuple[str, str]], x: float, y: float) -> None:
        """`lines` are a class of STYLE and a text each."""
        self.kind, self.key, self.lines, self.x, self.y = kind, key, lines, x, y
        self.width = max(len(text) for _, text in lines) * LETTER + 2 * PAD
        self.height = len(lines) * ROW + PAD

    def row(self, number: int) -> float:
        """The middle of a line."""
        return self.y + PAD / 2 + number * ROW + ROW / 2

    def drawn(self) -> str:
        shape = (
            f'<rect class="{self.kind}" x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}"/>'
        )
        texts = (
            f'<text class="{kind}" x="{self.x + PAD:g}" y="{self.row(number) + 4:g}">{escape(text)}</text>'
            for number, (kind, text) in enumerate(self.lines)
        )
        return "\n".join([shape, *texts])


def draw_svg(graph: ServiceGraph, notes: Mapping[str, str]) -> str:
    """`notes` are what is said of queues."""
    left = ARROWS / 2
    boxes = _column([(("endpoint", each.name), "own", _lines(each, notes)) for each in graph.endpoints], left)
    right = left + max((box.width for box in boxes), default=0) + ARROWS
    others = [
        (
            ("endpoint", each.name),
            "other",
            [("name", _signature_text(each.name, each.takes, each.replies)), *_noted(each.name, notes)],
        )
        for each in graph.remotes
    ]
    topics = [(("topic", each.name), "topic", [("name", f"topic {each.name}({each.takes})")]) for each in graph.topics]
    others_drawn = _column([*others, *topics], right)
    arrows = list(_arrows(graph, boxes, {box.key: box for box in [*boxes, *others_drawn]}, notes))
    every = [*boxes, *others_drawn]
    width = max((box.x + box.width for box in every), default=0) + GAP
    height = max((box.y + box.height for box in every), default=0) + GAP
    tip = '<path d="M0,0 L8,4 L0,8" style="marker-end: none"/>'
    marker = f'<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{tip}</marker>'
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{escape(graph.service)}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{marker}</defs>",
            *(box.drawn() for box in every),
            *arrows,
            "</svg>\n",
        ]
    )


def _column(boxes: list[tuple[tuple[str, str], str, list[tuple[str, str]]]], x: float) -> list[_Box]:
    made, y = [], float(GAP)
    for key, kind, lines in boxes:
        made.append(_Box(kind, key, lines, x, y))
        y += made[-1].height + GAP
    return made


def _lines(endpoint: EndpointNode, notes: Mapping[str, str]) -> list[tuple[str, str]]:
    lines = [("name", _signature_text(endpoint.name, endpoint.takes, endpoint.replies))]
    for number, stage in enumerate(endpoint.stages, 1):
        lines += [("", f"{number} {stage.name}({stage.takes})"), *_noted(stage.queue, notes)]
    return lines


def _noted(queue: str, notes: Mapping[str, str]) -> list[tuple[str, str]]:
    return [("note", f"  {notes[queue]}")] if queue in notes else []


def _arrows(
    graph: ServiceGraph, boxes: list[_Box], by_key: Mapping[tuple[str, str], _Box], notes: Mapping[str, str]
) -> list[str]:
    arrows = []
    for endpoint, box in zip(graph.endpoints, boxes, strict=True):
        row = 1
        for stage in endpoint.stages:
            for each in stage.references:
                to = by_key.get((each.kind, each.to))
                if to is not None:
                    arrows.append(_arrow(box, box.row(row), to, each.how))
            row += 1 + (stage.queue in notes)
        topic = by_key.get(("topic", endpoint.topic))
        if topic is not None:
            arrows.append(_arrow(topic, topic.row(0), box, "comes to"))
    return arrows


def _arrow(of: _Box, y: float, to: _Box, how: str) -> str:
    end = to.row(0)
    if of.x == to.x:
        # On the left, round what is in between.
        bend = of.x - min(ARROWS / 2 - PAD, 20 + abs(end - y) / 4)
        line = f"M{of.x:g},{y:g} C{bend:g},{y:g} {bend:g},{end:g} {to.x:g},{end:g}"
        return _labelled(line, how, (of.x + 3 * bend) / 4 - len(how) * LETTER / 4, (y + end) / 2)
    start, goal = (of.x + of.width, to.x) if of.x < to.x else (of.x, to.x + to.width)
    middle = (start + goal) / 2
    line = f"M{start:g},{y:g} C{middle:g},{y:g} {middle:g},{end:g} {goal:g},{end:g}"
    return _labelled(line, how, middle - len(how) * LETTER / 2, (y + end) / 2 - 4)


def _labelled(line: str, how: str, x: float, y: float) -> str:
    return f'<path d="{line}"/>\n<text class="how" x="{max(x, 2):g}" y="{y:g}">{escape(how)}</text>'


# ---- Graphviz ----


def draw_dot(graph: ServiceGraph, notes: Mapping[str, str]) -> str:
    """Source: Graphviz, "DOT Language"."""
    lines = [f"digraph {_quoted(graph.service)} {{", "  rankdir=LR; node [shape=box];"]
    for number, endpoint in enumerate(graph.endpoints):
        label = _quoted(_signature_text(endpoint.name, endpoint.takes, endpoint.replies))
        lines.append(f"  subgraph cluster_{number} {{ label={label};")
        for stage in endpoint.stages:
            label = "\n".join([f"{stage.name}({stage.takes})", *([notes[stage.queue]] if stage.queue in notes else [])])
            lines.append(f"    {_node(endpoint, stage.name)} [label={_quoted(label)}];")
        for before, after in zip(endpoint.stages, endpoint.stages[1:], strict=False):
            lines.append(f"    {_node(endpoint, before.name)} -> {_node(endpoint, after.name)} [style=dotted];")
        lines.append("  }")
    for remote in graph.remotes:
        label = "\n".join(
            [
                _signature_text(remote.name, remote.takes, remote.replies),
                *([notes[remote.name]] if remote.name in notes else []),
            ]
        )
        lines.append(f"  {_quoted(f'endpoint {remote.name}')} [label={_quoted(label)} style=filled];")
    for topic in graph.topics:
        lines.append(
            f"  {_quoted(f'topic {topic.name}')} [label={_quoted(f'{topic.name}({topic.takes})')} shape=ellipse];"
        )
    first = {each.name: _node(each, each.stages[0].name) for each in graph.endpoints}
    for endpoint in graph.endpoints:
        for stage in endpoint.stages:
            for each in stage.references:
                to = first.get(each.to) if each.kind == "endpoint" else None
                to = to or _quoted(f"{each.kind} {each.to}")
                lines.append(f"  {_node(endpoint, stage.name)} -> {to} [label={_quoted(each.how)}];")
        if endpoint.topic:
            lines.append(f"  {_quoted(f'topic {endpoint.topic}')} -> {first[endpoint.name]};")
    return "\n".join([*lines, "}\n"])


def _node(endpoint: EndpointNode, stage: str) -> str:
    return _quoted(f"stage {endpoint.name} {stage}")


def _signature_text(name: str, takes: str, replies: str | None) -> str:
    return f"{name}({takes})" if replies is None else f"{name}({takes}) -> {replies}"


def _quoted(text: str) -> str:
    r"""
    >>> _quoted('a "b"\nc')
    '"a \\"b\\"\\nc"'
    """
    return json.dumps(text, ensure_ascii=False)

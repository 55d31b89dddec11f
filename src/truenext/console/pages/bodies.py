"""Bodies of messages, and messages of stages, as text that is shown. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from truenext.console.pages.links import address, flow_link
from truenext.console.pages.messages import Body, StageMessage, Waiting
from truenext.flows.envelope import Envelope, NotDecoded, as_occurrence, decode_envelope

SHOWN_MAX = 64 * 1024
"""Bytes of a body that one page shows."""
JSON_MAX = 256 * 1024
"""Bytes up to which a body is shown as indented JSON."""
TEXT_MAX = 20_000
"""Characters of an indented part of a stage's message that are shown."""
FORMS = ("text", "json", "hex")
_ROW = 16
BEGINNING = 200


def show_body(body: bytes, form: str, start: int, **parameters: object) -> Body:
    """Return a part of a body as text. `form` "" chooses the form. `parameters` are those of the page's address."""
    form = form if form in FORMS else _natural_form(body)
    if form == "json" and (indented := _indent(body)) is None:
        form = "text"
    if form == "json":
        text, start, shown = indented or "", 0, len(body)
    else:
        start = min(start, len(body))
        part = body[start : start + SHOWN_MAX]
        text, shown = _hex_rows(part, start) if form == "hex" else _text(part), len(part)
    end = start + shown
    return Body(
        form=form if body else "empty",
        text=text,
        size=len(body),
        start=start,
        shown=shown,
        forms={each: address("/message", **parameters, form=each) for each in FORMS},
        next=address("/message", **parameters, form=form, start=end) if end < len(body) else "",
        first=address("/message", **parameters, form=form) if start else "",
    )


def beginning(body: bytes) -> str:
    """Return the first characters of a body as one line.

    >>> beginning(b'{"a":  1,' + bytes([10, 0xFF]) + b"x}")
    '{"a": 1, �x}'
    """
    return " ".join(body[: 4 * BEGINNING].decode(errors="replace").split())[:BEGINNING]


def _natural_form(body: bytes) -> str:
    """Return the form in which a body reads best: bodies with bytes that are no text as hex."""
    part = body[:SHOWN_MAX]
    if part[:1] in b"{[" and len(body) <= JSON_MAX and part:
        return "json"
    text = part.decode(errors="replace")
    odd = sum(not (each.isprintable() or each.isspace()) or each == "\ufffd" for each in text[:1000])
    return "hex" if odd > len(text[:1000]) // 10 else "text"


def _text(part: bytes) -> str:
    """Return bytes as text, in which each character that cannot be printed is shown as one that can."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in part.decode(errors="replace"))


def _indent(body: bytes | msgspec.Raw) -> str | None:
    """Return JSON with indentation; None if it is no JSON, or too large."""
    if len(bytes(body)) > JSON_MAX:
        return None
    try:
        return _text(msgspec.json.format(bytes(body), indent=2))
    except (msgspec.MsgspecError, RecursionError):
        return None


def _hex_rows(part: bytes, start: int) -> str:
    r"""Return bytes as rows of offset, hexadecimal digits and characters.

    >>> _hex_rows(b"ab\n", 32)
    '00000020  61 62 0a                                         ab.'
    """
    rows = []
    for offset in range(0, len(part), _ROW):
        row = part[offset : offset + _ROW]
        characters = "".join(chr(each) if 32 <= each < 127 else "." for each in row)
        rows.append(f"{start + offset:08x}  {row.hex(' '):<{_ROW * 3}} {characters}")
    return "\n".join(rows)


# ---- Messages of stages ----


def decode_stage_message(body: bytes, due: str | None) -> Envelope | None:
    """Decode the body of a message of stages; None if it is none of this version. `due` is the header
    `truenext-due`."""
    if not body.startswith(b"{"):
        return None
    try:
        return as_occurrence(decode_envelope(body), due)
    except (NotDecoded, ValueError):
        return None


def show_stage_message(envelope: Envelope, *, has_flows: bool) -> StageMessage:
    flow = envelope.flow
    return StageMessage(
        trace=flow.trace,
        flow=flow_link(flow.trace) if has_flows else "",
        kind=envelope.kind,
        sender=envelope.sender,
        started_by=flow.started_by,
        started_ms=flow.started_ms,
        parent=envelope.parent,
        calls=envelope.calls,
        interactive=flow.interactive,
        message=_part(envelope.message),
        state=_part(envelope.state),
        properties={name: _part_of_value(value) for name, value in flow.properties.items()},
        waiting=[Waiting(each.to, _part(each.state)) for each in envelope.waiting],
        attachments={name: len(value) for name, value in envelope.attachments.items()},
    )


def _part(raw: msgspec.Raw) -> str:
    text = _indent(raw)
    if text is None:
        text = bytes(raw)[: 4 * TEXT_MAX].decode(errors="replace")
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]} ..."


def _part_of_value(value: Any) -> str:
    return _part(msgspec.Raw(msgspec.json.encode(value)))

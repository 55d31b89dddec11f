"""Test that a broker sends the frames that docs/protocol.md shows.

The page says how its exchanges are to be read. The text behind `C:` is sent as it is, and each frame of the broker is
compared, header by header.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient
from truenext.wire.stomp.frame import Frame

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
END = "^@"
ELLIPSIS = "..."
CHOSEN = re.compile(r"\b[A-Z]{2,}\b")
"""Words for values that the broker chooses."""


class Shown(NamedTuple):
    """Frame as shown on the page."""

    by: str
    lines: list[str]

    @property
    def is_cut(self) -> bool:
        """Whether the end of its headers and its body are left out."""
        return self.lines[-1] == ELLIPSIS

    @property
    def head(self) -> list[str]:
        """Command and headers."""
        return self.lines[: self.lines.index("")] if "" in self.lines else self.lines

    @property
    def body(self) -> str:
        return "\n".join(self.lines[self.lines.index("") + 1 :]).removesuffix(END)


def shown() -> Iterator[Shown]:
    for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        lines: list[str] = []
        rows = [(line[0], line[3:]) for line in block.splitlines()]
        assert {line[1] for line in block.splitlines()} == {":"} and {by for by, _ in rows} <= {"B", "C"}, block
        for number, (by, text) in enumerate(rows):
            lines.append(text)
            if text.endswith(END) or (text == ELLIPSIS and rows[number + 1 : number + 2] != [(by, "")]):
                yield Shown(by, lines)
                lines = []
        assert not lines, f"this frame has no end: {lines}"


class Chosen:
    """Values that the broker has chosen so far, by their words on the page."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def filled_in(self, text: str) -> str:
        return CHOSEN.sub(lambda word: self._values.get(word[0], word[0]), text)

    def check(self, text: str, actual: str) -> None:
        """Check that `actual` matches the page. A word that is new there gets its value from `actual`."""
        text = self.filled_in(text)
        pattern, at = "", 0
        for word in CHOSEN.finditer(text):
            known = f"(?P<{word[0]}>" in pattern
            pattern += re.escape(text[at : word.start()]) + (f"(?P={word[0]})" if known else f"(?P<{word[0]}>.+?)")
            at = word.end()
        match = re.fullmatch(pattern + re.escape(text[at:]), actual)
        assert match is not None, f"{actual!r} instead of {text!r}"
        self._values |= match.groupdict()


def check(frame: Shown, frame_sent: Frame, chosen: Chosen) -> None:
    command, *lines = frame.head
    assert frame_sent.command == command
    headers = dict(line.split(":", 1) for line in lines if line not in (ELLIPSIS, END))
    if ELLIPSIS not in lines:
        assert frame_sent.headers.keys() == headers.keys()
    for name, value in headers.items():
        assert name in frame_sent.headers, f"{name} is missing in {frame_sent}"
        chosen.check(value, frame_sent.headers[name])
    if frame.is_cut:
        return
    if frame_sent.headers.get("content-type") == "application/json":
        assert json.loads(frame_sent.body) == json.loads(frame.body)
    else:
        chosen.check(frame.body, frame_sent.body.decode())


def test_a_broker_sends_the_frames_that_the_page_shows(own_broker: BrokerProcess) -> None:
    chosen = Chosen()
    clients: list[RawClient] = []
    frames = list(shown())
    for number, frame in enumerate(frames):
        is_login = frame.head[0] == "CONNECT"
        if is_login:
            clients.append(own_broker.connect(sends_connect=False))
        client = clients[-1]
        if frame.by == "C":
            client.write(chosen.filled_in("\n".join(frame.lines)).replace(END, "\0").encode())
        elif frame.head[0] == "CONNECTED":
            check(frame, client.await_connected(), chosen)
        else:
            check(frame, client.next_frame(), chosen)
        assert number or is_login
    first, last = clients
    first.await_silent_end()
    last.await_end()
    assert len(frames) > 30, "most of the page is not there"

"""Tests that docs/protocol.md has headers of truenext, and fields of messages between stages, that are in the code."""

import re
from pathlib import Path

from msgspec.structs import fields

from truenext.flows.envelope import Envelope, FlowContext
from truenext.wire.stomp.headers import OWN_PREFIX

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
OWN_HEADER = re.compile(rf"\b{OWN_PREFIX}[a-z-]+[a-z]\b")


def test_headers_of_truenext_on_the_protocol_page_are_in_the_code() -> None:
    page = re.sub(r"\b[a-z-]+\.md\b", "", PAGE)
    files = (ROOT / "src" / "truenext").rglob("*.py")
    assert set(OWN_HEADER.findall(page)) <= {name for file in files for name in OWN_HEADER.findall(file.read_text())}


def test_protocol_page_has_exactly_the_fields_of_a_message_between_stages() -> None:
    section = PAGE.partition("\n## Messages between stages\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {
        field.encode_name for field in fields(Envelope)
    }
    flow = next(line for line in section.split("\n\n") if line.startswith("`flow` has "))
    assert {field.encode_name for field in fields(FlowContext)} <= set(re.findall(r"`(\w+)`", flow))

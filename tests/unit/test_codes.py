"""Tests that docs/protocol.md has exactly the codes that an ERROR may have."""

import re
from pathlib import Path

from truenext.errors import Code, NoSpaceError, RemoteProtocolError

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_page_has_the_codes_in_the_order_of_the_enumeration() -> None:
    # C23.2
    _, _, section = PAGE.read_text().partition("\n## Error codes\n")
    section, _, _ = section.partition("\n## ")
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == [code.value for code in Code]


def test_a_refusal_has_the_code_that_was_given_or_else_that_of_headers() -> None:
    assert RemoteProtocolError("text").code is Code.HEADER
    assert RemoteProtocolError("text", Code.LIMIT).code is Code.LIMIT
    assert NoSpaceError("text").code is Code.NO_SPACE
    assert str(RemoteProtocolError("text", Code.LIMIT)) == "text"

"""Tests that docs/reference.md has each public name of the client, with the text of its docstring."""

import re

import truenext
from tests.unit import reference


def test_reference_page_is_made_of_the_current_docstrings() -> None:
    assert reference.PAGE.read_text() == reference.page(), "it is stale: say `make reference`"


def test_the_page_has_every_public_name() -> None:
    headings = set(re.findall(r"^##+ (\w+)$", reference.page(), re.MULTILINE))
    assert set(truenext.__all__) - headings == {"Code", "__version__"}


def test_public_names_are_explained() -> None:
    page = reference.page()
    assert not re.findall(r"^\| .* \|  \|$", page, re.MULTILINE)
    assert not re.findall(r"^## .*\n+## .*$", page, re.MULTILINE)
    assert not re.findall(r"^```\n+#+ .*$", page, re.MULTILINE)


def test_reference_of_a_message_has_attributes_of_all_its_classes() -> None:
    """The attributes of a message are in three classes, and the page must have them all."""
    of_messages = reference.page().split("\n## Message\n")[1].split("\n## Processing\n")[0]
    for name in ("text", "body", "headers", "attempts", "deliveries", "was_lost", "may_have_missed", "process", "nack"):
        assert re.search(rf"^(\| `{name}`|### Message\.{name}$)", of_messages, re.MULTILINE), name

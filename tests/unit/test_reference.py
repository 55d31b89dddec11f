"""Tests that the pages of docs/reference/ are up to date with the code, and that the client's page has each name."""

import re

import pytest

import truenext
import truenext.stage
import truenext.testing
from tools.reference import FOLDER, PAGES, client, path_of, stages
from tools.reference.members import described_call_parts, function_member


@pytest.mark.parametrize("name", PAGES)
def test_page_of_the_reference_is_made_of_the_current_code(name: str) -> None:
    assert path_of(name).read_text(encoding="utf-8") == PAGES[name](), "the page is stale: run `make reference`"


def test_each_page_of_the_reference_has_a_generator() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_no_entry_of_the_reference_is_without_text(name: str) -> None:
    text = PAGES[name]()
    assert not re.findall(r"^\| .* \|  \|$", text, re.MULTILINE)
    assert not re.findall(r"^(#+) .*\n+\1 .*$", text, re.MULTILINE)
    assert not re.findall(r"^```python\n[^`]*```\n+#+ .*$", text, re.MULTILINE)


def test_page_of_the_client_has_every_public_name() -> None:
    headings = set(re.findall(r"^##+ (\w+)$", client.page(), re.MULTILINE))
    assert set(truenext.__all__) - headings == {"Code", "__version__"}


def test_page_of_stages_has_every_public_name_of_stages_and_of_the_test_broker() -> None:
    headings = set(re.findall(r"^##+ (\w+)$", stages.page(), re.MULTILINE))
    names = set(truenext.stage.__all__) | set(truenext.testing.__all__)
    # A BlockingBroker has the methods of a LocalBroker, and HasSession is a type of theirs.
    assert names - headings == {"BlockingBroker", "HasSession"}


def send_once(to: str, times: int = 1) -> None:
    """Send a message.

    Args:
        to: Queue.
    """


def test_a_parameter_that_its_docstring_does_not_describe_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Args of send_once in the docstring are \['to'\], its parameters \['to', 't"):
        list(described_call_parts(function_member(send_once)))


def test_reference_of_a_message_has_attributes_of_all_its_classes() -> None:
    """The attributes of a message are in three classes, and the page must have them all."""
    of_messages = client.page().split("\n## Message\n")[1].split("\n## Processing\n")[0]
    for name in ("text", "body", "headers", "attempts", "deliveries", "was_lost", "may_have_missed", "process", "nack"):
        assert re.search(rf"^(\| `{name}`|### Message\.{name}$)", of_messages, re.MULTILINE), name

"""Tests that each selector on a page or in a --help selects the messages it is shown for."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from truenext.cli.main import main
from truenext.model.header_lines import encode_header_lines
from truenext.model.message import SentMessage
from truenext.model.selector import compile_selector

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md"))]

EXAMPLES: dict[str, dict[str, str]] = {
    "JMSPriority > 6": {},
    "JMSDeliveryMode = 'PERSISTENT'": {},
    "JMSTimestamp > 1700000000000": {},
    "JMSDestination = 'queue://orders'": {"destination": "/queue/orders"},
    "JMSType = 'order'": {"type": "order"},
    "JMSCorrelationID = '17'": {"correlation-id": "17"},
    "JMSCorrelationID = '01a224fa34bb99c6349466abf27ad967'": {"correlation-id": "01a224fa34bb99c6349466abf27ad967"},
    "colour = 'red'": {"colour": "red"},
    "colour = 'red' AND weight > 2.5": {"colour": "red", "weight": "3"},
    "colour = 'red' AND JMSPriority > 6": {"colour": "red"},
    "region = 'eu'": {"region": "eu"},
    "region = 'eu' AND JMSPriority > 6": {"region": "eu"},
    "content_type = 'application/json'": {"content-type": "application/json"},
    "hyphenated_props:content-type = 'application/json'": {"content-type": "application/json"},
    "convert_string_expressions:weight > 2.5": {"weight": "3"},
    "truenext_original_attempts > 2": {"truenext-original-attempts": "7"},
    "truenext_original_last_cause LIKE '%timeout%'": {"truenext-original-last-cause": "a timeout of 5 s"},
}
"""With the headers of a persistent message of priority 9 that each wants."""


def helps(command: click.Command, name: str = "truenext") -> Iterator[tuple[str, str]]:
    """The commands with --selector, and what its help says."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and "--selector" in parameter.opts:
            yield name, parameter.help or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from helps(found, f"{name} {each}")


def shown() -> set[str]:
    """Return all selectors on pages and in helps."""
    text = "".join(page.read_text() for page in PAGES)
    found = set(
        re.findall(r'--selector "([^"]+)"', text)
        + re.findall(r'selector that messages must match, such as "([^"]+)"', text)
    )
    (table,) = re.findall(
        r"\| selector \| asks for \|\n(.*?)\n\n", (ROOT / "docs" / "protocol.md").read_text(), re.DOTALL
    )
    for row in table.splitlines()[1:]:
        found.update(re.findall("`([^`]+)`", row.split("|")[1]))
    for _, help_text in helps(main):
        found.update(re.findall(r'such as "(.+?)"\.', help_text))
    return found


def test_selectors_shown_on_pages_and_in_help_are_the_examples_here() -> None:
    assert shown() == EXAMPLES.keys()


def test_commands_with_a_selector_show_one_in_their_help() -> None:
    found = dict(helps(main))
    assert {"truenext redrive", "truenext stages rerun", "truenext browse"} <= found.keys()
    assert [name for name, help_text in found.items() if "such as" not in help_text] == []


@pytest.mark.parametrize("text", EXAMPLES)
def test_example_selector_matches_its_example_message(text: str) -> None:
    message = SentMessage(9, True, 0, encode_header_lines(EXAMPLES[text]), b"", 1800000000000)
    assert compile_selector(text).matches(message)

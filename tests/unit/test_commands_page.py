"""Tests that docs/commands.md has exactly the commands and options that click has."""

import re
from collections import defaultdict
from pathlib import Path

import click

from tests.unit.test_command_line import walk
from truenext.cli.main import main

PAGE = (Path(__file__).parent.parent.parent / "docs" / "commands.md").read_text()
SHARED_BY = 4
"""Number of commands from which on their common option counts as shared."""
OPTION = r"(?<![\w-])--[a-z][a-z-]*"


def options_by_command() -> dict[str, set[str]]:
    return {
        " ".join(path): {
            name
            for param in command.params
            if isinstance(param, click.Option)
            for name in (*param.opts, *param.secondary_opts)
        }
        for path, command in walk(main)
    }


def rows(header: str) -> list[tuple[list[str], str]]:
    """Return the rows of the table with this header: the names in the first cell, and the rest."""
    table = PAGE.partition(header)[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ", 1) for line in table.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", names), rest) for names, rest in cells]


def test_table_of_commands_has_the_commands_that_there_are() -> None:
    named = [name for names, _ in rows("| command | does |") for name in names]
    assert sorted(named) == sorted(options_by_command())


def test_table_of_shared_options_has_the_options_that_commands_share() -> None:
    commands = defaultdict(set)
    for command, options in options_by_command().items():
        for option in options:
            commands[option].add(command)
    named = {name for names, _ in rows("| option | means |") for name in names}
    assert {option for option, sharing in commands.items() if len(sharing) >= SHARED_BY} <= named
    assert {option for option in named if len(commands[option]) < 2} == set()
    (count,) = [rest for names, rest in rows("| option | means |") if "--count" in names]
    assert set(re.findall(r"`([^`]+)`", count)) == commands["--count"]


def test_options_that_the_page_names_are_options_of_some_command() -> None:
    known = {"--help"}.union(*options_by_command().values())
    assert set(re.findall(OPTION, PAGE)) - known == set()


def test_examples_of_the_page_use_options_of_their_command() -> None:
    examples = re.findall(r"^truenext (.*)$", PAGE, re.MULTILINE)
    assert examples
    commands = options_by_command()
    for example in examples:
        command = max((each for each in commands if f"{example} ".startswith(f"{each} ")), key=len)
        assert set(re.findall(OPTION, example)) <= commands[command], example


def test_tables_of_options_have_every_option_of_every_command() -> None:
    shared = {name for names, _ in rows("| option | means |") for name in names}
    others = {name: set(re.findall(r"`([^`]+)`", rest)) for (name,), rest in rows("| command | options |")}
    for command, options in options_by_command().items():
        assert others.pop(command, set()) == options - shared, command
    assert not others

r"""What is printed of what others have written, so that no terminal obeys it.

Names, headers and bodies are what some client has sent. To a terminal some characters are orders (C0, C1, DEL), and
others turn round the text beside them (the controls of bidirectional writing). They are

    written as \x1b, \u202e     in a body on a terminal, and in all that is for people anyway: tables, standard error
    left as they are            in a body that goes into a pipe or a file
    written as \u001b, \u202e   in JSON, wherever that goes
"""

import re
import sys
from typing import Any, BinaryIO

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from truenext.errors import TruenextError

_ORDERS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
# What could not be read as UTF-8 where the command was started is a surrogate, which cannot be written.
_IN_A_LINE = re.compile(f"[{_ORDERS}\ud800-\udfff]")
_IN_A_TEXT = re.compile(f"(?![\n\t])[{_ORDERS}\ud800-\udfff]")
_IN_JSON = re.compile(f"(?!\n)[{_ORDERS}]")


def line(text: str) -> str:
    r"""A text that is to stand in one line.

    >>> line("two\n\x1b[31mlines")
    'two\\x0a\\x1b[31mlines'
    """
    return _IN_A_LINE.sub(_escaped, text)


def lines(text: str) -> str:
    r"""A text that may have lines and columns.

    >>> lines("two\n\x1b[31mlines\u202e")
    'two\n\\x1b[31mlines\\u202e'
    """
    return _IN_A_TEXT.sub(_escaped, text)


def cell(text: str) -> Text:
    """The same as `line` in a table, where nothing of it is markup."""
    return Text(line(text))


def say(text: str, *, err: bool = False) -> None:
    """Tell people, on standard output or standard error."""
    click.echo(lines(text), err=err)


def show(table: Table) -> None:
    console = Console()
    # Not printed by rich, which ends the process by itself when nobody reads.
    with console.capture() as captured:
        console.print(table)
    click.echo(captured.get(), nl=False)


def write_body(body: bytes) -> None:
    out = _output()
    if sys.stdout.isatty():
        text = lines(body.decode(errors="backslashreplace"))
        body = text.encode(sys.stdout.encoding, errors="backslashreplace")
    out.write(body + b"\n")


def write_json(value: Any) -> None:
    """One line."""
    write_json_text(msgspec.json.encode(value))


def write_json_text(encoded: bytes) -> None:
    # What is escaped can stand in strings only: elsewhere JSON has none of it.
    text = _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode())
    _output().write(text.encode() + b"\n")


def _output() -> BinaryIO:
    """Raises: TruenextError if there is none; what cannot be printed must not be taken from a queue."""
    if sys.stdout is None:
        raise TruenextError("standard output is closed: there is nowhere to print to")
    return sys.stdout.buffer


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

r"""What is printed of what others have written, so that no terminal obeys it.

Names, headers and bodies are what some client has sent. To a terminal some characters are orders (C0, C1, DEL), and
others turn round the text beside them (the controls of bidirectional writing). They are

    written as \x1b, \u202e     in a body on a terminal, and in all that is for people anyway: tables, standard error
    left as they are            in a body that goes into a pipe or a file
    written as \u001b, \u202e   in JSON, wherever that goes
"""

import io
import os
import re
import sys
from typing import Any, TextIO

import click
import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

WIDTH_MAX = 1_000_000
"""Columns of a line where no terminal bounds it."""

_CONTROL_CHARACTERS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
# What could not be read as UTF-8 where the command was started is a surrogate, which cannot be written.
_IN_A_LINE = re.compile(f"[{_CONTROL_CHARACTERS}\ud800-\udfff]")
_IN_A_TEXT = re.compile(f"(?![\n\t])[{_CONTROL_CHARACTERS}\ud800-\udfff]")
_IN_JSON = re.compile(f"(?!\n)[{_CONTROL_CHARACTERS}]")


def escape_line(text: str) -> str:
    r"""A text that is to stand in one line.

    >>> escape_line("two\n\x1b[31mlines")
    'two\\x0a\\x1b[31mlines'
    """
    return _IN_A_LINE.sub(_escaped, text)


def escape_text(text: str) -> str:
    r"""A text that may have lines and columns.

    >>> escape_text("two\n\x1b[31mlines\u202e")
    'two\n\\x1b[31mlines\\u202e'
    """
    return _IN_A_TEXT.sub(_escaped, text)


def table_cell(text: str) -> Text:
    """Return `text` in one line, without markup; a terminal that is too narrow wraps it instead of cutting it."""
    return Text(escape_line(text), overflow="fold")


def count_noun(count: int, noun: str) -> str:
    """
    >>> count_noun(1, "queue"), count_noun(2000, "queue")
    ('1 queue', '2,000 queues')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ensure_stdout() -> None:
    """Where standard output is closed there is one that cannot be written to: whoever prints must not believe that it
    is printed. No socket or file takes the number of any stream that is closed; the event loop aborts on one that does.

    What the encoding of standard output does not have is written as on standard error, such as \\u2603 in Latin-1.
    """
    while (nowhere := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    if sys.stdout is None:
        sys.stdout = os.fdopen(nowhere, "w", encoding="utf-8")
    else:
        os.close(nowhere)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def set_line_buffering() -> None:
    """Write each line to standard output when it is printed, also into a pipe or a file: for commands that print while
    they run, and for the programs that they run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def discard_output(stream: TextIO) -> None:
    """Let go of what could not be written. The interpreter would try once more at its end, and complain about it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def echo(text: str, *, err: bool = False) -> None:
    """Tell people, on standard output or standard error. Where the latter cannot be written to, the status must do.

    Raises: OSError if standard output cannot be written to
    """
    if not err:
        click.echo(escape_text(text))
        return
    try:
        click.echo(escape_text(text), err=True)
    except OSError:
        discard_output(sys.stderr)


def flush_errors() -> None:
    """What others than `echo` have written to standard error must not change the status, either."""
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except OSError:
            discard_output(sys.stderr)


def print_drawn(drawn: Table | Tree) -> None:
    """Print a table or a tree. A terminal wraps the cells of a table; nothing else is wrapped, and nothing is cut."""
    console = Console()
    if isinstance(drawn, Tree) or not sys.stdout.isatty():
        unbounded = console.options.update_width(WIDTH_MAX)
        console.width = max(1, Measurement.get(console, unbounded, drawn).maximum)
    # Not printed by rich, which ends the process by itself when nobody reads.
    with console.capture() as captured:
        console.print(drawn, soft_wrap=True)
    click.echo(captured.get(), nl=False)


def write_body(body: bytes) -> None:
    if sys.stdout.isatty():
        text = escape_text(body.decode(errors="backslashreplace"))
        body = text.encode(sys.stdout.encoding, errors="backslashreplace")
    sys.stdout.buffer.write(body + b"\n")


def write_json(value: Any) -> None:
    """One line."""
    write_json_text(msgspec.json.encode(value))


def write_json_text(encoded: bytes) -> None:
    # What is escaped can stand in strings only: elsewhere JSON has none of it.
    text = _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode())
    sys.stdout.buffer.write(text.encode() + b"\n")


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

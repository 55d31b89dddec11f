r"""Output of commands. Text from other programs is escaped, so that it cannot control a terminal.

Clients send names, headers and bodies. Some characters in them are commands to a terminal (C0, C1, DEL), and others
reverse the text next to them (controls of bidirectional writing). These characters are

    written as \x1b, \u202e     in a body on a terminal, and in all text for people: tables, standard error
    left as they are            in a body that goes into a pipe or a file
    written as \u001b, \u202e   in JSON, wherever the JSON goes
"""

import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import click
import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from truenext.errors import ConfigurationError

WIDTH_MAX = 1_000_000
"""Width in columns of an output that is not a terminal."""

_CONTROL_CHARACTERS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
# Arguments and environment that are not UTF-8 become surrogates, which cannot be encoded.
_IN_A_LINE = re.compile(f"[{_CONTROL_CHARACTERS}\ud800-\udfff]")
_IN_A_TEXT = re.compile(f"(?![\n\t])[{_CONTROL_CHARACTERS}\ud800-\udfff]")
_IN_JSON = re.compile(f"(?!\n)[{_CONTROL_CHARACTERS}]")


def escape_line(text: str) -> str:
    r"""Escape a text for one line.

    >>> escape_line("two\n\x1b[31mlines")
    'two\\x0a\\x1b[31mlines'
    """
    return _IN_A_LINE.sub(_escaped, text)


def escape_text(text: str) -> str:
    r"""Escape a text that may have line breaks and tabs.

    >>> escape_text("two\n\x1b[31mlines\u202e")
    'two\n\\x1b[31mlines\\u202e'
    """
    return _IN_A_TEXT.sub(_escaped, text)


def table_cell(text: str) -> Text:
    """Return `text` as one line for a table, without markup. If the terminal is too narrow, the cell is wrapped and not
    cut."""
    return Text(escape_line(text), overflow="fold")


def format_utc(time_ms: int) -> str:
    """Return a time, in milliseconds since 1970, as text."""
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


_UNITS = (("s", 1, 120), ("m", 60, 2 * 3600), ("h", 3600, 2 * 86_400))
"""Units of a time: name, seconds, and the seconds from which on the next unit is shown."""


def format_age(seconds: float) -> str:
    """Return a time as a short text, in the largest unit of which it has two or more.

    >>> [format_age(seconds) for seconds in (0.4, 119, 7199, 2 * 86_400 - 1, 86_400 * 100)]
    ['0 s', '119 s', '119 m', '47 h', '100 d']
    """
    for name, unit_s, until_s in _UNITS:
        if seconds < until_s:
            return f"{seconds // unit_s:.0f} {name}"
    return f"{seconds // 86_400:,.0f} d"


def ensure_stdout() -> None:
    """If standard output is closed, replace it by a file that cannot be written to, so that printing fails. This also
    keeps the numbers of the standard streams from being given to a socket or another file; the event loop aborts on
    such a socket.

    Characters that the encoding of standard output does not have are escaped, such as \\u2603 in Latin-1.
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
    """Write each line to standard output when it is printed, even into a pipe or a file. This is for commands that
    print while they run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def discard_output(stream: TextIO) -> None:
    """Redirect the stream to the null device, so that the interpreter does not complain about unwritten output at its
    end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def echo(text: str, *, err: bool = False) -> None:
    """Print a text for people. If standard error fails, its error is ignored, because the exit status tells the
    outcome.

    Raises: OSError if standard output cannot be written to
    """
    if not err:
        click.echo(escape_text(text))
        return
    try:
        click.echo(escape_text(text), err=True)
    except OSError:
        discard_output(sys.stderr)


def require_typed(kind: str, name: str, purpose: str) -> None:
    """Ask the operator to type a name, so that nothing is done to another one by mistake. `kind` says what has the
    name, and `purpose` what is done then.

    Raises: ConfigurationError if another text is typed, or standard input is closed
    """
    echo(f"Type the name of the {kind}, {escape_line(name)}, to {purpose}:", err=True)
    if sys.stdin is None or sys.stdin.readline().strip() != name:
        raise ConfigurationError(f"that is not the name of the {kind}: nothing was changed")


def flush_errors() -> None:
    """Flush standard error. An error of standard error is ignored, because it must not change the exit status."""
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except OSError:
            discard_output(sys.stderr)


def print_columns(head: Sequence[str], rows: Iterable[Sequence[str | int]]) -> None:
    """Print rows below a head, in columns. Numbers are at the right. Nothing is wrapped or cut. rich is not used:
    it takes a third of a millisecond for each row."""
    lines = [head, *rows]
    texts = [[escape_line(f"{each:,}" if isinstance(each, int) else each) for each in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for line in texts:
        cells = [
            cell.rjust(width) if isinstance(kind, int) else cell.ljust(width)
            for cell, width, kind in zip(line, widths, lines[-1], strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def print_drawn(drawn: Table | Tree) -> None:
    """Print a table or a tree. On a terminal the cells of a table are wrapped. Nothing else is wrapped, and nothing is
    cut."""
    console = Console()
    if isinstance(drawn, Tree) or not sys.stdout.isatty():
        unbounded = console.options.update_width(WIDTH_MAX)
        console.width = max(1, Measurement.get(console, unbounded, drawn).maximum)
    # Printed by click: rich ends the process by itself when the reader has gone.
    with console.capture() as captured:
        console.print(drawn, soft_wrap=True)
    click.echo(captured.get(), nl=False)


def write_body(body: bytes) -> None:
    if sys.stdout.isatty():
        text = escape_text(body.decode(errors="backslashreplace"))
        body = text.encode(sys.stdout.encoding, errors="backslashreplace")
    sys.stdout.buffer.write(body + b"\n")


def write_json(value: Any) -> None:
    """Print a value as JSON in one line."""
    write_json_text(msgspec.json.encode(value))


def write_json_text(encoded: bytes) -> None:
    # Escaping is safe: in JSON these characters occur only within strings.
    text = _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode())
    sys.stdout.buffer.write(text.encode() + b"\n")


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

"""Tests that foreign text is harmless on a terminal, unchanged in a pipe, and restored from JSON."""

import json
import os
import pty
import sys
import unicodedata
from collections.abc import Callable

import pytest
from rich.table import Table
from rich.tree import Tree

from truenext.cli import terminal

ORDERS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))]
TURNS = [*"\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"]
UNCHANGED = "plain, ä, 中文, עברית, 👩\u200d💻, a\u00a0b"
EVIL = f"{''.join(ORDERS)}{''.join(TURNS)}{UNCHANGED}"


def test_control_characters_of_unicode_are_known() -> None:
    """Source: Unicode's category Cc, and its bidirectional classes."""
    replaced = {chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cc"}
    turns = ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
    replaced |= {chr(code) for code in range(0x110000) if unicodedata.bidirectional(chr(code)) in turns}
    assert replaced | {"\u061c", "\u200e", "\u200f"} == {*ORDERS, *TURNS}


@pytest.mark.parametrize("one", [*ORDERS, *TURNS])
def test_escaped_line_has_no_control_character(one: str) -> None:
    assert terminal.escape_line(f"a{one}b").isprintable()
    assert terminal.escape_text(f"a{one}b") == (f"a{one}b" if one in "\n\t" else terminal.escape_line(f"a{one}b"))


def test_harmless_text_is_not_escaped() -> None:
    assert terminal.escape_line(UNCHANGED) == terminal.escape_text(UNCHANGED) == UNCHANGED


def test_in_json_all_of_it_is_there_and_none_of_it_is_seen(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    terminal.write_json({EVIL: [EVIL]})
    terminal.write_json_text(json.dumps([EVIL], ensure_ascii=False).encode())
    first, second = _flushed(capfdbinary).decode().splitlines()
    assert json.loads(first) == {EVIL: [EVIL]} and json.loads(second) == [EVIL]
    for one in (*ORDERS, *TURNS):
        assert one not in first + second, repr(one)
    assert "中文" in first


def test_a_body_goes_into_a_pipe_as_it_came(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    body = bytes(range(256)) + EVIL.encode()
    terminal.write_body(body)
    assert _flushed(capfdbinary) == body + b"\n"


def test_a_name_in_a_table_is_neither_an_order_nor_markup(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    table = Table("name", box=None)
    table.add_row(terminal.table_cell("[red]x[/red] :smile: \x1b[31m\u202e\n"))
    terminal.print_drawn(table)
    assert rb"[red]x[/red] :smile: \x1b[31m\u202e\x0a" in _flushed(capfdbinary)


def test_printing_without_a_standard_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    terminal.ensure_stdout()
    writes: list[Callable[[], None]] = [lambda: terminal.write_body(b""), lambda: terminal.write_json("")]
    writes.append(lambda: terminal.echo(""))
    for write in writes:
        with pytest.raises(OSError, match="Bad file descriptor"):
            write()
            sys.stdout.flush()
    terminal.discard_output(sys.stdout)
    sys.stdout.close()


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"\x1b]0;title\x07", r"\x1b]0;title\x07"),
        (b"a\r\n\tb", "a\\x0d\r\n\tb"),
        ("\x9b31m\u202e".encode(), r"\x9b31m\u202e"),
        # In one byte, as terminals of other encodings take it.
        (b"\x9b31m\xff", r"\x9b31m\xff"),
        ("中文".encode(), "中文"),
    ],
)
def test_a_body_on_a_terminal_is_harmless(body: bytes, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _on_a_terminal(lambda: terminal.write_body(body), monkeypatch) == f"{shown}\r\n"


def _on_a_terminal(write: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> str:
    master, its = pty.openpty()
    try:
        with open(its, "w", encoding="utf-8", closefd=False) as out:
            monkeypatch.setattr("sys.stdout", out)
            write()
        return os.read(master, 10_000).decode()
    finally:
        os.close(master)
        os.close(its)


def _flushed(captured: pytest.CaptureFixture[bytes]) -> bytes:
    sys.stdout.flush()
    return captured.readouterr().out


@pytest.mark.parametrize("columns", ["20", ""])
def test_tables_and_trees_without_a_terminal_are_neither_cut_nor_wrapped(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "a long name " * 1000 + "x" * 1000
    table = Table("queue", "waiting", box=None)
    table.add_row(terminal.table_cell(name), "1")
    tree = Tree(terminal.table_cell(name))
    tree.add("service").add(terminal.table_cell(name))
    terminal.print_drawn(table)
    terminal.print_drawn(tree)
    _, row, top, _, leaf = capsys.readouterr().out.splitlines()
    assert row.split(name)[1].split() == ["1"]
    assert top == name and leaf.endswith(f" {name}")

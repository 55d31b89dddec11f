"""Tests that the table of all texts that a user can see, tests/unit/texts.txt, is up to date."""

from tools import texts


def test_the_table_has_every_text_of_the_code() -> None:
    table = texts.TABLE.read_text(encoding="utf-8")
    assert table == texts.table(), "tests/unit/texts.txt is stale: run `make texts`, and read the texts in the diff"


def test_texts_have_their_kind_and_names_for_values() -> None:
    source = '''
"""Docstring of the module."""
def run(name: "str | None of the name") -> None:
    """Docstring of a function."""
    assert name, "message of an assert"
    logger.error("failed", extra={"reason": f"no queue {name!r} here"})
    raise ValueError(f"{shortened(name)} is no queue of {self.broker.url}: {'a longer reason' if name else ''}")

@cli.command("list")
@click.option("--count", help="Number")
def list_queues(count: int = setting(3, "Messages", unit="bytes")) -> None:
    """List the queues."""
    connection.execute("SELECT name FROM queues")
'''
    assert texts.texts_of(source) == {
        ("log", "failed"),
        ("text", "no queue {name!r} here"),
        ("raise", "{shortened} is no queue of {url}: {...}"),
        ("raise", "a longer reason"),
        ("help", "Number"),
        ("setting", "Messages"),
        ("setting", "bytes"),
        ("help", "List the queues."),
    }

"""Tests of the examples in the pages about dependencies, SQL, the outbox and failures."""

from pathlib import Path

from tests.integration.pages import Folder, follow


def test_the_examples_of_dependencies(tmp_path: Path) -> None:
    """The examples need no broker."""
    follow("docs/stages-dependencies.md", Folder(tmp_path / "folder", "stomp://127.0.0.1:1"))


def test_the_examples_of_sql(tmp_path: Path) -> None:
    """The examples need no broker."""
    follow("docs/stages-sql.md", Folder(tmp_path / "folder", "stomp://127.0.0.1:1"))


def test_the_examples_of_effects_that_happen_once(tmp_path: Path) -> None:
    """The examples start their own brokers."""
    follow("docs/stages-outbox.md", Folder(tmp_path / "folder", "stomp://127.0.0.1:1"))


def test_the_examples_of_failures(tmp_path: Path) -> None:
    """The examples start their own brokers."""
    follow("docs/stages-failure.md", Folder(tmp_path / "folder", "stomp://127.0.0.1:1"))

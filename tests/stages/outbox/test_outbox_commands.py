"""Tests of the commands `truenext stages schema` and `truenext stages outbox`. Source: docs/stages-database.md"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from tests.stages.flows import Number
from truenext.cli.main import main
from truenext.stage import Service
from truenext.stage.sql import apply_schema, schema_sql

SHOP = """
from truenext.stage import Service

app = Service("shop", exactly_once=True)
"""

RunCommand = Callable[..., Result]


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Function that runs a command in a folder with a service."""
    module = f"outbox_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(command: str, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["stages", command, f"{module}:app", *arguments])

    return run


def test_tables_are_made_where_they_are_missing_and_that_is_said(run_command: RunCommand, database: str) -> None:
    made = run_command("schema", "--apply", "--database", database)
    assert made.exit_code == 0, made.output
    assert "truenext_inbox" in made.output and "truenext_keys" in made.output
    again = run_command("schema", "--apply", "--database", database)
    assert again.exit_code == 0 and "all tables already" in again.output


@pytest.mark.parametrize("command", [["outbox"], ["schema", "--apply"]], ids=" ".join)
def test_database_that_is_not_there_is_said_in_one_line(run_command: RunCommand, command: list[str]) -> None:
    text = run_command(*command, "--database", "postgresql://127.0.0.1:1/shop")
    assert text.exit_code == 1
    assert "Connection refused" in text.stderr
    assert len(text.stderr.splitlines()) == 1


def test_the_statements_that_are_printed_make_the_same_tables(
    run_command: RunCommand, database: str, tmp_path: Path
) -> None:
    printed = run_command("schema", "--sql", "--database", database)
    assert printed.exit_code == 0
    assert printed.output.strip() == schema_sql(database).strip()
    engine = create_engine(database)
    with engine.begin() as connection:
        for statement in printed.output.split(";\n"):
            if statement.strip():
                connection.execute(text(statement))
    engine.dispose()
    assert apply_schema(database)[1] == []


@pytest.mark.parametrize("options", [(), ("--sql", "--apply")])
def test_schema_command_without_one_choice_of_output_names_its_options(
    run_command: RunCommand, options: tuple[str, ...]
) -> None:
    text = run_command("schema", *options, "--database", "sqlite:///shop.db")
    assert text.exit_code == 2 and "--apply" in text.output


@pytest.mark.parametrize("command, options", [("schema", ("--apply",)), ("outbox", ())])
def test_a_service_without_a_database_is_told_so(
    run_command: RunCommand, command: str, options: tuple[str, ...]
) -> None:
    text = run_command(command, *options)
    assert text.exit_code == 2 and "no database" in text.output and "Traceback" not in text.output


def test_an_outbox_is_shown_with_what_waits_in_it(run_command: RunCommand, database: str) -> None:
    apply_schema(database)
    empty = run_command("outbox", "--database", database, "--inbox")
    assert empty.exit_code == 0 and "No message waits" in empty.output and "0 of them unacknowledged" in empty.output
    app = Service("shop", exactly_once=True)
    take = app.remote("take", Number)
    engine = create_engine(database)
    with Session(engine) as session:
        for n in range(3):
            with app.initiate(session) as initiation:
                initiation.send(take, Number(n), trace="t")
                initiation.send(take, Number(n), trace="t")
        session.commit()
    engine.dispose()
    shown = run_command("outbox", "--database", database)
    assert shown.exit_code == 0 and "none yet" in shown.output and "no process" in shown.output
    facts = json.loads(run_command("outbox", "--database", database, "--json").output)
    (waits,) = facts["waiting"]
    assert (waits["producer"], waits["units"], waits["messages"]) == (None, 3, 6)
    assert 0 <= waits["oldest_s"] < 600


def test_a_database_without_the_tables_is_told_what_to_do(run_command: RunCommand, database: str) -> None:
    text = run_command("outbox", "--database", database)
    assert text.exit_code == 2 and "stages schema" in text.output


def test_a_file_that_is_not_there_is_said_and_not_made(run_command: RunCommand, tmp_path: Path) -> None:
    text = run_command("outbox", "--database", f"sqlite:///{tmp_path}/none.db")
    assert text.exit_code == 1 and "no file" in text.output
    assert not (tmp_path / "none.db").exists()


def test_a_database_that_cannot_be_written_is_said(run_command: RunCommand, tmp_path: Path) -> None:
    text = run_command("schema", "--apply", "--database", f"sqlite:///{tmp_path}/no-folder/shop.db")
    assert text.exit_code == 1 and "cannot be created" in text.output and "Traceback" not in text.output


def test_tables_made_by_the_sqlite3_module_need_no_change(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(schema_sql(f"sqlite:///{file}"))
    assert apply_schema(f"sqlite:///{file}")[1] == []

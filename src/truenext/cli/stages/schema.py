"""`truenext stages schema`: the tables that a service needs whose effects happen once."""

from __future__ import annotations

import click

from truenext.cli import terminal
from truenext.cli.ending import Failure
from truenext.cli.stages.loading import service_argument, service_at
from truenext.cli.values import DatabaseUrl
from truenext.errors import ConfigurationError
from truenext.stage.sql.errors import DatabaseAway


@click.command()
@service_argument
@click.option("--database", type=DatabaseUrl(), help="Instead of the service's own, as SQLAlchemy writes it.")
@click.option("--sql", "says_sql", is_flag=True, help="Print the statements that make all of them, and do nothing.")
@click.option("--apply", "applies", is_flag=True, help="Make those that are missing.")
def schema(place: str, database: str | None, says_sql: bool, applies: bool) -> None:
    """Print or make the tables of inbox and outbox.

    They belong to the database, not to a service: several services may share them. For Alembic they are in
    `truenext.stage.sql.tables.metadata`.
    """
    if says_sql and applies:
        raise click.UsageError("--sql and --apply exclude each other")
    if not (says_sql or applies):
        raise click.UsageError("say --sql to see the statements, or --apply to make the tables")
    try:
        service = service_at(place)
        url = database or service.database
        if url is None:
            raise ConfigurationError(
                f'{place} has no database: Service("{service.name}", database="postgresql+psycopg:///...") names one, '
                "and so does --database"
            )
        # SQLAlchemy need not be there for the other commands.
        from truenext.stage.sql import applied_schema, schema_sql

        if says_sql:
            terminal.say(schema_sql(url).rstrip())
            return
        where, made = applied_schema(url)
    except (ConfigurationError, DatabaseAway) as error:
        raise Failure(error) from error
    if made:
        terminal.say(f"{where} has now {', '.join(made)}.")
    else:
        terminal.say(f"{where} has all tables already.")

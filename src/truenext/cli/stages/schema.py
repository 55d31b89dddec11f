"""`truenext stages schema`: print or create the database tables of exactly-once stages."""

from __future__ import annotations

import click

from truenext.cli import terminal
from truenext.cli.stages.service_loader import database_option, load_with_database, service_argument


@click.command()
@service_argument
@database_option
@click.option("--sql", "prints_sql", is_flag=True, help="Print the statements that create all tables, and do nothing.")
@click.option(
    "--apply", "applies", is_flag=True, help="Create tables that are missing, and extend those of the version before."
)
def schema(target: str, database: str | None, prints_sql: bool, applies: bool) -> None:
    """Print or create the tables of inbox and outbox.

    The tables belong to the database, not to a service: several services may share them. Alembic finds them in
    `truenext.stage.sql.tables.metadata`.
    """
    if prints_sql and applies:
        raise click.UsageError("--sql and --apply exclude each other: use one of them")
    if not (prints_sql or applies):
        raise click.UsageError("use --sql to print the statements, or --apply to create the tables")
    _, url = load_with_database(target, database)
    # Imported here: the other commands work without SQLAlchemy.
    from truenext.stage.sql import apply_schema, schema_sql

    if prints_sql:
        terminal.echo(schema_sql(url).rstrip())
        return
    applied = apply_schema(url)
    if applied.is_extended:
        terminal.echo(f"{applied.database} now has the tables of this version; those of the version before still work.")
    if applied.created:
        terminal.echo(f"{applied.database} now has {', '.join(applied.created)}.")
    elif not applied.is_extended:
        terminal.echo(f"{applied.database} has all tables already.")

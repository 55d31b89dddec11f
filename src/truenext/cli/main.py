"""The `truenext` command."""

import click

from truenext.cli.exit_status import MainGroup
from truenext.version import VERSION

COMMAND_MODULES = {
    "audit": "audit",
    "browse": "messages",
    "config": "config",
    "history": "history",
    "move": "bulk",
    "pause": "pause",
    "purge": "bulk",
    "queues": "status",
    "receive": "messages",
    "record": "record",
    "redrive": "bulk",
    "reload": "config",
    "resume": "pause",
    "scheduled": "schedule",
    "send": "messages",
    "serve": "serve_command",
    "spark": "spark",
    "stages": "stages.group",
    "status": "status",
    "store": "store",
    "unschedule": "schedule",
    "user": "user",
}


@click.group(cls=MainGroup, modules=COMMAND_MODULES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="truenext")
def main() -> None:
    """A message broker that always hands out the true next message."""

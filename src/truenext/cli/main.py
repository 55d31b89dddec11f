"""The `truenext` command."""

import click

from truenext.cli.ending import Commands
from truenext.version import VERSION

HOMES = {
    "audit": "audit",
    "browse": "messages",
    "config": "config",
    "history": "history",
    "move": "bulk",
    "pause": "pause",
    "purge": "bulk",
    "queues": "looking",
    "receive": "messages",
    "record": "record",
    "redrive": "bulk",
    "reload": "config",
    "resume": "pause",
    "scheduled": "schedule",
    "send": "messages",
    "serve": "serving",
    "stages": "stages.group",
    "status": "looking",
    "store": "store",
    "unschedule": "schedule",
}
"""Of each command the module that has it, in this package."""


@click.group(cls=Commands, homes=HOMES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="truenext")
def main() -> None:
    """A message broker that always hands out the true next message."""

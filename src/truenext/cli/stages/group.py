"""The commands of `truenext stages`."""

import click

from truenext.cli.lazy import LazyGroup

COMMAND_MODULES = {
    "check": "stages.check",
    "cron": "stages.cron",
    "describe": "stages.describe",
    "flow": "stages.flow",
    "grants": "stages.grants",
    "outbox": "stages.outbox",
    "ps": "stages.ps",
    "rerun": "stages.rerun",
    "run": "stages.run",
    "schema": "stages.schema",
    "send": "stages.send",
}


@click.group(cls=LazyGroup, modules=COMMAND_MODULES)
def stages() -> None:
    """Run a service of stages, look at it, check a change.

    See docs/stages.md.
    """

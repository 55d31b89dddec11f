"""The commands of `truenext stages`."""

import click

from truenext.cli.lazy import LazyGroup

HOMES = {
    "check": "stages.checking",
    "describe": "stages.describing",
    "outbox": "stages.outbox",
    "rerun": "stages.rerunning",
    "run": "stages.running",
    "schema": "stages.schema",
}


@click.group(cls=LazyGroup, homes=HOMES)
def stages() -> None:
    """Run a service of stages, look at it, check a change.

    See docs/stages.md.
    """

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
    """A service of stages: run it, look at it, and see what a change of it breaks (docs/stages.md)."""

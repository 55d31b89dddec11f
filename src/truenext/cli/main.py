"""The `truenext` command."""

import click

from truenext.cli.exit_status import MainGroup
from truenext.version import VERSION

COMMAND_MODULES = {
    "audit": "audit",
    "backup": "backup",
    "browse": "messages",
    "completion": "completion",
    "config": "config",
    "drain": "drain",
    "failover": "failover",
    "history": "history",
    "move": "bulk",
    "pause": "pause",
    "purge": "bulk",
    "queues": "queues",
    "receive": "messages",
    "record": "record",
    "redrive": "bulk",
    "reload": "config",
    "restore": "backup",
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


def _print_version(context: click.Context, _: click.Parameter, is_requested: bool) -> None:
    if not is_requested or context.resilient_parsing:
        return
    # Only here: other commands start sooner without these modules.
    if context.params["is_json"]:
        from truenext.cli import terminal
        from truenext.cli.version import describe_installation

        terminal.write_json(describe_installation())
    else:
        from truenext.wire.stomp.speedups import CODEC_LANGUAGE

        click.echo(f"truenext, version {VERSION}, codec in {CODEC_LANGUAGE}")
    context.exit()


@click.group(cls=MainGroup, modules=COMMAND_MODULES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version, and the language of the codec's inner loops, and exit.",
)
@click.option(
    "--json",
    "is_json",
    is_flag=True,
    # Before --version, wherever it stands.
    is_eager=True,
    help="With --version: show also Python, libraries, and formats of files and tables, as JSON.",
)
def main(is_json: bool) -> None:
    """A message broker that always hands out the true next message."""
    if is_json:
        raise click.UsageError("--json before a command is for --version: put it after the command")

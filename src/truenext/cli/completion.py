"""`truenext completion`: script with which a shell completes the command line of `truenext`."""

import click
from click.shell_completion import get_completion_class

from truenext.cli import terminal

COMPLETE_VARIABLE = "_TRUENEXT_COMPLETE"
"""Environment variable in which the script asks `truenext` for completions. click reads it."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes the command line.

    The shell then completes commands, options, their values, and files. For bash (4.4 or later) add `eval "$(truenext
    completion bash)"` to ~/.bashrc, for zsh `eval "$(truenext completion zsh)"` to ~/.zshrc after compinit. For fish,
    save the script as ~/.config/fish/completions/truenext.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click has these shells"
    terminal.echo(kind(context.find_root().command, {}, "truenext", COMPLETE_VARIABLE).source())

"""Command group that imports a command only when it is called. So `truenext send` imports nothing of the broker."""

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import click


class LazyGroup(click.Group):
    def __init__(self, *arguments: Any, modules: Mapping[str, str], **options: Any) -> None:
        """Make a group. `modules` maps the name of each command to the name of a module of `truenext.cli`. The command
        is the function of its name in this module."""
        super().__init__(*arguments, **options)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = self._modules.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(importlib.import_module(f"truenext.cli.{module}"), cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click suggests only commands that are loaded.
        name = args[0]
        near = get_close_matches(name, self._modules, n=1)
        if near and name not in self._modules and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

"""Generators of the reference, docs/reference/: one module per page, each with `page() -> str`. `make reference`."""

from collections.abc import Callable
from pathlib import Path

from tools.reference import client, commands, control, headers, history, limits, settings, stages

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "client": client.page,
    "commands": commands.page,
    "control": control.page,
    "headers": headers.page,
    "history": history.page,
    "limits": limits.page,
    "settings": settings.page,
    "stages": stages.page,
}
"""Generators by name of the page, without `.md`."""


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.md"

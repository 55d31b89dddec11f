"""Import of the service that MODULE:NAME names. Errors say what the user can do."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

import click

from truenext.cli import terminal
from truenext.cli.values import DATABASE_URL, SERVICE
from truenext.errors import ConfigurationError
from truenext.stage.service import Service

_PACKAGE_DIR = str(Path(__file__).parents[2])

_EXTRAS = {
    "aiosqlite": "sql",
    "greenlet": "sql",
    "opentelemetry": "opentelemetry",
    "psycopg": "postgresql",
    "sqlalchemy": "sql",
}
"""Extra of truenext that installs a module, by the module's name."""

database_option = click.option(
    "--database", type=DATABASE_URL, help="Database instead of the service's own, a URL of SQLAlchemy."
)
service_argument = click.argument("target", metavar="MODULE:NAME", type=SERVICE)


def load_service(target: str) -> Service:
    """Import the service, with the current folder in `sys.path`.

    Raises: ConfigurationError if the import fails, or the name is not a service
    """
    module_name, _, name = target.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found: object = _module(module_name, folder, name)
    for word in name.split("."):
        if not hasattr(found, word):
            raise ConfigurationError(f"{module_name} has no {name}{_services_in(sys.modules[module_name])}")
        found = getattr(found, word)
    if not isinstance(found, Service):
        raise ConfigurationError(
            f"{target} is a {type(found).__name__}, not a Service{_services_in(sys.modules[module_name])}"
        )
    found.check()
    return found


def load_with_database(target: str, database: str | None) -> tuple[Service, str]:
    """Import the service. Return it with the URL of its database; `database` replaces this URL.

    Raises: ConfigurationError if the import fails, or there is no database
    """
    service = load_service(target)
    url = database or service.database
    if url is None:
        raise ConfigurationError(
            f'{target} has no database: name one with Service("{service.name}", '
            'database="postgresql+psycopg:///...") or --database'
        )
    return service, url


def _module(name: str, folder: str, of: str) -> ModuleType:
    """Import the module `name`. It should contain the service `of`, which is named in errors.

    Raises: ConfigurationError if the import fails; if the module is missing, its text names `folder`
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name and name.endswith(".py"):
            raise ConfigurationError(f"{name} is a file, not a module: use {name.removesuffix('.py')}:{of}") from error
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"there is no module {error.name} in {folder}, and none is installed: change to the folder of "
                f"{name.partition('.')[0]}.py, or use the name by which Python imports the module"
            ) from error
        raise ConfigurationError(
            f"{name} cannot be imported: {error}{_where(error)}: {_install_hint(error)}"
        ) from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}{_where(error)}") from error
    except SystemExit as error:
        raise ConfigurationError(
            f"{name} cannot be imported: it ends the program while it is imported{_where(error)}. Put code of a "
            'program below `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        # The author of the module needs the whole traceback.
        shown = traceback.format_exception(error.with_traceback(_program_part(error.__traceback__)))
        terminal.echo("".join(shown).rstrip(), err=True)
        raise ConfigurationError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _install_hint(error: ModuleNotFoundError) -> str:
    extra = _EXTRAS.get(error.name or "")
    return f"pip install 'truenext[{extra}]'" if extra else f"install it in the environment of truenext, {sys.prefix}"


def _program_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins with the program's first line."""
    while trace is not None and not _is_program_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _where(error: BaseException) -> str:
    """Return the innermost line of the program's code in a traceback, such as ` (orders.py:12)`; empty if there is
    none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_program_file(frame.filename):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def _is_program_file(file: str) -> bool:
    return not file.startswith((_PACKAGE_DIR, "<")) and "importlib" not in file


def _services_in(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, Service))
    if not names:
        return "; there is no Service in it"
    return f"; its services are {', '.join(f'{module.__name__}:{name}' for name in names)}"

"""Facts about this installation, for `truenext --version --json`."""

import importlib
import platform
import re
import ssl
from contextlib import suppress
from importlib import metadata
from typing import Any

from truenext.model.events import HISTORY_VERSION
from truenext.store.checkpoint_format import FORMAT_VERSION
from truenext.version import VERSION
from truenext.wire.stomp.speedups import CODEC_LANGUAGE

_FORMATS_OF_EXTRAS = {
    "postgresql_log": ("truenext.store.postgresql.layout", "LAYOUT_VERSION"),
    "outbox_tables": ("truenext.stage.sql.tables", "VERSION"),
}
"""Modules, each with its constant, that need the libraries of an extra."""

_AFTER_NAME = re.compile(r"[^A-Za-z0-9._-]")
_OF_DEVELOPMENT = re.compile(r"""extra == ["'](setup|demo|test)["']""")
"""Marker of a requirement that only the development of truenext has."""


def describe_installation() -> dict[str, Any]:
    """Return the versions of truenext, Python and libraries, and the numbers of the formats of files and tables.

    Formats and libraries of extras that are not installed are left out.
    """
    return {
        "truenext": VERSION,
        "codec": CODEC_LANGUAGE,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "openssl": ssl.OPENSSL_VERSION,
        "formats": _formats(),
        "libraries": _libraries(),
    }


def _formats() -> dict[str, int]:
    formats = {"data_folder": FORMAT_VERSION, "history": HISTORY_VERSION}
    for name, (module, constant) in _FORMATS_OF_EXTRAS.items():
        with suppress(ImportError):
            formats[name] = getattr(importlib.import_module(module), constant)
    return formats


def _libraries() -> dict[str, str]:
    """Return the versions of the installed libraries that truenext requires, or one of its extras for users."""
    required: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        required = metadata.requires("truenext") or []
    names = {_AFTER_NAME.split(each, 1)[0].lower() for each in required if not _OF_DEVELOPMENT.search(each)}
    versions: dict[str, str] = {}
    for name in sorted(names - {"truenext"}):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions

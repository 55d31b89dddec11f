"""Limit of a listener's connections. The limit follows from the number of files that the system lets the broker
open."""

import logging
import sys

from truenext.errors import ConfigurationError
from truenext.model.limits import CONNECTIONS_BEFORE_LOGIN_MAX, CONNECTIONS_MAX, CONTROL_ONLY_CONNECTIONS_MAX
from truenext.server.listener import ALL_PLACES, Places

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

FILES_OWN = 64
"""Largest number of files that the broker itself opens: journal, checkpoint, history, event loop, log, and the
connections of the health server."""


def needed_files(listeners: int) -> int:
    """Return how many files a broker opens at most."""
    return FILES_OWN + listeners * (sum(ALL_PLACES) + CONTROL_ONLY_CONNECTIONS_MAX)


def places_with(files: int, listeners: int) -> Places:
    """Return how many connections each listener may have if the broker may open so many files. There may be none, or
    fewer, if these are too few files for a broker."""
    if files >= needed_files(listeners):
        return ALL_PLACES
    count = (files - FILES_OWN) // listeners - CONTROL_ONLY_CONNECTIONS_MAX
    before_login = min(CONNECTIONS_BEFORE_LOGIN_MAX, max(1, count // 4))
    return Places(min(CONNECTIONS_MAX, count - before_login), before_login)


def fault_of_files(files: int, listeners: int) -> str | None:
    """Return why so many files are too few for a broker; None if they are enough."""
    if places_with(files, listeners).connections >= 1:
        return None
    minimum = FILES_OWN + listeners * (2 + CONTROL_ONLY_CONNECTIONS_MAX)
    return f"this process may open {files} files (ulimit -n), and the broker needs at least {minimum}: raise the limit"


def raise_file_limit(listeners: int) -> Places:
    """Raise the limit of open files if necessary, and return how many connections each listener may have.

    Raises: ConfigurationError if the limit leaves no file for a connection
    """
    if sys.platform == "win32":
        return ALL_PLACES
    needed = needed_files(listeners)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ALL_PLACES
    files = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    fault = fault_of_files(files, listeners)
    if fault is not None:
        raise ConfigurationError(fault)
    places = places_with(files, listeners)
    if places.connections < CONNECTIONS_MAX:
        logger.warning(
            "fewer connections than usual: the system limits open files (ulimit -n)",
            extra={"connections": places.connections, "usual": CONNECTIONS_MAX, "files": files},
        )
    return places

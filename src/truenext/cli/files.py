"""Limit of a listener's connections, by the number of files that the system lets the broker open."""

import logging
import sys

from truenext.errors import ConfigurationError
from truenext.model.limits import CONNECTIONS_MAX, CONTROL_ONLY_CONNECTIONS_MAX

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

FILES_OWN = 64
"""Files that the broker itself opens, at most: journal, checkpoint, history, event loop and log."""


def raise_file_limit(listeners: int) -> int:
    """Return the connections per listener, without control-only ones; raise the limit of open files if necessary.

    Raises: ConfigurationError if the system has no files left for a connection
    """
    if sys.platform == "win32":
        return CONNECTIONS_MAX
    needed = FILES_OWN + listeners * (CONNECTIONS_MAX + CONTROL_ONLY_CONNECTIONS_MAX)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return CONNECTIONS_MAX
    files = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    count = (files - FILES_OWN) // listeners - CONTROL_ONLY_CONNECTIONS_MAX
    if count < 1:
        minimum = FILES_OWN + listeners * (1 + CONTROL_ONLY_CONNECTIONS_MAX)
        raise ConfigurationError(
            f"the limit of open files of this process is {files} (ulimit -n), and it needs {minimum}: raise the limit"
        )
    if count < CONNECTIONS_MAX:
        logger.warning(
            "fewer connections than usual: the system limits open files (ulimit -n)",
            extra={"connections": count, "usual": CONNECTIONS_MAX, "files": files},
        )
    return count

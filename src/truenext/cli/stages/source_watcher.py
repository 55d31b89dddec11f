"""Watcher of the source files of a service, for `truenext stages run --reload`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from truenext.errors import ConfigurationError

logger = logging.getLogger("truenext.stage")

POLL_MS = 100
"""Milliseconds after which watchfiles returns if no file has changed. Its first return shows that it has begun to
watch."""


class SourceWatcher:
    """Watcher of the Python files in a folder and below. It notices the first change."""

    def __init__(self, folder: Path) -> None:
        """Begin to watch. Files that are read after this cannot change unnoticed.

        Raises: ConfigurationError if watchfiles is not installed
        """
        self._folder = folder
        self._is_watching = threading.Event()
        self._has_changed = threading.Event()
        self._on_change: Callable[[], None] = _do_nothing
        try:
            import watchfiles
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"--reload needs {error.name}: pip install 'truenext[reload]'") from error
        # Hidden folders, environments and caches are left out.
        self._changes = watchfiles.watch(
            folder,
            watch_filter=watchfiles.PythonFilter(),
            rust_timeout=POLL_MS,
            yield_on_timeout=True,
            ignore_permission_denied=True,
        )
        threading.Thread(target=self._watch, name="truenext sources", daemon=True).start()
        self._is_watching.wait()

    def _watch(self) -> None:
        try:
            for changes in self._changes:
                self._is_watching.set()
                if changes:
                    files = sorted({path for _, path in changes})
                    logger.warning("source files have changed: the service starts again", extra={"files": files})
                    self._has_changed.set()
                    self._on_change()
                    return
        except Exception as error:
            logger.error(
                "source files cannot be watched, and changes are not noticed",
                extra={"folder": str(self._folder), "error": str(error)},
            )
        finally:
            self._is_watching.set()

    def call_on_change(self, function: Callable[[], None]) -> None:
        """Call `function` in another thread at the first change, or in this thread if a file has changed already.
        `function` may be called twice."""
        self._on_change = function
        if self._has_changed.is_set():
            function()

    def wait_for_change(self) -> None:
        self._has_changed.wait()


def _do_nothing() -> None:
    pass

"""Options of a history as a source of Spark: parses and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from truenext.errors import ConfigurationError
from truenext.spark.broker.options import CREDENTIAL_NAMES, GivenOptions, QueryOptions
from truenext.spark.paths import is_address

if TYPE_CHECKING:
    from truenext.spark.history.places import History

KIND = "history"
_NAMES = ("kind", "path", "url", *CREDENTIAL_NAMES, "maxRowsPerTrigger", "failOnDataLoss", "patience")


@dataclass(frozen=True, kw_only=True)
class HistoryOptions(QueryOptions):
    path: str = ""
    """Data folder of a broker, or folder of a history. Empty if the history is read from a running broker."""
    rows_max: int = 1_000_000
    """Largest number of rows in a batch."""
    fails_on_loss: bool = True
    """True: the query fails if events that it has not read were deleted. False: they are missing, like those that a
    crash has lost."""

    def open(self) -> History:
        """Return the history. Nothing is read yet."""
        # This needs numpy, which executors of queries from queue to queue need not have.
        from truenext.spark.history.places import BrokerHistory, FolderHistory

        return FolderHistory(Path(self.path)) if self.path else BrokerHistory(self.connect, self.patience_s)


def is_history(options: Mapping[str, str]) -> bool:
    """Return whether the options of `format("truenext")` name a history.

    Raises: ConfigurationError if they name another kind than queues and histories
    """
    kind = {name.lower(): value for name, value in options.items()}.get("kind")
    if kind not in (None, KIND):
        raise ConfigurationError(f"option kind is {kind!r}, and must be {KIND}; without it a queue is read")
    return kind == KIND


def parse_options(options: Mapping[str, str]) -> HistoryOptions:
    """Parse the options of `format("truenext")` with `kind=history`. Names of options are case-insensitive.

    Raises: ConfigurationError if an option is invalid; its text names the option and its valid values
    """
    given = GivenOptions(options, _NAMES)
    path = (given.get("path") or "").strip()
    if bool(path) == bool((given.get("url") or "").strip()):
        raise ConfigurationError(
            "a history needs one of two options: path, a broker's data folder, or url, a broker that runs"
        )
    if is_address(path):
        raise ConfigurationError(
            f"option path: {path} is an address, which only a batch of `truenext audit` can read; mount it as a folder"
        )
    if path and Path(path).is_file():
        raise ConfigurationError(f"option path: {path} is a file: name a broker's data folder, or its folder history")
    return HistoryOptions(
        **given.of_query(),
        path=path,
        rows_max=given.number("maxRowsPerTrigger", 1, 1 << 40, HistoryOptions.rows_max),
        fails_on_loss=given.choice("failOnDataLoss", ("true", "false")) == "true",
    )

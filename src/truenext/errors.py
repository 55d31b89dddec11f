"""What can go wrong, and whose fault it is.

TruenextError
├── LocalProtocolError     our own caller broke the rules of a protocol
├── RemoteProtocolError    the peer did; its connection ends, nothing else does
│   └── NoRoomError        what it asked for would be allowed if there were room; it did nothing wrong
├── StoreError             the store cannot keep its promise; the broker stops
│   └── StoreInUseError    another broker holds the data folder
├── HistoryError           history cannot be written or read; the broker stops
└── ConfigurationError     a command line asks for what cannot be
    └── FaultyFileError    a configuration file does
"""


class TruenextError(Exception):
    """Anything truenext raises on purpose."""


class LocalProtocolError(TruenextError):
    """Our own caller asked for what the protocol does not allow now."""


class RemoteProtocolError(TruenextError):
    """The peer sent what the protocol does not allow, or asked for what cannot be done."""


class NoRoomError(RemoteProtocolError):
    """There is no room for what the peer sent; its connection ends as if it had taken leave."""


class StoreError(TruenextError):
    """The store cannot read or write; what was not yet confirmed may be lost, nothing else."""


class StoreInUseError(StoreError):
    """Another broker uses the data folder."""


class HistoryError(TruenextError):
    """History cannot be written or read."""


class ConfigurationError(TruenextError):
    """What was asked for at start cannot be done; the message says what to change."""


class FaultyFileError(ConfigurationError):
    """There are faults in the configuration file; nothing of it counts."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        """Of each fault the file, the line and the reason."""
        super().__init__("\n".join(faults))
        self.faults = faults

"""Where a broker listens, as people write it: stomp://HOST:PORT."""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from truenext.errors import ConfigurationError

STOMP_PORT = 61613
"""The port of ActiveMQ's and most others' STOMP listeners."""
DEFAULT_URL = f"stomp://127.0.0.1:{STOMP_PORT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    """0 lets a listener pick a free one."""

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_url(url: str) -> Address:
    """The address in `stomp://HOST:PORT`; the port may be left out.

    >>> parse_url("stomp://127.0.0.1:0")
    Address(host='127.0.0.1', port=0)

    Raises: ConfigurationError if it is not one.
    """
    if not url.isprintable():
        # Some of that would be left out without a word.
        raise ConfigurationError(f"{url!r} is no address of a broker: it has characters that cannot be printed")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is no address of a broker: {error}") from error
    if parts.scheme != "stomp" or not parts.hostname or parts.path or parts.query or parts.username:
        raise ConfigurationError(f"{url!r} is no address of a broker: it must be stomp://HOST:PORT")
    return Address(host=parts.hostname, port=STOMP_PORT if port is None else port)

"""Address of a broker: reads and writes stomp://HOST:PORT, and stomp+ssl://HOST:PORT (with TLS)."""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from truenext.errors import ConfigurationError

STOMP_PORT = 61613
"""Default port, the same as of ActiveMQ and most other brokers with STOMP."""
STOMP_TLS_PORT = 61612
"""Default port with TLS, the same as of ActiveMQ."""
DEFAULT_URL = f"stomp://127.0.0.1:{STOMP_PORT}"


_SCHEME, _TLS_SCHEME = "stomp", "stomp+ssl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    """Port; 0 lets the system choose a free port for a listener."""
    has_tls: bool = False

    @property
    def url(self) -> str:
        """The address as a text that `parse_url` reads."""
        return f"{_TLS_SCHEME if self.has_tls else _SCHEME}://{host_and_port(self.host, self.port)}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def host_and_port(host: str, port: int) -> str:
    """Return host and port as one text, with brackets around an IPv6 address.

    >>> host_and_port("::1", 61613)
    '[::1]:61613'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_url(url: str) -> Address:
    """Parse `stomp://HOST:PORT` or `stomp+ssl://HOST:PORT`. The port may be left out.

    >>> parse_url("stomp://127.0.0.1:0")
    Address(host='127.0.0.1', port=0, has_tls=False)

    Raises: ConfigurationError if the text is no such address.
    """
    if not url.isprintable():
        # `urlsplit` silently drops some such characters.
        raise ConfigurationError(f"{url!r} is not the address of a broker: it has characters that cannot be printed")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        has_bare_ipv6 = url.count(":") > 2 and "[" not in url
        reason = "an IPv6 address is written in brackets, stomp://[::1]:61613" if has_bare_ipv6 else error
        raise ConfigurationError(f"{url!r} is not the address of a broker: {reason}") from error
    has_tls = parts.scheme == _TLS_SCHEME
    if not (has_tls or parts.scheme == _SCHEME) or not parts.hostname or parts.path or parts.query or parts.username:
        raise ConfigurationError(
            f"{url!r} is not the address of a broker: it must be stomp://HOST:PORT or stomp+ssl://HOST:PORT"
        )
    default = STOMP_TLS_PORT if has_tls else STOMP_PORT
    return Address(host=parts.hostname, port=default if port is None else port, has_tls=has_tls)

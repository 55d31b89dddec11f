"""Address of a broker: reads and writes stomp://HOST:PORT and openwire://HOST:PORT, with TLS stomp+ssl://HOST:PORT and
openwire+ssl://HOST:PORT. A broker listens at all of these; truenext's clients connect to the first and the third."""

import ipaddress
import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from truenext.errors import ConfigurationError


class WireProtocol(Enum):
    """Protocol that clients speak at an address."""

    STOMP = "stomp"
    OPENWIRE = "openwire"


STOMP_PORT = 61613
"""Default port, the same as of ActiveMQ and most other brokers with STOMP."""
STOMP_TLS_PORT = 61612
"""Default port with TLS, the same as of ActiveMQ."""
OPENWIRE_PORT, OPENWIRE_TLS_PORT = 61616, 61617
"""Default ports of OpenWire, the same as of ActiveMQ."""
DEFAULT_URL = f"stomp://127.0.0.1:{STOMP_PORT}"

_TLS_SUFFIX = "+ssl"
_DEFAULT_PORTS: dict[str, int] = {
    "stomp": STOMP_PORT,
    "stomp+ssl": STOMP_TLS_PORT,
    "openwire": OPENWIRE_PORT,
    "openwire+ssl": OPENWIRE_TLS_PORT,
}
_SCHEMES_OF_ACTIVEMQ = {"tcp": "openwire", "nio": "openwire", "ssl": "openwire+ssl", "nio+ssl": "openwire+ssl"}
"""Schemes that ActiveMQ's clients and brokers give to OpenWire, and the schemes of truenext for the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    """Port; 0 lets the system choose a free port for a listener."""
    has_tls: bool = False
    protocol: WireProtocol = WireProtocol.STOMP

    @property
    def url(self) -> str:
        """The address as a text that `parse_listener_url` reads."""
        scheme = self.tls_scheme if self.has_tls else self.protocol.value
        return f"{scheme}://{host_and_port(self.host, self.port)}"

    @property
    def tls_scheme(self) -> str:
        """Scheme of the same protocol with TLS."""
        return self.protocol.value + _TLS_SUFFIX

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone.

    >>> is_loopback("localhost"), is_loopback("127.9.9.9"), is_loopback("::1"), is_loopback("broker.example")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(host: str, port: int) -> str:
    """Return host and port as one text, with brackets around an IPv6 address.

    >>> host_and_port("::1", 61613)
    '[::1]:61613'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_HOST = re.compile(r"[0-9A-Za-z._:%-]*")


def parse_host_and_port(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, or a port alone, which means 127.0.0.1.

    >>> parse_host_and_port("[::1]:8080"), parse_host_and_port("8080")
    (('::1', 8080), ('127.0.0.1', 8080))

    Raises: ConfigurationError if the text is no such address
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 2**16
    if not is_port or bool(host) != bool(colon) or not _HOST.fullmatch(host):
        shown = repr(text if len(text) < 80 else text[:80] + "...")
        raise ConfigurationError(f"{shown} is not HOST:PORT, such as 0.0.0.0:8080, or a port")
    return host or "127.0.0.1", int(port)


def fault_of_host_and_port(text: str) -> str:
    """Return why a text is not HOST:PORT and no port; "" if it is either."""
    try:
        parse_host_and_port(text)
    except ConfigurationError as error:
        return str(error)
    return ""


def parse_url(url: str) -> Address:
    """Parse the address at which a client of truenext connects: `stomp://HOST:PORT` or `stomp+ssl://HOST:PORT`. The
    port may be left out.

    >>> parse_url("stomp://127.0.0.1:0").host
    '127.0.0.1'

    Raises: ConfigurationError if the text is no such address.
    """
    address = _parse(url, "stomp://HOST:PORT or stomp+ssl://HOST:PORT")
    if address.protocol is not WireProtocol.STOMP:
        raise ConfigurationError(
            f"{url!r} is an address for clients of other protocols; truenext's clients speak STOMP: use "
            "stomp://HOST:PORT or stomp+ssl://HOST:PORT"
        )
    return address


def parse_listener_url(url: str) -> Address:
    """Parse an address at which a broker listens: one that `parse_url` reads, or `openwire://HOST:PORT` or
    `openwire+ssl://HOST:PORT`. The port may be left out.

    >>> parse_listener_url("openwire://127.0.0.1").port
    61616

    Raises: ConfigurationError if the text is no such address.
    """
    scheme = _SCHEMES_OF_ACTIVEMQ.get(url.partition("://")[0])
    if scheme is not None:
        raise ConfigurationError(
            f"{url!r} is not the address of a broker: for clients of ActiveMQ, write {scheme}://HOST:PORT, without "
            "options"
        )
    return _parse(
        url, "stomp://HOST:PORT or openwire://HOST:PORT, or with TLS stomp+ssl://HOST:PORT or openwire+ssl://HOST:PORT"
    )


def _parse(url: str, forms: str) -> Address:
    """Parse an address of any protocol. `forms` are the permitted ones, for the error."""
    if not url.isprintable():
        # `urlsplit` silently drops some such characters.
        raise ConfigurationError(f"{url!r} is not the address of a broker: it has characters that cannot be printed")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        has_bare_ipv6 = url.count(":") > 2 and "[" not in url
        reason = str(error)
        if has_bare_ipv6:
            reason = "an IPv6 address is written in brackets, stomp://[::1]:61613"
        elif reason.startswith("Port "):
            reason = "the port must be a number, 0 to 65535"
        raise ConfigurationError(f"{url!r} is not the address of a broker: {reason}") from error
    default_port = _DEFAULT_PORTS.get(parts.scheme)
    if default_port is not None and parts.query:
        raise ConfigurationError(f"{url!r} is not the address of a broker: it has no options, leave out ? and the rest")
    if default_port is None or not parts.hostname or parts.path or parts.query or parts.username:
        raise ConfigurationError(f"{url!r} is not the address of a broker: it must be {forms}")
    return Address(
        host=parts.hostname,
        port=default_port if port is None else port,
        has_tls=parts.scheme.endswith(_TLS_SUFFIX),
        protocol=WireProtocol(parts.scheme.removesuffix(_TLS_SUFFIX)),
    )

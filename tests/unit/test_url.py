"""Tests of broker addresses: parsing, and formatting."""

import pytest

from truenext.errors import ConfigurationError
from truenext.model.url import WireProtocol, host_and_port, parse_listener_url, parse_url


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("stomp://127.0.0.1:0", "127.0.0.1"),
        ("stomp://localhost:61613", "localhost"),
        ("stomp://[::1]:61613", "::1"),
        ("stomp://[fe80::1%eth0]:1", "fe80::1%eth0"),
    ],
)
def test_an_address_that_is_written_is_read_again(url: str, host: str) -> None:
    address = parse_url(url)
    assert (address.host, address.url) == (host, url)
    assert f"stomp://{host_and_port(address.host, address.port)}" == url


def test_an_ipv6_address_without_a_port_has_that_of_stomp() -> None:
    assert parse_url("stomp://[::1]").url == "stomp://[::1]:61613"


@pytest.mark.parametrize("url", ["stomp://::1", "stomp://::1:61613", "stomp://fe80::1:61613"])
def test_an_ipv6_address_without_brackets_is_refused_with_how_to_write_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is written in brackets, stomp://\[::1\]:61613"):
        parse_url(url)


@pytest.mark.parametrize(
    ("scheme", "port", "protocol"),
    [
        ("stomp", 61613, WireProtocol.STOMP),
        ("stomp+ssl", 61612, WireProtocol.STOMP),
        ("openwire", 61616, WireProtocol.OPENWIRE),
        ("openwire+ssl", 61617, WireProtocol.OPENWIRE),
    ],
)
def test_address_of_a_listener_has_the_protocol_and_default_port_of_its_scheme(
    scheme: str, port: int, protocol: WireProtocol
) -> None:
    address = parse_listener_url(f"{scheme}://localhost")
    assert (address.port, address.protocol, address.has_tls) == (port, protocol, scheme.endswith("+ssl"))
    assert address.url == f"{scheme}://localhost:{port}"
    for url in (f"{scheme}://[::1]:7", f"{scheme}://127.0.0.1:0"):
        assert parse_listener_url(url).url == url


@pytest.mark.parametrize("url", ["openwire://localhost", "openwire+ssl://[::1]:61617"])
def test_clients_refuse_an_address_of_openwire_and_say_what_they_speak(url: str) -> None:
    with pytest.raises(ConfigurationError, match="truenext's clients speak STOMP: use stomp://HOST:PORT"):
        parse_url(url)


@pytest.mark.parametrize(
    "url", ["http://localhost", "openwire+tls://localhost", "vm://a", "+ssl://a", "openwire://a/b"]
)
def test_address_of_a_listener_with_another_scheme_or_a_path_is_refused(url: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"it must be stomp://.* or openwire://.* TLS stomp\+ssl://.* or openwire\+ssl"
    ):
        parse_listener_url(url)
    with pytest.raises(ConfigurationError, match=r"it must be stomp://HOST:PORT or stomp\+ssl://HOST:PORT$"):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("tcp://localhost:61616", "openwire"),
        ("nio://0.0.0.0:61616?maximumConnections=1000&wireFormat.maxFrameSize=104857600", "openwire"),
        ("ssl://localhost:x", r"openwire\+ssl"),
        ("nio+ssl://localhost", r"openwire\+ssl"),
    ],
)
def test_address_of_activemq_to_listen_on_is_refused_with_the_scheme_to_write(url: str, scheme: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"for clients of ActiveMQ, write {scheme}://HOST:PORT, without opt"):
        parse_listener_url(url)


@pytest.mark.parametrize("url", ["openwire://localhost?maximumConnections=1000", "stomp://localhost:61613?trace=true"])
def test_address_with_options_is_refused_with_what_to_leave_out(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"it has no options, leave out \? and the rest$"):
        parse_listener_url(url)


@pytest.mark.parametrize("port", ["x", "-1", "65536", "6161O"])
def test_address_whose_port_is_no_number_is_refused_with_the_numbers_that_it_may_be(port: str) -> None:
    with pytest.raises(ConfigurationError, match=r"broker: the port must be a number, 0 to 65535$"):
        parse_listener_url(f"stomp://localhost:{port}")

"""Tests of broker addresses: parsing, and formatting."""

import pytest

from truenext.errors import ConfigurationError
from truenext.model.url import host_and_port, parse_url


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

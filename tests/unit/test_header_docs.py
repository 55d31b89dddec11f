"""Tests that tools/reference/header_docs.py, the source of docs/reference/headers.md, has the headers of the code."""

import re
from pathlib import Path

import pytest

from tools.reference.header_docs import BROKER_FRAME_HEADERS, CLIENT_HEADERS, DESTINATIONS
from truenext.model.destination import DestinationKind, parse_address
from truenext.model.header_lines import FIRST_OF_GROUP, SCHEDULE_HEADERS
from truenext.wire.stomp import headers
from truenext.wire.stomp.login import CONNECT_HEADERS

SOURCE = Path(headers.__file__).parent
OWN = re.compile(rf'"({headers.OWN_PREFIX}[a-z-]+)')


def names(frame: str) -> set[str]:
    docs = CLIENT_HEADERS.get(frame) or BROKER_FRAME_HEADERS[frame]
    return {name for each in docs for name in each.names}


def own_names(frame: str) -> set[str]:
    return {name for name in names(frame) if name.startswith(headers.OWN_PREFIX)}


def names_in(file: str) -> set[str]:
    """Return all headers that a file of the code reads from a frame, where it names them."""
    read = r'headers\.get\(\s*"([^"]+)"|require_header\(\s*[^()]*"([^"]+)"\)'
    return {name or other for name, other in re.findall(read, (SOURCE / file).read_text())}


@pytest.mark.parametrize("frame", headers.OWN_HEADERS)
def test_own_headers_of_a_client_s_frame_are_documented(frame: str) -> None:
    assert own_names(frame) == set(headers.OWN_HEADERS[frame])


def test_own_headers_of_connect_are_documented() -> None:
    assert own_names("CONNECT") == set(CONNECT_HEADERS)


def test_every_header_that_the_code_reads_is_documented() -> None:
    documented = {name for frame in CLIENT_HEADERS for name in names(frame)}
    found = names_in("requests.py") | names_in("server.py") | names_in("login.py") | names_in("headers.py")
    assert {"destination", "receipt", "heart-beat", "login", "truenext-delay"} <= found <= documented
    assert names("SEND") >= SCHEDULE_HEADERS


def test_names_of_other_brokers_are_documented() -> None:
    options = {*headers.WINDOW, *headers.PRIORITY, *headers.EXCLUSIVE_ON_QUEUE, *headers.SELECTOR}
    assert names("SUBSCRIBE") >= options | {*headers.DURABLE, *headers.DURABLE_NAME}
    assert names("UNSUBSCRIBE") >= {*headers.DURABLE, *headers.DURABLE_NAME}
    assert names("NACK") >= {*headers.REJECT}


def test_own_headers_of_the_broker_s_frames_are_documented() -> None:
    in_replies = set(OWN.findall((SOURCE / "replies.py").read_text())) | headers.BROKER_HEADERS
    assert own_names("MESSAGE") | own_names("RECEIPT") | own_names("ERROR") >= in_replies
    assert own_names("MESSAGE") > headers.BROKER_HEADERS
    assert own_names("CONNECTED") == set(OWN.findall((SOURCE / "server.py").read_text()))
    assert FIRST_OF_GROUP in names("MESSAGE")


def test_documented_destinations_are_of_all_kinds() -> None:
    kinds = [
        (parse_address(address, "SESSION").kind, kind)
        for each in DESTINATIONS
        for address, kind in zip(each.addresses, each.kinds * (2 if len(each.kinds) == 1 else 1), strict=False)
    ]
    assert [found for found, _ in kinds] == [kind for _, kind in kinds]
    assert {kind for _, kind in kinds} == set(DestinationKind)

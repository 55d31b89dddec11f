"""Tests that docs/stomp.md has exactly the broker's own headers, verbs and fields."""

import re
from pathlib import Path

from msgspec.structs import fields

from truenext.broker import connection_request, producer_request
from truenext.engine.dispatch.heads import WaitReason
from truenext.engine.state.producer import CommitOutcome
from truenext.wire.stomp.actions import ACTION_PARSERS, ReleaseBody
from truenext.wire.stomp.headers import BROKER_HEADERS, OWN_HEADERS, OWN_PREFIX
from truenext.wire.stomp.login import CONNECT_HEADERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stomp.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first column is called so."""
    _, _, rest = PAGE.partition(f"\n| {heading} |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    assert lines, f"there is no table of {heading}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall("`(.*?)`", cell)


def first_column(heading: str) -> list[str]:
    return [name for row in rows(heading) for name in names(row[0])]


def documented_headers(command: str) -> set[str]:
    table = rows("frame")
    return {name for frames, cell, *_ in table if command in frames.split(", ") for name in names(cell)}


def in_code(*files: str) -> set[str]:
    """Return all truenext- names in these files of the code."""
    texts = [(ROOT / "src" / "truenext" / file).read_text() for file in files]
    return set(re.findall(rf"\b{OWN_PREFIX}[a-z-]+[a-z]\b", " ".join(texts)))


def test_stomp_page_has_the_headers_of_connect() -> None:
    assert first_column("on CONNECT") == list(CONNECT_HEADERS)


def test_stomp_page_has_exactly_the_headers_of_client_frames() -> None:
    understood = {(command, name) for command, all_names in OWN_HEADERS.items() for name in all_names}
    commands = {command for frames, *_ in rows("frame") for command in frames.split(", ")}
    documented = {
        (command, name)
        for command in commands - {"MESSAGE", "RECEIPT", "ERROR"}
        for name in documented_headers(command)
    }
    assert documented == understood


def test_stomp_page_has_exactly_the_headers_of_broker_frames() -> None:
    documented = documented_headers("MESSAGE") | documented_headers("RECEIPT") | documented_headers("ERROR")
    assert documented_headers("MESSAGE") > BROKER_HEADERS
    in_replies = in_code("wire/stomp/replies.py") - BROKER_HEADERS
    assert documented - BROKER_HEADERS == in_replies
    connected = set(first_column("on CONNECTED, to a truenext client"))
    assert connected == in_code("wire/stomp/server.py")


def test_stomp_page_has_exactly_the_verbs() -> None:
    """Verbs for any client are in docs/control.md."""
    assert first_column("verb | header or body") == list(ACTION_PARSERS)
    assert first_column("verb | question") == [producer_request.VERB, connection_request.VERB]


def test_stomp_page_has_exactly_the_fields() -> None:
    assert first_column("field of `release`") == [field.encode_name for field in fields(ReleaseBody)]
    subscription = [field.encode_name for field in fields(connection_request.SubscriptionReport)]
    assert first_column("field of a subscription") == subscription
    answers = {cells[0]: set(names(cells[2])) for cells in rows("verb | question")}
    shapes = (connection_request.ConnectionReport, connection_request.TransactionReport)
    assert {field.encode_name for shape in shapes for field in fields(shape)} == answers["`connection`"]
    producer = {field.encode_name for field in fields(producer_request.ProducerAnswer)}
    assert producer | {outcome.value for outcome in CommitOutcome} == answers["`producer`"]


def test_stomp_page_has_the_idle_reasons_in_order() -> None:
    assert first_column("`idle` | means") == [reason.value for reason in WaitReason]

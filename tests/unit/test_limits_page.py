"""Tests that docs/limits.md has each limit a user can reach, with its value and the text of its error."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.unit.test_stomp_server import connected, receive
from tools import texts
from truenext.broker.settings import BrokerSettings
from truenext.engine.background.bulk import parse_request
from truenext.errors import RemoteProtocolError
from truenext.model import limits
from truenext.model.policy import Policy
from truenext.model.setting import settings_of
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.shapes import FRAME_SHAPES

ROOT = Path(__file__).parents[2]
ANYTHING = "…"
DEPENDS = {"CONNECTIONS_MAX", "CONNECTIONS_BEFORE_LOGIN_MAX", "DESTINATION_LENGTH_MAX"}
"""Limits whose error text has the number of the individual case."""

PUT_TOGETHER = {
    *("ANSWER_BYTES_MAX", "BODY_BYTES_MAX", "DELAY_MS_MAX", "PRODUCER_NUMBER_MAX"),
    *("CAUSE_BYTES_MAX", "HEADERS_MAX", "HEADER_BYTES_MAX", "MESSAGE_HEADERS_MAX", "MESSAGE_HEADER_BYTES_MAX"),
    *("CONTROL_REQUEST_SEQUENCES_MAX", "SCHEDULE_TIME_MAX", "TTL_MS_MAX", "WINDOW_MAX"),
}
"""Limits whose error text is composed at run time; the last tests here provoke it."""

TUNING = {
    "ANSWERS_IN_FLIGHT_BYTES_MAX",
    "BROKER_BYTES",
    "BROWSE_BYTES_PER_TURN",
    "BROWSE_MESSAGES_PER_TURN",
    "BULK_MESSAGES_PER_PIECE",
    "CONTENT_BYTES_MIN",
    "DUE_SENDS_PER_READ",
    "GATHERING_BYTES_MAX",
    "GROUP_FOUND_MIN",
    "HEART_BEAT_GRACE_FACTOR",
    "HISTORY_FILE_BYTES",
    "HISTORY_FLUSH_SECONDS",
    "JOIN_QUEUES_PER_TURN",
    "LAZY_COMMIT_SECONDS",
    "QUEUE_REMOVAL_BYTES",
    "PAGE_BYTES",
    "PAGE_BYTES_SHORT",
    "PAGE_SIZE_SHORT",
    "PAUSE_BYTES",
    "READ_BYTES",
    "REPLIES_EXCESS_BYTES_MAX",
    "REFUSALS_PER_PASS_MAX",
    "CAPACITY_CHECK_INTERVAL_S",
    "SCAN_BYTES",
    "SCAN_FOUND_MAX",
    "SCAN_PAGE_SIZE",
    "SCAN_MESSAGES_PER_TURN",
    "SELECTOR_CACHE_BYTES",
    "SEQUENCE_BLOCK",
    "SEQUENCE_MAX",
    "SEQUENCE_RESERVE",
    "SHOWN_SENDS_PER_PIECE",
    "SMALL_BATCH_BYTES",
    "STORE_TRANSACTION_BYTES_MAX",
    "UNUSED_QUEUES_CHECKED_MAX",
    "UNUSED_QUEUES_REMOVED_MAX",
    "UNUSED_QUEUE_SECONDS",
    "UNUSED_QUEUE_SECONDS_SHORT",
    "PENDING_ANSWER_BYTES",
    "INLINE_SMALL_WRITE_SECONDS_MAX",
    "INLINE_WRITE_SECONDS_MAX",
}
"""Constants that tune the broker and that no user notices."""


class Row(NamedTuple):
    name: str
    value: str
    setting: str
    words: list[str]
    """Error texts, each as on the page."""


def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for line in (ROOT / "docs" / "limits.md").read_text().splitlines():
        if line.startswith("| `"):
            name, value, _, setting, texts = (cell.strip() for cell in line.strip("|").split(" | "))
            name = name.strip("` ")
            assert name not in found, f"{name} is there twice"
            found[name] = Row(name, value, setting, re.findall("`(.*?)`", texts))
    return found


ROWS = rows()
CONSTANTS: dict[str, Any] = {name: value for name, value in vars(limits).items() if name.isupper()}
SETTINGS = settings_of(Policy) | settings_of(BrokerSettings)


@functools.cache
def all_texts() -> set[str]:
    """Return all texts that a user can see, with the names of their values in braces."""
    return {text for path in texts.SOURCE.rglob("*.py") for _, text in texts.texts_of(path.read_text(encoding="utf-8"))}


def test_limits_page_has_each_limit_that_does_not_only_tune_the_broker() -> None:
    assert not TUNING & ROWS.keys()
    assert TUNING | ROWS.keys() == CONSTANTS.keys()


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_value_on_the_page_is_that_of_the_code(row: Row) -> None:
    assert row.value == f"{CONSTANTS[row.name]:g}" or row.value == str(CONSTANTS[row.name])


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_error_text_on_the_page_is_that_of_the_code_and_names_the_limit(row: Row) -> None:
    if row.name in PUT_TOGETHER:
        return
    for words in row.words:
        pieces = words.replace(row.value, "{" + row.name + "}").split(ANYTHING)
        pattern = re.compile(r"\{[^}]*\}".join(map(re.escape, pieces)))
        assert any(pattern.search(text) for text in all_texts()), f"nobody says {words!r}"
        assert row.value in words or row.setting.strip("`") in words or row.name in DEPENDS


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_setting_on_the_page_exists_and_the_error_text_names_it(row: Row) -> None:
    if row.setting.startswith("fixed") or row.setting.endswith("of the SUBSCRIBE"):
        return
    name = row.setting.strip("`").removeprefix("--").replace("-", "_")
    setting = SETTINGS[name]
    assert CONSTANTS[row.name] in (setting.least, setting.most, setting.default)
    for words in row.words:
        assert row.setting.strip("`") in words


def named_too_many_messages() -> None:
    sequences = ",".join(map(str, range(limits.CONTROL_REQUEST_SEQUENCES_MAX + 1)))
    parse_request("purge", f'{{"queue":"q","sequences":[{sequences}]}}'.encode())


def request_too_long_delay() -> None:
    receive(connected(Version.V1_2), "NACK", "id:1@s", f"truenext-delay:{limits.DELAY_MS_MAX + 1}")


def send_too_long_cause() -> None:
    receive(connected(Version.V1_2), "NACK", "id:1@s", "truenext-cause:" + "x" * (limits.CAUSE_BYTES_MAX + 1))


def sent_too_many_headers() -> None:
    of_one_frame(Decoder(FRAME_SHAPES), b"SEND\n" + b"a:b\n" * (limits.HEADERS_MAX + 1))


def sent_too_large_headers() -> None:
    of_one_frame(Decoder(FRAME_SHAPES), b"SEND\na:" + b"x" * limits.HEADER_BYTES_MAX)


def receive_too_many_headers() -> None:
    of_one_frame(of_a_client(), b"MESSAGE\n" + b"a:b\n" * (limits.MESSAGE_HEADERS_MAX + 1))


def receive_too_large_headers() -> None:
    of_one_frame(of_a_client(), b"MESSAGE\na:" + b"x" * limits.MESSAGE_HEADER_BYTES_MAX)


def of_a_client() -> Decoder[Frame]:
    return Decoder(FRAME_SHAPES, 10, limits.MESSAGE_HEADER_BYTES_MAX, limits.MESSAGE_HEADERS_MAX)


def of_one_frame(decoder: Decoder[Frame], head: bytes) -> None:
    decoder.version = Version.V1_2
    decoder.receive(head + b"\n\0")


def request_too_long_ttl() -> None:
    receive(connected(Version.V1_2), "SEND", "destination:/queue/q", f"truenext-ttl:{limits.TTL_MS_MAX + 1}")


def named_too_late_a_time() -> None:
    line = f"AMQ_SCHEDULED_TIME:{limits.SCHEDULE_TIME_MAX + 1}"
    receive(connected(Version.V1_2), "SEND", "destination:/queue/q", line)


def used_too_large_a_number() -> None:
    number = limits.PRODUCER_NUMBER_MAX + 1
    receive(connected(Version.V1_2), "SEND", "destination:/queue/q", "truenext-producer:p", f"truenext-number:{number}")


def request_too_large_window() -> None:
    window = f"activemq.prefetchSize:{limits.WINDOW_MAX + 1}"
    receive(connected(Version.V1_2), "SUBSCRIBE", "id:1", "destination:/queue/q", window)


def sent_too_large_a_body() -> None:
    decoder = Decoder(FRAME_SHAPES, limits.BODY_BYTES_MAX)
    decoder.version = Version.V1_2
    decoder.receive(b"SEND\n\n" + b"x" * (limits.BODY_BYTES_MAX + 1) + b"\0")


def receive_too_large_answer() -> None:
    decoder = Decoder(FRAME_SHAPES, limits.ANSWER_BYTES_MAX)
    decoder.version = Version.V1_2
    decoder.receive(b"MESSAGE\ncontent-length:%d\n\n" % (limits.ANSWER_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("name", "exceeded"),
    [
        ("BODY_BYTES_MAX", sent_too_large_a_body),
        ("ANSWER_BYTES_MAX", receive_too_large_answer),
        ("CONTROL_REQUEST_SEQUENCES_MAX", named_too_many_messages),
        ("DELAY_MS_MAX", request_too_long_delay),
        ("CAUSE_BYTES_MAX", send_too_long_cause),
        ("HEADERS_MAX", sent_too_many_headers),
        ("HEADER_BYTES_MAX", sent_too_large_headers),
        ("MESSAGE_HEADERS_MAX", receive_too_many_headers),
        ("MESSAGE_HEADER_BYTES_MAX", receive_too_large_headers),
        ("TTL_MS_MAX", request_too_long_ttl),
        ("SCHEDULE_TIME_MAX", named_too_late_a_time),
        ("PRODUCER_NUMBER_MAX", used_too_large_a_number),
        ("WINDOW_MAX", request_too_large_window),
    ],
)
def test_composed_error_text_on_the_page_is_that_of_the_code(name: str, exceeded: Callable[[], None]) -> None:
    (words,) = ROWS[name].words
    with pytest.raises(RemoteProtocolError) as refused:
        exceeded()
    assert all(piece in str(refused.value) for piece in words.split(ANYTHING))
    assert ROWS[name].value in words

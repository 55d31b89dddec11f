"""Tests of the texts below the limits in model/limits.py, of which docs/reference/limits.md is made: each error that
they name is one of the code, and so is each setting."""

import functools
import json
import re
from collections.abc import Callable

import pytest

from tests.unit.test_stomp_server import connected, receive
from tools import texts
from tools.reference.limits import Limit, limits_by_name, sections, with_values
from truenext.broker.queues_request import parse_queues_request
from truenext.broker.settings import BrokerSettings
from truenext.engine.background.bulk import parse_request
from truenext.errors import RemoteProtocolError
from truenext.model import limits
from truenext.model.policy import Policy
from truenext.model.setting import settings_of
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.shapes import FRAME_SHAPES

ANYTHING = "…"
DEPENDS = {"CONNECTIONS_MAX", "CONNECTIONS_BEFORE_LOGIN_MAX", "COPIES_MAX", "DESTINATION_LENGTH_MAX"}
"""Limits whose error text has the number of the individual case."""

LIMITS = limits_by_name()
SETTINGS = settings_of(Policy) | settings_of(BrokerSettings)


def errors_of(limit: Limit) -> list[str]:
    """Return the texts that a client gets, with names of limits in braces, as in the source of the code."""
    return [text for text in re.findall("`(.*?)`", limit.exceeded) if " " in text]


def setting_of(limit: Limit) -> str:
    """Return the name of the setting in the configuration file; "" if there is none."""
    found = re.match("`([a-z_]+)`", limit.setting)
    return "" if found is None else found[1]


@functools.cache
def all_texts() -> set[str]:
    """Return all texts that a user can see, with the names of their values in braces."""
    return {text for path in texts.SOURCE.rglob("*.py") for _, text in texts.texts_of(path.read_text(encoding="utf-8"))}


def test_each_constant_is_in_a_section() -> None:
    constants = [name for names in sections().values() for name in names]
    assert sorted(constants) == sorted(name for name in vars(limits) if name.isupper())


@pytest.mark.parametrize("limit", LIMITS.values(), ids=lambda limit: limit.name)
def test_error_of_a_limit_is_one_of_the_code_and_names_the_limit(limit: Limit) -> None:
    if limit.name in EXCEEDED:
        return
    setting = setting_of(limit)
    for error in errors_of(limit):
        pattern = re.compile(r"\{[^}]*\}".join(map(re.escape, error.split(ANYTHING))))
        assert any(pattern.search(text) for text in all_texts()), f"no text of the code has {error!r}"
        names = (f"{{{limit.name}}}", f"({setting})", "--" + setting.replace("_", "-"))
        assert any(name in error for name in names) or limit.name in DEPENDS


@pytest.mark.parametrize("limit", LIMITS.values(), ids=lambda limit: limit.name)
def test_setting_of_a_limit_has_it_as_default_or_bound(limit: Limit) -> None:
    name = setting_of(limit)
    if name:
        setting = SETTINGS[name]
        assert limit.value in (setting.least, setting.most, setting.default)


def named_too_many_messages() -> None:
    sequences = ",".join(map(str, range(limits.CONTROL_REQUEST_SEQUENCES_MAX + 1)))
    parse_request("purge", f'{{"queue":"q","sequences":[{sequences}]}}'.encode())


def named_too_many_queues() -> None:
    parse_queues_request(json.dumps({"names": ["q"] * (limits.QUEUE_NAMES_MAX + 1)}).encode())


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


EXCEEDED: dict[str, Callable[[], None]] = {
    "BODY_BYTES_MAX": sent_too_large_a_body,
    "ANSWER_BYTES_MAX": receive_too_large_answer,
    "CONTROL_REQUEST_SEQUENCES_MAX": named_too_many_messages,
    "QUEUE_NAMES_MAX": named_too_many_queues,
    "DELAY_MS_MAX": request_too_long_delay,
    "CAUSE_BYTES_MAX": send_too_long_cause,
    "HEADERS_MAX": sent_too_many_headers,
    "HEADER_BYTES_MAX": sent_too_large_headers,
    "MESSAGE_HEADERS_MAX": receive_too_many_headers,
    "MESSAGE_HEADER_BYTES_MAX": receive_too_large_headers,
    "TTL_MS_MAX": request_too_long_ttl,
    "SCHEDULE_TIME_MAX": named_too_late_a_time,
    "PRODUCER_NUMBER_MAX": used_too_large_a_number,
    "WINDOW_MAX": request_too_large_window,
}
"""Functions that provoke the errors that are composed at run time, by limit."""


@pytest.mark.parametrize("name", EXCEEDED)
def test_composed_error_of_a_limit_is_that_of_the_code(name: str) -> None:
    (error,) = errors_of(LIMITS[name])
    with pytest.raises(RemoteProtocolError) as refused:
        EXCEEDED[name]()
    assert all(piece in str(refused.value) for piece in with_values(error).split(ANYTHING))
    assert f"{{{name}}}" in error

"""Tests that the codec's inner loops do the same in C (_speed.c) as in Python, and which of them are in use.

TRUENEXT_EXAMPLES=20000 pytest tests/unit/test_stomp_speed.py       longer
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.speed_comparison import (
    decoding_difference,
    encoding_difference,
    in_python,
    random_deliveries,
    random_encoder,
    reading_difference,
    shapes_of,
)
from tests.unit.test_connection_parts import consumer
from truenext.model.commands import AckMode, Login
from truenext.model.message import SentMessage
from truenext.server.life import ConnectionLife
from truenext.server.output import Output
from truenext.wire.stomp import replies, speedups
from truenext.wire.stomp.frame import Version

is_built = pytest.mark.skipif(speedups.SPEEDUPS is None, reason="the module in C was not built, or is switched off")
EXAMPLES = settings(
    max_examples=int(os.environ.get("TRUENEXT_EXAMPLES", "1000")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
SEEDS = st.integers(0, 2**48)


@is_built
@EXAMPLES
@given(SEEDS)
def test_c_reads_the_same_commands_of_a_shape(seed: int) -> None:
    assert reading_difference(seed) == ""


@is_built
@EXAMPLES
@given(SEEDS)
def test_c_changes_no_command_rest_or_error_of_a_stream(seed: int) -> None:
    assert decoding_difference(seed) == ""


@is_built
@EXAMPLES
@given(SEEDS)
def test_c_encodes_the_same_messages(seed: int) -> None:
    assert encoding_difference(seed) == ""


# ---- Owners of what a socket took ----


class TakingSocket:
    """Socket that takes any number of bytes, and notes them."""

    tls = None

    def __init__(self, dice: random.Random, trace: list[object]) -> None:
        self._dice = dice
        self._trace = trace

    def send(self, data: bytes) -> int:
        taken = min(len(data), self._dice.choice([0, 1, 40, 500, 10**6]))
        self._trace.append(bytes(data[:taken]))
        return taken

    def watch_writes(self, action: Callable[[], None]) -> None: ...

    def unwatch_writes(self) -> None: ...


def _acknowledged(seed: int) -> list[object]:
    """Return the bytes that an Output of one random connection sends, and its reports of messages."""
    dice = random.Random(seed)
    encoder, subscription = random_encoder(dice)
    trace: list[object] = []
    broker = mock.Mock(silence=None)
    broker.on_all_sent.side_effect = lambda session: trace.append("all sent")
    ending = SimpleNamespace(life=ConnectionLife())
    session = cast(Any, SimpleNamespace(id="s", release_count=dice.choice([0, 3])))
    socket = cast(Any, TakingSocket(dice, trace))
    output = Output(session, encoder, broker, socket, cast(Any, mock.Mock()), cast(Any, ending))
    reader = consumer(subscription)
    for _ in range(dice.randint(1, 8)):
        match dice.randrange(5):
            case 0 | 1:
                output.deliver(reader, random_deliveries(dice))
            case 2:
                output.add_frame(b"RECEIPT\n\n\0\n")
            case 3:
                output.flush()
            case _ if cast(Any, output)._unsent:
                output.on_writable()
    output.flush()
    sent, partially_sent = output.cancel_unsent([reader])
    trace.append((list(sent.values()), len(partially_sent)))
    return trace


@is_built
@EXAMPLES
@given(SEEDS)
def test_c_acknowledges_the_same_messages_whatever_a_socket_takes(seed: int) -> None:
    in_c = _acknowledged(seed)
    with in_python():
        assert in_c == _acknowledged(seed)


# ---- What is not plain, and what goes wrong ----


class UnslottedDelivery:
    """Dispatch that has its fields, but not in slots."""

    message = SentMessage(4, False, 0, b"content-length:1\n", b"x")
    sequence, deliveries, attempts = 7, 1, 0
    was_lost, is_first_of_group, causes = False, False, None


class UnslottedMessage:
    header, body, arrived_ms = b"", b"", 0


@is_built
def test_deliveries_whose_fields_are_not_in_slots_are_encoded_in_python() -> None:
    for delivery in (UnslottedDelivery(), SimpleNamespace()):
        assert replies._ENCODER.encode([delivery], [], "", "", "", 1, False) == 0
    assert replies._ENCODER.encode((), [], "", "", "", 1, False) == 0


@is_built
@pytest.mark.parametrize("message", [UnslottedMessage, SimpleNamespace])
def test_message_class_whose_fields_are_not_in_slots_is_refused(message: type) -> None:
    with pytest.raises(TypeError):
        speedups.SPEEDUPS.MessageEncoder(message, b"", b"")


@is_built
@pytest.mark.parametrize(
    "lines", [((b"id:",),), ((b"id:", 99),), ((b"id:", -1),), (("id:", 0),), ((b"id:", "0"),), (None,)]
)
def test_lines_that_are_no_pairs_are_refused(lines: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        speedups.SPEEDUPS.AckReader(lines, None, None, None, 255, 1000)


@is_built
def test_arguments_of_a_wrong_type_are_refused() -> None:
    read = shapes_of(Version.V1_2, "ACK", ("id",))[1].read
    wrong: list[tuple[Any, ...]] = [(b"",), ("", 0, [], 0), (b"", 0, (), 0), (b"", "", [], 0)]
    for arguments in wrong:
        with pytest.raises(TypeError):
            read(*arguments)
    for start in (-1, 1):
        with pytest.raises(ValueError):
            read(b"", start, [], 0)
    for refused in [([], (), "", "", "", 1, 0), ([], [], b"", "", "", 1, 0), ([], [], "", "", "", "1", 0), ([],)]:
        with pytest.raises(TypeError):
            replies._ENCODER.encode(*refused)


SENDS = b"SEND\ndestination:/queue/\xc3\xa4\nx:%d\ncontent-length:4\n\nbody\0"
CALLS: dict[str, Callable[[], object]] = {}
if speedups.SPEEDUPS is not None:
    sends = b"".join(SENDS % number for number in range(3))
    acks = b"".join(
        b"ACK\nid:%d.1@sub\ntruenext-started:%d.1@other\n\n\0" % (10**6 + at, 10**6 + at) for at in range(3)
    )
    usual = [each for seed in range(9) for each in random_deliveries(random.Random(seed)) if each.deliveries == 1]
    encoder = random_encoder(random.Random(1))[0]
    encoder.on_connected(Version.V1_2, Login(number=7))
    encoder.add_subscription("ä", AckMode.INDIVIDUAL, has_id=True, has_pattern=False)
    send_shape = shapes_of(Version.V1_2, "SEND", ("destination", "x", "content-length"))[1]
    ack_shape = shapes_of(Version.V1_2, "ACK", ("id", "truenext-started"))[1]
    CALLS = {
        "SEND": lambda: send_shape.read(sends, 0, [], 10),
        "SEND that is not UTF-8": lambda: send_shape.read(sends.replace(b"x:", b"x:\xff"), 0, [], 10),
        "ACK": lambda: ack_shape.read(acks, 0, [], 10),
        "MESSAGE": lambda: encoder.encode_deliveries("ä", usual, []),
    }


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_call_leaves_no_memory_behind(call: Callable[[], object]) -> None:
    for _ in range(100):
        call()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        call()
    assert sys.getallocatedblocks() - before < 100


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_memory_that_is_refused_is_an_error(call: Callable[[], object]) -> None:
    testcapi = pytest.importorskip("_testcapi")
    call()
    refused = 0
    for number in range(1, 200):
        error = None
        testcapi.set_nomemory(number, number + 1)
        try:
            call()
        except MemoryError as caught:
            error = caught
        finally:
            testcapi.remove_mem_hooks()
        refused += error is not None
    assert refused > 3
    call()


# ---- The choice ----


def test_speedups_are_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUENEXT_SPEEDUPS", "0")
    assert speedups._load() is None


@is_built
def test_module_that_cannot_read_messages_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUENEXT_SPEEDUPS", raising=False)
    assert speedups._load() is speedups.SPEEDUPS
    monkeypatch.setattr(speedups, "SentMessage", SimpleNamespace)
    assert speedups._load() is None


@pytest.mark.parametrize("setting", ["0", "1"])
def test_version_names_the_language_of_the_codec(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUENEXT_SPEEDUPS", setting)
    language = "Python" if speedups._load() is None else "C"
    command = [sys.executable, "-m", "truenext", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith(f", codec in {language}\n")

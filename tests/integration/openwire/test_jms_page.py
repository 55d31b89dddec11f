"""Tests that the programs of docs/jms.md run as they stand, and that the page names what the code has."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.openwire.java import CLIENT, SPRING, class_path, missing_reason
from tests.integration.openwire.test_raw_connections import JmsClient
from tests.integration.pages import blocks_of
from truenext.errors import Code
from truenext.model.answers import ErrorAnswer
from truenext.model.limits import OPENWIRE_FRAME_BYTES_MAX
from truenext.model.policy import Policy
from truenext.wire.openwire.refusals import ENDED_CLASS, exception_class
from truenext.wire.openwire.structures import TextMessage

PAGE = "docs/jms.md"
BLOCKS = blocks_of(PAGE)
TEXT = Path(PAGE).read_text(encoding="utf-8")
COMMAND = next(block.text for block in BLOCKS if block.language == "console")


@pytest.fixture
def options() -> Sequence[str]:
    """Listeners of the command on the page, at free ports."""
    command = COMMAND.splitlines()[0].removeprefix("$ truenext serve --data data ")
    urls = [url for word, url in zip(*[iter(command.split())] * 2, strict=True) if word == "--listen"]
    assert urls == ["stomp://127.0.0.1", "openwire://127.0.0.1"]
    return ("--listen", f"{urls[1]}:0")


@pytest.mark.parametrize(("program", "jars"), [("Orders", CLIENT), ("Bills", SPRING)])
def test_program_of_the_page_prints_what_the_page_says(
    own_broker: BrokerProcess, tmp_path: Path, program: str, jars: Sequence[str]
) -> None:
    reason = missing_reason(jars)
    if reason is not None:
        pytest.skip(reason)
    at = next(at for at, block in enumerate(BLOCKS) if block.file == f"{program}.java")
    printed = next(block for block in BLOCKS[at:] if block.language == "text")
    port = own_broker.openwire_url.rpartition(":")[2]
    file = tmp_path / f"{program}.java"
    file.write_text(BLOCKS[at].text.replace("127.0.0.1:61616", f"127.0.0.1:{port}"), encoding="utf-8")
    java = ["java", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", class_path(jars), str(file)]
    result = subprocess.run(java, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert result.stdout == printed.text, result.stderr


def test_command_of_the_page_sends_a_text(own_broker: BrokerProcess) -> None:
    command = next(block.text for block in BLOCKS if "--header" in block.text).removeprefix("$ truenext ")
    assert own_broker.truenext(*shlex.split(command)).returncode == 0
    client = JmsClient(own_broker)
    client.consume("orders")
    message = client.message().message
    client.close()
    assert isinstance(message, TextMessage) and message.content == b"\0\0\0\x0fan ordinary one"


def test_page_names_the_default_ports_and_limits() -> None:
    assert COMMAND.splitlines()[1:] == [
        "listening on stomp://127.0.0.1:61613",
        "listening on openwire://127.0.0.1:61616",
    ]
    assert f"at most {OPENWIRE_FRAME_BYTES_MAX / 2**20:g} MiB" in TEXT
    assert f"`attempts_max` ({Policy().attempts_max})" in TEXT


def test_page_names_each_exception() -> None:
    classes = {ENDED_CLASS, *(exception_class(ErrorAnswer("no", code)) for code in Code)}
    assert {each.rpartition(".")[2] for each in classes} == set(re.findall(r"`(?:java\.lang\.)?(\w+Exception)`", TEXT))

"""Tests that the programs of docs/jms.md run as they stand, and that the page names what the code has."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.openwire.java import CLIENT, SPRING, class_path, missing_reason
from tests.integration.openwire.test_raw_connections import JmsClient
from tests.integration.pages import blocks_of
from truenext.errors import Code
from truenext.model.answers import ErrorAnswer
from truenext.model.limits import BODY_BYTES_MAX
from truenext.model.policy import Policy
from truenext.wire.openwire.refusals import ENDED_CLASS, exception_class
from truenext.wire.openwire.structures import BytesMessage, TextMessage

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


def skip_without(jars: Sequence[str]) -> None:
    reason = missing_reason(jars)
    if reason is not None:
        pytest.skip(reason)


def save(program: str, folder: Path, broker: BrokerProcess) -> int:
    """Save a program of the page, with the port of this broker. Returns the number of its block."""
    at = next(at for at, block in enumerate(BLOCKS) if block.file == f"{program}.java")
    port = broker.openwire_url.rpartition(":")[2]
    text = BLOCKS[at].text.replace("127.0.0.1:61616", f"127.0.0.1:{port}")
    (folder / f"{program}.java").write_text(text, encoding="utf-8")
    return at


def test_orders_program_is_compiled_and_run_as_the_page_says(own_broker: BrokerProcess, tmp_path: Path) -> None:
    skip_without(CLIENT)
    block = BLOCKS[save("Orders", tmp_path, own_broker) + 1]
    assert block.language == "console"
    lib = tmp_path / "lib"
    lib.mkdir()
    for jar in map(Path, class_path(CLIENT).split(":")):
        assert f"`{jar.stem.replace('-1.1-', '_1.1_')}`" in TEXT
        (lib / jar.name).symlink_to(jar)
    lines = block.text.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    result = subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )
    assert result.stdout.splitlines() == lines[len(commands) :], result.stderr


def test_bills_program_prints_what_the_page_says(own_broker: BrokerProcess, tmp_path: Path) -> None:
    skip_without(SPRING)
    at = save("Bills", tmp_path, own_broker)
    printed = next(block for block in BLOCKS[at:] if block.language == "text")
    java = ["java", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", class_path(SPRING)]
    java.append(str(tmp_path / "Bills.java"))
    result = subprocess.run(java, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert result.stdout == printed.text, result.stderr


def test_python_program_of_the_page_and_the_command_send_texts(own_broker: BrokerProcess) -> None:
    program = next(block.text for block in BLOCKS if block.language == "python")
    program = program.replace("127.0.0.1:61613", f"127.0.0.1:{own_broker.port}")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SECONDS)
    for words in (["grün"], ["yes", "--header", "amq-msg-type=bytes"], [b"\xff"]):
        assert own_broker.truenext("send", "orders", *map(os.fsdecode, words)).returncode == 0
    client = JmsClient(own_broker)
    client.consume("orders")
    messages = [client.message().message for _ in range(4)]
    client.close()
    assert [type(message) for message in messages] == [TextMessage, TextMessage, BytesMessage, BytesMessage]
    assert [message and message.content for message in messages] == [
        *(b"\0\0\0\x0fan ordinary one", b"\0\0\0\x05" + "grün".encode(), b"yes", b"\xff")
    ]


def test_page_names_the_default_ports_and_limits() -> None:
    assert COMMAND.splitlines()[1:] == [
        "listening on stomp://127.0.0.1:61613",
        "listening on openwire://127.0.0.1:61616",
    ]
    assert f"at most {BODY_BYTES_MAX / 2**20:g} MiB" in TEXT
    assert f"`attempts_max` ({Policy().attempts_max})" in TEXT


def test_page_names_each_exception() -> None:
    classes = {ENDED_CLASS, *(exception_class(ErrorAnswer("no", code)) for code in Code)}
    assert {each.rpartition(".")[2] for each in classes} == set(re.findall(r"`(?:java\.lang\.)?(\w+Exception)`", TEXT))

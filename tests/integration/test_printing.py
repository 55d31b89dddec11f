"""Tests of the output of the commands on a terminal, into a pipe, onto a full disk, and to closed files."""

import base64
import json
import os
import pty
import random
import select
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess, dying_with_us
from tests.integration.forked import completed
from truenext.store.embedded import EmbeddedStore

EVIL = b"\x1b]0;title\x07 \x1b[2J \xc2\x9b31m \xe2\x80\xaeneddih\xe2\x80\xac \x9b\xff tab\t end"
SHOWN = r"\x1b]0;title\x07 \x1b[2J \x9b31m \u202eneddih\u202c \x9b\xff tab"


def on_a_terminal(broker: BrokerProcess, *arguments: str) -> str:
    """Run a command on a terminal, and return its output."""
    master, its = pty.openpty()
    command = dying_with_us([TRUENEXT, *arguments, "--url", f"stomp://127.0.0.1:{broker.port}"])
    environment = {**os.environ, "TERM": "dumb"}
    seen = b""
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while select.select([master], [], [], max(0.0, deadline - time.monotonic()))[0]:
                try:
                    data = os.read(master, 10_000)
                except OSError:
                    # Nobody has its other end any more.
                    break
                if not data:
                    break
                seen += data
        finally:
            process.kill()
            os.close(master)
    return seen.decode()


def piped(broker: BrokerProcess, *arguments: str) -> bytes:
    done = completed(*arguments, "--url", f"stomp://127.0.0.1:{broker.port}")
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def is_harmless(text: str) -> bool:
    return all(each in "\r\n\t" or each.isprintable() for each in text)


def test_a_body_is_harmless_on_a_terminal_raw_in_a_pipe_and_escaped_in_json(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.send(queue, EVIL, headers={"note": "\x1b[31m \u202e"}, confirmed=True)
    assert piped(broker, "browse", queue) == EVIL + b"\n"
    printed = on_a_terminal(broker, "browse", queue)
    assert SHOWN in printed and is_harmless(printed)
    for line in (
        piped(broker, "browse", queue, "--json").decode(),
        on_a_terminal(broker, "browse", queue, "--json"),
    ):
        assert is_harmless(line)
        message = json.loads(line)
        assert message["headers"]["note"] == "\x1b[31m \u202e"
        # What is no UTF-8 can stand in no JSON text.
        assert base64.b64decode(message["body_base64"]) == EVIL
    printed = on_a_terminal(broker, "receive", queue)
    assert SHOWN in printed and is_harmless(printed)
    assert broker.remaining_messages(queue) == []


def test_scheduled_sends_and_selectors_are_harmless_on_a_terminal(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    client.send("q", EVIL, headers={"AMQ_SCHEDULED_DELAY": "600000"}, confirmed=True)
    client = own_broker.connect(sends_connect=False)
    client.send_frame("CONNECT", {"accept-version": "1.2", "host": "h", "client-id": "me"})
    client.next_frame()
    headers = {"id": "news", "destination": "/topic/news", "durable": "true", "selector": "a = '\x1b[31m'"}
    client.send_frame("SUBSCRIBE", headers | {"receipt": "r"})
    client.await_receipt("r")
    for words in (["scheduled"], ["scheduled", "--json"], ["queues"], ["queues", "--json"], ["status"]):
        printed = on_a_terminal(own_broker, *words)
        assert printed and is_harmless(printed), (words, printed)
    assert r"'\x1b[31m'" in on_a_terminal(own_broker, "queues")
    names = [each["name"] for each in json.loads(piped(own_broker, "queues", "--json"))]
    assert "subscription,me,news,news,a = '\x1b[31m'" in names


@pytest.mark.parametrize(
    "words", [["receive"], ["receive", "--json"], ["receive", "--all", "--timeout", "0.2"], ["browse"]], ids=" ".join
)
def test_a_message_that_cannot_be_printed_is_reported_and_not_acknowledged(
    broker: BrokerProcess, queue: str, words: list[str]
) -> None:
    client = broker.connect()
    client.send(queue, b"kept", persistent=True, confirmed=True)
    command = [TRUENEXT, words[0], queue, *words[1:], "--url", f"stomp://127.0.0.1:{broker.port}"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(dying_with_us(command), stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stderr) == (
        2,
        b"truenext: cannot write to standard output: No space left on device\n",
    )
    assert [each.body for each in broker.remaining_messages(queue)] == [b"kept"]


@pytest.mark.parametrize("words", [["queues"], ["queues", "--json"], ["status"], ["--help"], ["send", "--help"]])
def test_no_command_ends_in_a_traceback_on_a_full_disk(broker: BrokerProcess, words: list[str]) -> None:
    url = [] if "--help" in words else ["--url", f"stomp://127.0.0.1:{broker.port}"]
    with Path("/dev/full").open("wb") as full:
        command = dying_with_us([TRUENEXT, *words, *url])
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stderr) == (
        2,
        b"truenext: cannot write to standard output: No space left on device\n",
    )


def test_a_closed_pipe_ends_receive_quietly_and_unread_messages_are_not_acknowledged(
    broker: BrokerProcess, queue: str
) -> None:
    client = broker.connect()
    for _ in range(20):
        client.send(queue, b"x" * 10_000)
    client.arrived()
    command = [TRUENEXT, "receive", queue, "--all", "--url", f"stomp://127.0.0.1:{broker.port}"]
    with subprocess.Popen(dying_with_us(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"x" * 10_000 + b"\n"
        process.stdout.close()
        assert process.wait(PATIENCE_SECONDS) == 141
        assert process.stderr.read() == b""
    assert 0 < len(broker.remaining_messages(queue)) < 20


CLOSED = "truenext: cannot write to standard output: it is closed, or open for reading only\n"
FULL = "truenext: cannot write to standard output: No space left on device\n"
OF_THE_BROKER = [
    *(["queues"], ["queues", "--json"], ["status"], ["browse", "QUEUE"], ["receive", "QUEUE"]),
    *(["receive", "QUEUE", "--json"], ["scheduled"], ["scheduled", "QUEUE", "--json"]),
    *(["move", "QUEUE", "elsewhere", "--dry-run"], ["move", "QUEUE", "elsewhere", "--dry-run", "--json"]),
    *(["purge", "QUEUE", "--dry-run"], ["unschedule", "QUEUE", "--dry-run"]),
]
STAGES = "tests.stages.services.working:app"
OF_NO_MESSAGE = [
    ["config", "check", "FILE"],
    ["store", "check", "FOLDER"],
    ["history", "export", "FOLDER"],
    *(
        ["stages", "describe", STAGES],
        ["stages", "describe", STAGES, "--json"],
        ["stages", "describe", STAGES, "--dot"],
    ),
    ["--help"],
    ["--version"],
    ["send", "-h"],
    ["serve", "--memory", "--listen", "stomp://127.0.0.1:0"],
]


def redirected(broker: BrokerProcess, redirection: str, *words: str, stdout: int | None = None) -> tuple[int, str]:
    """Run a command by a shell with a redirection. Return its exit status and its standard error."""
    to_broker = (
        []
        if list(words) in OF_NO_MESSAGE or words[0] in ("config", "store", "history")
        else ["--url", f"stomp://127.0.0.1:{broker.port}"]
    )
    command = dying_with_us(["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", TRUENEXT, *words, *to_broker])
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=PATIENCE_SECONDS, text=True, stdout=stdout)
    return done.returncode, done.stderr


@pytest.mark.drawn
@pytest.mark.parametrize("words", [*OF_THE_BROKER, *OF_NO_MESSAGE], ids=" ".join)
def test_a_closed_or_full_standard_output_is_reported_and_loses_no_message(
    broker: BrokerProcess, queue: str, words: list[str], tmp_path: Path
) -> None:
    broker.connect().send(queue, b"kept", persistent=True, confirmed=True)
    later = {"AMQ_SCHEDULED_DELAY": "600000"}
    broker.connect().send(queue, b"later", headers=later, confirmed=True)
    words = with_paths(words, queue, tmp_path)
    assert redirected(broker, ">&-", *words) == (2, CLOSED)
    assert redirected(broker, ">/dev/full", *words) == (2, FULL)
    # Nor is it another status where nobody can be told.
    redirection = random.choice([">/dev/full 2>&1", ">&- 2>&-", ">&- 2>/dev/full <&-"])
    assert redirected(broker, redirection, *words) == (2, ""), redirection
    assert [each.body for each in broker.remaining_messages(queue)] == [b"kept"]


def with_paths(words: list[str], queue: str, parent: Path) -> list[str]:
    """Replace QUEUE, FOLDER and FILE by a queue, a sound data folder and a configuration without a setting."""
    folder, file = parent / "data", parent / "empty.toml"
    EmbeddedStore(folder).close()
    file.touch()
    return [{"QUEUE": queue, "FOLDER": str(folder), "FILE": str(file)}.get(word, word) for word in words]


def test_standard_error_that_cannot_be_written_does_not_change_the_exit_status(
    broker: BrokerProcess, queue: str
) -> None:
    for redirection in ("2>/dev/full", "2>&-"):
        assert redirected(broker, f"{redirection} >/dev/null", "queues", "--nonsense")[0] == 2
        assert redirected(broker, f"{redirection} </dev/null", "send", queue, "--lines")[0] == 0
        assert redirected(broker, redirection, "receive", queue, "--timeout", "0.1")[0] == 1


def test_a_command_that_prints_nothing_needs_no_standard_output(broker: BrokerProcess, queue: str) -> None:
    for redirection in (">&-", ">/dev/full", ">&- <&-"):
        assert redirected(broker, redirection, "send", queue, "sent") == (0, "")
    assert [each.body for each in broker.remaining_messages(queue)] == [b"sent"] * 3


@pytest.mark.drawn
@pytest.mark.parametrize("words", [*OF_THE_BROKER, *OF_NO_MESSAGE], ids=" ".join)
def test_reader_that_has_gone_ends_every_command_in_the_same_way(
    broker: BrokerProcess, queue: str, words: list[str], tmp_path: Path
) -> None:
    broker.connect().send(queue, b"kept", headers={"AMQ_SCHEDULED_DELAY": "600000"}, confirmed=True)
    broker.connect().send(queue, b"kept", confirmed=True)
    words = with_paths(words, queue, tmp_path)
    read, written = os.pipe()
    os.close(read)
    assert redirected(broker, "", *words, stdout=written) == (141, "")
    os.close(written)


@pytest.mark.parametrize("words", [[], ["--lines"]], ids=" ".join)
@pytest.mark.parametrize(
    ("redirection", "why"),
    [("0>/dev/null", "Bad file descriptor"), ("<&-", "it is closed")],
    ids=["unreadable", "closed"],
)
def test_an_unreadable_standard_input_is_reported(
    broker: BrokerProcess, queue: str, words: list[str], redirection: str, why: str
) -> None:
    shell = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", TRUENEXT, "send", queue, *words]
    command = dying_with_us([*shell, "--url", f"stomp://127.0.0.1:{broker.port}"])
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stderr.decode()) == (1, f"truenext: cannot read standard input: {why}\n")
    assert broker.remaining_messages(queue) == []


def test_pause_reports_that_it_has_made_the_queue(broker: BrokerProcess, queue: str) -> None:
    made = piped(broker, "pause", queue).decode()
    assert made.startswith(f"there was no queue '{queue}': created and paused; if it is unused, it disappears")
    assert piped(broker, "pause", queue) == piped(broker, "resume", queue) == piped(broker, "pause", queue) == b""


def test_name_that_the_encoding_of_standard_output_lacks_is_printed_escaped(broker: BrokerProcess, queue: str) -> None:
    name = f"{queue}-ü☃"
    broker.connect().send(name, b"1", confirmed=True)
    url = ["--url", f"stomp://127.0.0.1:{broker.port}"]
    for words in (["queues"], ["pause", f"{name}-new"]):
        done = subprocess.run(
            dying_with_us([TRUENEXT, *words, *url]),
            capture_output=True,
            timeout=PATIENCE_SECONDS,
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert f"{queue}-ü\\u2603".encode("latin-1") in done.stdout


def test_bytes_that_are_no_utf_8_are_sent_as_they_are(broker: BrokerProcess, queue: str) -> None:
    command = [os.fsencode(each) for each in dying_with_us([TRUENEXT, "send", queue])]
    url = f"stomp://127.0.0.1:{broker.port}".encode()
    subprocess.run([*command, b"\xff\xfe", b"--url", url], check=True, timeout=PATIENCE_SECONDS)
    assert [each.body for each in broker.remaining_messages(queue)] == [b"\xff\xfe"]

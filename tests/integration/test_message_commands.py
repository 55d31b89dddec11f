"""Tests of `truenext send`, `receive` and `browse` with files, lines and JSON, and when the broker goes away.

Source of what is expected: docs/reference/commands.md.
"""

import base64
import json
import os
import queue as queues
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from bench.brokers import free_port
from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess, dying_with_us
from tests.integration.forked import completed
from truenext.blocking import Message
from truenext.cli import totals
from truenext.cli.main import main


def url(broker: BrokerProcess) -> str:
    return f"stomp://127.0.0.1:{broker.port}"


def run(
    broker: BrokerProcess, *words: str, stdin: bytes = b"", cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command with `stdin` on its standard input."""
    return completed(*words, "--url", url(broker), stdin_bytes=stdin, folder=cwd)


def waiting(broker: BrokerProcess, queue: str) -> list[bytes]:
    return [message.body for message in broker.remaining_messages(queue)]


# ---- Sending ----


def test_a_file_or_standard_input_is_one_message_as_it_is(broker: BrokerProcess, queue: str, tmp_path: Path) -> None:
    body = b"two\nlines\n\xff\0"
    file = tmp_path / "file"
    file.write_bytes(body)
    for words in ([], ["--file", "-"], ["--file", str(file)]):
        done = run(broker, "send", queue, *words, stdin=body)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert waiting(broker, queue) == [body] * 3


def test_send_lines_sends_each_line_without_its_line_feed(broker: BrokerProcess, queue: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1\n\n3\r\n4")
    done = run(broker, "send", queue, "--lines", "--file", str(tmp_path / "file"))
    assert (done.returncode, done.stderr) == (0, b"4 sent\n")
    done = run(broker, "send", queue, "--lines", stdin=b"5\n")
    assert (done.returncode, done.stderr) == (0, b"1 sent\n")
    assert waiting(broker, queue) == [b"1", b"", b"3\r", b"4", b"5"]


def test_several_files_and_standard_input_are_sent_in_their_order(
    broker: BrokerProcess, queue: str, tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    done = run(broker, "send", queue, "--file", "b", "--file", "-", "--file", "a", stdin=b"input", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"3 sent\n")
    assert waiting(broker, queue) == [b"b", b"input", b"a"]


def test_an_empty_file_is_an_empty_message_and_has_no_lines(broker: BrokerProcess, queue: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert run(broker, "send", queue, "--file", str(tmp_path / "empty")).returncode == 0
    done = run(broker, "send", queue, "--lines", "--file", str(tmp_path / "empty"))
    assert (done.returncode, done.stderr) == (0, b"0 sent\n")
    assert waiting(broker, queue) == [b""]


def test_with_a_file_that_is_missing_nothing_is_sent(broker: BrokerProcess, queue: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    done = run(broker, "send", queue, "--file", "there", "--file", "missing", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"'missing' does not exist" in done.stderr and done.stderr.count(b"\n") == 1
    assert waiting(broker, queue) == []


def test_lines_that_are_interrupted_say_how_many_were_sent_at_most(broker: BrokerProcess, queue: str) -> None:
    command = dying_with_us([TRUENEXT, "send", queue, "--lines", "--url", url(broker)])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"x\n" * 2000)
        process.stdin.flush()
        broker.await_facts(queue, waiting=2000)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, stderr.split()) == (130, b"2,000 sent at most".split())


def test_send_of_many_lines_reports_its_progress(broker: BrokerProcess, queue: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("".join(f"{number}\n" for number in range(3500)))
    with mock.patch.object(totals, "REPORT_INTERVAL_S", 0.0):
        words = ["send", queue, "--lines", "--file", str(tmp_path / "file"), "--transient", "--url", url(broker)]
        done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [*(f"{n},000 sent so far" for n in (1, 2, 3)), "3,500 sent"]
    assert broker.queues()[queue].waiting == 3500


# ---- Receiving ----


def test_receive_dispatches_no_message_that_it_does_not_print(broker: BrokerProcess, queue: str) -> None:
    sender = broker.connect()
    for number in range(5):
        sender.send(queue, b"%d" % number, persistent=True, confirmed=True)
    ack = Message.ack

    def ack_and_wait(message: Message) -> None:
        ack(message)
        # So the broker has time to dispatch another message before the command ends.
        time.sleep(0.05)

    with mock.patch.object(Message, "ack", ack_and_wait):
        done = CliRunner().invoke(main, ["receive", queue, "--count", "2", "--url", url(broker)])
    assert done.stdout == "0\n1\n"
    remaining = broker.remaining_messages(queue)
    assert [message.body for message in remaining] == [b"2", b"3", b"4"]
    assert {message.headers["truenext-deliveries"] for message in remaining} == {"1"}
    assert not any("redelivered" in message.headers for message in remaining)


# ---- JSON ----


def test_json_has_headers_and_a_body_or_one_in_base64(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.send(queue, "grün".encode(), headers={"colour": "green"}, confirmed=True)
    client.send(queue, b"\xff", confirmed=True)
    for words in (["browse", queue], ["receive", queue, "--count", "2"]):
        text, data = map(json.loads, broker.output_of(*words, "--json").splitlines())
        assert text.keys() == {"headers", "body"} and data.keys() == {"headers", "body_base64"}
        assert text["body"] == "grün" and text["headers"]["colour"] == "green"
        assert text["headers"]["destination"] == f"/queue/{queue}"
        assert base64.b64decode(data["body_base64"]) == b"\xff"
    assert waiting(broker, queue) == []


# ---- Following ----


class Following:
    """Command that runs until Ctrl-C."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.output_lines: queues.SimpleQueue[bytes] = queues.SimpleQueue()
        self.stderr: queues.SimpleQueue[bytes] = queues.SimpleQueue()
        """Lines of standard error."""
        pipes = ((process.stdout, self.output_lines), (process.stderr, self.stderr))
        self._threads = [threading.Thread(target=self._read, args=pipe) for pipe in pipes]
        for thread in self._threads:
            thread.start()

    def lines(self, count: int) -> list[bytes]:
        return [self.output_lines.get(timeout=PATIENCE_SECONDS) for _ in range(count)]

    def complaint(self) -> str:
        return self.stderr.get(timeout=PATIENCE_SECONDS).decode()

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(PATIENCE_SECONDS)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    @staticmethod
    def _read(pipe: Iterator[bytes], lines: queues.SimpleQueue[bytes]) -> None:
        for line in pipe:
            lines.put(line)


@contextmanager
def following(port: int, words: Sequence[str]) -> Iterator[Following]:
    command = dying_with_us([TRUENEXT, *words, "--follow", "--url", f"stomp://127.0.0.1:{port}"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        follower = Following(process)
        try:
            yield follower
        finally:
            process.kill()
            process.wait()
            follower.join()


@pytest.mark.parametrize("words", [["receive", "q"], ["browse", "q"], ["receive", "q", "--json"]], ids=" ".join)
def test_following_goes_on_after_the_broker_was_away_and_ends_with_ctrl_c(tmp_path: Path, words: list[str]) -> None:
    port = free_port()
    broker = BrokerProcess(tmp_path, ["--listen", f"stomp://127.0.0.1:{port}"])
    try:
        broker.start()
        broker.connect().send("q", b"1", persistent=True, confirmed=True)
        with following(port, words) as follower:
            (first,) = follower.lines(1)
            broker.restart(is_clean=False)
            assert "connection lost" in follower.complaint()
            broker.connect().send("q", b"2", persistent=True, confirmed=True)
            assert follower.complaint() == "truenext: connected again\n"
            (second,) = follower.lines(1)
            if words[0] == "receive":
                # Else it may be acknowledged or not.
                broker.await_facts("q", waiting=0, unacknowledged=0)
            assert follower.interrupt() == 130
            follower.join()
            # The shell's prompt does not stand behind ^C.
            assert follower.output_lines.empty() and follower.complaint() == "\n" and follower.stderr.empty()
        bodies = [first, second]
        if "--json" in words:
            assert [json.loads(line)["body"] for line in bodies] == ["1", "2"]
        else:
            assert bodies == [b"1\n", b"2\n"]
        broker.close_clients()
        assert waiting(broker, "q") == ([b"1", b"2"] if words[0] == "browse" else [])
    finally:
        broker.clean_up()


def test_browse_follows_and_shows_each_message_once_wherever_its_place_is(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.send(queue, b"1", confirmed=True)
    with following(broker.port, ["browse", queue, "--count", "4"]) as follower:
        assert follower.lines(1) == [b"1\n"]
        client.send(queue, b"2", confirmed=True)
        assert follower.lines(1) == [b"2\n"]
        client.send(queue, b"urgent", priority=9, confirmed=True)
        client.send(queue, b"4", confirmed=True)
        assert follower.lines(2) == [b"urgent\n", b"4\n"]


@pytest.mark.parametrize(
    "words",
    [
        *(["send", "q", "x"], ["send", "q", "--lines"], ["receive", "q"], ["receive", "q", "--follow"]),
        *(["browse", "q"], ["browse", "q", "--follow"], ["queues"], ["status"]),
    ],
    ids=" ".join,
)
def test_commands_without_a_broker_fail_at_once(words: list[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        started_at = time.monotonic()
        done = CliRunner().invoke(main, [*words, "--url", f"stomp://127.0.0.1:{port}"])
    assert time.monotonic() - started_at < 1
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"truenext: no broker at stomp://127.0.0.1:{port}: Connection refused; start one")


# ---- Dead letters ----


def test_command_and_cron_line_of_the_page_print_queues_that_have_dead_letters(
    broker: BrokerProcess, queue: str
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "stages.md").read_text()
    commands = re.findall(r"^(?:(?:\S+ ){5}\S+/)?(truenext dead-letters)$", page, re.MULTILINE)
    assert len(commands) == 2
    names = [f"DLQ.{queue}.{each}" for each in ("full", "paused", "with space", "empty")]
    for name in [*names, queue]:
        assert run(broker, "send", name, "x").returncode == 0
    assert run(broker, "pause", names[1]).returncode == 0
    assert run(broker, "purge", names[3]).returncode == 0
    # As cron does it: another shell, and hardly a variable.
    environment = {"PATH": f"{Path(TRUENEXT).parent}:/usr/bin:/bin", "TRUENEXT_URL": url(broker)}
    environment |= {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    for command in commands:
        done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, text=True)
        printed = " ".join(done.stdout.split())
        assert [name for name in names if name in printed] == names[:3]
        assert done.stderr == ""

"""Tests of the broker with foreign clients: their own libraries, where this machine has them, must find what STOMP
promises.

`test_recordings.py` plays their frames on every machine.
"""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.foreign.programs import CASES, PROGRAMS, Program
from tests.integration.raw_client import bodies

BEAT_MS = 400


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_foreign_client_finds_what_stomp_promises(
    broker: BrokerProcess, queue: str, tmp_path: Path, name: str
) -> None:
    program = PROGRAMS[name]
    if program.version() is None:
        pytest.skip(f"{name} is not on this machine: {program.needs}")
    output = tmp_path / "said"
    process = program.run(broker.port, queue, BEAT_MS, output)
    try:
        printed = _await_last_line(process, output, program)
        assert printed == {case: CASES[case].output for case in program.cases}
        expected = {
            f"{queue}{end}": remaining for case in program.cases for end, remaining in CASES[case].remaining.items()
        }
        assert {name: _remaining_bodies(broker, name) for name in expected} == expected
        if program.beats:
            _check_that_missing_beats_are_noticed(broker, f"{queue}.heart-beat", process)
    finally:
        process.kill()
        process.communicate()


def _await_last_line(process: subprocess.Popen[bytes], output: Path, program: Program) -> dict[str, str]:
    """Return the program's output by case, once the last case is printed. A program without heart-beats has ended
    then."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        has_ended = process.poll() is not None
        text = output.read_text()
        lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        if program.cases[-1] in lines and (has_ended or program.beats):
            return lines
        assert not has_ended, f"it ended with {process.returncode} and said\n{text}"
        assert time.monotonic() < deadline, f"it said only\n{text}"
        time.sleep(0.02)


def _remaining_bodies(broker: BrokerProcess, queue: str) -> list[str]:
    # What it had and did not acknowledge returns when its subscription ends.
    broker.await_facts(queue, unacknowledged=0)
    # One of them sends JSON.
    return [body.strip('"') for body in bodies(broker.remaining_messages(queue))]


def _check_that_missing_beats_are_noticed(broker: BrokerProcess, queue: str, process: subprocess.Popen[bytes]) -> None:
    assert broker.queues()[queue].consumers == 1
    # Its socket stays open: only the silence can tell.
    process.send_signal(signal.SIGSTOP)
    time.sleep(2 * BEAT_MS / 1000)
    broker.await_facts(queue, consumers=0)

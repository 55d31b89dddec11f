"""Tests of the deadline by which the process of a service ends after it was told to."""

import subprocess
import sys

SECONDS = 30


def status_after(calls: str) -> int:
    """Return the exit status of a process that only the deadline ends."""
    program = f"""
import time
from truenext.cli.stages.process_exit import ExitDeadline
deadline = ExitDeadline()
{calls}
time.sleep({SECONDS})
"""
    return subprocess.run([sys.executable, "-c", program], timeout=SECONDS * 2, check=False).returncode


def test_earliest_exit_deadline_counts_in_either_order() -> None:
    # A second signal that comes while the first is being handled sets its deadline first.
    assert status_after("deadline.bring_forward(0.01, 7); deadline.bring_forward(1000, 8)") == 7
    assert status_after("deadline.bring_forward(1000, 8); deadline.bring_forward(0.01, 7)") == 7


def test_cancelled_exit_deadline_does_not_end_the_process() -> None:
    assert status_after("deadline.bring_forward(0.5, 7); deadline.cancel(); time.sleep(1); raise SystemExit(3)") == 3


def test_exit_deadline_ends_a_process_whose_output_is_not_read() -> None:
    """Fixed: the last log record went to a full pipe, and the process did not end."""
    program = """
import os, threading, time
from truenext.cli import logs
from truenext.cli.stages.process_exit import ExitDeadline
logs.configure_logging("warning")
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
ExitDeadline().bring_forward(0.1, 7)
time.sleep(30)
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        assert process.wait(SECONDS * 2) == 7


ONCE_MORE = """
import os
from truenext.cli.stages.process_exit import RESTART
if os.environ.get("TRUENEXT_AGAIN"):
    raise SystemExit(5)
os.environ["TRUENEXT_AGAIN"] = "1"
"""


def test_deadline_of_a_restart_runs_the_command_line_again() -> None:
    assert status_after(f"{ONCE_MORE}\ndeadline.bring_forward(0.01, RESTART)") == 5


def test_signal_after_a_restart_was_due_ends_the_process_at_the_earlier_deadline() -> None:
    assert status_after(f"{ONCE_MORE}\ndeadline.bring_forward(0.5, RESTART); deadline.bring_forward(1000, 7)") == 7
    assert status_after(f"{ONCE_MORE}\ndeadline.bring_forward(1000, 7); deadline.bring_forward(0.5, RESTART)") == 7

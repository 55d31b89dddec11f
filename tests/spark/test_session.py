"""Tests of the file that gets the standard error of Java."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from truenext.errors import ConfigurationError
from truenext.spark import session
from truenext.spark.session import _stderr_to


def java(log: Path) -> subprocess.Popen[bytes]:
    """Start a process that stands for Java, which ends when its standard input is closed."""
    command = [sys.executable, "-ISc", "import sys; print('warning', file=sys.stderr, flush=True); sys.stdin.read()"]
    with _stderr_to(log):
        return subprocess.Popen(command, stdin=subprocess.PIPE)


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


def test_folder_is_refused_while_the_java_of_a_killed_command_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: Java went on after a kill -9 of its command, and the next command wrote the same tables beside it."""
    monkeypatch.setattr(session, "JAVA_END_SECONDS", 0.0)
    log = tmp_path / "spark.log"
    first = java(log)
    with pytest.raises(ConfigurationError, match=f"Java of another audit still writes to {tmp_path}"):
        java(log)
    end(first)
    assert log.read_text() == "warning\n"
    end(java(log))


def test_next_command_waits_until_the_java_of_a_killed_one_has_ended(tmp_path: Path) -> None:
    first = java(tmp_path / "spark.log")
    threading.Timer(0.2, end, [first]).start()
    end(java(tmp_path / "spark.log"))
    assert first.poll() == 0

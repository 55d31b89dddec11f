"""Tests that the benchmark of a backlog goes through all phases and leaves no broker and no file behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, dying_with_us

REPOSITORY = Path(__file__).parents[2]


def backlog_command(folder: Path, *arguments: str) -> list[str]:
    return dying_with_us([sys.executable, "-m", "bench.backlog", "--dir", str(folder), *arguments])


def run_backlog(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        backlog_command(folder, *arguments),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def command_lines_naming(folder: Path) -> list[bytes]:
    """Return the command lines of all processes that name the folder."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(line.read_bytes())
        except OSError:
            continue
    return [line for line in found if os.fsencode(folder) in line]


@pytest.mark.drawn
def test_a_small_backlog_of_either_kind_goes_through_all_phases(tmp_path: Path) -> None:
    data, page = tmp_path / "data", tmp_path / "page.md"
    data.mkdir()
    ended = run_backlog(data, "--messages", "1000,3000", "--probes", "5", "--seed", "3", "--markdown", str(page))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    output = ended.stdout
    assert "seed: 3" in output
    assert output.count("all 1,000 came exactly once and in order") == 2
    assert output.count("all 3,000 came exactly once and in order") == 2
    # A clean stop in the middle and one at the end; transients are not asked to survive a kill.
    assert output.count("exit status 0") == 8
    assert output.count("kill -9, restart: RssAnon") == 2
    assert output.count("3 transient: median") == output.count("2 persistent: median") == 4
    for kind in ("persistent", "transient"):
        table = output.split(f"\n{kind}, 512 to 1536 bytes")[1].split("\n\n")[0]
        assert re.search(r" 1,000 +3,000 ", table.splitlines()[1])
        figures = [line.split("  ")[0] for line in table.splitlines()[3:]]
        assert figures[0] == "enqueue, msg/s"
        assert ("after kill -9, until it listens" in figures) == (kind == "persistent")
        assert "- " not in " ".join(line for line in table.splitlines()[3:] if line.startswith(("enqueue", "drain")))
    assert page.read_text().count("| drain, msg/s |") == 2
    assert list(data.iterdir()) == []


def test_benchmark_measures_one_kind_alone_on_request(tmp_path: Path) -> None:
    ended = run_backlog(tmp_path, "--messages", "300", "--probes", "3", "--transient")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "transient, 300 messages" in ended.stdout
    assert "persistent, 300 messages" not in ended.stdout


def test_benchmark_without_disk_space_does_not_start(tmp_path: Path) -> None:
    ended = run_backlog(tmp_path, "--messages", "1000000000000")
    assert ended.returncode == 1
    assert "GiB of disk are needed" in ended.stdout
    assert "1,000,000,000,000 messages" not in ended.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_an_interrupt_leaves_no_broker_and_no_file_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        backlog_command(tmp_path, "--messages", "500000", "--persistent"),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as bench:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not list(tmp_path.rglob("*.journal")):
            assert time.monotonic() < deadline, "no message was stored"
            time.sleep(0.01)
        assert any(b"serve" in line for line in command_lines_naming(tmp_path))
        bench.send_signal(signal.SIGINT)
        rest = bench.communicate(timeout=2 * PATIENCE_SECONDS)[0]
    assert bench.returncode == 130, rest
    assert "interrupted" in rest
    assert list(tmp_path.iterdir()) == []
    assert command_lines_naming(tmp_path) == []

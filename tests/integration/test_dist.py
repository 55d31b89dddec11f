"""Tests of the packages: their files are git's, and their metadata, README and contents are usable."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.integration.environments import ROOT, make_environment
from tools import dist
from tools.dist import DistError, faults_of_sdist, faults_of_wheel, without_relative_links
from truenext.version import VERSION

TRACKED = {"pyproject.toml": b"p", "src/truenext/a.py": b"a", "src/truenext/_speed.c": b"c", ".gitignore": b"g"}
IN_SDIST = {"PKG-INFO": b"", "src/truenext.egg-info/SOURCES.txt": b"", "setup.cfg": b""}
IN_WHEEL = {"truenext-0.1.0.dist-info/METADATA": b"", "truenext/wire/stomp/_speed.cpython-311-x86_64-linux-gnu.so": b""}
README_LINK = re.compile(r"\]\((?!https://)[^)]*\)")
TEN_FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "src")


# ---- Comparison with git ----


def sdist_files() -> dict[str, bytes]:
    return {name: content for name, content in TRACKED.items() if name != ".gitignore"} | IN_SDIST


def wheel_files() -> dict[str, bytes]:
    return {"truenext/a.py": b"a"} | IN_WHEEL


def test_packages_with_the_files_of_git_have_no_fault() -> None:
    assert list(faults_of_sdist(sdist_files(), TRACKED)) == []
    assert list(faults_of_wheel(wheel_files(), TRACKED)) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"truenext/deleted.py": b""}, "truenext/deleted.py is not in git"),
        ({"other.py": b""}, "other.py is not in git"),
        ({"truenext/_speed.c": b"c"}, "truenext/_speed.c is not in git"),
        ({"truenext/a.py": b"b"}, "truenext/a.py differs from git's"),
        ({"truenext/a.py": None}, "truenext/a.py is missing"),
        (
            {"truenext/_speed.cpython-311-x86_64-linux-gnu.so": b""},
            "truenext/_speed.cpython-311-x86_64-linux-gnu.so is not in git",
        ),
    ],
)
def test_file_of_a_wheel_that_differs_from_git_is_a_fault(changed: dict[str, bytes | None], fault: str) -> None:
    files = {name: content for name, content in {**wheel_files(), **changed}.items() if content is not None}
    assert list(faults_of_wheel(files, TRACKED)) == [fault]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"src/truenext/deleted.py": b""}, "src/truenext/deleted.py is not in git"),
        ({"pyproject.toml": b""}, "pyproject.toml differs from git's"),
        ({"src/truenext/_speed.c": None}, "src/truenext/_speed.c is missing"),
    ],
)
def test_file_of_an_sdist_that_differs_from_git_is_a_fault(changed: dict[str, bytes | None], fault: str) -> None:
    files = {name: content for name, content in {**sdist_files(), **changed}.items() if content is not None}
    assert list(faults_of_sdist(files, TRACKED)) == [fault]


# ---- Links of the README ----


def test_readme_of_a_package_without_a_repository_has_no_link_to_a_file() -> None:
    text = without_relative_links((ROOT / "README.md").read_text(), "")
    assert not README_LINK.search(text)
    assert "docs/security.md" in text


def test_readme_of_a_package_with_a_repository_links_to_its_files() -> None:
    text = without_relative_links((ROOT / "README.md").read_text(), "https://example.org/truenext")
    assert not README_LINK.search(text)
    linked = re.findall(r"\]\(https://example\.org/truenext/blob/main/([^)#]+)", text)
    assert len(linked) > 10
    assert all((ROOT / each).exists() for each in linked)


def test_link_in_a_block_of_code_stays() -> None:
    text = "[a](a.md)\n```\n[b](b.md)\n```\n[c](https://c) [d](#d)\n"
    assert without_relative_links(text, "") == "a (a.md)\n```\n[b](b.md)\n```\n[c](https://c) [d](#d)\n"


# ---- Builds ----


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Working copy with the files that the package is built from."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in TEN_FILES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    for each in [*clone.rglob("*.so"), *clone.rglob("__pycache__"), *clone.rglob("*.egg-info")]:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    for command in ("init --quiet", "add --all"):
        subprocess.run(["git", *command.split()], cwd=clone, check=True)
    return clone


def test_package_from_a_working_copy_that_lacks_a_file_of_git_is_refused(clone: Path, tmp_path: Path) -> None:
    (clone / "src" / "truenext" / "blocking.py").unlink()
    with pytest.raises(dist.DistError, match=r"^the working copy lacks src/truenext/blocking\.py, which git has"):
        dist.build(clone, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


@pytest.mark.alternates("packages")
def test_package_from_a_working_copy_has_neither_removed_nor_untracked_modules(clone: Path, tmp_path: Path) -> None:
    for folder in ("src/truenext", "build/lib/truenext"):
        (clone / folder).mkdir(parents=True, exist_ok=True)
        (clone / folder / "leftover.py").write_text("")
    subprocess.run(["git", "rm", "--quiet", "--force", "src/truenext/blocking.py"], cwd=clone, check=True)
    _, wheel = dist.build(clone, tmp_path / "dist", has_speedups=False)
    names = zipfile.ZipFile(wheel).namelist()
    assert "truenext/broker/broker.py" in names
    assert not [name for name in names if "leftover" in name or name == "truenext/blocking.py"]


@pytest.mark.alternates("packages")
def test_wheel_that_is_built_without_a_compiler_is_for_all_systems(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "truenext-0.0.9-py3-none-any.whl").touch()
    packages = dist.build(clone, tmp_path / "dist")
    assert packages[1].name == f"truenext-{VERSION}-py3-none-any.whl"
    assert sorted(packages) == sorted((tmp_path / "dist").iterdir())


def test_package_without_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DistError, match="build them in a clone, with git"):
        dist.build(tmp_path, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return dist.build(ROOT, tmp_path_factory.mktemp("dist"), has_speedups=False)


@pytest.mark.alternates("packages")
def test_metadata_of_the_wheel_is_that_of_a_package_index(packages: tuple[Path, Path]) -> None:
    _, wheel = packages
    assert wheel.name == f"truenext-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"truenext-{VERSION}.dist-info/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    vendor = "src/truenext/console/static/vendor"
    assert set(metadata.get_all("License-File", [])) == {
        *("LICENSE", f"{vendor}/htmx-LICENSE", f"{vendor}/uPlot-LICENSE")
    }
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not README_LINK.search(str(metadata.get_payload()))
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"all", "sql", "postgresql", "postgresql-store", "opentelemetry", "reload", "spark"} <= extras
    of_all = next(each for each in metadata.get_all("Requires-Dist", []) if '; extra == "all"' in each)
    assert set(re.findall(r"[a-z-]+", of_all.partition("[")[2].partition("]")[0])) == extras - {
        *("all", "browser", "demo", "setup", "sql", "test")
    }


@pytest.mark.alternates("packages")
def test_wheel_in_an_environment_of_its_own_runs_the_command(packages: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = packages
    python = Path(make_environment(tmp_path / "environment", ["truenext"]))
    site = python.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    for each in unlinked(site):
        each.unlink()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [python, "-P", "-m", "truenext", "--version"],
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"truenext, version {VERSION}, codec in Python\n"


def unlinked(site: Path) -> Iterator[Path]:
    """Return the links of an environment that lead to the working copy."""
    yield from (each for each in site.iterdir() if "truenext" in each.name)

"""Files of npm's packages that the console serves: compared with their lock."""

import gzip
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tools.web_assets import FOLDER, LOCK, AssetError, Package, faults, integrity_of, read_lock, unpack, write_lock

_LOCKED = read_lock(LOCK.read_text())
STATIC = FOLDER.parent


def _archive(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(written.getvalue())


_ARCHIVE = _archive({"package/dist/a.js": b"a()", "package/LICENSE": b"free"})
_PACKAGE = Package("@some/a", "1.2.3", integrity_of(_ARCHIVE), {"a.js": "dist/a.js", "a-LICENSE": "LICENSE"}, {})


def test_committed_files_are_those_of_the_lock() -> None:
    assert list(faults(_LOCKED, FOLDER)) == []


def test_each_package_of_the_lock_brings_its_licence() -> None:
    assert all(any("LICENSE" in name for name in each.digests) for each in _LOCKED)


def test_a_lock_is_written_as_it_was_read() -> None:
    assert write_lock(_LOCKED) == LOCK.read_text()


def test_an_archive_of_the_lock_gives_its_files() -> None:
    assert _PACKAGE.url == "https://registry.npmjs.org/@some/a/-/a-1.2.3.tgz"
    assert unpack(_PACKAGE, _ARCHIVE) == {"a.js": b"a()", "a-LICENSE": b"free"}


def test_an_archive_with_another_content_is_rejected() -> None:
    with pytest.raises(AssetError, match="has the integrity sha512-"):
        unpack(_PACKAGE, _archive({"package/dist/a.js": b"b()", "package/LICENSE": b"free"}))


def test_an_archive_without_a_file_of_the_lock_is_rejected() -> None:
    with pytest.raises(AssetError, match=r"has no file package/dist/b\.js"):
        unpack(replace(_PACKAGE, sources={"b.js": "dist/b.js"}), _ARCHIVE)


def test_a_file_that_is_changed_missing_or_added_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_bytes(b"b()")
    (tmp_path / "c.js").write_bytes(b"c()")
    package = replace(_PACKAGE, digests={"a.js": "00", "a-LICENSE": "00"})
    assert list(faults([package], tmp_path)) == [
        "a-LICENSE is missing: python -m tools.web_assets",
        "a.js differs from the lock",
        "c.js is not in the lock",
    ]


def test_own_style_sheet_is_below_20_kib() -> None:
    assert sum(each.stat().st_size for each in STATIC.glob("*.css")) < 20 * 1024


def test_scripts_and_styles_of_a_first_page_leave_half_of_200_kib() -> None:
    assert sum(each.stat().st_size for each in STATIC.rglob("*") if each.suffix in {".js", ".css", ".svg"}) < 120 * 1024

"""Kept files of earlier versions, unpacked for a test."""

import tarfile
from pathlib import Path

import pytest

ARCHIVES = sorted(Path(__file__).parent.glob("format-*.tar.xz"))

each_archive = pytest.mark.parametrize("archive", ARCHIVES, ids=lambda each: each.name.partition(".")[0])


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive of make.py, and return the folder that has its files."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder

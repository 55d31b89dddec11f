"""Kept files of earlier versions, unpacked for a test."""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess

ARCHIVES = sorted(Path(__file__).parent.glob("format-*.tar.xz"))

each_archive = pytest.mark.parametrize("archive", ARCHIVES, ids=lambda each: each.name.partition(".")[0])


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive of make.py, and return the folder that has its files."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


@contextmanager
def running_broker(kept: Path, *options: str) -> Iterator[BrokerProcess]:
    """Run a broker on the data folder of an unpacked archive, and stop it cleanly."""
    broker = BrokerProcess(kept, options)
    try:
        broker.start()
        yield broker
        broker.stop()
    finally:
        broker.clean_up()

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.disk import KINDS, Disk
from tests.contract.simulated_disk import quick_folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Temporary folder where syncs are fast; a simulated disk, or brokers on real disks, test the syncs."""
    with tempfile.TemporaryDirectory(prefix="truenext-contract-", dir=quick_folder()) as folder:
        yield Path(folder)


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(request.param, tmp_path / "data")
    yield disk
    disk.store.close()


@pytest.fixture
def embedded_disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk("embedded", tmp_path / "data")
    yield disk
    disk.store.close()


@pytest.fixture
def memory_disk(tmp_path: Path) -> Disk:
    return Disk("memory", tmp_path)

"""Does what the pages for users say happen, when it is done as they say it?"""

import socket
from pathlib import Path

import pytest

from tests.integration.pages import Folder, follow


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Where no broker runs yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Folder(tmp_path / "folder", f"stomp://127.0.0.1:{free.getsockname()[1]}")


def test_the_tutorial(folder: Folder) -> None:
    follow("docs/tutorial.md", folder)

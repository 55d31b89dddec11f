"""Tests that the commands and programs on the pages for users do what the pages say."""

from pathlib import Path

import pytest

from bench.brokers import free_port
from tests.drawing import one_of
from tests.integration.environments import make_environment, requirements_of_page
from tests.integration.pages import Folder, blocks_of, follow
from truenext.testing import QueueContents, blocking_broker


@one_of("page", ["docs/first-hour.md", "docs/tutorial-stages.md"], ids=["first-hour", "tutorial-stages"])
def test_tutorial_in_the_environment_that_it_makes(page: str, tmp_path: Path) -> None:
    """No broker runs before, and only the requirements of the page are installed."""
    python = make_environment(tmp_path / "environment", requirements_of_page(page))
    follow(page, Folder(tmp_path / "folder", f"stomp://127.0.0.1:{free_port()}", python))


def test_moving_from_stomp_py(tmp_path: Path) -> None:
    """The programs with stomp.py and with truenext print the same."""
    blocks = [block.text for block in blocks_of("docs/other-clients.md")]
    printed = []
    for side in ("# stomp.py\n", "# truenext\n"):
        with blocking_broker() as broker:
            folder = Folder(tmp_path / side[2:-1], broker.url)
            printed.append(folder.run("\n\n".join(block for block in blocks if block.startswith(side))))
            assert broker.queue("invoices").bodies == [b"7 pears"]
            assert broker.queue("orders") == QueueContents(messages=(), unacknowledged=0, scheduled=0)
    assert printed == ["9 urgent\nHOW?\n"] * 2


@pytest.mark.parametrize("page", ["README", "docs/client", "docs/attempts", "docs/in-doubt"])
def test_examples_of_page_run(page: str, tmp_path: Path) -> None:
    with blocking_broker() as broker:
        follow(f"{page}.md", Folder(tmp_path / "folder", broker.url))

"""Tests of the examples in the pages about stages, their database, web applications, and Celery."""

from pathlib import Path

import pytest

from bench.brokers import free_port
from tests.integration.pages import Folder, follow


@pytest.mark.alternates("pages about stages")
@pytest.mark.parametrize("page", ["stages", "stages-database", "web", "celery"])
def test_examples_of_page_about_stages_run(page: str, tmp_path: Path) -> None:
    """The examples start their own brokers."""
    follow(f"docs/{page}.md", Folder(tmp_path / "folder", f"stomp://127.0.0.1:{free_port()}"))

"""Test of docs/stage-as-spark-job.md: its example runs as the page says."""

import os
import sys
from pathlib import Path

import pytest

from bench.brokers import free_port
from tests.integration.pages import Folder, follow
from truenext.spark.java import find_java


@pytest.mark.skipif(not os.environ.get("TRUENEXT_KILLS"), reason="starts Spark: make stage-job")
@pytest.mark.timeout(600)
def test_page_shows_what_its_example_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(find_java()))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    follow(
        "docs/stage-as-spark-job.md", Folder(tmp_path / "folder", f"stomp://127.0.0.1:{free_port()}", patience_s=180)
    )

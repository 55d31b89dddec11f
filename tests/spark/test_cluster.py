"""Test of the audit where Spark's workers are processes of their own.

A session cannot change its master, so each master has a process to itself.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.policies import serve, three_classes
from truenext.spark.schema import EVENTS

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.environ.get("TRUENEXT_KILLS"), reason="starts Spark twice: make spark"),
]


@pytest.mark.parametrize("master", ["local[*]", "local-cluster[2,1,1024]"])
def test_findings_are_the_same_with_every_master(master: str, spark: SparkSession, tmp_path: Path) -> None:
    history, wrong = serve(three_classes, 5)
    rows = [tuple(each[name] for name in EVENTS.names) for each in history]
    spark.createDataFrame(rows, EVENTS).write.parquet(str(tmp_path / "events"))
    ran = subprocess.run(
        [sys.executable, "-m", "truenext.spark.audit", tmp_path, "--master", master],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    for kind, count in wrong.items():
        words = "higher priority" if kind == "inversion" else "same priority"
        assert any(line.startswith(f"- {count:,} dispatches") and words in line for line in ran.stdout.splitlines())

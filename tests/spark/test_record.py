"""Tests of `truenext record`: its files are as in docs/reference/history.md, and existing files are left alone."""

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from tests.integration.broker_process import TRUENEXT, BrokerProcess
from truenext.errors import ConfigurationError
from truenext.spark.recorder import make_mix
from truenext.spark.recording import check_folder


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path)
    try:
        broker.start()
        yield broker
    finally:
        broker.clean_up()


def record_command(broker: BrokerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TRUENEXT, "record", "--url", f"stomp://127.0.0.1:{broker.port}", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_files_have_the_columns_of_the_history(broker: BrokerProcess, tmp_path: Path) -> None:
    out = tmp_path / "recording"
    done = record_command(broker, "--case", "mix", "--seed", "11", "--count", "50", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "seed 11" in done.stderr and "50 of 50 messages came" in done.stderr
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert paths == sorted(out.glob("date=*/*.parquet")) != []
    rows = [row for path in paths for row in parquet.read_table(path, partitioning=None).to_pylist()]
    assert [row["event"] for row in rows] == list(range(1, 154))
    sent = [(row["priority"], row["persistent"]) for row in rows if row["kind"] == "accepted"]
    assert sent == make_mix(50, random.Random(11))
    schema = parquet.read_schema(paths[0])
    assert not schema.field("at").nullable and str(schema.field("at").type) == "timestamp[us, tz=UTC]"

    again = record_command(broker, "--count", "5", "--out", str(out))
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_a_broker_that_is_not_there_is_one_line(broker: BrokerProcess, tmp_path: Path) -> None:
    broker.stop()
    done = record_command(broker, "--out", str(tmp_path / "recording"))
    assert done.returncode == 2
    assert "truenext: no broker at" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "another").touch()
    with pytest.raises(ConfigurationError, match="not empty"):
        check_folder(tmp_path)

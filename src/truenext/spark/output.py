"""Output of an audit: tables as folders of Parquet files, and a page, in a folder or at an address."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from truenext.errors import ConfigurationError
from truenext.spark.addresses import opening
from truenext.spark.paths import Location, is_address, output_path


def write_table(table: DataFrame, location: Location) -> None:
    """Write a table as a folder of Parquet files, in place of the one that is there.

    On a cluster the driver writes to a folder: tasks on other machines would write to their own disks.

    Raises: ConfigurationError if Spark cannot open the address
    """
    if is_address(location):
        with opening(location):
            table.write.mode("overwrite").parquet(output_path(location))
    elif _is_local(table.sparkSession):
        table.write.mode("overwrite").parquet(output_path(location))
    else:
        folder = Path(location)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pq.write_table(table.toArrow(), folder / "part-00000.parquet")


def make_durable(folder: Path) -> None:
    """Sync a folder, the files in it, and its name.

    Raises: OSError if the disk fails
    """
    for path in (*folder.iterdir(), folder, folder.parent):
        sync(path)


def sync(path: Path) -> None:
    """Make a file or folder durable.

    Raises: OSError if the disk fails
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_local(spark: SparkSession) -> bool:
    """Return whether all tasks run in the driver's process."""
    master = spark.conf.get("spark.master", "") or ""
    return master.partition("[")[0] == "local"


def write_to_address(address: str, text: str) -> None:
    """Write a file to an address.

    Raises: ConfigurationError if Spark cannot open the address, or the session is one of Spark Connect
    """
    spark = SparkSession.getActiveSession()
    jvm = getattr(spark, "_jvm", None)
    if spark is None or jvm is None:
        raise ConfigurationError(f"Spark Connect cannot write {address}: the tables are there; --out FOLDER has a page")
    with opening(address):
        path = jvm.org.apache.hadoop.fs.Path(address)
        file = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).create(path, True)
        try:
            file.write(text.encode())
        finally:
            file.close()

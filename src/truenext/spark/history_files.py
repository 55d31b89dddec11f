"""Files of histories: finds them below folders and addresses, and reads them in tasks of Spark.

    FOLDER/history/0000000000000001.history                 in the broker's own format: a task reads the whole file
    FOLDER/history/events/date=2026-11-21/*.parquet         Spark reads them

FOLDER is the folder of one broker. An address with a scheme (hdfs://, s3a://) is given to Spark, and so is the reading
of its files. A file of a local path, which may be on NFS, is opened by the task.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from truenext.errors import ConfigurationError, HistoryError
from truenext.history.files import EVENTS_FOLDER, PARQUET_SUFFIX, SUFFIX, chunks_of, history_files, parquet_files
from truenext.history.schema import DATE
from truenext.history.table import arrow_table_of, with_all_columns
from truenext.spark.addresses import opening
from truenext.spark.paths import Location, escape_pattern, is_address, path_to_read
from truenext.spark.schema import EVENTS

HISTORY_FOLDER = "history"
ASIDE = "aside-"
"""Beginning of the names of folders that a broker has put aside. They are no further broker's."""

ROWS_PER_BATCH = 65_536
_ROWS = StructType([field for field in EVENTS if field.name != DATE])


class HistoryFiles(NamedTuple):
    """Files of the history in one folder. Together they have each of its events once."""

    folder: str
    parquet: tuple[str, ...]
    raw: tuple[str, ...]
    """Files in the broker's own format that are not Parquet yet. The last one may still grow."""


def find_histories(spark: SparkSession, location: Location) -> list[HistoryFiles]:
    """Return the files of each history at `location`, which is the folder of a broker, or has those of several below.

    Raises: ConfigurationError if there are none, or Spark cannot open the address; OSError if a folder cannot be read
    """
    if is_address(location):
        return _group(location, map(unquote, _list_address(spark, str(location))))
    return find_local_histories(Path(location))


def find_local_histories(folder: Path) -> list[HistoryFiles]:
    """Return the files of each history in a folder, or below.

    Raises: ConfigurationError if there are none; OSError if a folder cannot be read
    """
    return _group(folder, map(str, _list_folder(folder.resolve())))


def _group(location: Location, paths: Iterable[str]) -> list[HistoryFiles]:
    found = group_files(paths)
    if not found:
        raise ConfigurationError(
            f"no history in {location}: neither it nor the folders below have *{SUFFIX} or Parquet files. The broker "
            "writes them unless it runs with --no-history"
        )
    return found


def group_files(paths: Iterable[str]) -> list[HistoryFiles]:
    """Return the files by the folder of their broker. A raw file whose events are in a Parquet file is left out.

    >>> group_files(["/a/history/1.history", "/a/history/2.history", "/a/history/events/date=2026-11-21/1.parquet"])
    [HistoryFiles(folder='/a', parquet=('/a/history/events/date=2026-11-21/1.parquet',), raw=('/a/history/2.history',))]
    """
    by_folder: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        by_folder[_broker_folder(path)].append(path)
    found = []
    for folder, own in sorted(by_folder.items()):
        parquet = sorted(path for path in own if not path.endswith(SUFFIX))
        stems = {PurePosixPath(path).stem for path in parquet}
        raw = sorted(path for path in own if path.endswith(SUFFIX) and PurePosixPath(path).stem not in stems)
        found.append(HistoryFiles(folder, tuple(parquet), tuple(raw)))
    return found


_INSIDE = re.compile(rf"(/{HISTORY_FOLDER})?(/{EVENTS_FOLDER})?(/date=[^/]*)?/[^/]*$")


def _broker_folder(path: str) -> str:
    return _INSIDE.sub("", path) or "/"


def _list_folder(folder: Path) -> list[Path]:
    for history in (folder / HISTORY_FOLDER, folder):
        # Before the Parquet files: a file that the broker exports meanwhile is in both lists, not in none.
        found = [*history_files(history), *parquet_files(history)]
        if found:
            return found
    below = [*folder.glob(f"**/*{SUFFIX}"), *folder.glob(f"**/*{PARQUET_SUFFIX}")]
    return [
        path
        for path in below
        if path.is_file() and not any(part.startswith(ASIDE) for part in path.relative_to(folder).parts)
    ]


# ---- Reading ----


def read_files(spark: SparkSession, files: HistoryFiles) -> tuple[DataFrame, DataFrame | None]:
    """Return the events in the files, in columns as `SCHEMA`; and those of raw files alone, which are cached, None if
    there are none.

    A later read of a file that still grows may have further events.
    """
    raw = _read_raw(spark, files.raw).persist() if files.raw else None
    if not files.parquet:
        assert raw is not None
        return raw, raw
    to_read = escape_pattern if is_address(files.folder) else _path_to_read
    parquet = spark.read.schema(_ROWS).parquet(*map(to_read, files.parquet))
    return (parquet if raw is None else parquet.unionByName(raw)), raw


def _path_to_read(path: str) -> str:
    return path_to_read(Path(path))


def _read_raw(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    if is_address(paths[0]):
        files = spark.read.format("binaryFile").load([*map(escape_pattern, paths)])
        return files.select("path", "content").mapInArrow(_decode_contents, _ROWS)
    # A task for each file.
    listed = spark.createDataFrame([(path,) for path in paths], "path string").repartition(len(paths))
    return listed.mapInArrow(_decode_files, _ROWS)


def _decode_contents(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for path, content in zip(*batch.to_pydict().values(), strict=True):
            yield from arrow_table_of(chunks_of(content, path)).to_batches(ROWS_PER_BATCH)


def _decode_files(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for path in chain.from_iterable(batch.column(0).to_pylist() for batch in batches):
        yield from _decode_file(Path(path)).to_batches(ROWS_PER_BATCH)


def _decode_file(path: Path) -> pa.Table:
    """Return the events of a raw file, or of the Parquet files that the broker has made of it meanwhile."""
    try:
        return arrow_table_of(chunks_of(path.read_bytes(), path))
    except FileNotFoundError as error:
        exported = parquet_files(path.parent, path.stem)
        if not exported:
            raise HistoryError(
                f"{path} is not there any more, or not on this machine: the machines of a cluster need the history at "
                "the same path; if retention has deleted the file meanwhile, start the audit again"
            ) from error
        return pa.concat_tables(with_all_columns(pq.ParquetFile(each).read()) for each in exported)


_OF_TASK = re.compile(r"^\s*truenext\.errors\.HistoryError: (.+)$", re.MULTILINE)


@contextmanager
def errors_of_tasks() -> Iterator[None]:
    """Raise errors of tasks that read history inside the block, which Spark wraps, as HistoryError."""
    try:
        yield
    except PySparkException as error:
        found = _OF_TASK.search(str(error))
        if found is None:
            raise
        raise HistoryError(found[1]) from error


# ---- Addresses ----


def _list_address(spark: SparkSession, address: str) -> list[str]:
    """Return all files of histories below an address, as Spark encodes them."""
    files = spark.read.format("binaryFile").option("recursiveFileLookup", True)
    with opening(address):
        listed = [
            files.option("pathGlobFilter", "*" + end).load(address).inputFiles() for end in (SUFFIX, PARQUET_SUFFIX)
        ]
    return [path for path in chain.from_iterable(listed) if f"/{ASIDE}" not in path]

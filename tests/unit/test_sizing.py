"""Tests that `truenext config check` says what a configuration needs, and warns of a machine that is too small."""

from dataclasses import replace
from pathlib import Path
from sys import maxsize

import pytest

from truenext.broker.settings import BrokerSettings
from truenext.cli.files import FILES_OWN, fault_of_files, needed_files, places_with
from truenext.cli.sizing import MachineFacts, describe, read_machine, warnings
from truenext.model.limits import CONNECTIONS_MAX
from truenext.server.listener import ALL_PLACES

GIB = 1 << 30
LARGE = MachineFacts(memory=8 * GIB, files=4096, disk=100 * GIB, disk_free=50 * GIB, file_system="ext4")
SETTINGS = BrokerSettings(data=Path("data"))


def test_large_machine_has_no_warnings() -> None:
    assert warnings(SETTINGS, LARGE) == []
    assert describe(SETTINGS, LARGE) == [
        "memory: 256MiB of 8GiB; 48MiB for the broker itself, 64MiB for messages, and the rest for some 104,134 queues",
        "files: up to 1,274; 1,000 connections of each listener",
        "disk: all of the disk but a reserve for messages, and 8GiB for the history; the disk has 100GiB, of which "
        "50GiB are free",
    ]


def test_broker_without_a_disk_is_told_nothing_of_disks() -> None:
    in_memory = BrokerSettings(memory=True)
    facts = replace(LARGE, memory=maxsize, disk=0, disk_free=0, file_system="")
    assert [line.partition(":")[0] for line in describe(in_memory, facts)] == ["memory", "files"]
    assert warnings(in_memory, facts) == []


def test_too_few_files_are_warned_of_with_the_number_that_is_needed() -> None:
    two = BrokerSettings(data=Path("data"), listen=("stomp://127.0.0.1:1", "stomp://127.0.0.1:2"))
    (warning,) = warnings(two, replace(LARGE, files=1024))
    assert warning == (
        "a broker may open 1,024 files here (ulimit -n), enough for 353 connections of each listener instead of 1,000: "
        "raise the limit to 2,484, of which 64 are for the broker itself"
    )
    assert warnings(two, replace(LARGE, files=needed_files(2))) == []
    assert warnings(two, replace(LARGE, files=10)) == []


def test_files_that_are_too_few_for_a_broker_are_a_fault() -> None:
    assert fault_of_files(76, 1) is None
    assert fault_of_files(75, 1) == (
        "this process may open 75 files (ulimit -n), and the broker needs at least 76: raise the limit"
    )


@pytest.mark.parametrize("files", [FILES_OWN + 12, 500, 1273, 1274, maxsize])
def test_places_never_need_more_files_than_there_are(files: int) -> None:
    places = places_with(files, 1)
    assert (places == ALL_PLACES) is (files >= needed_files(1))
    assert FILES_OWN + sum(places) + 10 <= files
    assert places.connections <= CONNECTIONS_MAX


@pytest.mark.parametrize(
    ("disk_limit", "history_bytes_max", "disk", "text"),
    [
        (20 * GIB, 8 * GIB, 28 * GIB, ""),
        (20 * GIB, 8 * GIB, 28 * GIB - 1, "disk_limit (20GiB) and the history (8GiB) are together more than the disk"),
        (None, 8 * GIB, 9 * GIB, ""),
        (None, 8 * GIB, 9 * GIB - 1, "the smallest disk_limit (1GiB) and the history (8GiB) are together more"),
    ],
)
def test_disk_smaller_than_its_limit_and_the_history_is_warned_of(
    disk_limit: int | None, history_bytes_max: int, disk: int, text: str
) -> None:
    settings = replace(SETTINGS, disk_limit=disk_limit, history_bytes_max=history_bytes_max)
    found = warnings(settings, replace(LARGE, disk=disk))
    assert len(found) == bool(text)
    assert all(each.startswith(text) for each in found)


def test_history_does_not_count_if_there_is_none() -> None:
    assert warnings(replace(SETTINGS, history=False, disk_limit=2 * GIB), replace(LARGE, disk=2 * GIB)) == []


@pytest.mark.parametrize(
    ("file_system", "text"),
    [("nfs4", "is on a network file system (nfs4)"), ("tmpfs", "is in memory (tmpfs)"), ("xfs", "")],
)
def test_data_folder_on_a_file_system_that_is_unfit_is_warned_of(file_system: str, text: str) -> None:
    found = warnings(SETTINGS, replace(LARGE, file_system=file_system))
    assert len(found) == bool(text)
    assert all(text in each for each in found)


def test_facts_of_this_machine_are_those_of_the_disk_of_the_data_folder(tmp_path: Path) -> None:
    facts = read_machine(tmp_path / "not" / "there")
    assert 0 < facts.disk_free <= facts.disk
    assert facts.files > 0
    assert read_machine(None).disk == 0

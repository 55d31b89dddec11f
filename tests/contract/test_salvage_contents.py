"""Tests of `store check` and `store export` with contents that several messages share."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from tests.contract.disk import Disk
from tests.contract.test_embedded_store import until
from tests.contract.test_salvage import check, truenext
from truenext.model.batch import NO_CAUSES, Mark
from truenext.model.message import SentMessage
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    content_key,
    decode_record,
    encode_record,
    encode_reference,
    lane_key,
    message_key,
)
from truenext.store.checkpoint import Checkpoint
from truenext.store.embedded import EmbeddedStore

LANES = [lane_key(number, 5) for number in (1, 2, 3)]
NUMBERS = (1, 4, 7, 10)
TRANSIENT = (4, 10)
"""Numbers of the contents whose copies are transient."""


def copies(number: int) -> list[bytes]:
    return [message_key(lane, number + at) for at, lane in enumerate(LANES)]


def content_of(number: int) -> SentMessage:
    return SentMessage(4, number not in TRANSIENT, 0, b"content-length:3\n", b"%03d" % number)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three copies each of four messages, the first two in the checkpoint. Each has lost one copy."""
    folder = tmp_path / "data"
    disk = Disk("checkpointing", folder)
    disk.apply(queues={1: "a", 2: "b", 3: "c"}, sequence_limit=1000)
    for number in NUMBERS:
        record = encode_record(content_key(number), content_of(number))
        puts = {one: encode_reference(one, number, persistent=number not in TRANSIENT) for one in copies(number)}
        kind = "transient_" * (number in TRANSIENT)
        disk.apply(**{f"{kind}puts": {content_key(number): record} | puts}, marks={content_key(number): (3, 0)})
        disk.apply(**{f"{kind}removes": [copies(number)[0]], f"{kind}dereferenced": [content_key(number)]})
        if number == NUMBERS[1]:
            until(lambda: is_checkpointed(disk))
            disk.store.close()
            disk.store = EmbeddedStore(folder)
            disk.store.recover()
            disk.number = 0
    disk.apply(clean_stop=True)
    disk.store.close()
    return folder


def is_checkpointed(disk: Disk) -> bool:
    """True once all but an empty batch is checkpointed; a reused segment has room for more than one batch."""
    disk.apply(puts={})
    assert isinstance(disk.store, EmbeddedStore)
    return not any(index.marks or index.chunks for index in disk.store._overlay.indexes)


def shown(data: Path) -> dict[bytes, SentMessage]:
    store = EmbeddedStore(data)
    store.recover()
    found = [each for lane in LANES for each in store.read_page(lane, 0, 100).messages]
    store.close()
    return {each.key: decode_record(each.key, each.record, each.content) for each in found}


def remaining() -> dict[bytes, SentMessage]:
    """Return the messages there are if nothing is damaged."""
    return {one: content_of(number) for number in NUMBERS for one in copies(number)[1:]}


def exported(data: Path) -> dict[bytes, SentMessage]:
    """Export to a new folder and check it; its contents go with their last copies. Returns its messages."""
    new = data.parent / "new"
    truenext("export", data, new)
    assert check(new) == []
    found = shown(new)
    disk = Disk("memory", new)
    disk.store = EmbeddedStore(new)
    disk.store.recover()
    for one in found:
        (number,) = (number for number in NUMBERS if one in copies(number))
        kind = "transient_" * (number in TRANSIENT)
        disk.apply(**{f"{kind}removes": [one], f"{kind}dereferenced": [content_key(number)]})
    assert disk.store.read_page(CONTENTS_LANE_KEY, 0, 10).messages == []
    disk.store.close()
    return found


def checkpoint_of(data: Path) -> Checkpoint:
    return Checkpoint(data / "lmdb", may_be_new=False)


def test_a_sound_folder_is_sound_and_every_copy_is_exported(data: Path) -> None:
    assert check(data) == []
    assert "8 messages of" in truenext("check", data).stdout
    assert "4 contents of" in truenext("check", data).stdout
    assert shown(data) == remaining()
    assert exported(data) == remaining()


def test_copies_whose_content_is_missing_are_named_and_left_out(data: Path) -> None:
    checkpoint = checkpoint_of(data)
    checkpoint.delete_messages([(content_key(1), False)])
    checkpoint.close()
    assert check(data) == [
        f"lmdb/data.mdb: message {number} of queue {name}, priority 4 is damaged: its content, number 1, is missing or "
        "damaged"
        for number, name in ((2, "'b'"), (3, "'c'"))
    ]
    assert exported(data) == {one: message for one, message in remaining().items() if one not in copies(1)}


def test_a_damaged_content_costs_its_copies_and_no_others(data: Path) -> None:
    with lmdb.open(str(data / "lmdb"), max_dbs=20, lib_version=0) as env, env.begin(write=True) as txn:
        transients = env.open_db(b"transients", txn=txn)
        key = bytes(4) + content_key(4)
        record = txn.get(key, b"", db=transients)
        txn.put(key, record[:-1] + b"!", db=transients)
    found = check(data)
    assert found[0] == "lmdb/data.mdb: content 4 is damaged: checksum does not match"
    assert len(found) == 3 and all("its content, number 4, is missing or damaged" in one for one in found[1:])
    assert exported(data) == {one: message for one, message in remaining().items() if one not in copies(4)}


def test_unreferenced_content_is_named_and_left_out(data: Path) -> None:
    checkpoint = checkpoint_of(data)
    checkpoint.delete_messages([(one, True) for one in copies(4)[1:]])
    checkpoint.close()
    assert check(data) == ["contents: content 4: its mark says 2 references, and 0 were found"]
    assert exported(data) == {one: message for one, message in remaining().items() if one not in copies(4)}


@pytest.mark.parametrize("stored_count", [1, 3])
def test_a_wrong_count_is_named_and_put_right(data: Path, stored_count: int) -> None:
    checkpoint = checkpoint_of(data)
    checkpoint.put_marks({content_key(4): (Mark(stored_count, 0), NO_CAUSES)})
    checkpoint.close()
    assert check(data) == [f"contents: content 4: its mark says {stored_count} references, and 2 were found"]
    assert exported(data) == remaining()


def test_copy_removed_by_a_lost_batch_is_counted_again(data: Path) -> None:
    """The last content has its lost copy again, and is there until all three copies are gone."""
    segments = sorted((data / "journal").glob("*.journal"))
    segment = [path for path in segments if copies(10)[0] in path.read_bytes()][-1]
    record = bytearray(segment.read_bytes())
    record[record.rindex(copies(10)[0])] ^= 0xFF
    segment.write_bytes(record)
    assert any("cannot be read, and a good frame follows" in one for one in check(data))
    assert exported(data) == remaining() | {copies(10)[0]: content_of(10)}


def test_a_copy_that_stands_on_a_lost_page_is_missed_by_its_content(data: Path) -> None:
    """Counts of messages do not show the loss."""
    checkpoint = checkpoint_of(data)
    checkpoint.delete_messages([(copies(1)[1], False)])
    checkpoint.close()
    assert check(data) == ["contents: content 1: its mark says 2 references, and 1 were found"]
    assert exported(data) == {one: message for one, message in remaining().items() if one != copies(1)[1]}

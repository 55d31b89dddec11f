import pytest

from truenext.store.log import LogPosition, Relation, next_digest
from truenext.store.postgresql.outcome import ErrorKind, Finding, Row, RowChain, find, kind_of_error, relate

OWN = 7
BEFORE, DIGEST, OTHER = b"before", b"digest", b"other"
NEW = Row(100, OWN, DIGEST)


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        (None, ErrorKind.LOST),
        ("08006", ErrorKind.LOST),
        ("08P01", ErrorKind.LOST),
        ("25006", ErrorKind.LOST),
        ("26000", ErrorKind.LOST),
        ("57P01", ErrorKind.LOST),
        ("57P02", ErrorKind.LOST),
        ("57P03", ErrorKind.LOST),
        ("23505", ErrorKind.NUMBER_EXISTS),
        ("23514", ErrorKind.NO_PARTITION),
        ("53100", ErrorKind.DISK_FULL),
        ("40P01", ErrorKind.INTERRUPTED),
        ("55P03", ErrorKind.INTERRUPTED),
        ("57014", ErrorKind.INTERRUPTED),
        ("42501", ErrorKind.OTHER),
        ("42P01", ErrorKind.OTHER),
        ("58030", ErrorKind.OTHER),
        ("XX000", ErrorKind.OTHER),
        ("XX001", ErrorKind.OTHER),
    ],
)
def test_kind_of_error_by_sqlstate(sqlstate: str | None, kind: ErrorKind) -> None:
    assert kind_of_error(sqlstate) is kind


@pytest.mark.parametrize(
    ("rows", "finding"),
    [
        ([Row(99, OWN, BEFORE), NEW], Finding.APPENDED),
        # The partition of the row before is dropped.
        ([NEW], Finding.APPENDED),
        ([Row(99, OWN, BEFORE)], Finding.ABSENT),
        # A takeover at the same number: the digest of its row may be the same.
        ([Row(99, OWN, BEFORE), Row(100, OWN + 1, DIGEST)], Finding.FENCED),
        ([Row(99, OWN, BEFORE), Row(100, OWN + 1, OTHER)], Finding.FENCED),
        # A takeover after the row: the row counts, but this broker confirms nothing any more.
        ([Row(99, OWN, BEFORE), NEW, Row(101, OWN + 1, OTHER)], Finding.FENCED),
        ([Row(9000, OWN + 1, OTHER)], Finding.FENCED),
        # The takeover of this broker itself is lost.
        ([Row(99, OWN - 1, BEFORE)], Finding.FORGOTTEN),
        ([Row(80, OWN - 1, OTHER)], Finding.FORGOTTEN),
        ([Row(98, OWN, OTHER)], Finding.FORGOTTEN),
        ([Row(99, OWN, OTHER)], Finding.FORGOTTEN),
        ([Row(99, OWN, BEFORE), Row(100, OWN, OTHER)], Finding.FORGOTTEN),
        ([Row(99, OWN, BEFORE), NEW, Row(101, OWN, OTHER)], Finding.FORGOTTEN),
        ([], Finding.FORGOTTEN),
    ],
)
def test_find_appended_row_among_rows(rows: list[Row], finding: Finding) -> None:
    assert find(NEW, BEFORE, rows) is finding
    assert find(NEW, BEFORE, [*reversed(rows), *rows]) is finding


@pytest.mark.parametrize(
    ("number", "digest", "relation"),
    [
        (100, DIGEST, Relation.PREFIX),
        (100, OTHER, Relation.OTHER_WAY),
        (101, None, Relation.AHEAD),
        (31, None, None),
        (30, None, Relation.OTHER_WAY),
        (29, None, Relation.OLD),
        (29, DIGEST, Relation.PREFIX),
    ],
)
def test_relation_of_a_folder(number: int, digest: bytes | None, relation: Relation | None) -> None:
    assert relate(LogPosition(number, DIGEST), digest, LogPosition(30, OTHER), 100) is relation


def test_relation_of_a_folder_at_the_position_is_prefix_without_its_row() -> None:
    assert relate(LogPosition(30, DIGEST), None, LogPosition(30, DIGEST), 100) is Relation.PREFIX


def chain() -> tuple[RowChain, bytes]:
    return RowChain(LogPosition(4, BEFORE)), next_digest(BEFORE, [b"one", b"two"])


def test_row_chain_joins_the_parts_of_a_row() -> None:
    rows, digest = chain()
    assert rows.add(5, 0, digest, b"one") is None
    assert rows.next_part == (5, 1)
    assert rows.add(5, 1, digest, b"two") == b"onetwo"
    assert rows.last == LogPosition(5, digest)
    assert rows.next_part == (6, 0)
    assert rows.add(6, 0, next_digest(digest, [b""]), b"") == b""


@pytest.mark.parametrize(("number", "part"), [(6, 0), (4, 0), (5, 1)])
def test_row_chain_with_a_gap_is_rejected(number: int, part: int) -> None:
    rows, digest = chain()
    with pytest.raises(ValueError, match=r"row 5 .* missing or changed"):
        rows.add(number, part, digest, b"onetwo")


@pytest.mark.parametrize(("number", "part"), [(6, 0), (5, 0), (5, 2)])
def test_row_chain_without_a_part_is_rejected(number: int, part: int) -> None:
    rows, digest = chain()
    rows.add(5, 0, digest, b"one")
    with pytest.raises(ValueError, match=r"row 5 \(part 1\)"):
        rows.add(number, part, digest, b"two")


def test_row_chain_with_a_changed_payload_is_rejected() -> None:
    rows, digest = chain()
    rows.add(5, 0, digest, b"onetwO")
    with pytest.raises(ValueError, match="row 5"):
        rows.add(6, 0, next_digest(digest, [b""]), b"")

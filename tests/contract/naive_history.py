"""Plain reader of history: one event at a time, one dictionary each."""

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

COLUMNS = {
    3: "sequence:Q size:I flags:B",
    5: "window:I",
    7: "sequence:Q consumer:I deliveries:I",
    8: "sequence:Q",
    9: "sequence:Q attempts:I",
    10: "sequence:Q",
    11: "sequence:Q target_queue:I target_sequence:Q",
    12: "sequence:Q target_queue:I target_sequence:Q",
    13: "sequence:Q",
    16: "sequence:Q size:I flags:B group:Q",
    18: "window:I",
    19: "count:I",
    20: "sequence:Q consumer:I",
    21: "window:I priority:b",
    23: "sequence:Q target_queue:I target_sequence:Q",
    24: "sequence:Q target_queue:I target_sequence:Q",
}
KINDS = ["name", "run-started", "recovered", "accepted", "committed", "subscribed", "unsubscribed", "dispatched"]
KINDS += ["acknowledged", "returned", "expired", "dead-lettered", "moved", "removed", "paused", "resumed", "accepted"]
KINDS += ["ended", "window", "requested", "started", "subscribed", "cause", "handled", "reported"]
REASONS = [None, "released", "clean", "unclean", "delayed", "blocking", "due"]
REASONS += ["nacked", "aborted", "lost"]
REASONS += [f"{failure} and {wait}" for failure in REASONS[-3:] for wait in ("delayed", "blocking")]
REASONS += ["closed"]
MODES = ["auto", "client", "client-individual"]
for more in ("with selector", "with express", "with started", "pulling", "exclusive"):
    MODES += [f"{mode} {more}" for mode in MODES]


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """Return the events in the broker's own files."""
    events: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.history")):
        with suppress(FileNotFoundError):
            events += read(path.read_bytes()[10:])
    return events


def read_parquet(folder: Path) -> list[dict[str, Any]]:
    """Return the events in the Parquet files of a folder."""
    found = []
    for path in sorted(folder.glob("date=*/*.parquet")):
        import pyarrow.parquet as pq

        for row in pq.ParquetFile(path).read().to_pylist():
            row["at"] = round(row["at"].timestamp() * 1e6)
            found.append({name: value for name, value in row.items() if value is not None})
    return sorted(found, key=lambda row: row["event"])


def read(content: bytes) -> Iterator[dict[str, Any]]:
    """The events of some chunks, without what is null."""
    names: dict[int, str] = {}
    at = 0
    while at + 24 <= len(content):
        checksum, size, run, _, number = struct.unpack_from("<IIIIQ", content, at)
        if at + 24 + size > len(content) or crc32(content[at + 4 : at + 24 + size]) != checksum:
            return
        blocks = content[at + 24 : at + 24 + size]
        at += 24 + size
        causes: dict[int, str] = {}
        while blocks:
            kind, code, count, queue, other, time = struct.unpack_from("<BBIIQQ", blocks)
            blocks = blocks[26:]
            if kind == 0:
                names[queue], blocks = blocks[:other].decode(), blocks[other:]
                continue
            if kind == 22:
                causes[queue], blocks = blocks[:other].decode(), blocks[other:]
                continue
            own: dict[str, tuple[int, ...]] = {}
            broker = {"store": names[0]} if 0 in names and kind != 1 else {}
            for column in COLUMNS.get(kind, "").split():
                name, type_ = column.split(":")
                layout = f"<{count}{type_}"
                own[name] = struct.unpack_from(layout, blocks)
                blocks = blocks[struct.calcsize(layout) :]
            for n in range(count):
                event = _event(number, run, time, kind, code, queue, other, names, own, n)
                if event["kind"] in ("returned", "dead-lettered", "handled") and other:
                    event["cause"] = causes[other]
                yield event | broker
                number += 1


def _event(
    number: int,
    run: int,
    time: int,
    kind: int,
    code: int,
    number_of_queue: int,
    other: int,
    names: dict[int, str],
    own: dict[str, tuple[int, ...]],
    n: int,
) -> dict[str, Any]:
    event: dict[str, Any] = {"event": number, "run": run, "at": time, "kind": KINDS[kind]}
    if event["kind"] != "run-started" and number_of_queue and number_of_queue in names:
        event["queue"] = names[number_of_queue]
    event |= {name: values[n] for name, values in own.items()}
    match event["kind"]:
        case "accepted":
            flags = event.pop("flags")
            event |= {"priority": flags % 16, "persistent": flags >= 16, "batch": other}
        case "committed":
            event["batch"] = other
        case "recovered":
            event["count"] = other
        case "subscribed":
            event |= {"consumer": other, "mode": MODES[code]}
            if event["window"] == 2**32 - 1:
                del event["window"]
        case "unsubscribed" | "window" | "requested":
            event["consumer"] = other
        case "reported" if not event["target_queue"]:
            del event["target_queue"], event["target_sequence"]
        case "dead-lettered" | "handled" | "reported" | "moved":
            event["target_queue"] = names[event["target_queue"]]
        case "returned":
            event["reason"] = REASONS[code]
        case "run-started":
            event["reason"] = REASONS[code]
            if other:
                event["epoch"] = other
            if number_of_queue:
                event["store"] = f"{number_of_queue:08x}"
    return event

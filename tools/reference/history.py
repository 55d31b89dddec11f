"""Page of the history, docs/reference/history.md, from model/events.py, history/schema.py and flows/events.py."""

import inspect
import re
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import fields

from tools.reference.json_types import field_docs, in_json
from tools.reference.markdown import code, joined, table, wrapped
from tools.reference.members import members_of, text_below
from truenext.flows import events as stage_events
from truenext.history import schema
from truenext.model.events import GAP_EVENTS, HISTORY_VERSION, OLDEST_HISTORY_VERSION, EventKind

_HEAD = f"""\
# Reference of the history

Look up each event of the broker's history and each of its columns here, and the events that services of stages record.
`truenext audit` proves from them whether the contract held ([spark.md](../spark.md)). You can also read them yourself.

The broker records each step of each message, unless it is started with `--no-history`. This page is made from the code:
`make reference`.

## Files

    DIR/history/0000000000000001.history              the latest events, in the broker's own format
    DIR/history/events/date=2026-11-21/*.parquet      earlier events, one row each

The name of a file is the number of its first event. A new `.history` file begins with each start of the broker, and
after 16 MiB. The file before it then becomes Parquet, if numpy and pyarrow are installed
(`pip install 'truenext[spark]'`), in a process of the lowest priority. Without the two there is no such process: the
files stay as they are, the broker's log says so once (at `info`), and they become Parquet at a start after the two were
installed. A Parquet file appears as a whole. `truenext history export DIR` does the same on request. With
`--out FOLDER` it writes everything that is not Parquet yet into that folder. Both work while the broker runs.

History is kept for 30 days and up to 8 GiB, unless [settings](settings.md) change that; the oldest is deleted first.
`truenext audit --state` judges each event once: it reads the events since the last audit, and names those that were
deleted before it came ([spark.md](../spark.md#audit-every-day)).

The `.history` files are of version {HISTORY_VERSION}. Versions from {OLDEST_HISTORY_VERSION} on are read, too. With any
other version `truenext history export` and `truenext audit` stop, and a broker whose newest file has one does not
start; each names the file and its version. The truenext that wrote the file reads it. Parquet files do not have their
version: `truenext audit` refuses them if an event has a `kind`, `reason` or `mode` that is not on this page.

Temporary queues, and subscriptions that end with their connections, are not in the history: they concern one connection
only.

## Read the story of one message

After step 7 of the [first hour](../first-hour.md), and a `truenext receive orders`, write the events since the broker's
last start to Parquet files in the folder `events` (it needs pandas and pyarrow: `pip install 'truenext[spark]'`):

```
$ truenext history export ./data --out ./events
1 file exported to events
```

The events of earlier runs are in Parquet files already, in `data/history/events`: the broker made them when it started
again. If numpy and pyarrow were not installed then, the command exports these runs, too, and counts more files.

Save this as `story.py`. It prints the events of messages of priority 7; there was one:

```python
\"\"\"Events of the message that no consumer could handle.\"\"\"

import pandas

events = pandas.read_parquet("events").sort_values("event")
sequences = events[(events["priority"] == 7) & (events["kind"] == "accepted")]["sequence"]
story = events[events["sequence"].isin(sequences)]
print(story[["event", "kind", "queue", "deliveries", "attempts", "reason"]].fillna("").to_string(index=False))
```

```
$ python story.py
  event          kind      queue deliveries attempts             reason
1048624      accepted     orders
1048627    dispatched     orders        1.0
1048628      returned     orders                 1.0             nacked
1048629    dispatched     orders        2.0
1048630      returned     orders                 2.0 nacked and delayed
1048632      returned     orders                 2.0                due
1048633    dispatched     orders        3.0
1048634      returned     orders                 3.0 nacked and delayed
1048636      returned     orders                 3.0                due
1048637    dispatched     orders        4.0
1048638      returned     orders                 4.0 nacked and delayed
1048640      returned     orders                 4.0                due
1048641    dispatched     orders        5.0
1048642      returned     orders                 5.0 nacked and delayed
1048644      returned     orders                 5.0                due
1048645    dispatched     orders        6.0
1048646      returned     orders                 6.0 nacked and delayed
1048648      returned     orders                 6.0                due
1048649    dispatched     orders        7.0
1048650 dead-lettered     orders
1048651      accepted DLQ.orders
1048654         moved DLQ.orders
1048655      accepted     orders
1048658    dispatched     orders        1.0
1048659  acknowledged     orders
```
"""
_RULES = f"""\
## Rules

A message is **visible** from its `accepted` on if `batch` is 0. Otherwise it is visible from the first `committed` of
the same run whose `batch` is not smaller, and at the latest from the next `run-started`: it was then recovered, or it
was never durable and has no further event. It is **held** from `dispatched` to `returned`. It is not ready from a
`delayed` or `blocking` to its `due`; from `blocking` to `due`, no message of its queue that comes after it in the order
is ready either. A `run-started` releases everything. A message is **gone** with `acknowledged`, `expired`,
`dead-lettered`, `moved`, `removed`, with the `ended` of its queue, and, if it is transient, with a `run-started` whose
reason is `unclean`. A message that is gone with `ended` is still on disk until it is `expired`, and the `count` of a
`recovered` includes it. No message is **ready** from `paused` to `resumed` or the next `run-started`.

A consumer has **credit** while it holds fewer messages than its `window`, the last one or that of its `subscribed`. If
it pulls, it has credit for the `count` of its last `requested`, less the messages that were `dispatched` to it since;
it has requested nothing before. A message that is acknowledged inside a transaction is in no window any more, and has
its event only at COMMIT. So the messages in a window are known surely only of a consumer ` with started`: those that
are held and not started. A consumer ` with express` may exceed its window. A consumer whose window is 0 gets nothing,
whatever its mode.

While consumers of a queue are ` exclusive`, only one consumer gets messages of it, with credit or without: the
exclusive one of the highest `priority`, among equals that of the lowest number in `consumer`. If events are missing,
there may be an exclusive consumer that is not known. Its absence is known again from the next start on, or once a
consumer gets a message that is known and not exclusive.

A message that has a `returned` with a `cause` has a cause when it is `dead-lettered`. The `attempts` of a message never
fall from one `returned` to the next, not even over a crash: this event of a persistent message is written in the batch
that makes the attempt durable.

A message is **started** from `started` to the end of that dispatch. `released` adds nothing to its `attempts`. A
consumer ` with started` has `lost` and `aborted` only for started messages.

A consumer exists from `subscribed` to `unsubscribed` or the next `run-started`. Only an existing consumer gets or
starts messages. A transaction may outlive it: its messages can be acknowledged, nacked or returned after
`unsubscribed`, and so can the message of an `auto` consumer of which the socket had taken a part. Only a message that a
consumer or a transaction holds is acknowledged.

The history does not say which consumer has a **group**. So a message of a group that waited is evidence only against a
dispatch of its own group: a consumer that got a message of another group, or of none, may have skipped it rightly. From
its `delayed` or `blocking` to its `due`, no message of its group that comes after it is ready; others are.

An `accepted`, and the event that ends a persistent message, is exactly as durable as the message, because it is written
in the same batch. Events of transient messages, and dispatches, can be missing after a crash. The first run after a
crash leaves out {GAP_EVENTS:,} numbers: the gap shows, and no number that a reader may have seen is used again.

A **client-side** history (`truenext record`) has the same columns, filled with the client's observations. `accepted` is
the time at which its send was confirmed, `dispatched` that at which a message arrived, and sequences are in the order
of its sends.
"""
_STAGES = """\
## Events of stages

A service of stages records its executions with `--events DIR` ([stages-running.md](../stages-running.md)): one line of
JSON per event. A message has the same `queue` and `sequence` here as in the broker's history.
"""
_NO_EVENTS = (EventKind.NAME, EventKind.CAUSE)

REASONS: dict[str, str] = {
    "nacked": "a NACK",
    "aborted": "an ABORT",
    "lost": "a lost connection that counts as an attempt",
    "closed": "the end of a JMS client's consumer, whose program had got the message",
    "released": "no attempt",
    "delayed": "as in `nacked and delayed`, also after `aborted` or `lost`: the message waits for its next try, "
    "and later messages are dispatched meanwhile. `delayed` alone: a message that was read from the store waits "
    "for its next try",
    "blocking": "as `delayed`, but later messages wait, too",
    "due": "the time of the message's next try has come",
    "clean": "of `run-started`: the previous run was stopped",
    "unclean": "of `run-started`: the previous run was killed, or crashed",
}
"""Meaning of the texts in the column `reason`."""

MODES: dict[str, str] = {
    "auto": "acknowledged by the socket",
    "client": "acknowledged cumulatively",
    "client-individual": "acknowledged one by one",
    " with selector": "the consumer has a selector, which is not recorded, so the audit does not judge the order "
    "of its messages. A consumer of a pattern of queues has this mode, too, since another queue may hold back a "
    "message that the consumer skips",
    " with express": "express dispatch",
    " with started": "the connection reports which messages its program has started to handle",
    " pulling": "the subscription pulls",
    " exclusive": "the consumer is exclusive",
}
"""Meaning of the texts in the column `mode`. A mode consists of one of the first three texts, followed by all other
texts that apply."""

STAGE_TABLES: dict[str, str] = {
    "flows": "flow: `started_at`, `seconds`, `messages`, `runs`, `failures`, `given_up`, `in_progress`",
    "stage_runs": "execution of a stage: its stage and message, its outcome, the times at which the broker accepted "
    "and dispatched the message, and the kind of event by which the message ended (`end_kind`). "
    "`process`, `execution` and `given_up_for` are those of its events",
    "stages": "stage: its executions by outcome, `interrupted` if none was recorded; milliseconds that messages waited "
    "and executions took: p50, p99, max",
    "stage_findings": "finding",
    "commit_gaps": "execution that committed its SQL, but did not acknowledge its message",
    "waterfalls": "execution that is on the page; `position` counts from 1 in each flow",
}
"""Parquet tables of `truenext audit --stages`, each with the meaning of a row."""


def page() -> str:
    return joined(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    yield "## Kinds of event"
    yield table(("`kind`", "when", "columns"), _kinds())
    yield "All events also have `event`, `run`, `at` and `store`."
    yield "## Columns"
    rows = [(code(each.name), _type(each), in_json(each.meaning)) for each in schema.COLUMNS]
    yield table(("column", "type", "is"), [*rows, (code(schema.DATE), "date", "date of `at`, in UTC; the folder")])
    yield table(("text in `reason`", "means"), [(code(text), meaning) for text, meaning in REASONS.items()])
    yield table(("text in `mode`", "means"), [(code(text), meaning) for text, meaning in MODES.items()])
    yield _RULES
    yield _STAGES
    yield table(("`kind`", "when"), [(code(kind), meaning) for kind, meaning in _stage_kinds().items()])
    yield wrapped(
        "An execution whose `started` is followed by no outcome was interrupted: the process was killed. A message "
        "that no stage has sent is rejected before anything starts, and has no event."
    )
    yield table(("field", "with", "is"), _stage_fields())
    yield "### Tables of the audit of stages"
    yield table(("table", "one row for each"), [(code(name), text) for name, text in STAGE_TABLES.items()])
    yield "A flow that a stage starts is a flow of its own; its trace is `parent|child`."


def _kinds() -> Iterator[tuple[str, str, str]]:
    texts = {member.name: member.doc for member in members_of(EventKind)}
    for kind in EventKind:
        if kind not in _NO_EVENTS and kind.label == kind.name.lower().replace("_", "-"):
            yield _kind(kind.label, texts[kind.name])
    yield _kind(schema.DRAINED, inspect.cleandoc(text_below(schema, "DRAINED")))


def _kind(label: str, text: str) -> tuple[str, str, str]:
    if not text:
        raise ValueError(f"EventKind has no text below the event {label}")
    return code(label), text, ", ".join(code(each.name) for each in schema.COLUMNS if label in each.kinds)


def _type(column: schema.HistoryColumn) -> str:
    text = "timestamp, microseconds, UTC" if column.type == "timestamp" else column.type
    return f"{text}, never null" if column.name in schema.REQUIRED else text


def _stage_kinds() -> dict[str, str]:
    """Return the meaning of each kind of event of stages, in the order in which they happen."""
    kinds: dict[str, str] = {}
    for struct in stage_events.EVENTS:
        if struct is stage_events.ExecutionEnded:
            kinds |= _outcomes()
        else:
            kinds[_tag(struct)] = inspect.cleandoc(struct.__doc__ or "")
    return kinds


def _outcomes() -> dict[str, str]:
    """Return the meanings of outcomes from the table in the text below ExecutionOutcome."""
    rows = re.findall(r"^    (\S+(?: \S+)*)  +(\S.*)$", text_below(stage_events, "ExecutionOutcome"), re.MULTILINE)
    return {outcome: f"{text[:1].upper()}{text[1:]}." for outcome, text in rows}


def _tag(struct: type[Struct]) -> str:
    return str(struct.__struct_config__.tag)


def _stage_fields() -> Iterator[tuple[str, str, str]]:
    texts: dict[str, str] = {}
    kinds: dict[str, list[str]] = {}
    for struct in stage_events.EVENTS:
        texts = {name: text for name, text in field_docs(struct).items() if text} | texts
        for each in fields(struct):
            is_end = struct is stage_events.ExecutionEnded
            kinds.setdefault(each.name, []).append("outcomes" if is_end else code(_tag(struct)))
    for name, of in kinds.items():
        if name != "kind":
            yield code(name), "all" if len(of) == len(stage_events.EVENTS) else ", ".join(of), in_json(texts[name])

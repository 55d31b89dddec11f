"""Settings of the whole broker; those of queues are in policy.py."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from truenext.model.limits import (
    DISK_LIMIT_MIN,
    HISTORY_BYTES_MAX,
    HISTORY_DAYS_MAX,
    HISTORY_FILE_BYTES,
    MEMORY_LIMIT,
    MEMORY_LIMIT_MIN,
    NAME_LENGTH_MAX,
    TRANSACTION_BYTES_CEILING,
    TRANSACTION_BYTES_MAX,
    TRANSACTION_MESSAGES_CEILING,
    TRANSACTION_MESSAGES_MAX,
    TRANSACTIONS_CEILING,
    TRANSACTIONS_MAX,
)
from truenext.model.policy import WhenFull
from truenext.model.setting import setting
from truenext.model.url import DEFAULT_URL
from truenext.version import VERSION

_AT_START = "it is laid down when the broker starts"
_WITH_CONNECTIONS = "clients are connected already"
_WITH_STORE = "the messages are there"


class LogLevel(Enum):
    """Lowest level of the events that the broker logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    listen: tuple[str, ...] = setting(
        (DEFAULT_URL,),
        "Where to listen, as stomp://HOST:PORT; port 0 picks a free one.",
        fixed=_WITH_CONNECTIONS,
        reason="The usual port of STOMP, and nobody on another machine: there are no users yet.",
    )
    server_name: str = setting(
        f"truenext/{VERSION}",
        "What CONNECTED says in its header `server`: NAME or NAME/VERSION, at most 255 characters.",
        fixed=_WITH_CONNECTIONS,
        reason="What it is; a client that only talks to brokers it knows by name can be told another.",
    )
    data: Path | None = setting(
        None,
        "Folder the messages are kept in, relative to the folder of the configuration file.",
        fixed=_WITH_STORE,
        reason="Messages are kept where somebody has said, or nowhere.",
    )
    memory: bool = setting(
        False,
        "Keep nothing on disk, for tests; instead of data.",
        fixed=_WITH_STORE,
        reason="A broker that forgets is no broker.",
    )
    memory_limit: int = setting(
        MEMORY_LIMIT,
        "Private memory the broker may take, all told; what waits beyond that waits on disk. No more than the machine "
        "has, or a control group lets the broker have.",
        unit="bytes",
        least=MEMORY_LIMIT_MIN,
        fixed=_AT_START,
        reason="The broker itself takes up to 48 MiB; a quarter of the limit is for messages, the rest for queues, of "
        "which each takes about 1.3 KiB, empty or not, and for subscriptions.",
    )
    disk_limit: int | None = setting(
        None,
        "What messages may take on disk, the history apart.",
        unit="bytes",
        least=DISK_LIMIT_MIN,
        none=None,
        fixed=_AT_START,
        reason="What the disk has, but for a reserve: most brokers have a disk to themselves.",
    )
    when_full: WhenFull = setting(
        WhenFull.SLOW,
        'Near the limit of the disk producers wait ("slow"), or are refused ("refuse"). Consumers go on either way.',
        fixed=_AT_START,
        reason="A producer that waits needs no program for it.",
    )
    history: bool = setting(
        True,
        "Write down what happens to every message, for `truenext audit`, in the folder history of data.",
        fixed="the history of a run is whole, or there is none",
        reason="A fault can only be explained if somebody wrote down what happened; it costs 3 to 8 % of throughput.",
    )
    history_bytes_max: int = setting(
        HISTORY_BYTES_MAX,
        "History that is kept; the oldest files go first, whenever a file ends.",
        unit="bytes",
        least=HISTORY_FILE_BYTES,
        reason="About five hundred million events, before they are Parquet; the least is one file.",
    )
    history_days_max: int = setting(
        HISTORY_DAYS_MAX,
        "For how long history is kept.",
        unit="days",
        least=1,
        most=36_500,
        reason="What was wrong last month can still be asked for.",
    )
    transactions_max: int = setting(
        TRANSACTIONS_MAX,
        "Open transactions of one connection.",
        unit="transactions",
        least=1,
        most=TRANSACTIONS_CEILING,
        fixed=_AT_START,
        reason="A session has one, a pool of workers a few. One in which nothing is said costs some 500 bytes, which "
        "memory_limit does not count, and no time.",
    )
    transaction_bytes_max: int = setting(
        TRANSACTION_BYTES_MAX,
        "What one connection may send in all its open transactions together, unless it is a single message.",
        unit="bytes",
        least=1024,
        most=TRANSACTION_BYTES_CEILING,
        fixed=_AT_START,
        reason="A COMMIT is written in one piece, while others wait for theirs. What all connections send in open "
        "transactions takes no more than a quarter of the memory for messages, whatever is said here.",
    )
    transaction_messages_max: int = setting(
        TRANSACTION_MESSAGES_MAX,
        "Sends, ACKs and NACKs in all open transactions of one connection together.",
        unit="messages",
        least=1,
        most=TRANSACTION_MESSAGES_CEILING,
        fixed=_AT_START,
        reason="A COMMIT is one step, in which nobody else is served: a quarter of a second with so many.",
    )
    allow_anonymous: bool = setting(
        False,
        "Let anybody in who reaches an address beyond loopback.",
        fixed=_WITH_CONNECTIONS,
        reason="Anybody there could read and write all queues.",
    )
    log_level: LogLevel = setting(
        LogLevel.WARNING,
        "What is logged, to standard error: this and what is worse.",
        reason="A log in which nothing stands is one that is read when something does.",
    )


def fault_of_server_name(name: str) -> str:
    """Return the fault of a server name, or "". It must be one line: headers of CONNECTED are not escaped."""
    if not name.strip() or not name.isprintable():
        return "must be a text that can be printed and is not empty"
    if name != name.strip():
        return "must not begin or end with a blank: STOMP 1.0 trims it"
    if len(name) > NAME_LENGTH_MAX:
        return f"has {len(name)} characters; at most {NAME_LENGTH_MAX}"
    return ""

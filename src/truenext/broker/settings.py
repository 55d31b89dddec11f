"""Settings of the whole broker. The settings of queues are in model/policy.py."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from truenext.model.limits import (
    DATABASE_LIMIT_MIN,
    DATABASE_PATIENCE_MS,
    DATABASE_PATIENCE_MS_MAX,
    DATABASE_PATIENCE_MS_MIN,
    DISK_LIMIT_MIN,
    FAILOVER_AFTER_MS,
    FAILOVER_AFTER_MS_MIN,
    HISTORY_BYTES_MAX,
    HISTORY_DAYS_MAX,
    HISTORY_FILE_BYTES,
    MEMORY_LIMIT,
    MEMORY_LIMIT_MIN,
    METRICS_QUEUES_MAX,
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

_AT_START = "this setting is fixed when the broker starts"
_WITH_CONNECTIONS = "clients are connected already"
_WITH_STORE = "the messages stay where they are stored"


class LogLevel(Enum):
    """Lowest level that the broker logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Enum):
    """Format of the log."""

    TEXT = "text"
    JSON = "json"


class ClientCertificates(Enum):
    """Rule whether clients show certificates to a listener with TLS."""

    NONE = "none"
    ASKED = "asked"
    REQUIRED = "required"


class Durability(Enum):
    """Rule when a message in PostgreSQL is confirmed."""

    REPLICATED = "replicated"
    LOCAL = "local"


DEFAULT_DATA = Path("truenext-data")
"""Data folder of a broker that was given none, in its current folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    listen: tuple[str, ...] = setting(
        (DEFAULT_URL,),
        "Where to listen, as stomp://HOST:PORT, or openwire://HOST:PORT for JMS clients; with TLS as "
        "stomp+ssl://HOST:PORT or openwire+ssl://HOST:PORT. Port 0 picks a free one.",
        fixed=_WITH_CONNECTIONS,
        reason="The usual port of STOMP, and no access from other machines.",
    )
    server_name: str = setting(
        f"truenext/{VERSION}",
        "Value of the header `server` of CONNECTED, and the broker's name for JMS clients: NAME or NAME/VERSION, at "
        "most 255 characters.",
        fixed=_WITH_CONNECTIONS,
        reason="The true name of the broker. Set another name for a client that accepts only brokers that it knows by "
        "name.",
    )
    data: Path | None = setting(
        None,
        "Folder that messages are stored in, relative to the folder of the configuration file. Without this setting "
        f"and memory = true, the folder is {DEFAULT_DATA} where `truenext serve` is called.",
        fixed=_WITH_STORE,
        reason="A first broker starts without a choice, and still keeps its messages.",
    )
    memory: bool = setting(
        False,
        "Store nothing on disk, for tests: neither messages nor history. Not together with data, disk_limit, history "
        "or store.",
        fixed=_WITH_STORE,
        reason="Messages are to survive a restart.",
    )
    store: str | None = setting(
        None,
        "PostgreSQL database in which messages are stored, as postgresql://USER@HOST:PORT/DATABASE without a password. "
        "The folder of `data` is only a copy then, which a broker can make anew. Needs schema and database_limit, too.",
        fixed=_WITH_STORE,
        reason="The folder alone needs no database, and is quicker.",
    )
    schema: str | None = setting(
        None,
        "Schema of the database in which the messages of this broker are stored. `truenext store init` makes its "
        "tables.",
        fixed=_WITH_STORE,
        reason="Two brokers with one schema would end one another, so the operator names it.",
    )
    durability: Durability = setting(
        Durability.REPLICATED,
        'Where a message is stored in PostgreSQL before it is confirmed: "replicated": on the database and on its '
        'synchronous standby, without which the broker does not start; "local": on the database alone.',
        fixed=_AT_START,
        reason="With one database alone, the loss of its disk loses confirmed messages.",
    )
    database_limit: int | None = setting(
        None,
        "Disk space in the database for the tables of the broker. Near this limit the broker acts as `when_full` says.",
        unit="bytes",
        least=DATABASE_LIMIT_MIN,
        fixed=_AT_START,
        reason="A broker cannot see how much space the machine of a database has, so the operator states it.",
    )
    database_patience_ms: int = setting(
        DATABASE_PATIENCE_MS,
        "Time for which a broker tries to reach a database that does not answer; then the broker stops. Nothing is "
        "confirmed meanwhile, and clients stay connected.",
        unit="milliseconds",
        least=DATABASE_PATIENCE_MS_MIN,
        most=DATABASE_PATIENCE_MS_MAX,
        fixed=_AT_START,
        reason="A standby of PostgreSQL usually becomes the primary within this time.",
    )
    member: str | None = setting(
        None,
        "Name of this broker among those that use the same schema: 1 to 63 letters, digits, _, . and -.",
        fixed=_AT_START,
        reason="The name of the machine: such brokers usually have a machine each.",
    )
    failover_after_ms: int = setting(
        FAILOVER_AFTER_MS,
        "Time without a new row in the database after which a broker that stands by takes over, at most "
        "database_patience_ms. After 0.8 of this time without a confirmed row the active broker dispatches nothing. "
        "If two brokers differ, the longer time counts.",
        unit="milliseconds",
        least=FAILOVER_AFTER_MS_MIN,
        fixed=_AT_START,
        reason="A shorter time makes a failover of each small outage of a network.",
    )
    memory_limit: int = setting(
        MEMORY_LIMIT,
        "Limit of the broker's private memory, all in all; messages beyond this limit wait on disk. A broker does "
        "not start if the limit is more than the memory of the machine, or of the broker's control group.",
        unit="bytes",
        least=MEMORY_LIMIT_MIN,
        fixed=_AT_START,
        reason="The broker itself needs up to 48 MiB. A quarter of the limit is for messages, the rest for queues, "
        "each of about 1.3 KiB, empty or not, and for subscriptions.",
    )
    disk_limit: int | None = setting(
        None,
        "Disk space for messages, without the history.",
        unit="bytes",
        least=DISK_LIMIT_MIN,
        none=None,
        fixed=_AT_START,
        reason="All of the disk but a reserve: most brokers have a disk of their own.",
    )
    backup_dir: Path | None = setting(
        None,
        "Folder in which `truenext backup` makes backups, relative to the folder of the configuration file. It must "
        "exist, outside the data folder, and no other user may write to it.",
        fixed=_AT_START,
        reason="A request names no path, so the operator does.",
    )
    when_full: WhenFull = setting(
        WhenFull.SLOW,
        'Near the limit of the disk producers wait ("slow"), or are refused ("refuse"). Consumers continue either way.',
        fixed=_AT_START,
        reason="A producer can wait without code for it.",
    )
    history: bool = setting(
        True,
        "Record what happens to every message, for `truenext audit`, in the subfolder `history` of the folder `data`.",
        fixed="a run of the broker has a complete history or none",
        reason="A fault can only be explained from a record of what happened. The record costs 3 to 8 % of throughput.",
    )
    history_bytes_max: int = setting(
        HISTORY_BYTES_MAX,
        "Largest size of the history. Whenever a file is complete, the oldest files beyond this size are deleted.",
        unit="bytes",
        least=HISTORY_FILE_BYTES,
        reason="Enough for about five hundred million events that are not Parquet yet. The smallest value is one file.",
    )
    history_days_max: int = setting(
        HISTORY_DAYS_MAX,
        "Age at which history is deleted.",
        unit="days",
        least=1,
        most=36_500,
        reason="A fault of last month can still be explained.",
    )
    transactions_max: int = setting(
        TRANSACTIONS_MAX,
        "Largest number of open transactions of one connection.",
        unit="transactions",
        least=1,
        most=TRANSACTIONS_CEILING,
        fixed=_AT_START,
        reason="A session has one transaction, and all sessions of a JMS client may share one connection. An empty "
        "transaction costs some 500 bytes, which memory_limit does not count, and no time.",
    )
    transaction_bytes_max: int = setting(
        TRANSACTION_BYTES_MAX,
        "Bytes that one connection may send in all its open transactions together; a single message may be larger.",
        unit="bytes",
        least=1024,
        most=TRANSACTION_BYTES_CEILING,
        fixed=_AT_START,
        reason="A COMMIT is written in one piece, and other clients wait meanwhile. The open transactions of all "
        "connections "
        "take at most a quarter of the memory for messages, whatever this setting is.",
    )
    transaction_messages_max: int = setting(
        TRANSACTION_MESSAGES_MAX,
        "Largest number of sends, ACKs and NACKs in all open transactions of one connection together. A send with a "
        "group, an expiry or a schedule counts twice, and a NACK once more for a cause and for a delay.",
        unit="messages",
        least=2,
        most=TRANSACTION_MESSAGES_CEILING,
        fixed=_AT_START,
        reason="A COMMIT is one step, during which no other client is served: about 0.1 s at this limit.",
    )
    certificate: Path | None = setting(
        None,
        "PEM file with the broker's certificate, followed by the certificates that signed it, for addresses "
        "with +ssl. A reload reads the file again.",
        reason="Only an address with TLS needs a certificate.",
    )
    key: Path | None = setting(
        None,
        "PEM file with the private key of the certificate; the key must have no password. A reload reads the file "
        "again.",
        reason="The private key may be in the file of the certificate.",
    )
    client_ca: Path | None = setting(
        None,
        "PEM file with the certificates that sign the certificates of clients. A reload reads the file again.",
        reason="Clients without certificates log in with passwords.",
    )
    client_certificates: ClientCertificates = setting(
        ClientCertificates.NONE,
        'Whether clients show certificates: "none": no; "asked": each client may log in by certificate or by '
        'password; "required": all must.',
        reason="Passwords are simpler to hand out than certificates.",
    )
    users: Path | None = setting(
        None,
        "File with users, their passwords and grants, relative to the folder of the configuration file; without "
        "this file every client may do everything. A reload reads the file again, but cannot change to another file.",
        fixed=_WITH_CONNECTIONS,
        reason="A first try needs no passwords, and the broker listens on loopback only.",
    )
    allow_anonymous: bool = setting(
        False,
        "Listen on addresses beyond loopback, although clients need no password.",
        fixed=_WITH_CONNECTIONS,
        reason="Otherwise every client that reaches such an address could read and write all queues.",
    )
    allow_plaintext: bool = setting(
        False,
        "Listen without TLS on addresses beyond loopback, although users send passwords.",
        fixed=_WITH_CONNECTIONS,
        reason="Otherwise passwords and messages could be read on the network between client and broker.",
    )
    allow_network_disk: bool = setting(
        False,
        "Start on a data folder on a network file system, such as NFS.",
        fixed=_AT_START,
        reason="A lock on such a file system does not keep a second machine away from the folder.",
    )
    log_level: LogLevel = setting(
        LogLevel.WARNING,
        "Lowest level of the log records that are written to standard error.",
        reason="A log that is usually empty is read when it has an entry.",
    )
    log_format: LogFormat = setting(
        LogFormat.TEXT,
        'Format of the log: "text": lines for a reader; "json": one JSON object a line, for a program.',
        reason="A log is first read by a person.",
    )
    health: str | None = setting(
        None,
        "Where the broker serves its health and metrics by HTTP, as HOST:PORT, or as a port alone on 127.0.0.1: /live, "
        "/ready and /metrics, without a password and without TLS.",
        fixed=_AT_START,
        reason="A port that is not watched is only one more to protect.",
    )
    metrics_queues: tuple[str, ...] = setting(
        (),
        "Patterns of the queues that have metrics of their own at /metrics, with their names as labels. The first "
        f"{METRICS_QUEUES_MAX:,} matching queues, by name, have them.",
        none=(),
        reason="Names of queues may tell more than numbers, and Prometheus keeps a series for each.",
    )


def fault_of_store(settings: BrokerSettings, *, take_over: bool) -> str | None:
    """Return what the settings lack for messages in PostgreSQL, or have in vain; None if nothing. `take_over` tells
    whether the broker is to take over from another one."""
    if settings.store is None:
        unused = {
            "--schema": settings.schema is not None,
            "--database-limit": settings.database_limit is not None,
            "--member": settings.member is not None,
            "--take-over": take_over,
        }
        return next((f"{option} is for a broker with --store" for option in unused if unused[option]), None)
    if settings.memory:
        return "--store and --memory exclude each other: messages are stored in PostgreSQL, or not at all"
    if settings.schema is None:
        return "a broker with --store needs the schema of its tables: --schema NAME"
    if settings.database_limit is None:
        return "a broker with --store needs a limit for its disk space in the database: --database-limit SIZE"
    return None


def fault_of_server_name(name: str) -> str:
    """Return why a text cannot be the server name; "" if the name is valid. A server name must be one line, because
    headers of CONNECTED are not escaped."""
    if not name.strip() or not name.isprintable():
        return "must be a printable text, not empty"
    if name != name.strip():
        return "must not begin or end with a blank, which STOMP 1.0 removes"
    if len(name) > NAME_LENGTH_MAX:
        return f"has {len(name)} characters; at most {NAME_LENGTH_MAX}"
    return ""

"""State machines that compare the engine with the oracle, with random clients, sockets and disks.

Each machine gives the same commands to the engine and to the oracle, and compares them after every turn and every
durable batch, through restarts and shortness of memory. It does not know how the engine works (only memory_audit.py
looks inside). test_against_oracle.py runs the machines.
"""

import gc
import itertools
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from random import Random
from sys import maxsize
from typing import Any, ClassVar, NamedTuple, TypeVar

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from msgspec import structs

import truenext.model.selector
from tests.property import targets
from tests.property.counts_audit import CountsAudit
from tests.property.disk import HIDDEN_PREFIX, Disk, Stored
from tests.property.draws import Draw, Each, Named, OneOf, Several, Some
from tests.property.held_audit import HeldAudit
from tests.property.memory_audit import miscounted, not_evicted, orphaned_names
from tests.property.oracle import (
    MESSAGE_BYTES,
    NO_CAUSES,
    REFERENCE_BYTES,
    REPORT_LABEL,
    REQUESTED_MAX,
    SOCKETS_BYTES_MIN,
    Disagreement,
    Ended,
    Letter,
    NackOptions,
    Numbered,
    OpenBrowse,
    Oracle,
    Parcel,
    Peer,
    Reader,
    Retries,
    Seen,
    Work,
)
from tests.property.oracle import (
    SELECTORS as SELECTORS_OF_CONSUMERS,
)
from tests.property.producers_oracle import Kind as Frame
from tests.property.producers_oracle import NumberStatus
from truenext.engine.background.browsing import BrowseSlice
from truenext.engine.background.bulk import BulkRead, ListScheduled, Move, Purge, Redrive, ScheduledRequest, Unschedule
from truenext.engine.background.bulk import BulkRequest as BulkCommand
from truenext.engine.background.bulk import ScheduledResult as ShownSends
from truenext.engine.dispatch.heads import WaitReason
from truenext.engine.engine import Engine
from truenext.engine.idle import find_next
from truenext.engine.queues.topics import RouteAhead
from truenext.engine.remainder import QueueRemainder, Remainder, count_remainder
from truenext.engine.selecting.groups import GroupScanCursor
from truenext.engine.selecting.scan import QueueScan
from truenext.engine.state.causes import causes_from_store, causes_size
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.memory import MemoryBudget, size_of
from truenext.engine.state.pages import PageMessage, PageResult
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, Queue
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog, NoEventLog
from truenext.errors import NoSpaceError, RemoteProtocolError, StoreError
from truenext.model.answers import Receipt
from truenext.model.batch import Causes
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Browse,
    Close,
    Commit,
    Credit,
    Login,
    Nack,
    Release,
    Send,
    Started,
    Subscribe,
    Unsubscribe,
    Wake,
)
from truenext.model.destination import Destination, DestinationKind, parse_address
from truenext.model.disk_level import DiskLevel
from truenext.model.header_lines import decode_header_lines, group_of
from truenext.model.limits import PRODUCERS_MAX, RESOLVED_MAX
from truenext.model.message import SentMessage
from truenext.model.policy import ExpiryAction, Policies, Policy, StoreAndDispatch, WhileWaiting
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    content_key,
    decode_record,
    referenced_content_number,
    sequence_of,
    split_lane_key,
)
from truenext.model.schedule import Schedule
from truenext.store.store import Recovered
from truenext.wire.stomp.protocol import Side, StompProtocol
from truenext.wire.stomp.replies import ReplyEncoder
from truenext.wire.stomp.request_shapes import REQUEST_SHAPES

BIG = 600 * 1024
"""Bytes of a large body: two of them fill a connection's room (limits.UNSENT_BYTES_MAX)."""
HOUR_MS = 3600 * 1000
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS
REMEMBERED_MS = 7 * DAY_MS
PEERS_MAX = 4
READERS_MAX = 6
BROWSES_MAX = 2
STEPS = 50
"""Number of steps of an example."""
ROUNDS_MAX = 1000
"""Steps until a broker that is left alone must have come to rest."""

NO_LIMIT = maxsize
ROOMY = 8 * 1024 * 1024
"""Bytes of memory for messages that are enough, unless large ones come together."""
TINY = (300, 1000, 2000, 6000)
"""Bytes of memory for messages, each of which costs 400 at least."""

PICK = OneOf(range(8))
"""Index of an existing object, modulo their number."""
SENT_TO = OneOf(["a"] * 4 + ["b"])
PRIORITY = OneOf([4, 4, 4, 9, 1])
EXPIRES_IN = OneOf([None] * 14 + [0, 1, 10, 10, 1000])
IS_BIG = OneOf([False] * 9 + [True])
PRODUCER = OneOf(["p", "p", "q", "G"])
"""In capitals are those that say that their numbers have no gaps."""
YES_OR_NO = OneOf([False, True])
MEMORY = OneOf([*TINY, ROOMY, NO_LIMIT])

SPELLINGS: list[Callable[[str], str]] = [
    lambda selector: selector,
    lambda selector: f"({selector.replace(' = ', '=')})",
    lambda selector: re.sub("AND|IS|NOT|NULL", lambda keyword: keyword[0].lower(), selector).replace(" ", "  "),
]
"""Functions that respell the selector of a durable subscription without changing its meaning."""
SELECTORS = {
    "TRUE": range(10),
    "JMSPriority > 1": range(2, 10),
    "JMSPriority = 4 AND label IS NULL": range(4, 5),
    "label IS NOT NULL": range(0),
}
"""With the priorities that they want."""

BULK_SOURCES = OneOf(["a"] * 4 + ["b", "DLQ.a"])
MOVED_TO = OneOf(["a", "b", "b", None, None])
"""None is nowhere: it is removed."""

DELAYS = Several(OneOf([0, 1, 5, 5, 20, 20, 1000]), 4)

SENDING: dict[str, Draw] = {"peer_index": PICK, "queue": SENT_TO, "priority": PRIORITY, "persistent": YES_OR_NO}
ANSWERING: dict[str, Draw] = {
    "which": PICK,
    "in_transaction": OneOf([False, False, True]),
    "names_subscription": YES_OR_NO,
}
SUBSCRIBING: dict[str, Draw] = {
    "peer_index": PICK,
    "queue": OneOf(["a"] * 6 + ["b", "DLQ.a"]),
    "mode": OneOf([AckMode.CLIENT] * 2 + [AckMode.INDIVIDUAL] * 2 + [AckMode.AUTO]),
    "window": OneOf([1, 1, 2, 3, 4, None]),
    "priority": OneOf([0] * 6 + [5, -5]),
    "is_exclusive": OneOf([False] * 9 + [True]),
    "has_express": OneOf([False, False, True]),
    "is_pulling": OneOf([False] * 9 + [True]),
    "selector": OneOf([None] * 16 + sorted(SELECTORS_OF_CONSUMERS)),
}
PLAIN = {"priority": 0, "is_exclusive": False, "has_express": False, "is_pulling": False, "selector": None}
"""A subscription like most."""
LOGIN: dict[str, Draw] = {
    "is_truenext_client": OneOf([True, True, False]),
}
PLAIN_LOGIN = dict.fromkeys(LOGIN, False)
ROLLBACK_ONLY_REQUESTS = [
    "sends when its transaction is doomed",
    "acknowledges when its transaction is doomed",
    "nacks when its transaction is doomed",
    "nacks what it acknowledged when its transaction is doomed",
    "commits what is doomed",
    "begins anew what is doomed",
]
INVALID_REQUESTS = [
    "acknowledges what is given back",
    "acknowledges an earlier dispatch",
    "nacks an earlier dispatch",
    "begins an earlier dispatch",
    "begins what it does not hold",
    "acknowledges, and begins what it does not hold",
    "begins what it took without a word",
    "answers once more what a transaction has",
    "asks for too much",
    "asks though it does not pull",
    "asks for nobody",
    "wakes nobody",
    "gives back of nobody",
    "gives back what it took without a word",
    "gives back what it is shown",
    "gives back and aborts nothing",
    "gives back without being a truenext client",
    *ROLLBACK_ONLY_REQUESTS,
]
"""Invalid requests of a client: see BrokerMachine._invalid_request."""
CAUSES = OneOf(["", "", "one", "another", "a\\: third\n\u00fc"])
ACTIONS: dict[str, tuple[int, dict[str, Draw]]] = {
    "connect": (1, LOGIN),
    "keep": (0, {"which": PICK}),
    "close": (0, {"peer_index": PICK, "of": OneOf([1, 1, 2, 3, 7]), "last": OneOf([None, 0, 0, 1, 2, 3, 5])}),
    "disconnect_naming": (0, {"peer_index": PICK, "last": OneOf([None, 0, 1, 2, 3])}),
    "send_numbered_by_jms": (
        0,
        SENDING | {"producer": OneOf(["p", "p", "q", "j", "k"]), "step": OneOf([1, 1, 1, 2, 0, -1])},
    ),
    "forget_jms_producers": (0, {"peer_index": PICK, "producers": Several(OneOf("pqjk"), 2)}),
    "subscribe": (2, SUBSCRIBING),
    "unsubscribe": (1, {"which": PICK}),
    "end_durable": (0, {"peer_index": PICK, "name": OneOf(["n", "n", "o"])}),
    "disconnect": (1, {"peer_index": PICK, "is_clean": YES_OR_NO, "sent_count": OneOf([0, 0, 1, 2])}),
    "browse": (3, {"peer_index": PICK, "queue": SENT_TO, "selector": OneOf(sorted(SELECTORS))}),
    "browse_at_once": (2, {"peer_index": PICK, "queue": SENT_TO, "selector": OneOf(sorted(SELECTORS))}),
    "browse_while_evicting": (2, SENDING | {"is_read_first": YES_OR_NO}),
    "end_browse": (1, {"which": PICK}),
    "request_receipt": (1, {"peer_index": PICK}),
    "send": (
        8,
        SENDING
        | {
            "expires_in": EXPIRES_IN,
            "is_big": IS_BIG,
            "count": OneOf([1, 1, 2, 3, 5]),
            "has_receipt": YES_OR_NO,
        },
    ),
    "send_after_commits": (1, SENDING),
    "send_numbered": (
        2,
        {
            "peer_index": PICK,
            "queue": SENT_TO,
            "priority": PRIORITY,
            "are_persistent": Several(YES_OR_NO, 3),
            "producer": PRODUCER,
            "skips": OneOf([0] * 8 + [1]),
        },
    ),
    "repeat_send": (3, SENDING | {"which": PICK}),
    "acknowledge": (8, ANSWERING | {"has_receipt": YES_OR_NO, "starts_next": YES_OR_NO}),
    "acknowledge_and_end": (0, {"which": PICK}),
    "acknowledge_and_read_on": (2, {"which": PICK, "is_written": YES_OR_NO, "is_squeezed": YES_OR_NO}),
    "nack": (
        6,
        ANSWERING
        | {
            "delay": OneOf([None] * 8 + [0, 1, 20, 7 * DAY_MS]),
            "is_rejected": OneOf([False] * 9 + [True]),
            "cause": CAUSES,
        },
    ),
    "nack_acknowledged": (
        1,
        {
            "which": PICK,
            "delay": OneOf([None] * 4 + [0, 20]),
            "is_rejected": OneOf([False] * 5 + [True]),
            "cause": CAUSES,
        },
    ),
    "mark_started": (1, {"which": PICK}),
    "release": (
        1,
        {
            "peer_index": PICK,
            "of": OneOf([7, 7, 7, 1, 2, 6, 0]),
            "kept": OneOf([0, 0, 0, 1, 2, 4, 6]),
            "names_others": YES_OR_NO,
            "suspends": YES_OR_NO,
            "aborts": YES_OR_NO,
            "counts_all": YES_OR_NO,
        },
    ),
    "wake": (2, {"which": PICK}),
    "pull": (
        2,
        {
            "which": PICK,
            "messages": OneOf([1, 1, 2, 3, 5, 100]),
            "waits": YES_OR_NO,
            "has_correlation": YES_OR_NO,
        },
    ),
    "pull_and_wait": (1, {"which": PICK, "messages": OneOf([1, 2, 100])}),
    "pull_for": (0, {"which": PICK, "messages": OneOf([1, 1, 2]), "milliseconds": OneOf([1, 5, 20, 1000])}),
    "withdraw": (1, {"which": PICK, "has_correlation": YES_OR_NO, "pulls_again": OneOf([False] * 4 + [True])}),
    "send_invalid_request": (1, {"peer_index": PICK, "which": PICK, "what": OneOf(INVALID_REQUESTS)}),
    "mark_rollback_only": (0, {"which": PICK}),
    "reconnect": (0, {"peer_index": PICK, "is_in_time": YES_OR_NO, "sent_count": OneOf([0, 0, 1, 2])}),
    "cut": (0, {"peer_index": PICK}),
    "read_for_redrive": (
        2,
        {"queue": OneOf(["DLQ.a", "DLQ.a", "DLQ.b"]), "limit": OneOf([1, 3, 500])},
    ),
    "redrive": (4, {"limit": OneOf([1, 500])}),
    "send_and_nack": (
        1,
        {
            "peer_index": PICK,
            "priority": PRIORITY,
            "persistent": YES_OR_NO,
            "which": PICK,
            "delay": OneOf([None] * 6 + [0, 20]),
            "is_rejected": OneOf([False] * 3 + [True]),
        },
    ),
    "redrive_at_once": (1, {"queue": OneOf(["DLQ.a"] * 4 + ["DLQ.b"])}),
    "schedule": (
        2,
        SENDING | {"delays": Several(OneOf([0, 1, 5, 5, 20, 20, 1000]), 4)},
    ),
    "read_scheduled": (0, {"queue": OneOf(["a", "a", "b"]), "rank": OneOf([0, 0, 0, 5])}),
    "unschedule": (
        0,
        {"selector": OneOf([None, *sorted(SELECTORS)]), "limit": OneOf([1, 2, None])},
    ),
    "show_scheduled": (0, {"queue": OneOf(["a", "b"])}),
    "read_for_bulk": (
        2,
        {
            "queue": BULK_SOURCES,
            "rank": OneOf([0, 0, 5, 8]),
            "selector": OneOf([None, *sorted(SELECTORS)]),
        },
    ),
    "do_bulk": (4, {"to": MOVED_TO, "limit": OneOf([1, 2, None])}),
    "move_at_once": (1, {"queue": BULK_SOURCES, "to": OneOf(["a", "b"]), "is_dry": OneOf([False, True])}),
    "purge_at_once": (1, {"queue": BULK_SOURCES, "selector": OneOf(sorted(SELECTORS))}),
    "pause": (1, {"queue": BULK_SOURCES}),
    "resume": (2, {"which": PICK}),
    "jump": (1, {"milliseconds": OneOf([-HOUR_MS, -20, -5, 5, 20, HOUR_MS])}),
    "send_in_transaction": (
        3,
        {
            "peer_index": PICK,
            "sends": Several(Each(SENT_TO, PRIORITY, YES_OR_NO, EXPIRES_IN, IS_BIG), 3),
            "commits": YES_OR_NO,
        },
    ),
    "send_without_room": (
        0,
        {
            "which": PICK,
            "queue": OneOf(["a", "Spark.s"]),
            "persistent": OneOf([True, True, False]),
            "surplus": OneOf([0, 0, 1, 1, -1, -100, -100, -1000, 200, 16_384, -16_384]),
            "level": OneOf([DiskLevel.NONE] * 8 + [DiskLevel.FULL, DiskLevel.LITTLE]),
            "is_last": OneOf([False, False, True]),
        },
    ),
    "commit": (3, {"which": PICK, "has_receipt": YES_OR_NO}),
    "commit_numbered": (1, {"which": PICK, "producer": PRODUCER}),
    "repeat_commit": (1, {"peer_index": PICK, "which": PICK, "repeats_all": YES_OR_NO}),
    "query_producer": (
        2,
        {"producer": PRODUCER, "number": OneOf([None, -3, -1, -1, 0, 0, 0, 1, 1, 1, 2]), "resolves": YES_OR_NO},
    ),
    "forget_producers": (1, {"peer_index": PICK, "producers": Several(PRODUCER, 2)}),
    "repeat_commit_of_what_is_open": (2, {"which": PICK, "number": PICK, "counts_all": YES_OR_NO}),
    "commit_what_is_neither_open_nor_recorded": (1, {"peer_index": PICK, "producer": PRODUCER}),
    "abort": (2, {"which": PICK, "counts_all": YES_OR_NO}),
    "stretch_windows": (1, {"milliseconds": OneOf([0, 1000, 20_000])}),
    "advance": (2, {"milliseconds": OneOf([1, 1, 5, 5, 20, 20, 1000, 1000, 61_000, 3 * DAY_MS])}),
    "turn": (4, {}),
    "turn_and_send": (6, {}),
    "all_sent": (1, {"peer_index": PICK}),
    "take_batch": (5, {}),
    "batch_is_written": (4, {}),
    "batch_becomes_durable": (5, {}),
    "all_becomes_durable": (4, {}),
    "read_page": (8, {}),
    "page_shows_what_the_engine_does_not_know": (5, {}),
    "deliver_page": (8, {}),
    "all_pages_are_there": (5, {}),
    "read_timers": (3, {}),
    "deliver_timers": (3, {}),
    "evict": (4, {}),
    "squeeze": (8, {"share": OneOf([0.99, 0.99, 0.8, 0.0]), "is_written": YES_OR_NO}),
    "change_memory": (1, {"limit": MEMORY}),
    "change_policies": (
        2,
        {
            "attempts_max": OneOf([1, 2, 1, 3]),
            "limit_of_a_queue": OneOf([None, None, 1000, NO_LIMIT]),
            "page_size": OneOf([1, 3, 1000]),
            "store_and_dispatch": OneOf(list(StoreAndDispatch)),
            "expired": OneOf([ExpiryAction.DROP, ExpiryAction.DROP, ExpiryAction.DEAD_LETTER]),
        },
    ),
    "remove_unused": (1, {"milliseconds": OneOf([0, 1000, 61_000, 61_000])}),
    "remove_all_unused": (1, {}),
    "settle": (1, {}),
    "crash": (1, {}),
    "restart": (1, {}),
}
"""Possible actions, their weights, and the draws of their arguments."""
RELEASE_ACTIONS = [
    "nack_acknowledged",
    "mark_started",
    "release",
    "wake",
    "pull",
    "pull_and_wait",
    "withdraw",
    "send_invalid_request",
]
"""Actions that are to happen in most machines, now and then."""
RELEASE_WEIGHTS = {name: ACTIONS[name][0] for name in RELEASE_ACTIONS}
RARE = sorted(name for name, (weight, _) in ACTIONS.items() if 0 < weight <= 2)
MANY_PRODUCERS = OneOf("mnopQRST")
OF_TOPICS = [
    "/topic/news.eu",
    "/topic/news.eu",
    "/topic/news.us",
    "/topic/news.us.ny",
    "/topic/VirtualTopic.t",
    "a,/topic/news.eu",
    "/topic/news.us,/topic/news.eu,a,/queue/a",
    "Consumer.x.VirtualTopic.t",
    "a,Consumer.y.VirtualTopic.t",
    "a",
]
"""Addresses to send to."""

OF_BULK = ["subscription,c,n,news.eu", "subscription,c,n,news.*"]
"""Subscriptions for bulk work, of which one exists at a time: a moved message has no copy at its target."""

OF_MANY = OneOf(["x.a"] * 3 + ["x.b"] * 2 + ["x.b.c", "y", "Consumer.y.VirtualTopic.t", "Spark.a"])
"""Queues for those who take from several."""

T = TypeVar("T")

_EXAMPLES = itertools.count()
_SLOTS: list[Any] = [Lane.__dict__[name] for name in Lane.__slots__]
"""Slots of Lane, whatever planted faults put in their place."""


def _forget_engines() -> None:
    """Free the engines of earlier examples. An entry refers to its lane without the garbage collector's knowledge, so
    that some 400 KiB of each example would stay."""
    for lane in [each for each in gc.get_objects() if type(each) is Lane]:
        for slot in _SLOTS:
            with suppress(AttributeError):
                slot.__delete__(lane)


class PerTurn(NamedTuple):
    """Limits of one turn, some so small that few messages reach them."""

    dispatches: int = 2000
    """Messages dispatched in one turn; half as many expire, or return when their delay ends."""
    held_max: int = 25_000
    """Messages that a connection holds before it has no credit."""
    dead_letters: int = 100
    """Messages that become dead letters in one turn because they were given up."""


class BrokerMachine(RuleBasedStateMachine):
    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = {
        "memory_limits": OneOf(
            [(NO_LIMIT, NO_LIMIT)] * 3
            + [(ROOMY, NO_LIMIT)] * 3
            + [(tiny, NO_LIMIT) for tiny in TINY]
            + [(NO_LIMIT, 1000), (ROOMY, 2000), (2000, 1000)]
        ),
        "page_size": OneOf([1, 2, 3, 4, 1000]),
        "store_and_dispatch": OneOf([StoreAndDispatch.DURABLE] * 2 + [StoreAndDispatch.CONCURRENT]),
        "expired": OneOf([ExpiryAction.DROP] * 3 + [ExpiryAction.DEAD_LETTER]),
        "retries": OneOf(
            [Retries()] * 2
            + [Retries(0, 5), Retries(0, 5, holds=True)]
            + [Retries(5, 20, 2.0, 30), Retries(5, 20, 2.0, 30, holds=True)]
        ),
        "per_turn": OneOf(
            [PerTurn()] * 3
            + [
                PerTurn(2),
                PerTurn(4, dead_letters=1),
                PerTurn(2, 3, 1),
                PerTurn(4, 5, 2),
                PerTurn(50, 4),
                PerTurn(dead_letters=1),
            ]
        ),
    }
    WEIGHTS: ClassVar[dict[str, int]] = {name: weight for name, (weight, _) in ACTIONS.items()}
    ARE_NARROW: ClassVar[list[bool]] = [False, False, True]
    EXPIRE: ClassVar[bool] = False
    """Nearly all messages do."""
    WINDOW_MAX: ClassVar[int | None] = None
    """Limit of the windows of all subscriptions."""
    ALL_QUEUES: ClassVar[tuple[str, ...]] = ("a", "b", "DLQ.a", "DLQ.b")
    """Queues from which the remaining messages are taken at the end."""
    GROUPS: ClassVar[tuple[str, ...]] = ("",)
    """Groups of the messages, in turns; every fourth message closes its group."""
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {}
    """Draws of arguments that differ from those in ACTIONS."""
    TELLS: ClassVar[bool] = False
    """Most messages ask for reports or name handlers."""
    PRODUCERS_MAX: ClassVar[int] = PRODUCERS_MAX
    RESOLVED_MAX: ClassVar[int] = RESOLVED_MAX

    def __init__(self) -> None:
        super().__init__()
        if next(_EXAMPLES) % 50 == 0:
            _forget_engines()
        self.is_over = False
        self.nothing_new = True
        """A turn would change nothing: the last thing that happened was one."""
        self.serial = 0
        self.committed = 0
        """The last batch that the engine knows to be durable."""
        self.used_numbers: dict[tuple[str, int], int] = {}
        """Numbers of producers, and the time of their first use."""
        self.sessions: dict[Peer, ConnectionState] = {}
        self.browses: list[OpenBrowse] = []
        """Browses of those who are connected, also what they were told the end of."""
        self.names: dict[tuple[str, str], Reader] = {}
        """Last subscription by the names of its connection and of itself."""
        self.subscribe_arguments: dict[Reader, dict[str, Any]] = {}
        """Arguments with which each reader subscribed."""
        self.disk = Disk()
        self.counting: tuple[Engine, Generator[None, None, Remainder]] | None = None
        """Count for a drain that is under way, and the engine whose messages it counts."""
        self.due: list[tuple[str, str]] = []
        """Label and address of each scheduled send that has become a message since the last check."""
        self.redriving: tuple[BulkRead, PageResult] | None = None
        """A page of dead letters that was read, and none was moved yet."""
        self.piece: tuple[BulkRead, PageResult, str | None, list[Letter]] | None = None
        """Piece of bulk work whose page was read, with its selector, and the messages there were at that time."""
        self.cancelling: tuple[BulkRead, PageResult] | None = None
        """Piece whose page of scheduled sends was read."""

    @classmethod
    def run_plainly(cls, random: Random, steps: list[str]) -> None:
        """One example without Hypothesis: nothing makes it small if it fails. Of what `steps` has noted it is all."""
        steps.clear()
        machine = cls()
        machine.start(**cls._beginning().by(random))
        for _ in range(STEPS):
            name = random.choice(machine.actions())
            machine.happens(action=(name, cls._arguments(name).by(random)))
        machine.teardown()

    @classmethod
    @lru_cache
    def _beginning(cls) -> Named:
        return Named(
            {
                "circumstances": Named(cls.CIRCUMSTANCES),
                "evicts": OneOf([True, True, False]),
                "is_narrow": OneOf(cls.ARE_NARROW),
                "attempts_max": OneOf([1, 2, 1, 3]),
                "never": Some(RARE),
                "readers": Several(cls._arguments("subscribe"), 4),
                "logins": Each(cls._arguments("connect"), cls._arguments("connect")),
            }
        )

    @initialize(beginning=st.runner().flatmap(lambda machine: machine._beginning().strategy))
    def starts(self, beginning: dict[str, Any]) -> None:
        self.start(**beginning)

    def start(
        self,
        circumstances: dict[str, Any],
        evicts: bool,
        is_narrow: bool,
        attempts_max: int,
        never: set[str],
        readers: list[dict[str, Any]],
        logins: tuple[dict[str, bool], ...] = (PLAIN_LOGIN, PLAIN_LOGIN),
    ) -> None:
        """`never` is what does not happen in this example: what is rare elsewhere has more time to go wrong.

        If `evicts`, memory is relieved after every turn, as the broker does it. If `is_narrow`, nearly all messages
        stand in one lane.
        """
        self.never = never
        self.evicts = evicts
        self.is_narrow = is_narrow
        self.memory_limit, of_a_queue = circumstances.pop("memory_limits")
        retries = circumstances.pop("retries")
        self.per_turn: PerTurn = circumstances.pop("per_turn")
        self.policy = Policy(
            attempts_max=attempts_max,
            memory_limit=of_a_queue,
            first_delay_ms=retries.first_delay,
            delay_ms=retries.delay,
            backoff=retries.backoff,
            delay_max_ms=retries.delay_max,
            while_waiting=WhileWaiting.BLOCK if retries.holds else WhileWaiting.SKIP,
            **circumstances,
        )
        is_concurrent = self.policy.store_and_dispatch is StoreAndDispatch.CONCURRENT
        expired_move = self.policy.expired is ExpiryAction.DEAD_LETTER
        self.oracle = Oracle(
            attempts_max,
            is_concurrent=is_concurrent,
            expired_move=expired_move,
            retries=retries,
            producers_max=self.PRODUCERS_MAX,
            resolved_max=self.RESOLVED_MAX,
        )
        self.oracle.held_max = self.per_turn.held_max
        self.oracle.moves_later = self.per_turn.dead_letters < PerTurn().dead_letters
        # What expires is moved at any time, as what has left memory is.
        self.oracle.may_evict = expired_move
        self.oracle.now_ms = 1000 * DAY_MS
        self._start_run(self.disk.restart())
        self.logins = logins
        self._connect_all(readers)

    def _connect_all(self, readers: list[dict[str, Any]]) -> None:
        self.readers = readers
        for login in self.logins:
            self.connect(**login)
        for reader in readers:
            self.subscribe(**reader)

    def _start_run(self, recovered: Recovered) -> None:
        """Start the engine as broker/recovery.py and Broker.start do."""
        note(f"engine = Engine(..., memory=MemoryBudget({self.memory_limit}), {self.policy})  # from {recovered}")
        self.engine = Engine(
            CommitState(
                # What it is told of it may ask for when nobody expects it; without one numbers are free sooner. Half of
                # the examples have one.
                EventLog() if self.policy.attempts_max > 1 else NoEventLog(),
                sequence_limit=recovered.sequence_limit,
                redelivered_below=recovered.redelivered_below if recovered.clean_stop else recovered.sequence_limit,
            ),
            memory=MemoryBudget(self.memory_limit),
            policies=Policies(self.policy),
        )
        targets.hear_of_due(self.engine, self._becomes_a_message)
        if self.policy.attempts_max > 1:
            targets.find_all_queues_ahead(self.engine)
        if self.policy.page_size < 1000:
            targets.compare_one_message_a_turn(self.engine)
        self.redriving = self.piece = self.cancelling = None
        self.boot_us = self.oracle.steady_ms * 1000 - 7
        self._tick()
        queues = {number: self.engine.lifespan.restore_queue(number, name) for number, name in recovered.queues.items()}
        for number in recovered.paused:
            self.engine.lifespan.restore_pause(queues[number])
        self.engine.state.producers.restore(recovered.producers.items())
        self.engine.state.jms_producers.restore(recovered.producers.items())
        for lane, count in recovered.counts.items():
            number, rank = split_lane_key(lane)
            self.engine.lifespan.restore_lane(queues[number], rank, count)
        self.oracle.may_evict |= min(self.memory_limit, self.policy.memory_limit) < NO_LIMIT
        self.oracle.sockets_max = max(self.memory_limit // 4, SOCKETS_BYTES_MIN)
        self.sessions = {}
        self.browses = []
        self.counts = CountsAudit(self.engine)
        self.held = HeldAudit(self.engine)
        self.engine.lifespan.start()
        batch = self.engine.take_batch()
        assert batch is not None
        self.counts.add(batch.history)
        self.disk.submit(batch)
        self.disk.done()
        self.engine.store_results.on_committed(batch)
        self.committed = batch.number

    @rule(
        action=st.runner().flatmap(
            lambda machine: st.sampled_from(machine.actions()).flatmap(
                lambda name: st.tuples(st.just(name), machine._arguments(name).strategy)
            )
        )
    )
    def happens(self, action: tuple[str, dict[str, Any]]) -> None:
        """One rule for all actions: rules that can do nothing, or are switched off at random by Hypothesis, would leave
        most examples without a single dispatch."""
        name, arguments = action
        self.nothing_new = name in ("turn", "all_becomes_durable", "settle")
        with self._comparing():
            getattr(self, name)(**arguments)
            self._audit()

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        """Report an error in this block as a difference between the engine and the contract."""
        try:
            with pytest.MonkeyPatch.context() as patch:
                dispatches, held_max, dead_letters = self.per_turn
                targets.DISPATCHES_PER_TURN.replace(patch, dispatches)
                targets.DISPATCHES_OF_WILDCARDS_PER_TURN.replace(patch, dispatches)
                targets.SEARCHES_MIN.replace(patch, dispatches // 2)
                targets.EXPIRED_PER_TURN.replace(patch, dispatches // 2)
                targets.RETRIES_PER_TURN.replace(patch, dispatches // 2)
                targets.DEAD_LETTERS_PER_TURN.replace(patch, dead_letters)
                if dispatches < PerTurn().dispatches:
                    targets.EVICTED_BYTES_PER_TURN.replace(patch, 100 * dispatches)
                    targets.EVICTION_QUEUES_PER_TURN.replace(patch, dispatches)
                    targets.EVICTION_QUEUES_SORTED_PER_TURN.replace(patch, dispatches)
                targets.HELD_MAX.replace(patch, held_max)
                targets.HELD_MAX_TO_COUNT.replace(patch, held_max)
                targets.QUEUES_COUNTED_PER_STEP.replace(patch, 1)
                targets.ENTRIES_COUNTED_PER_STEP.replace(patch, 1)
                yield
        except RemoteProtocolError as error:
            self.is_over = True
            raise Disagreement(f"what the contract allows was refused: {error}") from error
        except StoreError as error:
            self.is_over = True
            raise Disagreement(f"engine and store do not agree: {error}") from error
        except Disagreement:
            self.is_over = True
            raise
        except AssertionError as error:
            self.is_over = True
            raise Disagreement(f"what the engine takes for granted is not so: {error}") from error
        except Exception:
            self.is_over = True
            raise

    def _report_due(self) -> None:
        """Scheduled sends have become messages."""
        due, self.due[:] = list(self.due), []
        for label, address in due:
            note(f"# {address}:{label} is due")
            self.oracle.became_due(label, address)

    def _becomes_a_message(
        self,
        send: Callable[..., int],
        name: str,
        to: str,
        message: SentMessage,
        ahead: RouteAhead | None = None,
    ) -> int:
        if _failure_of(message) != "report":
            self.due.append((_label(message), to or name))
        return send(name, to, message, ahead)

    def _audit(self) -> None:
        self._report_due()
        self._count_a_step()
        if (
            self.oracle.attempt_counted_in == self.oracle.gathering
            and not self.engine.state.commit_state.is_batch_awaited
        ):
            raise Disagreement("the batch with an attempt is not written at once")
        if wrong := miscounted(self.engine, self.sessions.values()):
            raise Disagreement(f"memory is counted wrong: {wrong}")
        if wrong := self.counts.unbalanced():
            raise Disagreement(f"queues have other messages than their counts say: {wrong}")
        if wrong := self.held.differing():
            raise Disagreement(f"messages are held for another time: {wrong}")
        for peer, session in self.sessions.items():
            if session.release_count != peer.round:
                raise Disagreement(f"{peer.name} is in round {session.release_count}, not {peer.round}")

    def actions(self) -> list[str]:
        """Return the actions that are possible now, each as often as its weight says."""
        letters = self.oracle.letters
        is_under_way = self.redriving is not None or self.piece is not None or self.cancelling is not None
        can_do_bulk = self.engine.tasks.bulk_pieces.can_execute and not is_under_way
        is_impossible = {
            "connect": len(self.sessions) >= PEERS_MAX,
            "subscribe": not self.sessions or len(self.oracle.readers) >= READERS_MAX,
            "unsubscribe": not self.oracle.readers,
            "browse": len(self.oracle.browses) >= BROWSES_MAX,
            "browse_at_once": len(self.oracle.browses) >= BROWSES_MAX,
            "browse_while_evicting": len(self.oracle.browses) >= BROWSES_MAX or not self.oracle.may_evict,
            "end_browse": not self.browses,
            "repeat_send": not self._repeatable(),
            "jump": any(
                self.oracle.is_expired(letter)
                or (letter.is_restored and not letter.is_removed)
                # The longest delay would become one that a restart cuts (C9.7): see tests/unit/test_delays.py.
                or letter.due - self.oracle.steady_ms > DAY_MS
                for letter in letters
            ),
            "read_for_redrive": not can_do_bulk,
            "redrive_at_once": not can_do_bulk,
            "redrive": self.redriving is None,
            "read_for_bulk": not can_do_bulk,
            "move_at_once": not can_do_bulk,
            "purge_at_once": not can_do_bulk,
            "do_bulk": self.piece is None,
            "read_scheduled": not can_do_bulk or not self.oracle.planned,
            "unschedule": self.cancelling is None,
            "show_scheduled": not can_do_bulk,
            "resume": not self.oracle.paused,
            "acknowledge": not self._answerable(),
            "acknowledge_and_end": not self._answerable(),
            "acknowledge_and_read_on": not self._answerable(),
            "nack": not self._answerable(),
            "nack_acknowledged": not self._acknowledged_inside(),
            "keep": not self._keepable(),
            "close": not self._jms_clients(),
            "disconnect_naming": not self._jms_clients(),
            "send_numbered_by_jms": not self._jms_clients(),
            "forget_jms_producers": not self._jms_clients(),
            "mark_started": not self._beginnable(),
            "release": not self._can_release(),
            "cut": not self._truenext_clients(),
            "wake": not self._wakeable(),
            "pull": not self._pulling(),
            "pull_and_wait": not self._pulling(),
            "pull_for": not self._pulling(),
            "withdraw": not self._pulling(),
            "mark_rollback_only": not self._doomable(),
            "send_without_room": not self._open_transactions(),
            "commit": not self._open_transactions(),
            "commit_numbered": not self._open_transactions(),
            "repeat_commit": not self._repeatable(),
            "repeat_commit_of_what_is_open": not self._repeatable() or not self._open_transactions(),
            "abort": not self._all_transactions(),
            "take_batch": self.disk.in_flight is not None,
            "batch_is_written": self.disk.in_flight is None or self.disk.is_written,
            "batch_becomes_durable": self.disk.in_flight is None,
            "read_page": not self.disk.requested,
            "page_shows_what_the_engine_does_not_know": not self.disk.requested or self.disk.in_flight is None,
            "deliver_page": not self.disk.has_page,
            "squeeze": not self.oracle.may_evict,
            "all_pages_are_there": not self.disk.requested and not self.disk.has_page,
            "read_timers": not self.disk.requested_timers,
            "deliver_timers": not self.disk.has_timers,
            "turn": self.nothing_new,
            "turn_and_send": self.nothing_new,
        }
        possible: list[str] = []
        for name, often, is_of_session in self._likely():
            if not (name in self.never or is_impossible.get(name) or (is_of_session and not self.sessions)):
                possible += often
        return possible or ["connect"]

    @classmethod
    @lru_cache
    def _likely(cls) -> list[tuple[str, list[str], bool]]:
        """Return of all actions the name, the name repeated by its weight, and whether it needs a connection."""
        return [
            (name, [name] * cls.WEIGHTS[name], "peer_index" in arguments) for name, (_, arguments) in ACTIONS.items()
        ]

    @classmethod
    @lru_cache(maxsize=1000)  # To make a strategy, and to validate it, costs as much as a whole step.
    def _arguments(cls, name: str) -> Named:
        return Named(ACTIONS[name][1] | cls.ARGUMENTS.get(name, {}))

    # Connections and subscriptions ------------------------------------------------------------------------------------

    def connect(self, is_truenext_client: bool, is_jms_client: bool = False) -> None:
        is_truenext_client &= not is_jms_client
        name = self._fresh("s")
        note(f'{name} = engine.commands.connect("{name}")')
        login = Login(number=1 if is_truenext_client else 0, is_jms_client=is_jms_client)
        peer = self.oracle.connect(name, is_truenext_client=is_truenext_client, is_jms_client=is_jms_client)
        self.sessions[peer] = self.engine.commands.connect(name)
        note(f"engine.commands.log_in({name}, {login})")
        self.engine.commands.log_in(self.sessions[peer], login)

    def subscribe(
        self,
        peer_index: int,
        queue: str,
        mode: AckMode,
        window: int | None,
        priority: int,
        is_exclusive: bool,
        has_express: bool,
        is_pulling: bool,
        selector: str | None,
    ) -> None:
        peer, session = self._peer(peer_index)
        arguments: dict[str, Any] = {
            "queue": queue,
            "mode": mode,
            "window": window,
            "priority": priority,
            "is_exclusive": is_exclusive,
            "has_express": has_express,
            "is_pulling": is_pulling,
            "selector": selector,
        }
        used = {reader.subscription for reader in self.oracle.readers if reader.peer is peer}
        names = {f"c{number}" for number in range(max(READERS_MAX, len(self.ALL_QUEUES)))}
        name = min(names - used)
        address, _, durable = queue.partition("#")
        if durable and self._is_used(durable):
            return
        destination = parse_address(_address(address), session.id)
        if self.WINDOW_MAX is not None:
            window = min(window or self.WINDOW_MAX, self.WINDOW_MAX)
        if peer.is_jms_client:
            mode, is_pulling = AckMode.INDIVIDUAL, True  # C26.3
        elif window == 0:
            window = 1
        if is_pulling:
            mode = AckMode.INDIVIDUAL if mode is AckMode.AUTO else mode
            window, has_express = None, False
        has_express &= mode is AckMode.INDIVIDUAL and destination.kind is not DestinationKind.QUEUE_PATTERN
        extras: dict[str, Any] = {
            "priority": priority,
            "is_exclusive": is_exclusive,
            "has_express": has_express,
            "is_pulling": is_pulling,
        }
        note(
            f'engine.commands.subscribe({peer.name}, Subscribe("{name}", {queue}, {mode}, {window}, '
            f"selector={selector!r}, **{extras}))"
        )
        spelling = selector
        if durable and selector is not None:
            spelling = SPELLINGS[len(self.names) % len(SPELLINGS)](selector)
        compiled = None if spelling is None else truenext.model.selector.compile_selector(spelling)
        key = f"c,{durable}" if durable else ""
        self.engine.commands.subscribe(
            session, Subscribe(name, destination, mode, window, selector=compiled, **extras, durable_key=key)
        )
        reader = self.oracle.subscribe(peer, name, queue, mode, window, selector=selector, spelling=spelling, **extras)
        self.names[peer.name, name] = reader
        self.subscribe_arguments[reader] = arguments
        if queue.startswith("Consumer.") or durable:
            # From its receipt on it collects.
            self.request_receipt(peer_index)
        if peer.is_jms_client and (prefetch := _prefetch(arguments)):
            self._pull(reader, prefetch, True, None)

    def unsubscribe(self, which: int) -> None:
        reader = _one_of(self.oracle.readers, which)
        note(f'engine.commands.unsubscribe({reader.peer.name}, Unsubscribe("{reader.subscription}"))')
        self.engine.commands.unsubscribe(self.sessions[reader.peer], Unsubscribe(reader.subscription))
        self.oracle.unsubscribe(reader)

    def close(self, peer_index: int, of: int, last: int | None) -> None:
        """A JMS client ends some of its consumers, and names a message that one of them holds, or that none holds."""
        peer = _one_of(self._jms_clients(), peer_index)
        session = self.sessions[peer]
        readers = _some_of([reader for reader in self.oracle.readers if reader.peer is peer], of)
        self._take_kept(peer, readers)
        letter = self._last_delivered(peer, last)
        close = Close([reader.subscription for reader in readers], self.oracle.sequences[letter] if letter else None)
        note(f"engine.commands.close({peer.name}, {close})")
        self.engine.commands.close(session, close)
        if readers:
            self.oracle.close(readers, letter)

    def _last_delivered(self, peer: Peer, last: int | None) -> Letter | None:
        """Return one of the messages that the connection holds; None if there is none, or `last` is None."""
        readers = [reader for reader in self.oracle.readers if reader.peer is peer]
        held = [letter for reader in readers for letter in self.oracle.unacknowledged(reader)]
        return None if last is None or not held else _one_of(held, last)

    def _take_kept(self, peer: Peer, readers: list[Reader]) -> None:
        """C26.6: what consumers that end have kept is the transaction's."""
        for reader in readers:
            for work in peer.transactions.values():
                for letter in [each for each in self.oracle.kept(work) if each.holder is reader]:
                    if not work.is_rollback_only:
                        ack = Ack(reader.subscription, self.oracle.sequences[letter], work.name)
                        note(f"engine.commands.acknowledge({peer.name}, {ack})")
                        self.engine.commands.acknowledge(self.sessions[peer], ack)
            self.oracle.take_kept(peer, reader)

    def disconnect_naming(self, peer_index: int, last: int | None) -> None:
        """As ConnectionEnds.disconnect does it."""
        peer = _one_of(self._jms_clients(), peer_index)
        session = self.sessions[peer]
        letter = self._last_delivered(peer, last)
        if letter is not None:
            sequence = self.oracle.sequences[letter]
            note(f"engine.commands.subscribing.requeue_delivered({peer.name}, ..., {sequence})")
            self.engine.commands.subscribing.requeue_delivered(session, session.consumers.values(), sequence)
        note(f"engine.commands.disconnect({peer.name}, is_exempt=True, is_requested=True)")
        self.engine.commands.disconnect(session, is_exempt=True, is_requested=True)
        self.oracle.disconnect(peer, True, is_by_frame=True, last_delivered=letter)
        self.browses = [browse for browse in self.browses if browse.peer is not peer]
        del self.sessions[peer]

    def end_durable(self, peer_index: int, name: str) -> None:
        """End the subscription by its subscriber, or by any connection if it has none."""
        peer, session = self._peer(peer_index)
        durable = self.oracle.durable_of(name)
        if durable is None:
            return
        subscription = "none"
        for reader in self.oracle.readers:
            if reader.queue == durable.queue:
                peer, session, subscription = reader.peer, self.sessions[reader.peer], reader.subscription
        note(f'engine.commands.unsubscribe({peer.name}, Unsubscribe("{subscription}", "c,{name}"))')
        self.engine.commands.unsubscribe(session, Unsubscribe(subscription, f"c,{name}"))
        self.oracle.end_durable(peer, name)
        self.request_receipt(list(self.sessions).index(peer))

    def _is_used(self, name: str) -> bool:
        durable = self.oracle.durable_of(name)
        return durable is not None and any(reader.queue == durable.queue for reader in self.oracle.readers)

    def disconnect(self, peer_index: int, is_clean: bool, sent_count: int) -> None:
        """End the connection; its socket may have taken some messages before. A clean end of the upper half of the
        picks comes by DISCONNECT; any other by a takeover or a reload. A further draw would change what all examples
        draw after it, and so the rounds in which planted faults show."""
        self._disconnect(peer_index, is_clean, sent_count, is_requested=is_clean and peer_index >= PEERS_MAX)

    def _disconnect(self, peer_index: int, is_clean: bool, sent_count: int, *, is_requested: bool = False) -> None:
        peer, session = self._peer(peer_index)
        for reader in [reader for reader in self.oracle.readers if reader.peer is peer]:
            if reader.mode is AckMode.AUTO and sent_count:
                name = f'{peer.name}.consumers["{reader.subscription}"]'
                note(f"engine.commands.acknowledging.acknowledge_first({name}, {sent_count})")
                self.engine.commands.acknowledging.acknowledge_first(session.consumers[reader.subscription], sent_count)
                self.oracle.sent_before_loss(reader, sent_count)
        note(f"engine.commands.disconnect({peer.name}, is_exempt={is_clean}, is_requested={is_requested})")
        self.engine.commands.disconnect(session, is_exempt=is_clean, is_requested=is_requested)
        self.oracle.disconnect(peer, is_clean, is_by_frame=is_requested)
        self.browses = [browse for browse in self.browses if browse.peer is not peer]
        del self.sessions[peer]

    def cut(self, peer_index: int) -> None:
        """The socket of a connection ends; it is taken over or lost at some later time."""
        peer = _one_of(self._truenext_clients(), peer_index)
        session = self.sessions[peer]
        note(f"engine.commands.connecting.park({peer.name})")
        self.engine.commands.connecting.park(session)
        self.oracle.park(peer)
        self.browses = [browse for browse in self.browses if browse.peer is not peer]

    def reconnect(self, peer_index: int, is_in_time: bool, sent_count: int) -> None:
        """A connection ends, and its client comes back with the same subscriptions. If that is in time, a truenext
        client takes the connection over."""
        peer, _session = self._peer(peer_index)
        arguments_of_all = [self.subscribe_arguments[reader] for reader in self.oracle.readers if reader.peer is peer]
        self._disconnect(peer_index, is_in_time and peer.is_truenext_client, sent_count)
        self.connect(peer.is_truenext_client, peer.is_jms_client)
        for arguments in arguments_of_all:
            self.subscribe(len(self.sessions) - 1, **arguments)

    # Browsing ---------------------------------------------------------------------------------------------------------

    def browse(self, peer_index: int, queue: str, selector: str) -> None:
        peer, session = self._peer(peer_index)
        name = self._fresh("l")
        note(f'engine.commands.browse({peer.name}, Browse("{name}", /queue/{queue}, {selector!r}))')
        compiled = None if selector == "TRUE" else truenext.model.selector.compile_selector(selector)
        self.engine.commands.browse(session, Browse(name, parse_address(f"/queue/{queue}", session.id), compiled))
        self.browses.append(self.oracle.browse(peer, name, queue, SELECTORS[selector]))

    def browse_at_once(self, peer_index: int, queue: str, selector: str) -> None:
        """Browse without other actions until the end: all waiting messages must be shown."""
        self.browse(peer_index, queue, selector)
        browse = self.browses[-1]
        for _ in range(ROUNDS_MAX):
            if browse not in self.oracle.browses:
                return
            self.everything_sent()
            self._turn()
            self.all_pages_are_there()
        raise Disagreement(f"{browse} never ends")

    def browse_while_evicting(
        self, peer_index: int, queue: str, priority: int, persistent: bool, is_read_first: bool
    ) -> None:
        """The store gets some behind a horizon while a page is read that shows them or not."""
        self.squeeze(0.8, True)
        self.send(peer_index, queue, priority, persistent, None, False, 2, False)
        self.browse(peer_index, queue, "TRUE")
        self.everything_sent()
        self._turn()
        while is_read_first and self.disk.requested:
            self.read_page()
        if self.disk.in_flight is None:
            self.take_batch()
        if self.disk.in_flight is not None:
            self.batch_becomes_durable()
        self.all_pages_are_there()
        self._turn()

    def end_browse(self, which: int) -> None:
        browse = _one_of(self.browses, which)
        note(f'engine.commands.unsubscribe({browse.peer.name}, Unsubscribe("{browse.subscription}"))')
        self.engine.commands.unsubscribe(self.sessions[browse.peer], Unsubscribe(browse.subscription))
        self.oracle.end_browse(browse)
        self.browses.remove(browse)

    def request_receipt(self, peer_index: int) -> None:
        peer, session = self._peer(peer_index)
        receipt = self._fresh("r")
        note(f'engine.state.commit_state.answer({peer.name}, Receipt("{receipt}"))')
        self.engine.state.commit_state.answer(session, Receipt(receipt))
        self.oracle.request_receipt(peer, receipt)

    # Sending ----------------------------------------------------------------------------------------------------------

    def send(
        self,
        peer_index: int,
        queue: str,
        priority: int,
        persistent: bool,
        expires_in: int | None,
        is_big: bool,
        count: int,
        has_receipt: bool,
    ) -> None:
        peer, session = self._peer(peer_index)
        for _ in range(count):
            parcel = self._parcel(priority, persistent, expires_in, is_big)
            note(f"engine.commands.send({peer.name}, Send({queue}, {parcel}))")
            self.engine.commands.send(session, _send(parse_address(_address(queue), session.id), parcel))
            self.oracle.send(peer, queue, parcel)
        if has_receipt:
            self.request_receipt(peer_index)

    def send_after_commits(self, peer_index: int, queue: str, priority: int, persistent: bool) -> None:
        """Persistent and transient ones in turns, which are dispatched before anything is durable."""
        for is_other in (False, True, False, True, True):
            self.send(peer_index, queue, priority, persistent is not is_other, None, False, 1, False)
        self.turn_and_send()

    def send_numbered(
        self, peer_index: int, queue: str, priority: int, are_persistent: list[bool], producer: str, skips: int
    ) -> None:
        name = self._called(producer)
        for persistent in are_persistent:
            number = self._next_number(name, Frame.SEND) + skips
            if not self._send_numbered(peer_index, queue, priority, persistent, name, number):
                return

    def repeat_send(self, peer_index: int, queue: str, priority: int, persistent: bool, which: int) -> None:
        """The newest number of some producer, or an older one."""
        producer, number = _one_of(self._repeatable(), which)
        if self._send_numbered(peer_index, queue, priority, persistent, producer, number):
            self.request_receipt(peer_index)

    def _send_numbered(
        self, peer_index: int, queue: str, priority: int, persistent: bool, producer: str, number: int
    ) -> bool:
        """Returns: False if the number is refused, or the producer one too many; the connection has ended then.
        JMS clients have `send_numbered_by_jms`."""
        others = [index for index, peer in enumerate(self.sessions) if not peer.is_jms_client]
        if not others:
            return False
        peer_index = _one_of(others, peer_index) if len(others) < len(self.sessions) else peer_index
        peer, session = self._peer(peer_index)
        parcel = self._parcel(priority, persistent, None, False)
        numbered = self._numbered(producer, Frame.SEND, number)
        note(f"engine.commands.send({peer.name}, Send({queue}, {parcel}, None, {numbered}))")
        send = _send(parse_address(_address(queue), session.id), parcel, None, producer, number)
        send.is_gapless = numbered.declares_gapless
        if self._must_be_refused(numbered):
            self._expect_refusal(peer_index, lambda: self.engine.commands.send(session, send))
            return False
        self.engine.commands.send(session, send)
        _check_repeat(send, self.oracle.send_numbered(peer, queue, parcel, numbered))
        self._later()
        return True

    def send_numbered_by_jms(
        self, peer_index: int, queue: str, priority: int, persistent: bool, producer: str, step: int
    ) -> None:
        """The next number of a producer, a later one, or one that is a repeat."""
        peer = _one_of(self._jms_clients(), peer_index)
        session = self.sessions[peer]
        remembered = self.oracle.jms_producers.remembered()
        while producer in remembered and not self._is_recent(remembered[producer].used_ms):
            producer += producer[0]
        known = remembered.get(producer)
        number = max(1, (0 if known is None else known.highest(Frame.SEND)) + step)
        parcel = self._parcel(priority, persistent, None, False)
        send = _send(parse_address(_address(queue), session.id), parcel, None, producer, number)
        note(f"engine.commands.send({peer.name}, Send({queue}, {parcel}, None, {producer}, {number}))")
        self.engine.commands.send(session, send)
        _check_repeat(send, self.oracle.send_numbered_by_jms(peer, queue, parcel, producer, number))
        # So that one of too many is the longest unused.
        self.advance(1)

    def forget_jms_producers(self, peer_index: int, producers: list[str]) -> None:
        peer = _one_of(self._jms_clients(), peer_index)
        session = self.sessions[peer]
        note(f"engine.state.producers_of({peer.name}).forget({peer.name}, {producers})")
        self.engine.state.producers_of(session).forget(session, producers)
        self.oracle.forget_jms_producers(peer, producers)
        self.request_receipt(list(self.sessions).index(peer))

    def _must_be_refused(self, numbered: Numbered) -> bool:
        is_one_too_many = self.oracle.producers.is_refused(numbered.producer, self.oracle.now_ms)
        return is_one_too_many or self.oracle.status_of(numbered) is NumberStatus.REFUSED

    def _numbered(self, producer: str, kind: Frame, number: int) -> Numbered:
        """Return the numbered command; a gapless producer declares that with the first number, and sometimes again."""
        self.used_numbers.setdefault((producer, number), self.oracle.now_ms)
        known = self.oracle.producers.remembered().get(producer)
        must_declare = known is None or known.is_gapless is None
        return Numbered(producer, kind, number, producer.isupper() and (must_declare or number % 2 == 1))

    def _called(self, producer: str) -> str:
        """A producer that may have been forgotten for its age is another from then on."""
        remembered = self.oracle.producers.remembered()
        while producer in remembered and not self._is_recent(remembered[producer].used_ms):
            producer += producer[0]
        return producer

    def _is_recent(self, used_ms: int) -> bool:
        """True if the producer was remembered all the time, however the clock has jumped."""
        return self.oracle.now_ms - used_ms < REMEMBERED_MS - DAY_MS

    def query_producer(self, producer: str, number: int | None, resolves: bool) -> None:
        """About a COMMIT that is so far from the highest."""
        name = self._called(producer)
        known = self.oracle.producers.remembered().get(name)
        highest = 0 if known is None else known.highest(Frame.COMMIT)
        commit = None if number is None else max(1, highest + number)
        note(f'engine.state.producers.query("{name}", {commit}, resolves={resolves})')
        answer = self.engine.state.producers.query(name, commit, resolves=resolves)
        outcome, batch = self.oracle.query_producer(name, commit, resolves=resolves)
        actual = answer.outcome and answer.outcome.value
        if actual != outcome:
            raise Disagreement(f"COMMIT {commit} of {name} is said to be {actual!r}, not {outcome!r}")
        # The engine's batches begin with 1 in each run.
        waits_for = answer.batch and answer.batch + self.oracle.gathering - self.engine.state.commit_state.batch.number
        if not batch <= max(waits_for, self.oracle.durable) <= self.oracle.gathering:
            raise Disagreement(f"the answer about {name} waits for batch {waits_for}, not {batch}")
        shown, expected = answer.producer, self.oracle.producers.remembered().get(name)
        is_right = shown is None if expected is None else shown is not None
        if shown is not None and expected is not None:
            numbers = max(shown.highest_send, 0), max(shown.highest_commit, 0)
            is_right = numbers == (expected.highest(Frame.SEND), expected.highest(Frame.COMMIT))
            is_right &= shown.is_gapless is expected.is_gapless
        if not is_right:
            raise Disagreement(f"of {name} is known {shown}, not {expected}")
        self._later()

    def forget_producers(self, peer_index: int, producers: list[str]) -> None:
        peer, session = self._peer(peer_index)
        names = list(map(self._called, producers))
        note(f"engine.state.producers.forget({peer.name}, {names})")
        self.engine.state.producers.forget(session, names)
        self.oracle.forget_producers(peer, names)
        self.request_receipt(peer_index)

    def _later(self) -> None:
        """Advance the time in machines where the order of use matters; here, do nothing."""

    def _expect_refusal(self, peer_index: int, request: Callable[[], None]) -> None:
        try:
            request()
        except RemoteProtocolError:
            self.disconnect(peer_index, False, 0)
        else:
            raise Disagreement("a number was accepted that may not be used, or of a producer that is one too many")

    # Acknowledging ----------------------------------------------------------------------------------------------------

    def acknowledge(
        self,
        which: int,
        in_transaction: bool,
        names_subscription: bool,
        has_receipt: bool,
        starts_next: bool = False,
    ) -> None:
        letter = _one_of(self._answerable(), which)
        reader, session, subscription, transaction = self._answer_arguments(letter, in_transaction, names_subscription)
        ack = Ack(subscription, self.oracle.sequences[letter], transaction, self._dispatch_of(letter))
        others = [each for each in self._beginnable() if each.holder is not None and each.holder.peer is reader.peer]
        others = [each for each in others if each not in self.oracle.covered(letter)]
        if starts_next and transaction is None and others:
            ack.started = self._started(others[0])
            self.oracle.mark_started(others[0])
        note(f"engine.commands.acknowledge({reader.peer.name}, {ack})")
        self.engine.commands.acknowledge(session, ack)
        self.oracle.acknowledge(reader.peer, letter, transaction)
        if has_receipt:
            self.request_receipt(list(self.sessions).index(reader.peer))

    def keep(self, which: int) -> None:
        """A JMS client acknowledges a message in a transaction. The broker does nothing until COMMIT."""
        letter = _one_of(self._keepable(), which)
        assert letter.holder is not None
        peer = letter.holder.peer
        transaction = self._transaction(peer)
        note(f"# {peer.name} keeps {letter} for {transaction}")
        self.oracle.keep(peer, letter, transaction)

    def acknowledge_and_end(self, which: int) -> None:
        """In a transaction that is committed while what is left of the durable subscription is removed."""
        reader = _one_of(self._answerable(), which).holder
        durable = next((one for one in self.oracle.durables if reader is not None and one.queue == reader.queue), None)
        if durable is None:
            return
        assert reader is not None
        self.acknowledge(which, True, True, False)
        self.end_durable(list(self.sessions).index(reader.peer), durable.queue.split(",")[2])
        self.all_becomes_durable()
        self._commit(reader.peer, list(reader.peer.transactions)[-1])

    def acknowledge_and_read_on(self, which: int, is_written: bool, is_squeezed: bool) -> None:
        """The pages that are wanted then come before anything else, with or without the batch in flight; messages may
        leave memory on the way."""
        self.acknowledge(which, False, False, False)
        if self.disk.in_flight is None:
            self.take_batch()
        self._turn()
        if is_written and self.disk.in_flight is not None and not self.disk.is_written:
            self.batch_is_written()
        if self.disk.requested:
            self.read_page()
        if is_squeezed and self.oracle.may_evict:
            self.squeeze(0.99, False)
        self.all_pages_are_there()
        self._turn()

    def nack(
        self,
        which: int,
        in_transaction: bool,
        names_subscription: bool,
        delay: int | None,
        is_rejected: bool,
        cause: str = "",
    ) -> None:
        letter = _one_of(self._answerable(), which)
        reader, session, subscription, transaction = self._answer_arguments(letter, in_transaction, names_subscription)
        dispatch, sequence = self._dispatch_of(letter), self.oracle.sequences[letter]
        nack = Nack(subscription, sequence, transaction, delay, is_rejected, dispatch, cause)
        note(f"engine.commands.nack({reader.peer.name}, {nack})")
        self.engine.commands.nack(session, nack)
        self.oracle.nack(reader.peer, letter, transaction, NackOptions(delay, is_rejected, cause))

    def nack_acknowledged(self, which: int, delay: int | None, is_rejected: bool, cause: str = "") -> None:
        """In the transaction that has acknowledged it."""
        letter = _one_of(self._acknowledged_inside(), which)
        reader, work = letter.holder, letter.acknowledged_by
        assert reader is not None and work is not None
        sequence = self.oracle.sequences[letter]
        nack = Nack(reader.subscription, sequence, work.name, delay, is_rejected, self._dispatch_of(letter), cause)
        note(f"engine.commands.nack({reader.peer.name}, {nack})")
        self.engine.commands.nack(self.sessions[reader.peer], nack)
        self.oracle.nack_acknowledged(letter, NackOptions(delay, is_rejected, cause))

    @staticmethod
    def _dispatch_of(letter: Letter) -> int:
        """Return the dispatch as the `ack` header of the MESSAGE names it."""
        assert letter.holder is not None
        return letter.deliveries if letter.holder.peer.is_truenext_client else 0

    def _answer_arguments(
        self, letter: Letter, in_transaction: bool, names_subscription: bool
    ) -> tuple[Reader, ConnectionState, str | None, str | None]:
        reader = letter.holder
        assert reader is not None
        transaction = self._transaction(reader.peer) if in_transaction else None
        # STOMP 1.0 need not say it, and knows no rounds.
        subscription = reader.subscription if names_subscription or reader.peer.is_truenext_client else None
        return reader, self.sessions[reader.peer], subscription, transaction

    # Releasing and pulling --------------------------------------------------------------------------------------------

    def mark_started(self, which: int) -> None:
        letter = _one_of(self._beginnable(), which)
        assert letter.holder is not None
        peer, started = letter.holder.peer, self._started(letter)
        note(f"engine.commands.mark_started({peer.name}, {started})")
        self.engine.commands.mark_started(self.sessions[peer], started)
        self.oracle.mark_started(letter)

    def _started(self, letter: Letter) -> Started:
        assert letter.holder is not None
        return Started(letter.holder.subscription, self.oracle.sequences[letter], self._dispatch_of(letter))

    def release(
        self, peer_index: int, of: int, kept: int, names_others: bool, suspends: bool, aborts: bool, counts_all: bool
    ) -> None:
        """Release messages of a connection that holds some, if any does. `of` 0 is no subscription; `names_others` also
        names messages that are not held any more, or not by these subscriptions."""
        peer = _one_of(self._can_release(), peer_index)
        can_be = [each for each in self.oracle.readers if each.peer is peer and each.mode is not AckMode.AUTO]
        readers = _some_of(can_be, of) or (can_be if of else [])
        names: list[tuple[str, int, int]] = []
        for reader in can_be if names_others else readers:
            for letter in _some_of(self.oracle.unacknowledged(reader), kept):
                names.append((reader.subscription, self.oracle.sequences[letter], letter.deliveries))
        if names_others:
            names += self._names_not_held(peer)
        transactions = list(peer.transactions)
        transaction = _one_of(transactions, self.serial) if aborts and transactions else None
        request = Release([each.subscription for each in readers], names, suspends, transaction, counts_all)
        windows = self._windows()
        note(f"engine.commands.release({peer.name}, {request})")
        self.engine.commands.release(self.sessions[peer], request)
        self.oracle.release(peer, readers, names, suspends=suspends, transaction=transaction, counts_all=counts_all)
        if self._windows() != windows:
            raise Disagreement(f"automatic windows have learnt from it: {windows} became {self._windows()}")

    def _names_not_held(self, peer: Peer) -> list[tuple[str, int, int]]:
        """Return names of earlier dispatches, of messages in transactions, and of messages of other connections."""
        names: list[tuple[str, int, int]] = []
        for letter, sequence in self.oracle.sequences.items():
            held_by = letter.holder
            if held_by is None or held_by.peer is not peer:
                names.append((f"c{sequence % 2}", sequence, max(1, letter.deliveries)))
            elif letter.acknowledged_by or letter.nacked_by:
                names.append((held_by.subscription, sequence, letter.deliveries))
            elif letter.deliveries > 1:
                names.append((held_by.subscription, sequence, letter.deliveries - 1))
        return names

    def _windows(self) -> dict[Reader, int]:
        """Return the windows that the broker chooses."""
        consumers = {
            reader: self.sessions[reader.peer].consumers[reader.subscription] for reader in self.oracle.readers
        }
        return {reader: targets.window_of(one) for reader, one in consumers.items() if one.auto_window is not None}

    def wake(self, which: int) -> None:
        reader = _one_of(self._wakeable(), which)
        note(f'engine.commands.wake({reader.peer.name}, Wake("{reader.subscription}"))')
        self.engine.commands.wake(self.sessions[reader.peer], Wake(reader.subscription))
        self.oracle.wake(reader)

    def pull(self, which: int, messages: int, waits: bool, has_correlation: bool) -> None:
        reader = _one_of(self._pulling(), which)
        self._pull(reader, messages, waits, self._fresh("a") if has_correlation else None)

    def pull_for(self, which: int, messages: int, milliseconds: int) -> None:
        """C26.4: a pull request with a time."""
        reader = _one_of(self._pulling(), which)
        self._pull(reader, messages, True, self._fresh("a"), milliseconds)

    def _pull(self, reader: Reader, messages: int, waits: bool, correlation: str | None, wait_ms: int = 0) -> None:
        credit = Credit(reader.subscription, messages, waits, correlation, wait_ms)
        note(f"engine.commands.pull({reader.peer.name}, {credit})")
        withdrawn = self.engine.commands.pull(self.sessions[reader.peer], credit)
        answer = None if withdrawn is None else Ended(withdrawn.unused, withdrawn.correlation)
        if not messages:
            self.oracle.withdraw(reader, correlation, answer)
            return
        if answer is not None:
            raise Disagreement(f"{reader} has asked for more, and is told {answer}")
        self.oracle.pull(reader, messages, waits=waits, correlation=correlation, wait_ms=wait_ms)

    def pull_and_wait(self, which: int, messages: int) -> None:
        """Pull without other actions until all ready messages have come, or the end of the pull request is reported."""
        reader = _one_of(self._pulling(), which)
        self._pull(reader, messages, False, self._fresh("a"))
        for patience in reversed(range(ROUNDS_MAX)):
            self.everything_sent()
            self._turn()
            # The connection may be a stalled subscriber, whose end frees memory for others.
            if not reader.requested or reader.peer not in self.sessions:
                return
            self.all_pages_are_there()
            if patience < ROUNDS_MAX - 20:
                # A page that was read ahead of the engine is applied once the engine knows of the batch.
                self.all_becomes_durable()
        if self.oracle.is_full(reader.peer):
            return
        raise Disagreement(f"{reader} is neither given {reader.requested} more nor told that they do not come")

    def withdraw(self, which: int, has_correlation: bool, pulls_again: bool) -> None:
        """Rarely it is done with a subscription that has asked for nothing; one may ask anew before it has the
        answer."""
        pulling = [reader for reader in self._pulling() if reader.requested]
        reader = _one_of(pulling or self._pulling(), which)
        self._pull(reader, 0, True, self._fresh("a") if has_correlation else None)
        if pulls_again:
            self._pull(reader, 1, False, self._fresh("a"))

    def mark_rollback_only(self, which: int) -> None:
        """A frame of the transaction was refused, whatever it was."""
        peer, transaction = _one_of(self._doomable(), which)
        self._mark_rollback_only(peer, transaction)

    def _mark_rollback_only(self, peer: Peer, transaction: str) -> None:
        note(f'engine.doom({peer.name}, "{transaction}")')
        self.engine.commands.transactions.mark_rollback_only(self.sessions[peer], transaction)
        self.oracle.mark_rollback_only(peer, transaction)

    # What is refused --------------------------------------------------------------------------------------------------

    def send_invalid_request(self, peer_index: int, which: int, what: str) -> None:
        """Send a request that must be refused without effect; the connection ends, or the named transaction becomes
        rollback-only."""
        for other in range(len(self.sessions)):
            peer, session = self._peer(peer_index + other)
            found = self._invalid_request(peer, session, which, what)
            if found is not None:
                break
        else:
            return
        request, command, transaction = found
        note(f"engine.{request.__name__}({peer.name}, {command})  # is refused: {what}")
        try:
            request(session, command)
        except RemoteProtocolError:
            pass
        else:
            raise Disagreement(f"{peer.name} {what}, and is not refused: {command}")
        if not peer.is_truenext_client:
            self.disconnect(list(self.sessions).index(peer), False, 0)
        elif transaction is not None:
            self._mark_rollback_only(peer, transaction)

    def _invalid_request(
        self, peer: Peer, session: ConnectionState, which: int, what: str
    ) -> tuple[Callable[[ConnectionState, Any], object], object, str | None] | None:
        """Return the method to call, its command, and the transaction it names; None if that is not possible now."""
        readers = [each for each in self.oracle.readers if each.peer is peer]
        pulling = [each for each in readers if each.is_pulling]
        auto = [each for each in readers if each.mode is AckMode.AUTO]
        held = [each for each in self._answerable() if each.holder in readers]
        again = [each for each in held if each.deliveries > 1]
        works = [each for each in peer.transactions.values() if each.is_rollback_only]
        engine, sequences = self.engine, self.oracle.sequences
        transaction = _one_of([*peer.transactions, None], which)
        named = [each.subscription for each in readers if each.mode is not AckMode.AUTO]
        match what:
            case "acknowledges what is given back":
                released = [each for each in sequences if each.holder is None and each.deliveries]
                if readers and released:
                    letter, reader = _one_of(released, which), _one_of(readers, which)
                    ack = Ack(reader.subscription, sequences[letter], transaction, letter.deliveries)
                    return engine.commands.acknowledge, ack, transaction
            case "acknowledges an earlier dispatch" | "nacks an earlier dispatch" if again:
                letter = _one_of(again, which)
                assert letter.holder is not None
                arguments = (letter.holder.subscription, sequences[letter], transaction)
                earlier = letter.deliveries - 1
                if what == "acknowledges an earlier dispatch":
                    return engine.commands.acknowledge, Ack(*arguments, dispatch=earlier), transaction
                return engine.commands.nack, Nack(*arguments, dispatch=earlier), transaction
            case "begins an earlier dispatch" if again:
                letter = _one_of(again, which)
                assert letter.holder is not None
                return (
                    engine.commands.mark_started,
                    Started(letter.holder.subscription, sequences[letter], letter.deliveries - 1),
                    None,
                )
            case "acknowledges, and begins what it does not hold" if held:
                letter = _one_of(held, which)
                assert letter.holder is not None
                next_one = Started(letter.holder.subscription, sequences[letter] + 1000, 1)
                ack = Ack(letter.holder.subscription, sequences[letter], started=next_one)
                return engine.commands.acknowledge, ack, None
            case "begins what it does not hold" if readers:
                others = [
                    each for each in sequences if each.holder not in readers or each.acknowledged_by or each.nacked_by
                ]
                if others:
                    letter, reader = _one_of(others, which), _one_of(readers, which)
                    reader = letter.holder if letter.holder in readers else reader
                    return (
                        engine.commands.mark_started,
                        Started(reader.subscription, sequences[letter], letter.deliveries),
                        None,
                    )
            case "begins what it took without a word":
                received = [each for reader in auto for each in self.oracle.unacknowledged(reader)]
                if received:
                    letter = _one_of(received, which)
                    assert letter.holder is not None
                    return (
                        engine.commands.mark_started,
                        Started(letter.holder.subscription, sequences[letter], letter.deliveries),
                        None,
                    )
            case "answers once more what a transaction has":
                has = [each for one in peer.transactions.values() for each in [*one.acknowledged, *one.nacked]]
                has = [each for each in has if each.holder in readers]
                if has:
                    letter = _one_of(has, which)
                    assert letter.holder is not None
                    work = letter.acknowledged_by or letter.nacked_by
                    transaction = None if transaction == (work and work.name) else transaction
                    arguments = (letter.holder.subscription, sequences[letter], transaction)
                    if which % 2:
                        return engine.commands.acknowledge, Ack(*arguments), transaction
                    return engine.commands.nack, Nack(*arguments), transaction
            case "asks for too much" if pulling:
                reader = _one_of(pulling, which)
                too_many = REQUESTED_MAX + 1 - reader.requested
                return engine.commands.pull, Credit(reader.subscription, too_many), None
            case "asks though it does not pull":
                not_pulling = [each for each in readers if not each.is_pulling]
                if not_pulling:
                    return engine.commands.pull, Credit(_one_of(not_pulling, which).subscription, which % 2), None
            case "asks for nobody":
                return engine.commands.pull, Credit("nobody", which % 2), None
            case "wakes nobody":
                return engine.commands.wake, Wake("nobody"), None
            case "gives back of nobody" if peer.is_truenext_client:
                return engine.commands.release, Release([*named, "nobody"], [], True, transaction), transaction
            case "gives back what it took without a word" if auto and peer.is_truenext_client:
                names = [*named, _one_of(auto, which).subscription]
                return engine.commands.release, Release(names, [], True, transaction), transaction
            case "gives back what it is shown" if peer.is_truenext_client:
                browses = [each.subscription for each in self.browses if each.peer is peer]
                if browses:
                    return engine.commands.release, Release([*named, *browses], [], True, transaction), transaction
            case "gives back and aborts nothing" if peer.is_truenext_client:
                return engine.commands.release, Release(named, [], True, "gone"), "gone"
            case "gives back without being a truenext client" if not peer.is_truenext_client:
                return engine.commands.release, Release(named, []), None
            case "sends when its transaction is doomed" if works:
                send = Send(
                    parse_address("/queue/a", session.id), _message(self._parcel(4, True, None, False)), works[0].name
                )
                return engine.commands.send, send, works[0].name
            case "acknowledges when its transaction is doomed" if works and held:
                letter = _one_of(held, which)
                return engine.commands.acknowledge, Ack(None, sequences[letter], works[0].name), works[0].name
            case "nacks when its transaction is doomed" if works and held:
                letter = _one_of(held, which)
                return engine.commands.nack, Nack(None, sequences[letter], works[0].name), works[0].name
            case "nacks what it acknowledged when its transaction is doomed" if works:
                has = [each for each in works[0].acknowledged if each.holder in readers]
                if has:
                    letter = _one_of(has, which)
                    assert letter.holder is not None
                    nack = Nack(letter.holder.subscription, sequences[letter], works[0].name)
                    return engine.commands.nack, nack, works[0].name
            case "commits what is doomed" if works:
                numbered = self._repeatable() if which % 2 else []
                producer, number = _one_of(numbered, which) if numbered else (None, 0)
                return engine.commands.commit, Commit(works[0].name, producer, number), works[0].name
            case "begins anew what is doomed" if works:
                return engine.commands.begin, Begin(works[0].name, counts_all=not works[0].counts_all), works[0].name
        return None

    # Transactions -----------------------------------------------------------------------------------------------------

    def send_in_transaction(
        self, peer_index: int, sends: list[tuple[str, int, bool, int | None, bool]], commits: bool
    ) -> None:
        peer, _session = self._peer(peer_index)
        transaction = self._transaction(peer)
        for queue, priority, persistent, expires_in, is_big in sends:
            parcel = self._parcel(priority, persistent, expires_in, is_big)
            if not self._send_inside(peer_index, queue, parcel, transaction):
                return
        if commits:
            self._commit(peer, transaction)

    def commit(self, which: int, has_receipt: bool) -> None:
        peer, transaction = _one_of(self._open_transactions(), which)
        self._commit(peer, transaction)
        if has_receipt:
            self.request_receipt(list(self.sessions).index(peer))

    def commit_numbered(self, which: int, producer: str) -> None:
        peer, transaction = _one_of(self._open_transactions(), which)
        name = self._called(producer)
        numbered = self._numbered(name, Frame.COMMIT, self._next_number(name, Frame.COMMIT))
        if self._must_be_refused(numbered):
            self._commit_in_vain(list(self.sessions).index(peer), transaction, numbered)
            return
        self._commit(peer, transaction, numbered)

    def repeat_commit(self, peer_index: int, which: int, repeats_all: bool) -> None:
        """After a lost connection a client repeats a COMMIT whose fate it does not know, or the whole transaction."""
        peer, _session = self._peer(peer_index)
        producer, number = _one_of(self._repeatable(), which)
        transaction = self._fresh("t")
        numbered = self._numbered(producer, Frame.COMMIT, number)
        if repeats_all:
            self._begin(peer, transaction)
            if not self._send_inside(peer_index, "a", self._parcel(4, True, None, False), transaction):
                return
        is_nothing = not repeats_all and self.oracle.status_of(numbered) is NumberStatus.NEW
        if is_nothing or self._must_be_refused(numbered):
            self._commit_in_vain(peer_index, transaction, numbered)
            return
        self._commit(peer, transaction, numbered)
        self.request_receipt(peer_index)

    def repeat_commit_of_what_is_open(self, which: int, number: int, counts_all: bool) -> None:
        """A transaction ends under a number that was used already: nothing of it happens, whatever it acknowledged."""
        peer, transaction = _one_of(self._open_transactions(), which)
        producer, used = _one_of(self._repeatable(), number)
        peer_index = list(self.sessions).index(peer)
        numbered = self._numbered(producer, Frame.COMMIT, used)
        if self._must_be_refused(numbered):
            self._commit_in_vain(peer_index, transaction, numbered)
            return
        self._commit(peer, transaction, numbered, counts_all=counts_all)
        self.request_receipt(peer_index)

    def commit_what_is_neither_open_nor_recorded(self, peer_index: int, producer: str) -> None:
        name = self._called(producer)
        number = self._next_number(name, Frame.COMMIT)
        self._commit_in_vain(peer_index, "gone", Numbered(name, Frame.COMMIT, number))

    def _commit_in_vain(self, peer_index: int, transaction: str, numbered: Numbered) -> None:
        peer, session = self._peer(peer_index)
        note(f'engine.commands.commit({peer.name}, Commit("{transaction}", {numbered}))  # is refused')
        commit = _commit_of(transaction, numbered)
        self._expect_refusal(peer_index, lambda: self.engine.commands.commit(session, commit))

    def _send_inside(self, peer_index: int, queue: str, parcel: Parcel, transaction: str) -> bool:
        """Returns: False if open transactions take too much memory for one more send; its connection has ended then."""
        peer, session = self._peer(peer_index)
        message = _message(parcel)
        note(f'engine.commands.send({peer.name}, Send({queue}, {parcel}, "{transaction}"))')
        kept = [_size(_message(each)) for one in self.oracle.peers for each in one.parcels_in_transactions()]
        kept += [len(cause) for one in self.oracle.peers for cause in one.causes_in_transactions()]
        is_too_much = bool(kept) and sum(kept) + _size(message) > self.memory_limit // 4
        try:
            self.engine.commands.send(session, _send(parse_address(_address(queue), session.id), parcel, transaction))
        except NoSpaceError as error:
            if not is_too_much:
                raise Disagreement(f"there is room for {_size(message)} bytes beside {kept}") from error
            self.disconnect(peer_index, True, 0)
            return False
        if is_too_much:
            raise Disagreement(f"there is no room for {_size(message)} bytes beside {kept}")
        self.oracle.send(peer, queue, parcel, transaction)
        return True

    def send_without_room(
        self, which: int, queue: str, persistent: bool, surplus: int, level: DiskLevel, is_last: bool
    ) -> None:
        """Send a message larger by `surplus` bytes than is allowed, as far as possible; with `is_last` after the other
        copies of messages that the transaction has acknowledged are gone."""
        peer, transaction = _one_of(self._open_transactions(), which)
        if is_last:
            self._acknowledge_copies(peer.transactions[transaction])
        peer_index = list(self.sessions).index(peer)
        session = self.sessions[peer]
        least, most = self._freed_by(peer.transactions[transaction])
        parcel = self._parcel(4, persistent, None, False)
        size = self._largest_size(peer, transaction, queue, parcel, most)
        parcel = replace(parcel, size=max(0, size + surplus))
        sends = self._sends_with(peer, transaction, queue, parcel)
        must, may = (self.oracle.takes_as_much(sends, freed) for freed in (least, most))
        if level is not DiskLevel.NONE:
            must = may = level is DiskLevel.LITTLE
        note(f"engine.state.commit_state.disk_level = {level}  # {least} to {most} bytes are free")
        self.engine.state.commit_state.disk_level = level
        send = _send(parse_address(_address(queue), session.id), parcel, transaction)
        if contents := self.engine.commands.sending.contents_to_count(session, send):
            self.engine.commands.sending.count_contents(session, send, self.disk.content_references(contents))
        try:
            if must:
                self._send_inside(peer_index, queue, parcel, transaction)
            else:
                note(f'engine.commands.send({peer.name}, Send({queue}, {parcel}, "{transaction}"))  # {may=}')
                self.engine.commands.send(session, send)
        except NoSpaceError:
            if peer.is_truenext_client or peer.is_jms_client:
                self._mark_rollback_only(peer, transaction)
            else:
                self.disconnect(peer_index, True, 0)
        else:
            if not may:
                raise Disagreement(f"{parcel} is taken, though there is no room, and {transaction} frees {most} bytes")
            if not must:
                self.oracle.send(peer, queue, parcel, transaction)
        finally:
            self.engine.state.commit_state.disk_level = DiskLevel.PLENTY

    def _acknowledge_copies(self, work: Work) -> None:
        """Acknowledge the copies that other consumers hold of messages that the transaction has acknowledged."""
        copies = {order for letter in work.acknowledged for order in letter.copies}
        while others := [number for number, each in enumerate(self._answerable()) if each.order in copies]:
            self.acknowledge(
                others[0], in_transaction=False, names_subscription=False, has_receipt=False, starts_next=False
            )
        self.all_becomes_durable()

    def _freed_by(self, work: Work) -> tuple[int, int]:
        """C24.6: return the least and the most bytes on disk that the acknowledged messages of a transaction
        free; those not stored yet are uncertain."""
        stored, copies = self._stored_letters(), self.disk.copies()
        freed = unknown = 0
        shared: dict[int, list[int]] = {}
        for letter in work.acknowledged:
            if not letter.persistent:
                continue
            if letter not in stored:
                unknown += BIG
                continue
            each = stored[letter]
            size = _size(each.message) + MESSAGE_BYTES
            if each.content:
                freed += REFERENCE_BYTES
                shared.setdefault(each.content, []).append(size)
            else:
                freed += size
        freed += sum(sizes[0] for number, sizes in shared.items() if copies[number] == len(sizes))
        return freed, freed + unknown

    def _sends_with(self, peer: Peer, transaction: str, queue: str, parcel: Parcel) -> list[tuple[str, Parcel, int]]:
        sends = [*peer.transactions[transaction].sends, (queue, parcel)]
        return [(address, each, _size(_message(each))) for address, each in sends]

    def _largest_size(self, peer: Peer, transaction: str, queue: str, parcel: Parcel, freed: int) -> int:
        """Return the largest size that a send may have; 0 if it may not be sent."""
        low, high = 0, 2 * BIG
        while low < high:
            size = (low + high + 1) // 2
            if self.oracle.takes_as_much(self._sends_with(peer, transaction, queue, replace(parcel, size=size)), freed):
                low = size
            else:
                high = size - 1
        return 0 if low == 2 * BIG else low

    def abort(self, which: int, counts_all: bool) -> None:
        peer, transaction = _one_of(self._all_transactions(), which)
        counts_all &= not peer.is_jms_client  # C26.7
        abort = Abort(transaction, counts_all)
        note(f"engine.commands.abort({peer.name}, {abort})")
        self.engine.commands.abort(self.sessions[peer], abort)
        self.oracle.abort(peer, transaction, counts_all=counts_all)

    def _transaction(self, peer: Peer) -> str:
        """An open transaction; usually there is only one."""
        usable = [name for name, work in peer.transactions.items() if not work.is_rollback_only]
        if not usable or self.serial % 5 == 0:
            usable = [self._fresh("t")]
            self._begin(peer, usable[0])
        return usable[-1]

    def _begin(self, peer: Peer, transaction: str) -> None:
        begin = Begin(transaction, counts_all=self.serial % 3 > 0)
        note(f"engine.commands.begin({peer.name}, {begin})")
        self.engine.commands.begin(self.sessions[peer], begin)
        self.oracle.begin(peer, transaction, counts_all=begin.counts_all)

    def _commit(
        self, peer: Peer, transaction: str, numbered: Numbered | None = None, *, counts_all: bool = True
    ) -> None:
        note(f'engine.commands.commit({peer.name}, Commit("{transaction}", {numbered}, counts_all={counts_all}))')
        commit = _commit_of(transaction, numbered)
        commit.counts_all = counts_all
        if transaction in peer.transactions:
            for letter in self.oracle.kept(peer.transactions[transaction]):
                assert letter.holder is not None
                commit.acks = [*commit.acks, Ack(letter.holder.subscription, self.oracle.sequences[letter])]
            note(f"# with {commit.acks}")
        self.engine.commands.commit(self.sessions[peer], commit)
        _check_repeat(commit, self.oracle.commit(peer, transaction, numbered, counts_all=counts_all))
        if numbered is not None:
            self._later()

    # Time, sockets and disk -------------------------------------------------------------------------------------------

    def advance(self, milliseconds: int) -> None:
        self.oracle.steady_ms += milliseconds
        self.jump(milliseconds)

    def jump(self, milliseconds: int) -> None:
        """Set the wall clock."""
        self.oracle.now_ms += milliseconds
        self._tick()

    def stretch_windows(self, milliseconds: int) -> None:
        """Advance the time, and double the windows that were full for long enough."""
        self.advance(milliseconds)
        note("engine.stretch_windows()")
        for _ in self.engine.stretch_windows():
            pass

    def turn(self) -> None:
        """A turn whose messages the sockets do not take yet."""
        self._turn()
        if self.evicts:
            self.evict()

    def turn_and_send(self) -> None:
        self.turn()
        self.everything_sent()

    def all_sent(self, peer_index: int) -> None:
        peer, session = self._peer(peer_index)
        note(f"engine.commands.on_all_sent({peer.name})")
        self.engine.commands.on_all_sent(session)
        self.oracle.all_sent(peer)

    def everything_sent(self) -> None:
        for peer_index in range(len(self.sessions)):
            self.all_sent(peer_index)

    def take_batch(self) -> None:
        note("batch = engine.take_batch()")
        batch = self.engine.take_batch()
        if batch is not None:
            self._check_counts(batch.history)
            names = self.disk.queue_names | {number: name for number, name in batch.queues.items() if name}
            self.disk.queue_names = names
            records = batch.puts | batch.transient_puts
            puts = [
                (key, decode_record(key, record, records.get(content_key(referenced_content_number(record)), b"")))
                for key, record in records.items()
                if not key.startswith(CONTENTS_LANE_KEY)
            ]
            puts = [
                (key, message) for key, message in puts if not (self.disk.has_ended(key) or self.disk.is_hidden(key))
            ]
            for key, message in puts:
                label = _label(message, sequence_of(key))
                self.oracle.arrived(label, self.disk.queue_names[split_lane_key(key[:-8])[0]])
            self.oracle.saw_batch([self._stored_letter(key, message) for key, message in puts])
            self.disk.submit(batch)
        self.oracle.take_batch(is_there=batch is not None, is_empty=batch is None or batch.is_empty())

    def _check_counts(self, history: bytes) -> None:
        self.counts.add(history)
        if wrong := self.counts.differing():
            raise Disagreement(f"the counts differ from the history: {wrong}")

    def batch_is_written(self) -> None:
        """Pages show it from now on; the engine does not know yet."""
        note("store.apply(batch)")
        self.disk.write()

    def batch_becomes_durable(self) -> None:
        batch = self.disk.done()
        note("engine.committed(batch)")
        self.engine.store_results.on_committed(batch)
        self.committed = batch.number
        self.oracle.committed()
        self._report_due()
        self._compare_store()

    def all_becomes_durable(self) -> None:
        if self.disk.in_flight is not None:
            self.batch_becomes_durable()
        self.take_batch()
        if self.disk.in_flight is not None:
            self.batch_becomes_durable()
        self.turn()

    # Pages and memory -------------------------------------------------------------------------------------------------

    def read_page(self) -> None:
        """Read a page; its contents are fixed now, and the engine gets it later."""
        read, page = self.disk.read()
        note(f"# {read.lane.queue.name} is read after {read.after_sequence}, at most {read.limit}: {_sketch(page)}")

    def deliver_page(self) -> None:
        read, page = self.disk.next_page(self.committed)
        note(f"engine.store_results.on_page_read({read.lane.queue.name}, {_sketch(page)})")
        self.engine.store_results.on_page_read(read, page)
        self._report_due()

    def all_pages_are_there(self) -> None:
        while self.disk.has_page:
            self.deliver_page()
        while self.disk.requested:
            self.read_page()
            self.deliver_page()
        while self.disk.has_timers:
            self.deliver_timers()
        while self.disk.requested_timers:
            self.read_timers()
            self.deliver_timers()

    def read_timers(self) -> None:
        read, page = self.disk.read_timers()
        note(f"# timers are read after {read.after.hex()}: {page}")

    def deliver_timers(self) -> None:
        note("engine.store_results.on_timers_read(...)")
        self.engine.store_results.on_timers_read(*self.disk.next_timers())

    def evict(self) -> None:
        note("engine.evict()")
        for session, why in self.engine.evict().items():
            # C24.13: what waits in a subscription leaves memory; C24.16: there are no reply queues here.
            peer = next(peer for peer, one in self.sessions.items() if one is session)
            if max(self._sizes_by_subscription(peer, is_least=False), default=0) <= self.policy.memory_limit:
                raise Disagreement(f"{peer.name} is to be ended: {why}")
            self.disconnect(list(self.sessions).index(peer), False, 0)

    def _sizes_by_subscription(self, peer: Peer, *, is_least: bool) -> list[int]:
        """Bytes of memory that what is in each subscription to a topic would take, at least or at most."""
        return [
            sum(
                size_of(_message(each.parcel))
                + (0 if is_least else causes_size(causes_from_store(Causes(*each.causes))))
                for each in kept
                if not (is_least and self.oracle.is_expired(each))
            )
            for kept in self.oracle.stored_for_subscriptions(peer).values()
        ]

    def send_and_nack(
        self, peer_index: int, priority: int, persistent: bool, which: int, delay: int | None, is_rejected: bool
    ) -> None:
        self.send(peer_index, "a", priority, persistent, None, False, 2, False)
        self.all_becomes_durable()
        self.all_pages_are_there()
        self.everything_sent()
        self.turn()
        if self._answerable():
            self.nack(which, False, False, delay, is_rejected)

    def redrive_at_once(self, queue: str) -> None:
        self.read_for_redrive(queue, 500)
        if self.redriving is not None:
            self.redrive(500)

    def read_for_redrive(self, queue: str, limit: int) -> None:
        """Read a page for a re-drive. Empty lanes and lanes that show nothing are skipped."""
        if self.oracle.may_evict and queue.startswith("DLQ.h"):
            # What is handled arrives in the same queue, once it was read: nobody can see when that was.
            return
        if queue not in {each.name for each in self.engine.queues.by_name.values()}:
            return
        after: tuple[int, int] | None = (0, 0)
        while after is not None:
            piece = Redrive(queue, limit=limit, after=after)
            read = self.engine.tasks.bulk_pieces.next_read(piece)
            if read is None:
                return
            page = self.disk.read_at_once(read)
            if page.messages:
                note(f"# to be moved from {queue}: {_sketch(page)}")
                self.redriving = read, page
                return
            self.engine.tasks.bulk_pieces.execute(piece, read, page)
            rank = read.lane.rank
            after = (rank + 1, 0) if rank < 9 else None

    def redrive(self, limit: int) -> None:
        """Re-drive with the page read before; other actions may have happened since."""
        assert self.redriving is not None
        read, page = self.redriving
        self.redriving = None
        shown = [found.sequence for found in page.messages][:limit]
        note(f"engine.redrive({shown}, {_sketch(page)})")
        answer = self.engine.tasks.bulk_pieces.execute(
            Redrive(read.lane.queue.name, sequences=tuple(shown)), read, page
        )
        self.oracle.redriven(shown, answer.sequences)

    def schedule(self, peer_index: int, queue: str, priority: int, persistent: bool, delays: list[int]) -> None:
        peer, session = self._peer(peer_index)
        for delay in delays:
            # Some have a time to live, too long to end here: from which time it is counted can be seen all the same.
            parcel = self._parcel(priority, persistent, YEAR_MS if self.serial % 3 == 0 else None, False)
            destination = parse_address(_address(queue), session.id)
            note(f"engine.commands.send({peer.name}, Send({destination.address}, {parcel}), in {delay} ms)")
            # Some say after how long, others when.
            if self.serial % 2:
                schedule = Schedule(delay_ms=delay, ttl_ms=parcel.ttl_ms)
            else:
                schedule = Schedule(due_ms=self.oracle.now_ms + delay, ttl_ms=parcel.ttl_ms)
            self.engine.commands.send(session, Send(destination, _message(parcel), schedule=schedule))
            planned = destination.address if destination.is_multi_queue else queue
            self.oracle.schedule(peer, planned, parcel, delay)

    def read_scheduled(self, queue: str, rank: int) -> None:
        """The page of a piece, at the first lane from `rank` on that has anything."""
        if queue in targets.names_of_scheduled(self.engine):
            read = self._read_scheduled(Unschedule(queue, after=(rank, 0)))
            if read is not None:
                page = self.disk.read_at_once(read)
                note(f"# to be cancelled of {queue}: {_sketch(page)}")
                self.cancelling = read, page

    def _read_scheduled(self, request: ScheduledRequest) -> BulkRead | None:
        """Once all is durable that was accepted."""
        if not self.engine.tasks.bulk_pieces.freeze_scheduled():
            self.all_becomes_durable()
            if not self.engine.tasks.bulk_pieces.freeze_scheduled():
                raise Disagreement("what is durable is waited for")
        return self.engine.tasks.bulk_pieces.next_read(request)

    def unschedule(self, selector: str | None, limit: int | None) -> None:
        """Cancel sends with the page read before; other actions may have happened since."""
        assert self.cancelling is not None
        read, page = self.cancelling
        self.cancelling = None
        priorities = set(range(10) if selector is None else SELECTORS[selector])
        queue = read.lane.queue.name.removeprefix(HIDDEN_PREFIX)
        here = self.oracle.planned_of(queue, [_label(_body_of(found)) for found in page.messages], priorities)[:limit]
        request = Unschedule(queue, selector=selector, limit=limit)
        note(f"engine.tasks.bulk_pieces.execute({request}, {_sketch(page)})")
        answer = self.engine.tasks.bulk_pieces.execute(request, read, page)
        self.oracle.cancelled(here, answer.count)

    def show_scheduled(self, queue: str) -> None:
        """List all stored scheduled sends page by page, without other actions in between."""
        if queue not in targets.names_of_scheduled(self.engine):
            return
        request = ListScheduled(queue)
        shown: list[tuple[str, int]] = []
        while (read := self._read_scheduled(request)) is not None:
            answer = self.engine.tasks.bulk_pieces.execute(request, read, self.disk.read_at_once(read))
            assert isinstance(answer, ShownSends)
            shown += [(each.body[:12].rstrip("."), each.due_ms) for each in answer.sends]
            if answer.next is None:
                break
            request = structs.replace(request, after=answer.next, until=answer.until)
        note(f"# scheduled for {queue}: {shown}")
        self.oracle.check_shown_plans(queue, shown)

    def read_for_bulk(self, queue: str, rank: int, selector: str | None) -> None:
        """The page of a piece, at the first lane from `rank` on that has anything."""
        if self.oracle.is_any_on_its_way_to(queue) or queue not in {
            each.name for each in self.engine.queues.by_name.values()
        }:
            return
        read = self.engine.tasks.bulk_pieces.next_read(Purge(queue, after=(rank, 0)))
        if read is not None:
            page = self.disk.read_at_once(read)
            note(f"# to be taken from {queue}: {_sketch(page)}, and what is in memory")
            self.piece = read, page, selector, list(self.oracle.letters)

    def do_bulk(self, to: str | None, limit: int | None) -> None:
        """Do bulk work with the page read before; other actions may have happened since."""
        assert self.piece is not None
        read, page, selector, letters = self.piece
        self.piece = None
        queue, rank = read.lane.queue.name, read.lane.rank
        if to == queue:
            to = None
        priorities = set(range(10) if selector is None else SELECTORS[selector]) & {9 - rank}
        here = [each for each in self.oracle.bulk_candidates(queue, priorities) if each in letters]
        if not page.is_end:
            last = self.oracle.letter(_label(_body_of(page.messages[-1])), queue)
            here = [each for each in here if each.order <= last.order]
        here = here[:limit]
        request: BulkCommand = Purge(queue, selector=selector, limit=limit)
        if to is not None:
            request = Move(queue, selector=selector, limit=limit, to=to)
        note(f"engine.tasks.bulk_pieces.execute({request}, {_sketch(page)})")
        answer = self.engine.tasks.bulk_pieces.execute(request, read, page)
        self.oracle.bulk_done(here, answer.count, to)

    def move_at_once(self, queue: str, to: str, is_dry: bool) -> None:
        if to != queue:
            self._all_pieces(Move(queue, to=to, dry_run=is_dry), range(10), to)

    def purge_at_once(self, queue: str, selector: str) -> None:
        self._all_pieces(Purge(queue, selector=selector), SELECTORS[selector], None)

    def _all_pieces(self, request: BulkCommand, priorities: range, to: str | None) -> None:
        """Do all pieces of bulk work on the stored messages, without other actions in between."""
        if request.queue not in {each.name for each in self.engine.queues.by_name.values()}:
            return
        here = self.oracle.bulk_candidates(request.queue, priorities)
        moved = 0
        while (read := self.engine.tasks.bulk_pieces.next_read(request)) is not None:
            answer = self.engine.tasks.bulk_pieces.execute(request, read, self.disk.read_at_once(read))
            moved += answer.count
            if answer.next is None:
                break
            request = structs.replace(request, after=answer.next, until=answer.until)
        note(f"# {moved} are taken by {request}")
        if request.dry_run and moved == len(here):
            here, moved = [], 0
        self.oracle.bulk_done(here, moved, to)

    def pause(self, queue: str) -> None:
        if "," in queue and queue not in {each.name for each in self.engine.queues.by_name.values()}:
            # Other queues are made for that.
            return
        note(f'engine.commands.administering.pause("{queue}")')
        self.engine.commands.administering.pause(queue)
        self.oracle.pause(queue, is_paused=True)

    def resume(self, which: int) -> None:
        queue = _one_of(sorted(self.oracle.paused), which)
        note(f'engine.commands.administering.resume("{queue}")')
        self.engine.commands.administering.resume(queue)
        self.oracle.pause(queue, is_paused=False)

    def page_shows_what_the_engine_does_not_know(self) -> None:
        if not self.disk.is_written:
            self.batch_is_written()
        self.all_pages_are_there()

    def change_memory(self, limit: int) -> None:
        note(f"engine.state.memory.limit = {limit}")
        self.engine.state.memory.limit = self.memory_limit = limit
        self.oracle.may_evict |= limit < NO_LIMIT

    def change_policies(
        self,
        attempts_max: int,
        limit_of_a_queue: int | None,
        page_size: int,
        store_and_dispatch: StoreAndDispatch,
        expired: ExpiryAction,
    ) -> None:
        """`limit_of_a_queue` None leaves it: most examples are to have no limit, or always one."""
        if not self.oracle.can_be_spared:
            attempts_max = min(attempts_max, self.policy.attempts_max)
        limit = self.policy.memory_limit if limit_of_a_queue is None else limit_of_a_queue
        self.policy = replace(
            self.policy,
            attempts_max=attempts_max,
            memory_limit=limit,
            page_size=page_size,
            store_and_dispatch=store_and_dispatch,
            expired=expired,
        )
        note(f"engine.commands.administering.change_policies(Policies({self.policy}))")
        self.engine.commands.administering.change_policies(Policies(self.policy))
        self.oracle.may_evict |= limit < NO_LIMIT
        expired_move = expired is ExpiryAction.DEAD_LETTER
        self.oracle.may_evict |= expired_move
        self.oracle.change_policies(
            attempts_max,
            is_concurrent=store_and_dispatch is StoreAndDispatch.CONCURRENT,
            expired_move=expired_move,
        )

    def squeeze(self, share: float, is_written: bool) -> None:
        """Limit the memory to a share of the used one for a moment; evicted messages are written at once or not."""
        self.engine.state.memory.limit = int(
            (self.engine.state.memory.message_bytes + self.engine.state.memory.deque_bytes) * share
        )
        note(f"engine.state.memory.limit = {self.engine.state.memory.limit}")
        self.evict()
        note(f"engine.state.memory.limit = {self.memory_limit}")
        self.engine.state.memory.limit = self.memory_limit
        if is_written:
            self.all_becomes_durable()

    def remove_unused(self, milliseconds: int) -> None:
        """Remove unused queues at any moment."""
        if milliseconds:
            self.advance(milliseconds)
        before = self._ordinary()
        note("engine.remove_unused_queues()")
        self.engine.remove_unused_queues()
        for queue in before - self._ordinary():
            self.oracle.queue_removed(queue)
            if any(each is not None and each[0].lane.queue.name == queue for each in (self.redriving, self.piece)):
                raise Disagreement(f"{queue} has gone, though a piece of it was read that is to be moved")

    def remove_all_unused(self) -> None:
        """With nothing under way what can go does."""
        self.settle()
        self.remove_unused(61_000)
        self.settle()
        self.remove_unused(61_000)
        self.settle()
        for queue in self._ordinary():
            if not self.oracle.needs(queue):
                raise Disagreement(f"nobody needs {queue}, and it stays")
        if orphaned := orphaned_names(self.engine, self.disk.queue_names):
            raise Disagreement(f"the store knows queues that are no more: {orphaned}")

    def _ordinary(self) -> set[str]:
        return {queue.name for queue in self.engine.queues.by_name.values() if not queue.is_temporary}

    def settle(self) -> None:
        """End all work that was started: no queue may be stuck then, and memory must be within its limit."""
        if self.redriving is not None:
            self.redrive(500)
        if self.piece is not None:
            self.do_bulk("b", None)
        if self.cancelling is not None:
            self.unschedule(None, None)
        for _ in range(ROUNDS_MAX):
            self.all_pages_are_there()
            self.everything_sent()
            has_done = self._turn()
            if self.disk.in_flight is None:
                self.take_batch()
            if self.disk.in_flight is not None:
                self.batch_becomes_durable()
                has_done = True
            if not has_done:
                self.evict()
                is_reading = self.disk.requested or self.disk.requested_timers
                if not (self.engine.has_work or self.engine.state.commit_state.has_batch or is_reading):
                    break
        else:
            raise Disagreement("the broker never comes to rest")
        self.oracle.check_idle()
        for peer in self.sessions:
            if max(self._sizes_by_subscription(peer, is_least=True), default=0) > self.policy.memory_limit:
                raise Disagreement(f"{peer.name} keeps more than {self.policy.memory_limit} bytes, and is not ended")
        if self.oracle.browses:
            raise Disagreement(f"browses never end: {self.oracle.browses}")
        for queue in self.engine.queues.by_name.values():
            at_least, at_most = self.oracle.waiting(queue.name)
            if not at_least <= queue.waiting_count() <= at_most:
                raise Disagreement(f"{queue.name} counts {queue.waiting_count()} messages, not {at_least} to {at_most}")
        self._check_remainder(self._count_to_the_end(), is_at_rest=True)
        for name in targets.names_of_scheduled(self.engine):
            planned = self.oracle.count_planned(name)
            if self.engine.queues.scheduled_count(name) != planned:
                raise Disagreement(
                    f"{name} counts {self.engine.queues.scheduled_count(name)} scheduled sends, not {planned}"
                )
        if wrong := not_evicted(self.engine, self.policy):
            raise Disagreement(f"still in memory: {wrong}")

    # Drains -----------------------------------------------------------------------------------------------------------

    def _count_to_the_end(self) -> Remainder:
        counting = count_remainder(self.engine)
        while True:
            try:
                next(counting)
            except StopIteration as end:
                found: Remainder = end.value
                return found

    def _count_a_step(self) -> None:
        """Count what a drain waits for, a step at a time between actions. C31.5: if nothing is found, and none was
        missed, nothing is left."""
        if self.counting is None or self.counting[0] is not self.engine:
            self.counting = self.engine, count_remainder(self.engine)
        try:
            next(self.counting[1])
        except StopIteration as end:
            self.counting = None
            if end.value.is_certain and end.value.is_empty:
                self._check_remainder(end.value, is_at_rest=False)

    def _check_remainder(self, found: Remainder, *, is_at_rest: bool) -> None:
        if is_at_rest and not found.is_certain:
            raise Disagreement("nothing happens, and a drain does not know whether it has missed a message")
        by_name = {queue.name: each for queue, each in found.queues.items()}
        totals: dict[str, list[int]] = {"dead": [0, 0], "paused": [0, 0], "delayed": [0, 0]}
        for name in {letter.queue for letter in self.oracle.letters} | by_name.keys():
            expected = self.oracle.left(name, is_at_rest=is_at_rest)
            each = by_name.get(name, QueueRemainder())
            for kind, count in {"waiting": each.waiting, "held": each.held}.items():
                least, most = expected[kind]
                if not least <= count <= most:
                    raise Disagreement(f"a drain waits for {count} {kind} of {name}, not {least} to {most}")
            for kind, total in totals.items():
                total[0] += expected[kind][0]
                total[1] += expected[kind][1]
        if is_at_rest:
            for kind, (least, most) in totals.items():
                if not least <= getattr(found, kind) <= most:
                    raise Disagreement(f"a drain says that {getattr(found, kind)} are {kind}, not {least} to {most}")

    # Restarts ---------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """The broker ends without a word, and begins again."""
        note("# crash")
        self._crash()
        self._connect_all(self.readers)

    def _crash(self) -> None:
        self.oracle.crash(has_written=self.disk.is_written)
        self._start_recovered(self.disk.restart())

    def restart(self) -> None:
        """The broker ends as Broker.stop does it, and begins again."""
        self._restart()
        self._connect_all(self.readers)

    def _restart(self) -> None:
        self._drain()
        self._stop()
        self.oracle.restart()
        self._start_recovered(self.disk.restart())

    def _start_recovered(self, recovered: Recovered) -> None:
        self.oracle.recovered_queues({name for name in recovered.queues.values() if "," not in name})
        self.oracle.recovered([self._stored_letter(key, each.message)[0] for key, each in self.disk.contents().items()])
        self._start_run(recovered)

    def _drain(self) -> None:
        self._turn()
        while self.disk.in_flight is not None or self.engine.state.commit_state.has_batch:
            if self.disk.in_flight is None:
                self.take_batch()
            if self.disk.in_flight is not None:
                self.batch_becomes_durable()
            self._turn()

    def teardown(self) -> None:
        """Let all work end; then restart the broker, and dispatch all remaining messages."""
        if self.is_over or not hasattr(self, "engine"):
            return
        with self._comparing():
            self.settle()
            if self.serial % 5:
                while self.oracle.paused:
                    self.resume(0)
            if self.serial % 2:
                self._crash()
            else:
                self._restart()
            if self.serial % 3:
                self.advance(8 * DAY_MS)
            while self.oracle.paused:
                self.resume(0)
            self._connect_all(
                [
                    {"peer_index": 0, "queue": each, "mode": AckMode.INDIVIDUAL, "window": None} | PLAIN
                    for each in self.ALL_QUEUES
                ]
            )
            self.settle()
            self._audit()

    # Comparing --------------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Returns: whether anything came of it."""
        note("engine.turn.run()")
        waited: dict[BrokerConsumer, int] = {}
        asked = {} if self.engine.state.commit_state.active_work else self._ask_all()
        with _record_waiting(self.engine, waited):
            effects = self.engine.turn.run()
            for queue in self.engine.queues.by_name.values():
                if queue.has_groups:
                    _query_waiting(self.engine, queue)
        self.held.add(effects.deliveries)
        self._check_asked(asked, effects.deliveries)
        self._learn_windows()
        self._learn_joins()
        names = {(reader.peer.name, reader.subscription): reader for reader in self.oracle.readers}
        dispatched: dict[Reader, list[Seen]] = {}
        for consumer, entries in effects.deliveries.items():
            reader = names.get((consumer.session.id, consumer.subscription))
            if reader is None or (consumer.queue is not None and reader.queue != consumer.queue.name):
                raise Disagreement(f"a dispatch to {consumer.session.id}/{consumer.subscription}, which has ended")
            dispatched[reader] = [_seen(entry, entry.lane.queue.name) for entry in entries]
        answered = []
        for session, answer in effects.answers:
            assert isinstance(answer, Receipt)
            answered.append((session.id, answer.receipt))
        self.disk.request(effects.reads)
        self.disk.requested_timers.extend(effects.timer_reads)
        self.oracle.scanning = {
            (queue.name, text): rank
            for queue, selecting in self.engine.queues.selections.by_queue.items()
            if selecting.groups is None
            for text, scan in selecting.scans.items()
            if (rank := _waits_at(scan)) is not None
        }
        self.oracle.scanning_for = {
            queue.name: {
                names[consumer.session.id, consumer.subscription]: rank
                for consumer in self.engine.state.clients.receivers_of(queue).all()
                if consumer.is_subscribed and (rank := waited.get(consumer)) is not None
            }
            for queue in self.engine.queues.by_name.values()
            if queue.has_groups
        }
        reading = self.disk.reading()
        self.oracle.unfinished = {
            names.get((consumer.session.id, consumer.subscription))
            for consumer in targets.to_be_dispatched(self.engine)
        }
        note(
            f"# answers: {answered}; deliveries: {dispatched}; reading: {reading}, {self.oracle.scanning}, "
            f"{self.oracle.scanning_for}"
        )
        ended = [
            (self.names[each.consumer.session.id, each.consumer.subscription], Ended(each.unused, each.correlation))
            for each in effects.ended_pull_requests
        ]
        note(f"# wishes that have ended: {ended}")
        self.oracle.check_turn(dispatched, answered, reading, ended)
        self._check_browses(effects.browse_slices)
        return any(effects)

    def _ask_all(self) -> dict[BrokerConsumer, Entry | WaitReason]:
        """Ask what is next for each consumer."""
        consumers = (consumer for session in self.sessions.values() for consumer in session.consumers.values())
        return {consumer: _ask(self.engine, consumer) for consumer in consumers}

    def _check_asked(
        self, asked: dict[BrokerConsumer, Entry | WaitReason], deliveries: dict[BrokerConsumer, list[Entry]]
    ) -> None:
        """Compare the answers from before a turn, if background tasks had no work, with the first dispatch of each
        plain queue, and check that nothing can be dispatched now, unless the engine goes on with another turn."""
        first: dict[Queue, tuple[tuple[int, int], Entry, BrokerConsumer]] = {}
        for consumer, entries in deliveries.items():
            queue = consumer.queue
            if queue is not None and queue.observer is None and not queue.has_wildcards:
                found = (entries[0].lane.rank, entries[0].sequence), entries[0], consumer
                first[queue] = min(found, first.get(queue, found), key=lambda one: one[0])
        for _, entry, consumer in first.values():
            answer = asked.get(consumer, entry)
            has_expired = isinstance(answer, Entry) and answer.message is None
            # The turn itself may have adjusted the window.
            if answer is not entry and answer is not WaitReason.NO_CREDIT and not has_expired:
                raise Disagreement(f"{consumer.subscription} is given {entry.sequence}, and {answer} was said before")
        for consumer, answer in self._ask_all().items() if not self.engine.has_work else ():
            if isinstance(answer, Entry):
                raise Disagreement(f"{answer.sequence} is next for {consumer.subscription}, and was not dispatched")

    def _learn_windows(self) -> None:
        """The size of an automatic window is the broker's own affair, within limits."""
        for reader in self.oracle.readers:
            consumer = self.sessions[reader.peer].consumers.get(reader.subscription)
            if consumer is None:
                raise Disagreement(f"the broker has ended {reader}")
            if consumer.auto_window is not None and not reader.is_pulling:
                reader.window, reader.is_stretched = targets.window_of(consumer), consumer.auto_window.is_stretched
                if not 1 < reader.window <= 1000:
                    raise Disagreement(f"{reader} has an automatic window of {reader.window}")

    def _learn_joins(self) -> None:
        """Learn which of its queues a wildcard consumer has joined, until it has joined all."""
        for reader in self.oracle.readers:
            if reader.is_of_many:
                consumer = self.sessions[reader.peer].consumers[reader.subscription]
                assert isinstance(consumer, Wildcard)
                names = {queue.name for queue in consumer.all_queues()}
                reader.joined = names if consumer.is_joining else None

    def _check_browses(self, browse_slices: list[BrowseSlice]) -> None:
        shown: dict[OpenBrowse, list[Seen]] = {}
        ended = []
        browses = {(browse.peer.name, browse.subscription): browse for browse in self.browses}
        for browser, entries, is_end in browse_slices:
            browse = browses.get((browser.session.id, browser.subscription))
            if browse is None:
                raise Disagreement(f"{browser.session.id}/{browser.subscription} is shown {entries}, and has ended")
            shown[browse] = [_seen(entry, browser.queue.name, is_browse=True) for entry in entries]
            ended += [browse] if is_end else []
        note(f"# shown: {shown}, ended: {ended}")
        self.oracle.check_browses(shown, ended)

    def _compare_store(self) -> None:
        """A crash now: what would be found, and would it be what the contract promises?"""
        must, may = self.oracle.stored()
        found = self._stored_letters()
        plans = sorted(each.parcel.label for each in self.oracle.stored_plans())
        if plans != (stored := sorted(map(_label, self.disk.hidden()))):
            raise Disagreement(f"scheduled in the store are {stored}; by the contract {plans}")
        if wrong := self.disk.wrong_contents():
            raise Disagreement(f"contents are said to have, and have, so many references: {wrong}")
        lost = [letter for letter in must if letter not in found]
        undead = [letter for letter in found if letter not in must and letter not in may]
        if lost or undead:
            raise Disagreement(f"in the store are missing {lost}, and should not be {undead}")
        for letter in must:
            mark, written = found[letter].mark, self.oracle.stored_state(letter)
            is_right = mark.attempts == written.attempts and found[letter].causes == written.causes
            if self.oracle.is_waiting_for_next_try(letter) and written.due_ms:
                is_right = mark.due_ms == written.due_ms
            if letter.persistent and not is_right:
                raise Disagreement(f"{letter} has {mark} in the store: {letter.written}")

    def _stored_letters(self) -> dict[Letter, Stored]:
        return {self._stored_letter(key, each.message)[0]: each for key, each in self.disk.contents().items()}

    def _stop(self) -> None:
        """C18.2, C16.2: after a clean stop the waiting transients survive too, at their places."""
        note("engine.commands.connecting.stop()")
        self.engine.commands.connecting.stop()
        for peer in list(self.oracle.peers):
            self.oracle.disconnect(peer, is_clean=True)
        self._drain()
        with pytest.MonkeyPatch.context() as patch:
            # Hardly more than one message in each.
            targets.STORE_TRANSACTION_BYTES_MAX.replace(patch, 100)
            for batch in self.engine.lifespan.final_batches():
                self.disk.submit(batch)
                self.engine.store_results.on_committed(self.disk.done())
                # What was wanted before goes on.
                self.all_pages_are_there()
                self.engine.turn.run()
                self.engine.evict()
        here = [letter for letter in self.oracle.letters if not letter.is_removed or self.oracle.is_moving(letter)]
        alive = [letter for letter in here if not self.oracle.is_expired(letter)]
        found = {}
        for key, each in self.disk.contents().items():
            letter, sequence = self._stored_letter(key, each.message)
            self.oracle.saw_sequence(letter, sequence)
            found[letter] = each
        if not set(alive) <= found.keys() <= set(here):
            raise Disagreement(f"after a clean stop there are {list(found)}; waiting were {alive}")
        for letter in alive:
            each = found[letter]
            is_right = letter.deliveries == each.mark.deliveries or letter.least_deliveries is not None
            # What is to be dead-lettered waits for nothing.
            waits = self.oracle.is_waiting_for_next_try(letter) and not self.oracle.must_be_dead_lettered(letter)
            due_ms = self.oracle.now_ms + letter.due - self.oracle.steady_ms
            is_right &= not waits or each.mark.due_ms == due_ms
            if not is_right or letter.attempts != each.mark.attempts or letter.causes != each.causes:
                raise Disagreement(f"after a clean stop {letter} is {found[letter]}: {vars(letter)}")

    def _stored_letter(self, key: bytes, message: SentMessage) -> tuple[Letter, int]:
        queue, rank = split_lane_key(key[:-8])
        letter = self.oracle.letter(_label(message, sequence_of(key)), self.disk.queue_names[queue])
        is_right = (rank, message.persistent, message.expires_ms) == (
            letter.key[0],
            letter.persistent,
            letter.parcel.expires_ms,
        )
        if not is_right:
            raise Disagreement(f"{letter} is stored with rank {rank} as {message}: {vars(letter)}")
        return letter, sequence_of(key)

    # Choosing ---------------------------------------------------------------------------------------------------------

    def _peer(self, peer_index: int) -> tuple[Peer, ConnectionState]:
        return _one_of(list(self.sessions.items()), peer_index)

    def _answerable(self) -> list[Letter]:
        return [
            letter
            for reader in self.oracle.readers
            if reader.mode is not AckMode.AUTO
            for letter in self.oracle.answerable(reader)
        ]

    def _all_transactions(self) -> list[tuple[Peer, str]]:
        return [(peer, transaction) for peer in self.sessions for transaction in peer.transactions]

    def _open_transactions(self) -> list[tuple[Peer, str]]:
        """Return the open transactions that are not rollback-only."""
        return [each for each in self._all_transactions() if not each[0].transactions[each[1]].is_rollback_only]

    def _doomable(self) -> list[tuple[Peer, str]]:
        return [each for each in self._all_transactions() if each[0].is_truenext_client or each[0].is_jms_client]

    def _acknowledged_inside(self) -> list[Letter]:
        """Return the messages of existing subscriptions that are acknowledged in transactions that may go on."""
        works = [peer.transactions[name] for peer, name in self._open_transactions()]
        return [each for work in works for each in work.acknowledged if each.holder in self.oracle.readers]

    def _beginnable(self) -> list[Letter]:
        return [each for each in self._answerable() if each.holder is not None and each.holder.peer.is_truenext_client]

    def _keepable(self) -> list[Letter]:
        """Return the messages that JMS clients may acknowledge in a transaction."""
        return [each for each in self._answerable() if each.holder is not None and each.holder.peer.is_jms_client]

    def _jms_clients(self) -> list[Peer]:
        return [peer for peer in self.sessions if peer.is_jms_client]

    def _truenext_clients(self) -> list[Peer]:
        return [peer for peer in self.sessions if peer.is_truenext_client]

    def _can_release(self) -> list[Peer]:
        """Return the connections that hold messages, now and then any."""
        can = self._truenext_clients()
        if self.serial % 4:
            busy = {letter.holder.peer for letter in self._answerable() if letter.holder is not None}
            can = [peer for peer in can if peer.transactions or peer in busy]
        return can

    def _wakeable(self) -> list[Reader]:
        """Return the suspended consumers, or one that is not."""
        can_be = [
            each for each in self.oracle.readers if each.peer.is_truenext_client and each.mode is not AckMode.AUTO
        ]
        return [each for each in can_be if each.is_suspended] or can_be[:1]

    def _pulling(self) -> list[Reader]:
        return [each for each in self.oracle.readers if each.is_pulling]

    def _repeatable(self) -> list[tuple[str, int]]:
        """Numbers that C18.5 still promises to recognise, whether a SEND had them or a COMMIT, newest first."""
        remembered = self.oracle.producers.remembered()
        return [
            number
            for number, used_at in reversed(self.used_numbers.items())
            if self._is_recent(used_at)
            and (number[0] not in remembered or self._is_recent(remembered[number[0]].used_ms))
        ]

    def _next_number(self, producer: str, kind: Frame) -> int:
        known = self.oracle.producers.remembered().get(producer)
        return 1 if known is None else known.highest(kind) + 1

    def _parcel(self, priority: int, persistent: bool, expires_in: int | None, is_big: bool) -> Parcel:
        if expires_in is None and self.EXPIRE and self.serial % 4:
            expires_in = (1, 10, 1000)[self.serial % 3]
        if self.oracle.retries.holds:
            # When it is removed, and holds back nobody from then on, cannot be seen: see tests/unit/test_delays.py.
            expires_in = None
        # Said as the time itself, or as the time to live, which is not 0.
        ttl_ms = expires_in if expires_in and self.serial % 2 else 0
        expires_ms = 0 if expires_in is None or ttl_ms else self.oracle.now_ms + expires_in
        priority = 4 if self.is_narrow else priority
        label = self._fresh("m")
        colour = ("", "red", "blue", "red", "")[self.serial % 5]
        size = BIG if is_big else 0
        group = self.GROUPS[self.serial % len(self.GROUPS)]
        parcel = Parcel(label, priority, persistent, expires_ms, size, colour, group, self.serial % 4 == 0, ttl_ms)
        if not self.TELLS:
            return parcel
        handlers = ((), ("h1",), (), ("h1", "h2"), ("h2", "h1"))[self.serial % 5]
        return replace(parcel, report_to="reports" if self.serial % 3 else "", handlers=handlers)

    def _fresh(self, kind: str) -> str:
        self.serial += 1
        return f"{kind}{self.serial}"

    def _tick(self) -> None:
        """The clock that does not jump begins anywhere in each run."""
        now_us, steady_us = self.oracle.now_ms * 1000, self.oracle.steady_ms * 1000 - self.boot_us
        note(f"engine.state.commit_state.tick({now_us}, {steady_us})")
        self.engine.state.commit_state.tick(now_us, steady_us)


class PagingMachine(BrokerMachine):
    """Hardly anything but messages that leave memory, and pages that bring them back while all goes on."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(ROOMY, NO_LIMIT)] * 3 + [(2000, NO_LIMIT), (6000, NO_LIMIT)]),
        "page_size": OneOf([1, 2, 4, 4, 1000]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = (
        dict.fromkeys(ACTIONS, 0)
        | RELEASE_WEIGHTS
        | {
            "subscribe": 1,
            "unsubscribe": 1,
            "browse": 3,
            "browse_at_once": 1,
            "browse_while_evicting": 3,
            "disconnect": 1,
            "connect": 1,
            "send": 6,
            "send_in_transaction": 1,
            "acknowledge": 4,
            "acknowledge_and_read_on": 8,
            "nack": 3,
            "turn_and_send": 6,
            "turn": 2,
            "take_batch": 6,
            "batch_becomes_durable": 3,
            "all_becomes_durable": 1,
            "read_page": 8,
            "page_shows_what_the_engine_does_not_know": 8,
            "deliver_page": 4,
            "all_pages_are_there": 2,
            "evict": 1,
            "squeeze": 8,
            "change_policies": 1,
            "crash": 1,
            "restart": 1,
        }
    )
    WINDOW_MAX = 2
    ARE_NARROW: ClassVar[list[bool]] = [True, True, False]


class StarvedMachine(BrokerMachine):
    """Machine in which hardly any message fits into memory: one message per page and window."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(tiny, NO_LIMIT) for tiny in TINY] + [(2000, 1000)]),
        "page_size": OneOf([1]),
    }
    WINDOW_MAX = 1


class WindowsMachine(BrokerMachine):
    """Consumers whose windows the broker chooses, and that have asked for express dispatch; nothing leaves memory."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(NO_LIMIT, NO_LIMIT)]),
        "page_size": OneOf([1000]),
        "retries": OneOf([Retries()]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = (
        dict.fromkeys(ACTIONS, 0)
        | RELEASE_WEIGHTS
        | {
            "subscribe": 3,
            "unsubscribe": 1,
            "connect": 1,
            "disconnect": 1,
            "send": 14,
            "send_in_transaction": 1,
            "acknowledge": 12,
            "nack": 2,
            "commit": 1,
            "abort": 1,
            "stretch_windows": 6,
            "advance": 2,
            "turn": 2,
            "turn_and_send": 12,
            "all_sent": 1,
            "all_becomes_durable": 8,
        }
    )
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "subscribe": {
            "queue": OneOf(["a"]),
            "mode": OneOf([AckMode.INDIVIDUAL] * 5 + [AckMode.CLIENT]),
            "window": OneOf([None, None, None, 1, 2, 3]),
            "has_express": OneOf([True, True, False]),
        },
        "send": {"queue": OneOf(["a"]), "count": OneOf([1, 2, 5, 12])},
        "disconnect": {"is_clean": OneOf([True])},
    }


class ExpiringMachine(BrokerMachine):
    """Most messages expire, in memory or not, and hardly any is taken before."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = PagingMachine.CIRCUMSTANCES | {
        "retries": OneOf([Retries(), Retries(HOUR_MS, HOUR_MS, delay_max=HOUR_MS)]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = PagingMachine.WEIGHTS | {
        "advance": 6,
        "read_timers": 6,
        "deliver_timers": 6,
        "acknowledge_and_read_on": 3,
        "unsubscribe": 3,
        "settle": 3,
        "crash": 2,
    }
    WINDOW_MAX = 2
    ARE_NARROW: ClassVar[list[bool]] = [True, True, False]
    EXPIRE: ClassVar[bool] = True


class FailingMachine(BrokerMachine):
    """Hardly anything but messages that fail, wait for their next try, are given up and moved back."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(NO_LIMIT, NO_LIMIT)] * 2 + [(ROOMY, NO_LIMIT)] * 3 + [(2000, NO_LIMIT)]),
        "page_size": OneOf([1, 2, 4, 1000]),
        "retries": OneOf(
            [Retries(0, 5), Retries(0, 5, holds=True)]
            + [Retries(5, 20, 2.0, 30), Retries(5, 20, 2.0, 30, holds=True)] * 2
        ),
    }
    WEIGHTS: ClassVar[dict[str, int]] = (
        dict.fromkeys(ACTIONS, 0)
        | RELEASE_WEIGHTS
        | {
            "subscribe": 1,
            "unsubscribe": 1,
            "disconnect": 1,
            "connect": 1,
            "send": 6,
            "send_in_transaction": 1,
            "acknowledge": 1,
            "nack": 12,
            "send_and_nack": 12,
            "redrive_at_once": 6,
            "commit": 2,
            "abort": 2,
            "advance": 5,
            "jump": 1,
            "turn": 2,
            "turn_and_send": 8,
            "take_batch": 3,
            "batch_is_written": 1,
            "batch_becomes_durable": 3,
            "all_becomes_durable": 6,
            "read_page": 2,
            "deliver_page": 2,
            "all_pages_are_there": 5,
            "evict": 1,
            "squeeze": 5,
            "read_for_redrive": 6,
            "redrive": 4,
            "change_policies": 3,
            "crash": 1,
            "restart": 1,
        }
    )
    ARE_NARROW: ClassVar[list[bool]] = [True, False]


class ReportingMachine(FailingMachine):
    """FailingMachine whose messages ask for reports and name handlers, which fail, too."""

    TELLS = True
    ALL_QUEUES = (*FailingMachine.ALL_QUEUES, "h1", "h2", "DLQ.h1", "DLQ.h2", "reports")
    WEIGHTS: ClassVar[dict[str, int]] = FailingMachine.WEIGHTS | {"read_for_bulk": 2, "do_bulk": 2, "move_at_once": 2}
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "subscribe": {"queue": OneOf(["a"] * 3 + ["h1", "h1", "h2", "b", "DLQ.a"])},
        "nack": {"is_rejected": OneOf([False, True])},
        "read_for_redrive": {"queue": OneOf(["DLQ.a", "DLQ.h1", "DLQ.h2"])},
        "redrive_at_once": {"queue": OneOf(["DLQ.a", "DLQ.h1", "DLQ.h2"])},
        "change_policies": {"expired": OneOf([ExpiryAction.DROP, ExpiryAction.DEAD_LETTER])},
    }


class TopicsMachine(BrokerMachine):
    """Subscriptions to topics, and sends to many queues at once; now and then memory is short."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(NO_LIMIT, NO_LIMIT)] * 3 + [(ROOMY, NO_LIMIT)] * 3 + [(6000, NO_LIMIT)]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = BrokerMachine.WEIGHTS | {
        "remove_unused": 2,
        "remove_all_unused": 1,
        "subscribe": 4,
        "unsubscribe": 3,
        "end_durable": 3,
        "acknowledge_and_end": 1,
        "send": 12,
        "nack": 3,
        "send_in_transaction": 5,
        "squeeze": 2,
        "crash": 2,
        "restart": 2,
        "browse": 0,
        "browse_at_once": 0,
        "browse_while_evicting": 0,
        "read_for_redrive": 0,
        "redrive_at_once": 0,
        "change_policies": 0,
        "schedule": 0,
        "read_for_bulk": 0,
        "move_at_once": 0,
        "purge_at_once": 0,
        "pause": 0,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "subscribe": {
            "queue": OneOf(
                ["/topic/news.eu", "/topic/news.*", "/topic/>", "/topic/VirtualTopic.>"] * 2
                + ["/topic/news.eu#n", "/topic/news.eu#n", "/topic/news.eu#n", "/topic/news.*#n", "/topic/>#o"] * 2
                + ["a", "Consumer.x.VirtualTopic.t", "Consumer.y.VirtualTopic.t", "Consumer.x.VirtualTopic.u"]
            ),
            "selector": OneOf([None] * 8 + sorted(SELECTORS_OF_CONSUMERS)),
        },
        "send": {"queue": OneOf(OF_TOPICS)},
        "send_numbered": {"queue": OneOf(OF_TOPICS)},
        "send_in_transaction": {"sends": Several(Each(OneOf(OF_TOPICS), PRIORITY, YES_OR_NO, EXPIRES_IN, IS_BIG), 3)},
    }


class NoRoomMachine(TopicsMachine):
    """Transactions that acknowledge and send while there is no room on the disk; much of it is several queues'."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(NO_LIMIT, NO_LIMIT)] + [(ROOMY, NO_LIMIT)] * 3 + [(100_000, NO_LIMIT)]),
        "retries": OneOf([Retries()]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = dict.fromkeys(ACTIONS, 0) | {
        "subscribe": 4,
        "unsubscribe": 1,
        "end_durable": 1,
        "disconnect": 1,
        "connect": 1,
        "send": 10,
        "send_in_transaction": 1,
        "send_without_room": 14,
        "acknowledge": 24,
        "nack": 1,
        "nack_acknowledged": 8,
        "commit": 3,
        "abort": 1,
        "turn": 2,
        "turn_and_send": 10,
        "take_batch": 2,
        "batch_is_written": 2,
        "batch_becomes_durable": 2,
        "all_becomes_durable": 8,
        "read_page": 2,
        "deliver_page": 2,
        "all_pages_are_there": 5,
        "squeeze": 4,
        "crash": 1,
        "restart": 1,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = TopicsMachine.ARGUMENTS | {
        "subscribe": {
            "queue": OneOf(
                ["a"] * 3
                + ["b"] * 2
                + ["Consumer.x.VirtualTopic.t", "Consumer.y.VirtualTopic.t", "/topic/news.eu", "/topic/news.eu#n"]
            ),
            "mode": OneOf([AckMode.CLIENT, AckMode.INDIVIDUAL]),
            "window": OneOf([3, 5, None]),
        },
        "send": {
            "queue": OneOf(["a"] * 2 + ["a,b"] * 3 + ["a,/topic/news.eu", "/topic/VirtualTopic.t"]),
            "persistent": OneOf([True, True, True, False]),
            "is_big": YES_OR_NO,
        },
        "acknowledge": {"in_transaction": OneOf([True, True, False])},
        "send_without_room": {"queue": OneOf(["a", "b", "Spark.s", "Spark.s", "a,b", "/topic/VirtualTopic.t"])},
    }
    ALL_QUEUES = (*BrokerMachine.ALL_QUEUES, "Spark.s")

    def _parcel(self, priority: int, persistent: bool, expires_in: int | None, is_big: bool) -> Parcel:
        # Large enough to be stored once.
        return replace(super()._parcel(priority, persistent, expires_in, False), size=2000 if is_big else 0)


class BusyTopicsMachine(TopicsMachine):
    """Topics with scheduled sends, and bulk work on durable subscriptions that may end meanwhile."""

    WEIGHTS: ClassVar[dict[str, int]] = TopicsMachine.WEIGHTS | {
        "schedule": 3,
        "advance": 3,
        "read_for_bulk": 4,
        "do_bulk": 4,
        "move_at_once": 1,
        "purge_at_once": 1,
        "pause": 1,
        "resume": 2,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = TopicsMachine.ARGUMENTS | {
        "schedule": {"queue": OneOf(OF_TOPICS)},
        "read_for_bulk": {"queue": OneOf(OF_BULK)},
        "do_bulk": {"to": OneOf(["b", "Consumer.z.VirtualTopic.t", None])},
        "move_at_once": {"queue": OneOf(OF_BULK), "to": OneOf(["b", "Consumer.z.VirtualTopic.t"])},
        "purge_at_once": {"queue": OneOf([*OF_BULK, "subscription,c,o,>", "a"])},
        "pause": {"queue": OneOf([*OF_BULK, "subscription,c,o,>", "a", "Consumer.x.VirtualTopic.t"])},
    }


class SpillingMachine(TopicsMachine):
    """Subscriptions that end with their connections, and of which many messages leave memory; some have a limit that
    counts messages in memory and on disk."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = PagingMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf(
            [(ROOMY, NO_LIMIT)] * 3 + [(2000, NO_LIMIT), (6000, NO_LIMIT), (1000, 2500), (ROOMY, 2500)]
        ),
    }
    WEIGHTS: ClassVar[dict[str, int]] = PagingMachine.WEIGHTS | {
        "subscribe": 4,
        "unsubscribe": 2,
        "end_durable": 1,
        "send": 10,
        "send_in_transaction": 2,
        "browse": 0,
        "browse_at_once": 0,
        "browse_while_evicting": 0,
        "commit": 1,
        "abort": 1,
        "advance": 2,
        "change_policies": 0,
        "crash": 2,
        "restart": 2,
        "settle": 1,
        "remove_all_unused": 1,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = TopicsMachine.ARGUMENTS | {
        "subscribe": {
            "queue": OneOf(
                ["/topic/news.eu", "/topic/news.*", "/topic/news.>", "/topic/news.eu"] * 3
                + ["/topic/news.eu#n", "/topic/news.*#o", "a"] * 4
            ),
            "selector": OneOf([None] * 8 + sorted(SELECTORS_OF_CONSUMERS)),
        },
        "send": {
            "queue": OneOf(["/topic/news.eu"] * 3 + ["/topic/news.us", "a,/topic/news.eu", "a"]),
            "count": OneOf([1, 2, 3, 5]),
        },
    }


class BulkMachine(BrokerMachine):
    """Messages are moved and removed, in memory or not, and queues paused, while all goes on."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = PagingMachine.CIRCUMSTANCES
    WEIGHTS: ClassVar[dict[str, int]] = PagingMachine.WEIGHTS | {
        "read_for_bulk": 10,
        "do_bulk": 8,
        "move_at_once": 3,
        "purge_at_once": 2,
        "pause": 2,
        "resume": 3,
        "nack": 4,
        "redrive_at_once": 1,
        "advance": 2,
        "crash": 2,
        "evict": 3,
    }
    WINDOW_MAX = 2
    ARE_NARROW: ClassVar[list[bool]] = [True, True, False]


class ScheduledMachine(BrokerMachine):
    """Most messages are sent later, while batches and pages take their time, and the clock jumps."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = PagingMachine.CIRCUMSTANCES
    WEIGHTS: ClassVar[dict[str, int]] = PagingMachine.WEIGHTS | {
        "remove_unused": 2,
        "remove_all_unused": 1,
        "schedule": 12,
        "read_scheduled": 6,
        "unschedule": 6,
        "show_scheduled": 2,
        "send": 2,
        "advance": 8,
        "jump": 4,
        "read_timers": 6,
        "deliver_timers": 6,
        "settle": 2,
        "crash": 3,
        "restart": 2,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "send": {"expires_in": OneOf([None])},
        "advance": {"milliseconds": OneOf([1, 5, 20, 1000])},
        "jump": {"milliseconds": OneOf([-HOUR_MS, -20, -5, 5, 20])},
    }
    WINDOW_MAX = 2
    ARE_NARROW: ClassVar[list[bool]] = [True, False]

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        # Of two records that are due the second is left out, of many most.
        with pytest.MonkeyPatch.context() as patch, super()._comparing():
            targets.DUE_PAGE_BYTES.replace(patch, 150)
            yield


class ProducersMachine(BrokerMachine):
    """Producers with numbers, more than are remembered, which send, commit and repeat, while hours go by."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(NO_LIMIT, NO_LIMIT)]),
        "page_size": OneOf([1000]),
        "retries": OneOf([Retries()]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = dict.fromkeys(ACTIONS, 0) | {
        "connect": 1,
        "disconnect": 1,
        "send_numbered": 10,
        "repeat_send": 5,
        "send_in_transaction": 2,
        "commit_numbered": 3,
        "repeat_commit": 1,
        "repeat_commit_of_what_is_open": 1,
        "query_producer": 6,
        "forget_producers": 1,
        "advance": 5,
        "turn_and_send": 1,
        "take_batch": 2,
        "batch_is_written": 1,
        "batch_becomes_durable": 2,
        "all_becomes_durable": 2,
        "crash": 1,
        "restart": 1,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "send_numbered": {
            "are_persistent": OneOf([[True]] * 6 + [[False], [True, True], [True, False]]),
            "producer": MANY_PRODUCERS,
        },
        "send_in_transaction": {"commits": OneOf([False])},
        "commit_numbered": {"producer": MANY_PRODUCERS},
        "query_producer": {"producer": MANY_PRODUCERS},
        "forget_producers": {"producers": Several(MANY_PRODUCERS, 1)},
        "advance": {"milliseconds": OneOf([HOUR_MS // 2, HOUR_MS - 3, HOUR_MS - 2, HOUR_MS, HOUR_MS])},
    }
    PRODUCERS_MAX: ClassVar[int] = 3
    RESOLVED_MAX: ClassVar[int] = 1

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, super()._comparing():
            targets.PRODUCERS_MAX.replace(patch, self.PRODUCERS_MAX)
            targets.RESOLVED_MAX.replace(patch, self.RESOLVED_MAX)
            yield

    def _later(self) -> None:
        self.advance(1)


class SelectingMachine(BrokerMachine):
    """Most consumers have a selector; messages leave memory, and are compared a few at a time."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(ROOMY, NO_LIMIT)] * 4 + [(NO_LIMIT, NO_LIMIT), (2000, NO_LIMIT)]),
        "page_size": OneOf([1, 2, 4, 1000]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = PagingMachine.WEIGHTS | {
        "subscribe": 5,
        "unsubscribe": 3,
        "send": 10,
        "send_after_commits": 6,
        "browse_while_evicting": 1,
        "abort": 1,
        "advance": 2,
        "all_becomes_durable": 3,
        "all_pages_are_there": 4,
        "read_timers": 1,
        "deliver_timers": 1,
        "settle": 1,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "subscribe": {
            "queue": OneOf(["a"]),
            "selector": OneOf([None] * 2 + sorted(SELECTORS_OF_CONSUMERS) * 2),
        },
        "send": {"queue": OneOf(["a"]), "count": OneOf([1, 2, 5, 8])},
        "send_after_commits": {"queue": OneOf(["a"])},
    }
    WINDOW_MAX = 3
    SLICES: ClassVar[tuple[int, int]] = (2, 3)

    def _parcel(self, priority: int, persistent: bool, expires_in: int | None, is_big: bool) -> Parcel:
        # What holds others back and has expired does so until it is removed, and nobody can see when that was.
        return super()._parcel(priority, persistent, None if self.oracle.retries.holds else expires_in, is_big)

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        # So few that more than one slice is needed, and too much can be found.
        with pytest.MonkeyPatch.context() as patch, super()._comparing():
            size, found_max = self.SLICES
            targets.SCAN_MESSAGES_PER_TURN.replace(patch, size)
            targets.SCAN_PAGE_SIZE.replace(patch, size)
            targets.SCAN_FOUND_MAX.replace(patch, found_max)
            targets.SCAN_CHUNK.replace(patch, 2 * size)
            targets.SCAN_FOUND_MAX_OF_GROUPS.replace(patch, found_max)
            targets.GROUP_FOUND_MIN.replace(patch, 1)
            yield


class GroupsMachine(SelectingMachine):
    """Most messages are of one of few groups; of each hardly any is noted before it is taken."""

    WEIGHTS: ClassVar[dict[str, int]] = SelectingMachine.WEIGHTS | {
        "acknowledge": 8,
        "nack": 6,
        "advance": 4,
        "abort": 2,
        "commit": 2,
        "disconnect": 2,
        "pause": 1,
        "resume": 2,
        "schedule": 1,
        "read_timers": 2,
        "deliver_timers": 2,
        "read_for_bulk": 2,
        "do_bulk": 2,
        "redrive_at_once": 1,
        "stretch_windows": 1,
        "crash": 2,
        "restart": 2,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "subscribe": {
            "queue": OneOf(["a"]),
            "selector": OneOf([None] * 16 + sorted(SELECTORS_OF_CONSUMERS)),
        },
        "send": {"queue": OneOf(["a"]), "count": OneOf([1, 2, 5, 8])},
        "send_after_commits": {"queue": OneOf(["a"])},
    }
    GROUPS = ("g", "h", "", "g", "k", "h", "g")

    def _parcel(self, priority: int, persistent: bool, expires_in: int | None, is_big: bool) -> Parcel:
        # When what holds back its group is removed cannot be seen.
        return super()._parcel(priority, persistent, None, is_big)


class SpillingGroupsMachine(SpillingMachine, SelectingMachine):
    """SpillingMachine with groups."""

    GROUPS = ("g", "", "h", "g", "")

    def _parcel(self, priority: int, persistent: bool, expires_in: int | None, is_big: bool) -> Parcel:
        # When what holds back its group is removed cannot be seen.
        return super()._parcel(priority, persistent, None, is_big)


class ExpiringGroupsMachine(GroupsMachine):
    """GroupsMachine with retries at once, in which many messages expire."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = GroupsMachine.CIRCUMSTANCES | {
        "retries": OneOf([Retries(0, 0)]),
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = GroupsMachine.ARGUMENTS | {
        "nack": {"delay": OneOf([None, None, 0])},
        "send_and_nack": {"delay": OneOf([None])},
    }

    def _parcel(self, priority: int, persistent: bool, expires_in: int | None, is_big: bool) -> Parcel:
        return BrokerMachine._parcel(self, priority, persistent, expires_in, is_big)


class ReleasingMachine(BrokerMachine):
    """Hardly anything but clients that give back, rest, pull, say what they begin and are refused."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(NO_LIMIT, NO_LIMIT)] * 3 + [(ROOMY, NO_LIMIT)] * 3 + [(2000, NO_LIMIT)]),
        "page_size": OneOf([1, 1, 2, 4, 1000]),
        "retries": OneOf([Retries()] * 3 + [Retries(0, 5), Retries(5, 20, 2.0, 30, holds=True)]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = dict.fromkeys(ACTIONS, 0) | {
        "connect": 1,
        "subscribe": 3,
        "unsubscribe": 1,
        "disconnect": 2,
        "reconnect": 6,
        "cut": 3,
        "browse": 1,
        "send": 20,
        "send_in_transaction": 2,
        "acknowledge": 14,
        "nack": 4,
        "nack_acknowledged": 8,
        "mark_started": 10,
        "release": 14,
        "wake": 3,
        "pull": 12,
        "pull_and_wait": 5,
        "withdraw": 2,
        "send_invalid_request": 6,
        "mark_rollback_only": 3,
        "commit": 3,
        "commit_numbered": 1,
        "send_numbered": 1,
        "repeat_commit_of_what_is_open": 2,
        "abort": 4,
        "advance": 2,
        "stretch_windows": 1,
        "pause": 1,
        "resume": 3,
        "request_receipt": 1,
        "turn": 4,
        "turn_and_send": 24,
        "all_sent": 1,
        "take_batch": 2,
        "batch_becomes_durable": 2,
        "all_becomes_durable": 10,
        "read_page": 2,
        "deliver_page": 2,
        "all_pages_are_there": 6,
        "squeeze": 5,
        "change_policies": 1,
        "settle": 1,
        "crash": 1,
        "restart": 2,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "connect": {"is_truenext_client": OneOf([True] * 4 + [False])},
        "disconnect": {"is_clean": OneOf([False, False, True])},
        "reconnect": {"is_in_time": OneOf([False, False, True])},
        "send_invalid_request": {"what": OneOf(INVALID_REQUESTS + 2 * ROLLBACK_ONLY_REQUESTS)},
        "subscribe": {
            "queue": OneOf(["a"] * 6 + ["b", "DLQ.a"]),
            "mode": OneOf([AckMode.CLIENT] * 4 + [AckMode.INDIVIDUAL] * 5 + [AckMode.AUTO]),
            "window": OneOf([1, 3, 5, 8, None]),
            "is_exclusive": OneOf([False] * 19 + [True]),
            "is_pulling": OneOf([False, False, True]),
            "selector": OneOf([None] * 10 + sorted(SELECTORS_OF_CONSUMERS)),
        },
        "send": {
            "queue": OneOf(["a"] * 6 + ["b"]),
            "persistent": OneOf([False, False, True]),
            "count": OneOf([2, 3, 5, 8]),
            "expires_in": OneOf([None] * 9 + [5]),
        },
        "send_in_transaction": {"commits": OneOf([True, False, False])},
        "acknowledge": {"in_transaction": OneOf([True, True, False])},
        "pause": {"queue": OneOf(["a"])},
    }


class ReleasingGroupsMachine(ReleasingMachine, GroupsMachine):
    """ReleasingMachine with wildcards and with groups, which are compared a few messages at a time."""

    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = ReleasingMachine.ARGUMENTS | {
        "subscribe": ReleasingMachine.ARGUMENTS["subscribe"] | {"queue": OneOf(["a"] * 6 + ["*", "b"])},
    }
    WINDOW_MAX = 5
    ALL_QUEUES = ("a", "b", "DLQ.a", "DLQ.b")


class WildcardMachine(BrokerMachine):
    """Most consumers take from several queues, some of which are made later; now and then memory is short."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(NO_LIMIT, NO_LIMIT)] * 3 + [(ROOMY, NO_LIMIT)] * 3 + [(6000, NO_LIMIT)]),
        "page_size": OneOf([1, 1, 2, 4, 1000]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = BrokerMachine.WEIGHTS | {
        "remove_unused": 3,
        "remove_all_unused": 1,
        "subscribe": 4,
        "unsubscribe": 2,
        "send": 14,
        "send_after_commits": 4,
        "send_in_transaction": 3,
        "acknowledge": 10,
        "acknowledge_and_read_on": 4,
        "nack": 4,
        "squeeze": 6,
        "schedule": 1,
        "browse": 0,
        "browse_at_once": 0,
        "browse_while_evicting": 0,
        "read_for_redrive": 1,
        "redrive_at_once": 1,
        "crash": 2,
        "restart": 2,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "subscribe": {
            "queue": OneOf(
                ["x.*", ">", "x.>", "x.*", "*.a", "x.a", "x.b", "DLQ.>", "Consumer.y.VirtualTopic.>", "Spark.>"]
            ),
            "selector": OneOf([None] * 12 + sorted(SELECTORS_OF_CONSUMERS)),
        },
        "send": {"queue": OF_MANY, "count": OneOf([1, 2, 3, 5])},
        "send_after_commits": {"queue": OF_MANY},
        "send_numbered": {"queue": OF_MANY},
        "repeat_send": {"queue": OF_MANY},
        "send_in_transaction": {"sends": Several(Each(OF_MANY, PRIORITY, YES_OR_NO, EXPIRES_IN, IS_BIG), 3)},
        "schedule": {"queue": OF_MANY},
        "read_for_redrive": {"queue": OneOf(["DLQ.x.a", "DLQ.x.b"])},
        "redrive_at_once": {"queue": OneOf(["DLQ.x.a", "DLQ.x.b"])},
        "read_for_bulk": {"queue": OF_MANY},
        "do_bulk": {"to": OneOf(["x.b", None])},
        "move_at_once": {"queue": OF_MANY, "to": OneOf(["x.a", "x.b"])},
        "purge_at_once": {"queue": OF_MANY},
        "pause": {"queue": OF_MANY},
    }
    WINDOW_MAX = 3
    ALL_QUEUES = (">", "DLQ.>", "Consumer.>", "Spark.>")

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        # So few that more than one turn is needed to join all.
        with pytest.MonkeyPatch.context() as patch, super()._comparing():
            targets.JOIN_QUEUES_PER_TURN.replace(patch, 1)
            targets.LEAVE_QUEUES_PER_TURN.replace(patch, self.per_turn.dispatches // 2)
            yield


class WildcardSelectingMachine(WildcardMachine, SelectingMachine):
    """WildcardMachine in which half of the consumers have selectors, and are compared a few messages at a time."""

    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = WildcardMachine.ARGUMENTS | {
        "subscribe": WildcardMachine.ARGUMENTS["subscribe"]
        | {"selector": OneOf([None] * 4 + sorted(SELECTORS_OF_CONSUMERS))},
    }


class WildcardGroupsMachine(WildcardMachine, SelectingMachine):
    """WildcardMachine with groups."""

    GROUPS = ("g", "", "h", "g", "")

    def _parcel(self, priority: int, persistent: bool, expires_in: int | None, is_big: bool) -> Parcel:
        # When what holds back its group is removed cannot be seen.
        return super()._parcel(priority, persistent, None, is_big)


class JmsMachine(BrokerMachine):
    """Most clients are JMS clients: they keep messages for their transactions, end consumers by name of a message, lose
    connections, and number their sends, with more producers than are remembered (chapter 26)."""

    CIRCUMSTANCES: ClassVar[dict[str, Draw]] = BrokerMachine.CIRCUMSTANCES | {
        "memory_limits": OneOf([(NO_LIMIT, NO_LIMIT)] * 3 + [(ROOMY, NO_LIMIT)] * 2 + [(2000, NO_LIMIT)]),
        "page_size": OneOf([1, 2, 4, 1000]),
        "retries": OneOf([Retries()] * 3 + [Retries(0, 5), Retries(5, 20, 2.0, 30, holds=True)]),
    }
    WEIGHTS: ClassVar[dict[str, int]] = dict.fromkeys(ACTIONS, 0) | {
        "connect": 1,
        "subscribe": 5,
        "unsubscribe": 0,
        "disconnect": 4,
        "disconnect_naming": 3,
        "reconnect": 4,
        "browse": 1,
        "send": 16,
        "send_in_transaction": 3,
        "send_numbered": 6,
        "send_numbered_by_jms": 10,
        "forget_jms_producers": 1,
        "repeat_send": 4,
        "query_producer": 5,
        "acknowledge": 2,
        "keep": 20,
        "close": 8,
        "nack": 3,
        "pull": 2,
        "pull_for": 6,
        "withdraw": 2,
        "mark_rollback_only": 1,
        "commit": 10,
        "abort": 4,
        "advance": 2,
        "request_receipt": 2,
        "turn": 1,
        "turn_and_send": 40,
        "take_batch": 2,
        "batch_is_written": 1,
        "batch_becomes_durable": 2,
        "all_becomes_durable": 10,
        "read_page": 2,
        "deliver_page": 2,
        "all_pages_are_there": 6,
        "squeeze": 4,
        "change_policies": 1,
        "settle": 1,
        "crash": 1,
        "restart": 2,
    }
    ARGUMENTS: ClassVar[dict[str, dict[str, Draw]]] = {
        "connect": {"is_jms_client": OneOf([True] * 3 + [False])},
        "disconnect": {"is_clean": OneOf([False, False, True])},
        "reconnect": {"is_in_time": OneOf([False, False, True])},
        "subscribe": {
            "queue": OneOf(["a"] * 6 + ["b", "DLQ.a", "/topic/news"]),
            "mode": OneOf([AckMode.CLIENT, AckMode.INDIVIDUAL, AckMode.AUTO]),
            "window": OneOf([0, 0, 1, 2, 3, 5, 8, None]),
            "selector": OneOf([None] * 10 + sorted(SELECTORS_OF_CONSUMERS)),
        },
        "send": {
            "queue": OneOf(["a"] * 6 + ["b", "/topic/news"]),
            "persistent": OneOf([False, True, True]),
            "count": OneOf([2, 3, 5, 8]),
            "expires_in": OneOf([None] * 9 + [5]),
        },
        "send_in_transaction": {"commits": OneOf([False])},
        "acknowledge": {"in_transaction": OneOf([True, False, False])},
        "send_numbered": {"producer": OneOf("pqjk"), "are_persistent": OneOf([[True]])},
        "send_numbered_by_jms": {"producer": OneOf("pqjkl"), "step": OneOf([1, 1, 0, 0, 2, -1])},
        "query_producer": {"producer": OneOf("pqjk"), "number": OneOf([None, 0]), "resolves": OneOf([False])},
        "nack": {"is_rejected": OneOf([False, True])},
        "advance": {"milliseconds": OneOf([1, 5, 20, HOUR_MS, 3 * DAY_MS])},
    }
    PRODUCERS_MAX: ClassVar[int] = 3

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, super()._comparing():
            targets.PRODUCERS_MAX.replace(patch, self.PRODUCERS_MAX)
            yield

    def turn_and_send(self) -> None:
        """C26.3: before the turn, as after a read of the socket, messages are requested up to the prefetch."""
        for reader in [reader for reader in self.oracle.readers if reader.peer.is_jms_client]:
            prefetch = _prefetch(self.subscribe_arguments[reader])
            missing = prefetch - len(self.oracle.unacknowledged(reader)) - reader.requested
            if prefetch and missing > 0:
                self._pull(reader, missing, True, None)
        super().turn_and_send()

    def _later(self) -> None:
        self.advance(1)


MACHINES: list[type[BrokerMachine]] = [
    WildcardMachine,
    WildcardSelectingMachine,
    WildcardGroupsMachine,
    TopicsMachine,
    BusyTopicsMachine,
    NoRoomMachine,
    SpillingMachine,
    SpillingGroupsMachine,
    BrokerMachine,
    FailingMachine,
    ReportingMachine,
    PagingMachine,
    StarvedMachine,
    WindowsMachine,
    ExpiringMachine,
    BulkMachine,
    ScheduledMachine,
    ProducersMachine,
    ReleasingMachine,
    ReleasingGroupsMachine,
    SelectingMachine,
    GroupsMachine,
    ExpiringGroupsMachine,
    JmsMachine,
]


@contextmanager
def _record_waiting(engine: Engine, waited: dict[BrokerConsumer, int]) -> Iterator[None]:
    """Record, where there are groups, up to which rank a consumer waited at any time for a comparison or a read."""
    first_for = targets.FIRST_OF_GROUPS.current

    def noting(cursor: GroupScanCursor, consumer: BrokerConsumer | None) -> tuple[Entry | None, bool]:
        entry, must_wait = first_for(cursor, consumer)
        if must_wait or (entry is not None and entry.message is None):
            for one in [consumer] if consumer is not None else _receivers_without_groups(engine, cursor):
                waited[one] = min(cursor.lane.rank, waited.get(one, 10))
        return entry, must_wait

    with pytest.MonkeyPatch.context() as patch:
        targets.FIRST_OF_GROUPS.replace(patch, noting)
        yield


def _receivers_without_groups(engine: Engine, cursor: GroupScanCursor) -> list[BrokerConsumer]:
    """Return the consumers without groups at this cursor, which are served together."""
    queue = cursor.lane.queue

    def is_scanning(consumer: BrokerConsumer) -> bool:
        scan = engine.queues.selections.scan_of(consumer, queue)
        cursors = [] if scan is None else list(scan.cursors.values())
        # Outdated heads may stay behind when a consumer's last group is free again.
        owns_groups = engine.queues.selections.by_queue[queue].existing_groups.owns_any(consumer)
        return cursor in cursors and not (
            owns_groups
            and any(isinstance(one, GroupScanCursor) and one.heads_by_owner.get(consumer) for one in cursors)
        )

    return list(filter(is_scanning, engine.state.clients.receivers_of(queue).all()))


def _waits_at(scan: QueueScan) -> int | None:
    """The rank of the lane of which something has to be tested or read before anything else can be dispatched, should
    there be nothing before that; None if there is none."""
    for rank, cursor in scan.cursors.items():
        entry = cursor.first()
        if (entry is None and cursor.known_to < UNBOUNDED) or (entry is not None and entry.message is None):
            return rank
    return None


def _query_waiting(engine: Engine, queue: Queue) -> None:
    for consumer in engine.state.clients.receivers_of(queue).all():
        scan = engine.queues.selections.scan_of(consumer, queue)
        assert scan is not None
        for cursor in scan.cursors.values():
            assert isinstance(cursor, GroupScanCursor)
            cursor.first_for(consumer)


def _prefetch(subscribe_arguments: dict[str, Any]) -> int:
    """Return the prefetch of a JMS client's consumer (C26.3)."""
    window = subscribe_arguments["window"]
    return 100 if window is None else window


def _one_of(items: list[T], which: int) -> T:
    return items[which % len(items)]


def _some_of(items: list[T], bits: int) -> list[T]:
    return [item for at, item in enumerate(items) if bits >> at % 3 & 1]


def _check_repeat(command: Send | Commit, expected: NumberStatus) -> None:
    actual = NumberStatus.NEW
    if command.is_repeat:
        actual = NumberStatus.UNKNOWN if command.is_unknown else NumberStatus.REPEAT
    if actual is not expected:
        raise Disagreement(f"of {command} is said that {actual.value}; but {expected.value}")


def _commit_of(transaction: str, numbered: Numbered | None) -> Commit:
    if numbered is None:
        return Commit(transaction)
    return Commit(transaction, numbered.producer, numbered.number, is_gapless=numbered.declares_gapless)


def _address(queue: str) -> str:
    """Return the address of one or several queues; parts that begin with a slash are addresses already."""
    return ",".join(part if part.startswith("/") else f"/queue/{part}" for part in queue.split(","))


def _send(
    destination: Destination,
    parcel: Parcel,
    transaction: str | None = None,
    producer: str | None = None,
    number: int = 0,
) -> Send:
    return Send(destination, _message(parcel), transaction, producer, number, ttl_ms=parcel.ttl_ms)


def _message(parcel: Parcel) -> SentMessage:
    body = parcel.label.encode() + b"." * parcel.size
    # Of a time to live the header says when it ends, once it has begun.
    header = f"expires:{parcel.expires_ms}\n" if parcel.ttl_ms and parcel.expires_ms else ""
    header += f"content-length:{len(body)}\n"
    header += f"colour:{parcel.colour}\n" if parcel.colour else ""
    header += f"JMSXGroupID:{parcel.group}\n" if parcel.group else ""
    header += "JMSXGroupSeq:-1\n" if parcel.group and parcel.closes_group else ""
    if parcel.report_to:
        header += f"truenext-report-to:/queue/{parcel.report_to}\ntruenext-report-id:{parcel.label}\n"
    if parcel.handlers:
        header += f"truenext-on-failure:{' '.join(f'/queue/{handler}' for handler in parcel.handlers)}\n"
    return SentMessage(
        priority=parcel.priority,
        persistent=parcel.persistent,
        expires_ms=parcel.expires_ms,
        header=header.encode(),
        body=body,
        group=group_of(header.encode()),
    )


def _seen(entry: Entry, queue: str, *, is_browse: bool = False) -> Seen:
    message = entry.message
    if message is None:
        raise Disagreement(f"{queue}:{entry.sequence} is dispatched without its body")
    failure = _failure_of(message)
    headers = decode_header_lines(message.header) if b"truenext-" in message.header else {}
    return Seen(
        _label(message, entry.sequence),
        queue,
        entry.sequence,
        message.priority,
        entry.persistent,
        message.expires_ms,
        entry.deliveries,
        entry.attempts,
        entry.is_first_of_group,
        entry.was_lost and entry.attempts > 0,
        (entry.causes.first, entry.causes.last) if entry.causes is not None else NO_CAUSES,
        _original_causes(message),
        _is_redelivered(entry, is_browse=is_browse),
        failure,
        tuple(each.removeprefix("/queue/") for each in headers.get("truenext-on-failure", "").split(" ") if each),
        headers.get("truenext-original-destination", "").removeprefix("/queue/") if failure else "",
        int(decode_header_lines(message.header).get("truenext-due", "0")),
        entry.redelivery_count,
    )


_REPLIES = ReplyEncoder(StompProtocol(Side.SERVER, REQUEST_SHAPES), "")
_REPLIES.add_subscription("c", AckMode.INDIVIDUAL, has_id=True, has_pattern=False)


def _is_redelivered(entry: Entry, *, is_browse: bool) -> bool:
    """Return whether a client is told `redelivered:true`, in a MESSAGE that is written now."""
    parts: list[bytes] = []
    _REPLIES.encode_deliveries("c", [entry], parts, is_browse=is_browse)
    return b"\nredelivered:true\n" in parts[0]


def _original_causes(message: SentMessage) -> tuple[str, str]:
    """Return the causes in the headers of a dead letter."""
    if b"-cause:" not in message.header:
        return NO_CAUSES
    headers = decode_header_lines(message.header)
    return headers.get("truenext-original-first-cause", ""), headers.get("truenext-original-last-cause", "")


def _failure_of(message: SentMessage) -> str:
    """Return what the broker says of a report or a handled message; empty for all others."""
    if b"truenext-failure:" not in message.header:
        return ""
    return decode_header_lines(message.header)["truenext-failure"]


def _label(message: SentMessage, sequence: int = 0) -> str:
    body = message.body[:12].rstrip(b".").decode()
    if _failure_of(message) == "report":
        return f"{REPORT_LABEL}{sequence}:{decode_header_lines(message.header)['correlation-id']}{body}"
    return body


def _body_of(found: PageMessage) -> SentMessage:
    assert found.message is not None, "nothing is damaged"
    return found.message


def _size(message: SentMessage) -> int:
    return len(message.header) + len(message.body)


def _sketch(page: PageResult) -> str:
    found = ", ".join("damaged" if each.message is None else _label(each.message) for each in page.messages)
    return f"[{found}] as of {page.as_of}{', the end' if page.is_end else ''}"


def _ask(engine: Engine, consumer: BrokerConsumer) -> Entry | WaitReason:
    answer = find_next(engine, consumer)
    while True:
        try:
            next(answer)
        except StopIteration as end:
            found: Entry | WaitReason = end.value
            return found

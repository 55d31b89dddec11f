"""Proxy between a broker and PostgreSQL that does harm at one message of the protocol, in either direction.

Source: PostgreSQL 18, chapter 54. A broker sends a statement on a connection only when it has the whole answer to the
one before: an exchange is a statement and its answer.

Most of the thousands of messages of a script differ in nothing that matters when one of them is lost or late: what
PostgreSQL has done by then, what the broker knows, and where in its code it waits. A `MessageClass` has all messages
that agree in these three.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from tests.listening_proxy import ListeningProxy, shut_down

_ENCRYPTION_REQUESTS: Final = (b"\x04\xd2\x16\x2f", b"\x04\xd2\x16\x30")
"""Codes of a request for encryption, which the server answers with a single byte."""


class Harm(Enum):
    CUT = "cut"
    """The connection is cut, and the message is lost."""
    CUT_AFTER = "cut after"
    """The message passes, then the connection is cut."""
    FREEZE = "freeze"
    """Nothing passes for `freeze_s` seconds, in either direction. Then all passes, late."""
    DELAY = "delay"
    """The message is late by `delay_s` seconds."""


class Step(Enum):
    """Step of an exchange. Which of the messages of one step is lost makes no difference."""

    REQUEST = "request"
    """Parse, Bind, Describe, Execute or Query, or a message of the start. Without all of them nothing is committed."""
    COPY = "copied rows"
    """Rows from the client, and their end."""
    SYNC = "sync"
    """The statement is executed. PostgreSQL commits it when this arrives, unless it is in a transaction block."""
    ANSWER = "answer"
    """All messages before CommandComplete. PostgreSQL has committed, unless the rows are many."""
    COMPLETE = "complete"
    """CommandComplete or ErrorResponse. The client has the result, and does not know whether it is committed."""
    READY = "ready"
    """ReadyForQuery, the end of an exchange."""

    @property
    def harms(self) -> tuple[Harm, ...]:
        """Each harm to a message of this step that is not the same as another one: a cut after a message is a cut at
        the next one, unless the exchange ends; and a broker that has the result waits for the end in the same way."""
        if self is Step.READY:
            return tuple(Harm)
        return (Harm.CUT,) if self is Step.COMPLETE else (Harm.CUT, Harm.FREEZE, Harm.DELAY)


_REQUEST_STEPS: Final = {b"S": Step.SYNC, b"d": Step.COPY, b"c": Step.COPY, b"f": Step.COPY}
_ANSWER_STEPS: Final = {b"C": Step.COMPLETE, b"E": Step.COMPLETE, b"Z": Step.READY}


class Exchange(NamedTuple):
    connection: int
    """Number of the connection, in the order in which they were opened. In a phase, it shows the broker, and the use
    of the connection: to append, to read a snapshot, to work in the background, to compact."""
    statement: str
    """Statement, without the name of the schema; or "encryption", "start" or "end"."""
    is_in_transaction: bool = False
    """True in a transaction block, which COMMIT ends."""
    is_repeated: bool = False
    """True if the connection has had an answer to the same statement before."""


class MessageClass(NamedTuple):
    """Messages that have the same phase of a script, exchange and step."""

    phase: str
    exchange: Exchange
    step: Step

    def __str__(self) -> str:
        connection, statement, is_in_transaction, is_repeated = self.exchange
        remarks = " again" * is_repeated + " in a transaction" * is_in_transaction
        return f"{self.step.value} of {statement[:70]!r}{remarks}, connection {connection}, while {self.phase}"


class Plan(NamedTuple):
    """Harm to the message of this class that has this number among them; the first one has number 0."""

    harm: Harm
    message_class: MessageClass
    number: int
    freeze_s: float = 3.0
    delay_s: float = 0.3


class ProtocolProxy(ListeningProxy):
    """Proxy that listens on `port` of 127.0.0.1, for the server whose socket is in `folder`."""

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        super().__init__()
        self._path = str(folder / ".s.PGSQL.5432")
        self._plan = plan
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self.phase = ""
        """Phase of the script."""
        self.counts = Counter[MessageClass]()
        """Number of messages so far, by class."""
        self.is_harmed = False
        self.is_over = threading.Event()
        """Set when the harm was done, and all late messages have passed."""

    def harm_of(self, exchange: Exchange, step: Step) -> Harm | None:
        """Count a message, and return the harm to do to it."""
        with self._lock:
            message_class = MessageClass(self.phase, exchange, step)
            number = self.counts[message_class]
            self.counts[message_class] += 1
            if self._plan is None or (self._plan.message_class, self._plan.number) != (message_class, number):
                return None
            self.is_harmed = True
            return self._plan.harm

    def wait(self, harm: Harm) -> None:
        assert self._plan is not None
        time.sleep(self._plan.freeze_s if harm is Harm.FREEZE else self._plan.delay_s)

    def _connect(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self._path)
        except OSError:
            server.close()
            client.close()
            return
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(_Link(self, len(self._links), client, server))

    def _end_connections(self) -> None:
        for link in self._links:
            link.end()
        for link in self._links:
            link.join()


class _Direction:
    """Messages from one side of a connection to the other. They pass together if they have arrived together."""

    def __init__(self, source: socket.socket, target: socket.socket, thawed: threading.Event) -> None:
        self._source = source
        self._target = target
        self._thawed = thawed
        self._arrived = b""
        self._passing = b""

    def read(self, size: int) -> bytes:
        """Raises: EOFError; OSError"""
        while len(self._arrived) < size:
            self.flush()
            piece = self._source.recv(1 << 16)
            if not piece:
                raise EOFError
            self._arrived += piece
        data, self._arrived = self._arrived[:size], self._arrived[size:]
        return data

    def read_body(self) -> bytes:
        """Return the length of a message, and the rest of it. Raises: EOFError; OSError"""
        length = self.read(4)
        return length + self.read(int.from_bytes(length) - 4)

    def send(self, message: bytes) -> None:
        self._passing += message

    def flush(self) -> None:
        self._thawed.wait()
        self.flush_late()

    def flush_late(self) -> None:
        """Send messages also while the other ones are frozen."""
        if self._passing:
            passing, self._passing = self._passing, b""
            self._target.sendall(passing)

    def end(self) -> None:
        """Let late messages pass, and end the connection."""
        self._thawed.wait()
        shut_down(self._target)


class _Link:
    """Connection through the proxy."""

    def __init__(self, proxy: ProtocolProxy, number: int, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._exchange = Exchange(number, "start")
        self._is_in_transaction = False
        self._answered = set[str]()
        """Statements that were answered."""
        self._expects_byte = False
        """True if the next answer of the server is a single byte."""
        self._thawed = threading.Event()
        self._thawed.set()
        self._threads = [
            threading.Thread(target=self._run, args=(self._forward_requests, client, server)),
            threading.Thread(target=self._run, args=(self._forward_answers, server, client)),
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        shut_down(self._client)
        shut_down(self._server)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._client.close()
        self._server.close()

    def _run(self, forward: Callable[[_Direction], None], source: socket.socket, target: socket.socket) -> None:
        direction = _Direction(source, target, self._thawed)
        with contextlib.suppress(OSError, EOFError):
            forward(direction)
        direction.end()

    def _forward_requests(self, direction: _Direction) -> None:
        while True:
            message = direction.read_body()
            self._expects_byte = message[4:8] in _ENCRYPTION_REQUESTS
            self._begin("encryption" if self._expects_byte else "start")
            self._pass(Step.REQUEST, message, direction)
            if not self._expects_byte:
                break
        while True:
            kind, rest = direction.read(1), direction.read_body()
            if statement := _statement_of(kind, rest[4:]):
                self._begin(statement)
            self._pass(_REQUEST_STEPS.get(kind, Step.REQUEST), kind + rest, direction)

    def _begin(self, statement: str) -> None:
        is_repeated = statement in self._answered
        self._exchange = Exchange(self._exchange.connection, statement, self._is_in_transaction, is_repeated)

    def _forward_answers(self, direction: _Direction) -> None:
        while True:
            kind = direction.read(1)
            if self._expects_byte:
                self._expects_byte = False
                self._pass(Step.ANSWER, kind, direction)
                continue
            rest = direction.read_body()
            if kind == b"Z":
                self._is_in_transaction = rest[4:] != b"I"
                self._answered.add(self._exchange.statement)
            self._pass(_ANSWER_STEPS.get(kind, Step.ANSWER), kind + rest, direction)

    def _pass(self, step: Step, message: bytes, direction: _Direction) -> None:
        harm = self._proxy.harm_of(self._exchange, step)
        if harm is None:
            direction.send(message)
            return
        direction.flush()
        try:
            self._pass_harmed(harm, message, direction)
        finally:
            self._proxy.is_over.set()

    def _pass_harmed(self, harm: Harm, message: bytes, direction: _Direction) -> None:
        if harm in (Harm.CUT, Harm.CUT_AFTER):
            if harm is Harm.CUT_AFTER:
                direction.send(message)
                direction.flush()
            self.end()
            raise EOFError
        if harm is Harm.FREEZE:
            self._thawed.clear()
        self._proxy.wait(harm)
        direction.send(message)
        try:
            direction.flush_late()
        finally:
            self._thawed.set()


def _statement_of(kind: bytes, body: bytes) -> str:
    """Return the statement of the exchange that a request begins; "" if it begins none."""
    texts = body.split(b"\0", 2)
    if kind == b"Q":
        return _plain(texts[0])
    if kind == b"P":
        return f"prepare {texts[0].decode()}" if texts[0] else _plain(texts[1])
    if kind == b"B" and texts[1]:
        return f"execute {texts[1].decode()}"
    return "end" if kind == b"X" else ""


def _plain(statement: bytes) -> str:
    return " ".join(re.sub(r'"\w+"\.', "", statement.decode()).split())

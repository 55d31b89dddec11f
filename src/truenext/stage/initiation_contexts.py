"""Blocks that start flows: `async with app.initiate() as initiation:`, or `with` in functions that are not async.

The flows of a block are sent in one transaction of the broker. With `app.initiate(session)`, they are written to the
outbox in the program's own database transaction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from truenext.errors import LocalProtocolError
from truenext.flows.envelope import PRIORITY_INTERACTIVE
from truenext.flows.message_ids import key_id
from truenext.model.limits import TRANSACTION_BYTES_MAX, TRANSACTION_MESSAGES_MAX
from truenext.stage.broker_transaction import encode_messages, transaction_count, transaction_size
from truenext.stage.context import ServiceContext
from truenext.stage.core.errors import FlowError
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.names import replies_queue
from truenext.stage.core.outbox_unit import Delay, InitiationKey, OutboxUnit
from truenext.stage.core.output import Output
from truenext.stage.initiator import checked_timeout
from truenext.stage.user_code import running_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truenext.stage.core.output import OutputMessage
    from truenext.stage.definition import Definition
    from truenext.stage.initiator import Initiator
    from truenext.stage.interceptors.chain import InterceptorChain
    from truenext.stage.sql.session_outbox import SessionOutbox

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair. No encoding can represent a text that contains it."""


class InitiationContext:
    """Block whose flows are sent at its end, in one transaction of the broker. If the block raises, no flow is sent.

    Raises: RolledBack if no flow was sent; InDoubt if the client cannot know whether the flows were sent, with a token
    for `Service.outcome`
    """

    def __init__(self, initiator: Initiator, timeout: float) -> None:
        """Create the block for `Service.initiate`. Raises: ValueError if `timeout` is not more than 0"""
        self._initiator = initiator
        self._timeout = checked_timeout(timeout)
        self._output: Output | None = None

    async def __aenter__(self) -> Initiation:
        """Begin the block. Raises: ClosedError if this event loop is not the service's"""
        self._initiator.check_loop()
        return self._start()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        output = self._end()
        if error is None:
            await self._initiator.send_output(output, self._deadline)

    def __enter__(self) -> Initiation:
        if running_loop() is self._initiator.loop:
            raise LocalProtocolError(
                "`with` would block the event loop until the broker answers: use `async with` in async functions"
            )
        return self._start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        output = self._end()
        if error is None:
            self._initiator.send_output_in_thread(output, self._deadline)

    def _start(self) -> Initiation:
        """Begin to collect the flows of the block. Raises: LocalProtocolError if the same object is in use for another
        block"""
        if self._output is not None:
            raise LocalProtocolError("this initiation was entered already: call initiate() again for another")
        self._output, initiation = self._initiator.new_initiation()
        return initiation

    def _end(self) -> Output:
        output, self._output = self._output, None
        assert output is not None, "the block has begun"
        output.is_closed = True
        return output

    @property
    def _deadline(self) -> float:
        return self._initiator.loop.time() + self._timeout


@dataclass(slots=True, eq=False)
class OutboxInitiationContext:
    """Block whose flows are written to the outbox at its end, in the transaction of the session. The flows are sent
    after that transaction is committed, and never if it is rolled back. The broker need not be available.

    Raises: FlowError if the flows are too large, or other flows were started under the key
    """

    _definition: Definition
    _chain: InterceptorChain
    _transaction: SessionOutbox
    _key: str | None
    """Id of the key (`checked_key_id`) under which the flows start; None without a key."""
    _on_commit: Callable[[], object]
    """Called after the commit."""
    _seed: str = ""
    """Id of the unit, from which the ids of its messages are derived. The first call with a key chooses the seed, and
    further calls with this key reuse the seed, so that all these calls make the same ids."""
    _output: Output | None = None
    _initiation: Initiation | None = None

    async def __aenter__(self) -> Initiation:
        if not self._transaction.is_async:
            raise LocalProtocolError("a Session is used with `with`; `async with` is for an AsyncSession")
        self._check_not_started()
        return self._start(
            None if self._key is None else await self._transaction.seed_of_key_async(self._key, ServiceContext.new_id())
        )

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        outgoing = self._end()
        if error is None and outgoing:
            self._transaction.check_transaction_not_lost()
            unit = self._unit(outgoing)
            await self._transaction.write_unit_async(self._definition.name, self._seed, self._key_of(outgoing), unit)
            self._transaction.call_on_commit(self._on_commit)

    def __enter__(self) -> Initiation:
        if self._transaction.is_async:
            raise LocalProtocolError("an AsyncSession is used with `async with`; `with` is for a Session")
        self._check_not_started()
        return self._start(
            None if self._key is None else self._transaction.seed_of_key(self._key, ServiceContext.new_id())
        )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        outgoing = self._end()
        if error is None and outgoing:
            self._transaction.check_transaction_not_lost()
            unit = self._unit(outgoing)
            self._transaction.write_unit(self._definition.name, self._seed, self._key_of(outgoing), unit)
            self._transaction.call_on_commit(self._on_commit)

    def _check_not_started(self) -> None:
        if self._output is not None:
            raise LocalProtocolError("this initiation was entered already: call initiate() again for another")

    def _start(self, seed: str | None) -> Initiation:
        self._seed = seed or ServiceContext.new_id()
        self._output = Output(self._seed, self._definition.name)
        self._transaction.open_block()
        kept_to = "" if self._key is None else f"/queue/{replies_queue(self._definition.name)}"
        self._initiation = Initiation(self._output, ServiceContext.now_ms(), self._definition.stages, kept_to)
        return self._initiation

    def _end(self) -> Sequence[OutputMessage]:
        output = self._output
        assert output is not None, "the block has begun"
        output.is_closed = True
        self._transaction.close_block()
        if output.after_commit:
            raise FlowError(
                "after_commit is not available with a session, since your program commits the transaction: call the "
                "function after your commit"
            )
        return output.outgoing

    def _unit(self, outgoing: Sequence[OutputMessage]) -> OutboxUnit:
        """Return the unit for the outbox. Raises: FlowError if the messages exceed the limits of a transaction of the
        broker"""
        messages = encode_messages(outgoing, self._chain, None)
        if self._definition.direct_counters is not None:
            self._definition.direct_counters.add_sent_outside(len(messages))
        if len(messages) > 1 and transaction_size(messages) > TRANSACTION_BYTES_MAX:
            raise FlowError(
                f"the initiation has {transaction_size(messages)} bytes of messages; a transaction of the broker may "
                f"have at most {TRANSACTION_BYTES_MAX}: use several initiations"
            )
        if transaction_count(messages) > TRANSACTION_MESSAGES_MAX:
            raise FlowError(
                f"the initiation counts as {transaction_count(messages)} messages (one with an expiry or a delay "
                "counts as two, each queue after the first 100 adds ten); a transaction of the broker may have at most "
                f"{TRANSACTION_MESSAGES_MAX}: use several initiations"
            )
        return OutboxUnit(messages, any(each.priority == PRIORITY_INTERACTIVE for each in messages))

    def _key_of(self, outgoing: Sequence[OutputMessage]) -> InitiationKey | None:
        """Return the key with a hash of the flows; None if the block has no key. The hash does not depend on the time
        of the call."""
        if self._key is None:
            return None
        digest = blake2b(digest_size=16)
        for each in outgoing:
            flow = msgspec.structs.replace(each.envelope.flow, started_ms=0)
            timeless = msgspec.structs.replace(each, envelope=msgspec.structs.replace(each.envelope, flow=flow))
            if each.delay is not None and each.delay.at_ms:
                timeless = msgspec.structs.replace(timeless, delay=Delay(0, each.delay.at_ms))
            digest.update(msgspec.json.encode(timeless, order="deterministic"))
        assert self._initiation is not None, "the block has begun"
        delay_ms = max((each.delay.ms for each in outgoing if each.delay is not None), default=0)
        return InitiationKey(self._key, digest.hexdigest(), self._initiation.kept, delay_ms)


def checked_key_id(service: str, key: str) -> str:
    """Return the id of a key: the hash by which the database knows the key. Raises: FlowError if the key is not a text,
    or is empty"""
    if not (isinstance(key, str) and key and not _SURROGATE.search(key)):
        raise FlowError(f"key must be a text that names the initiation, such as the number of an order, not {key!r}")
    return key_id(service, key)

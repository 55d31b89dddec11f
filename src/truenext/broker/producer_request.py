"""What became of a COMMIT, and which numbers has a producer used? A question to the broker, answered in one step.

Source: docs/contract.md, "Did it happen?"
"""

from typing import Annotated

import msgspec

from truenext.engine.engine import Engine
from truenext.engine.state.producer import CommitOutcome
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import decode_client_json
from truenext.model.limits import NAME_LENGTH_MAX, PRODUCER_NUMBER_MAX

VERB = "producer"


class ProducerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What is asked of a producer, in JSON."""

    producer: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
    commit: Annotated[int, msgspec.Meta(ge=0, le=PRODUCER_NUMBER_MAX)] | None = None
    resolve: bool = False
    """What is not recorded is rolled back."""


class ProducerAnswer(msgspec.Struct):
    """The answer to that, in JSON."""

    known: bool
    gapless: bool
    sends: int
    """The highest number; 0 is none."""
    commits: int
    """The same; one that was resolved counts."""
    outcome: CommitOutcome | None
    """Of the COMMIT that was asked for."""


def make_producer_report(engine: Engine, body: bytes) -> tuple[bytes, int]:
    """What is known of a producer, and the batch with which that is durable.

    Raises: RemoteProtocolError if it is no such question
    """
    request = decode_client_json(VERB, body, ProducerRequest)
    if request.resolve and request.commit is None:
        raise RemoteProtocolError(f"{VERB}: resolve is for a commit, which it does not name", Code.CONTROL_REQUEST)
    known, outcome, batch = engine.query_producer(request.producer, request.commit, resolves=request.resolve)
    report = ProducerAnswer(
        known=known is not None,
        gapless=known is not None and known.is_gapless is True,
        sends=0 if known is None else max(known.highest_send, 0),
        commits=0 if known is None else max(known.highest_commit, 0),
        outcome=outcome,
    )
    return msgspec.json.encode(report), batch

"""Control request `producer`: shows the outcome of a COMMIT, and the highest numbers that a producer has used.

Source: docs/contract.md, "In doubt"
"""

from collections.abc import Callable
from typing import Annotated

import msgspec

from truenext.engine.engine import Engine
from truenext.engine.state.producer import CommitOutcome
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import decode_client_json
from truenext.model.limits import NAME_LENGTH_MAX, PRODUCER_NUMBER_MAX

VERB = "producer"


class ProducerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a control request `producer`, in JSON."""

    producer: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX, pattern="^[^\\0]*$")]
    """Name of the producer."""
    commit: Annotated[int, msgspec.Meta(ge=0, le=PRODUCER_NUMBER_MAX)] | None = None
    """Number of the COMMIT whose outcome is requested; None requests no outcome."""
    resolve: bool = False
    """If true, and the COMMIT is not recorded, it is rolled back for good. Needs `commit`."""


class ProducerAnswer(msgspec.Struct):
    """Body of the answer to a control request `producer`, in JSON."""

    known: bool
    """True if the broker remembers the producer."""
    gapless: bool
    """True if the producer's numbers have no gaps."""
    sends: int
    """Highest number of a SEND; 0 if none."""
    commits: int
    """Highest number of a COMMIT, also of a resolved one; 0 if none."""
    outcome: CommitOutcome | None
    """Outcome of the requested COMMIT; None if none was requested."""


def make_producer_report(engine: Engine, body: bytes, key_of: Callable[[str], str]) -> tuple[bytes, int]:
    """Report the highest numbers that a producer has used, and the outcome of one of its COMMITs.

    Returns the answer, as JSON, and the number of the batch with which all that the answer says is durable. `key_of`
    returns the key under which the broker knows a producer of this client.

    Raises: RemoteProtocolError if the request is invalid
    """
    request = decode_client_json(VERB, body, ProducerRequest)
    if request.resolve and request.commit is None:
        raise RemoteProtocolError(f"{VERB}: resolve needs commit, the number of a COMMIT", Code.CONTROL_REQUEST)
    known, outcome, batch = engine.state.producers.query(
        key_of(request.producer), request.commit, resolves=request.resolve
    )
    report = ProducerAnswer(
        known=known is not None,
        gapless=known is not None and known.is_gapless is True,
        sends=0 if known is None else max(known.highest_send, 0),
        commits=0 if known is None else max(known.highest_commit, 0),
        outcome=outcome,
    )
    return msgspec.json.encode(report), batch

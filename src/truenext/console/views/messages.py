"""Views of one message, and of its body as a file."""

from __future__ import annotations

from truenext.client.core.message import Content
from truenext.console.pages.bodies import decode_stage_message, show_body, show_stage_message
from truenext.console.pages.links import address, queue_link
from truenext.console.pages.message_rows import origin_of
from truenext.console.pages.messages import MessagePage
from truenext.console.pages.spark_queries import spark_command
from truenext.console.views.queues import ask_queue, browse, message_acts
from truenext.console.visit import NotAllowed, NotFound, Visit
from truenext.model.limits import SEQUENCE_MAX
from truenext.model.order import PRIORITY_MAX

FRAME_BYTES_MAX = 64 * 1024 * 1024


async def message(visit: Visit) -> MessagePage:
    queue = visit.required("queue")
    content = await find_message(visit, queue)
    where = {"queue": queue, "priority": content.priority, "sequence": content.sequence}
    envelope = decode_stage_message(content.body, content.headers.get("truenext-due"))
    dead_letters = (await ask_queue(visit, queue)).dead_letters
    return MessagePage(
        queue=queue,
        queue_link=queue_link(queue),
        sequence=content.sequence,
        priority=content.priority,
        message_id=content.message_id,
        persistent=content.persistent,
        arrived_ms=content.timestamp_ms or None,
        expires_ms=content.expires_ms or None,
        attempts=content.attempts,
        deliveries=content.deliveries,
        origin=origin_of(content),
        reason=content.headers.get("truenext-dead-letter-cause", ""),
        first_cause=content.first_cause,
        last_cause=content.last_cause,
        headers=sorted((name, value) for name, value in content.headers.items() if name != "subscription"),
        body=show_body(content.body, visit.text("form"), visit.number("start", 0), **where),
        stage=None if envelope is None else show_stage_message(envelope, has_flows=visit.has_flows),
        download=address("/body", **where),
        acts=message_acts(visit, queue, dead_letters=dead_letters, sequence=content.sequence),
        spark_command=spark_command(queue),
    )


async def body(visit: Visit) -> bytes:
    return (await find_message(visit, visit.required("queue"))).body


async def find_message(visit: Visit, queue: str) -> Content:
    """Return the message that the parameters name.

    Raises: NotFound if it does not wait in the queue; NotAllowed if the user may not browse
    """
    if not visit.rights.may_browse(queue):
        raise NotAllowed(f"user {visit.rights.name!r} may not browse {queue!r}")
    sequence = visit.number("sequence", 0, SEQUENCE_MAX)
    given = visit.text("priority")
    priorities = [visit.number("priority", 0, PRIORITY_MAX)] if given else range(PRIORITY_MAX, -1, -1)
    for priority in priorities if sequence else ():
        after = f"{priority},{sequence - 1}"
        contents, _ = await browse(visit, queue, count=1, after=after, bytes_max=FRAME_BYTES_MAX, body_max=None)
        if contents and (contents[0].priority, contents[0].sequence) == (priority, sequence):
            return contents[0]
    raise NotFound(
        f"message {sequence} does not wait in {queue!r}: a consumer holds it, or it was processed, moved or removed"
    )

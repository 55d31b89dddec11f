"""Destinations and headers that the broker understands, frame by frame, with their values and meanings.

docs/reference/headers.md is made of these tables. The broker does not import this file. SUBSCRIBE_RULES (headers.py)
has the headers of other brokers that are only accepted or refused, with the reasons."""

from typing import NamedTuple

from truenext.model.destination import DestinationKind
from truenext.model.limits import (
    CAUSE_BYTES_MAX,
    COMPOSITE_MAX,
    CONSUMER_PRIORITY_MAX,
    DELAY_MS_MAX,
    HANDLERS_MAX,
    HEART_BEAT_MS_MIN,
    NAME_LENGTH_MAX,
    PRODUCER_NUMBER_MAX,
    REPORT_ID_LENGTH_MAX,
    SCHEDULE_TIME_MAX,
    TTL_MS_MAX,
    WINDOW_DEFAULT,
    WINDOW_MAX,
)
from truenext.model.order import PRIORITY_DEFAULT, PRIORITY_MAX


class DestinationDoc(NamedTuple):
    addresses: tuple[str, ...]
    """Examples of the address."""
    frames: str
    """Commands of the frames that may name the destination."""
    meaning: str
    kinds: tuple[DestinationKind, ...]
    """Kind of each example."""


class HeaderDoc(NamedTuple):
    names: tuple[str, ...]
    """The header, or several headers with one meaning or purpose."""
    values: str
    """Valid values; for a header of a client also the default."""
    meaning: str


DESTINATIONS: tuple[DestinationDoc, ...] = (
    DestinationDoc(
        ("/queue/NAME", "NAME"),
        "SEND, SUBSCRIBE",
        "Queue: each message goes to one consumer. The plain name has no `/` and no `:`.",
        (DestinationKind.QUEUE,),
    ),
    DestinationDoc(
        ("/queue/orders.*", "/queue/orders.>"),
        "SUBSCRIBE",
        "Pattern of queues: `*` stands for one word, `>` for the rest; the word `#` is refused. "
        "The consumer has one window and one order over all queues that match, and the `destination` of a MESSAGE "
        "names the queue. Queues `DLQ.` + anything, "
        "`Spark.` + anything and `Consumer.ANY.VirtualTopic.NAME` match only a pattern with the same first word.",
        (DestinationKind.QUEUE_PATTERN,),
    ),
    DestinationDoc(
        ("/topic/NAME",),
        "SEND, SUBSCRIBE",
        "Topic: each message goes to all subscriptions.",
        (DestinationKind.TOPIC,),
    ),
    DestinationDoc(
        ("/topic/orders.*", "/topic/orders.>"),
        "SUBSCRIBE",
        "Pattern of topics. The word `#` is refused.",
        (DestinationKind.TOPIC_PATTERN,),
    ),
    DestinationDoc(
        ("/topic/VirtualTopic.NAME",),
        "SEND, SUBSCRIBE",
        "Virtual topic: each queue `Consumer.ANY.VirtualTopic.NAME` gets a copy, too, used or not, from the time when "
        "a client first names that queue.",
        (DestinationKind.TOPIC,),
    ),
    DestinationDoc(
        ("/queue/a,/topic/b",),
        "SEND",
        f"Composite destination: all of its parts at once, at most {COMPOSITE_MAX}.",
        (DestinationKind.COMPOSITE,),
    ),
    DestinationDoc(
        ("/temp-queue/NAME", "/temp-topic/NAME"),
        "SEND, SUBSCRIBE, `reply-to`",
        "Temporary queue or topic: it belongs to this connection alone, and ends with it.",
        (DestinationKind.TEMPORARY, DestinationKind.TOPIC),
    ),
    DestinationDoc(
        ("/remote-temp-queue/SESSION/NAME", "/remote-temp-topic/SESSION/NAME"),
        "SEND",
        "Temporary queue or topic of another connection, as the `reply-to` of its MESSAGE names it.",
        (DestinationKind.TEMPORARY, DestinationKind.TOPIC),
    ),
    DestinationDoc(
        ("/subscription/CLIENT,NAME",),
        "SUBSCRIBE with `browser:true`",
        "Durable subscription.",
        (DestinationKind.DURABLE,),
    ),
    DestinationDoc(
        ("/control/VERB",),
        "SEND",
        "Control request to the broker ([control.md](control.md)).",
        (DestinationKind.CONTROL,),
    ),
)

_COUNTED = "`all` (default), `nacked`"
_PRODUCER = HeaderDoc(
    ("truenext-producer", "truenext-number"),
    f"a name of at most {NAME_LENGTH_MAX} characters; 0 to {PRODUCER_NUMBER_MAX}. Default: none",
    "Accept the frame once, however often it is repeated. Numbers of a producer rise; SENDs and COMMITs are numbered "
    "separately. Both headers are needed.",
)
_GAPLESS = HeaderDoc(
    ("truenext-gapless",),
    "`true`, `false` (default)",
    "The numbers of this producer have no gaps: a number higher than the last one plus 1 is refused. The broker can "
    "then report the outcome of each COMMIT. It needs `truenext-producer`.",
)
_TRANSACTION = HeaderDoc(("transaction",), "a name. Default: none", "The frame is part of this open transaction.")
_ACK_ID = (
    HeaderDoc(("id",), "the `ack` of a MESSAGE. Required in STOMP 1.2", "Message that the frame is about."),
    HeaderDoc(
        ("message-id", "subscription"),
        "those of the MESSAGE. Required in STOMP 1.1, and `message-id` in 1.0",
        "Message that the frame is about.",
    ),
    _TRANSACTION,
)
_DURABLE = HeaderDoc(
    ("durable", "persistent"),
    "`true`, `false` (default)",
    "A subscription to a topic is durable, and is named by `id`, of the client with the `client-id` of its CONNECT. It "
    "collects messages while it has no consumer.",
)
_DURABLE_NAME = HeaderDoc(
    (
        *("activemq.subscriptionName", "activemq.subcriptionName"),
        *("durable-subscription-name", "durable-subscriber-name"),
    ),
    "a name. Default: none",
    "A subscription to a topic is durable, and has this name.",
)

EVERY_FRAME = "Every frame of a client"
CLIENT_HEADERS: dict[str, tuple[HeaderDoc, ...]] = {
    EVERY_FRAME: (
        HeaderDoc(
            ("receipt",),
            f"a text of at most {NAME_LENGTH_MAX} characters. Default: none",
            "Answer with a RECEIPT, once all earlier frames of the connection are as durable as promised. It also "
            "confirms their persistent SENDs. CONNECT cannot have it.",
        ),
    ),
    "CONNECT": (
        HeaderDoc(
            ("accept-version",), "`1.0`, `1.1`, `1.2`, joined by commas. Default: `1.0`", "Versions of the client."
        ),
        HeaderDoc(
            ("heart-beat",),
            "two numbers, joined by a comma. Default: `0,0`",
            "Milliseconds between heart-beats that the client can send, and wants; 0 is none. The least is "
            f"{HEART_BEAT_MS_MIN}. A client that misses its heart-beats counts as lost after 2 to 2.5 times the agreed "
            "interval.",
        ),
        HeaderDoc(
            ("login", "passcode"),
            "a user's name and password. Default: none",
            "User of the connection. A broker without users does not check them.",
        ),
        HeaderDoc(
            ("client-id",), "a name. Default: none", "Name of the client, to which its durable subscriptions belong."
        ),
        HeaderDoc(
            ("truenext-client",),
            f"1 to {PRODUCER_NUMBER_MAX}. Default: none",
            "The client is a truenext client, and this is the number of the connection among the client's connections. "
            "The header needs STOMP 1.2.",
        ),
        HeaderDoc(
            ("truenext-secret",),
            "32 hexadecimal digits, as in CONNECTED. Default: none",
            "Take over the client's former connection, which has this secret. It needs a `truenext-client` that is "
            "higher than that connection's.",
        ),
    ),
    "SEND": (
        HeaderDoc(("destination",), "an address. Required", "Destination of the message."),
        HeaderDoc(
            ("persistent",),
            "`true`, `false` (default)",
            "The message survives a crash. Without this header it is transient, as in ActiveMQ.",
        ),
        HeaderDoc(
            ("priority",),
            f"0 to {PRIORITY_MAX}; {PRIORITY_DEFAULT} (default)",
            f"Priority of the message; {PRIORITY_MAX} is first. A number out of range counts as the nearest one.",
        ),
        HeaderDoc(
            ("expires",),
            "milliseconds since the epoch; 0 and -1 are never (default)",
            "The message is not dispatched after this time, and is removed a second or so later.",
        ),
        HeaderDoc(
            ("truenext-ttl",),
            f"milliseconds, 1 to {TTL_MS_MAX}. Default: none",
            "The message expires so long after the broker has accepted it; not together with `expires`.",
        ),
        HeaderDoc(
            ("truenext-report-to", "truenext-report-id"),
            f"a queue or topic; a text of 1 to {REPORT_ID_LENGTH_MAX} characters. Default: none",
            "Send a report to this destination whenever the message becomes a dead letter: a message without a body, "
            "with the headers of the dead letter and the id as `correlation-id`. Both headers are needed, and the "
            "right to send there. Only on a SEND to one queue.",
        ),
        HeaderDoc(
            ("truenext-on-failure",),
            f"1 to {HANDLERS_MAX} queues `/queue/NAME`, with one blank between two. Default: none",
            "A message that has failed moves to the first of these queues instead of becoming a dead letter; the "
            "others stay in the header. It needs the right to send to each. Only on a SEND to one queue.",
        ),
        _PRODUCER,
        _GAPLESS,
        HeaderDoc(
            ("AMQ_SCHEDULED_DELAY",),
            "milliseconds; 0 (default)",
            "Send the message after this delay, or after each hit of CRON.",
        ),
        HeaderDoc(
            ("AMQ_SCHEDULED_TIME",),
            f"milliseconds since the epoch, at most {SCHEDULE_TIME_MAX}. Default: none",
            "Send the message at this time; a past time is now. It excludes DELAY and CRON.",
        ),
        HeaderDoc(("AMQ_SCHEDULED_PERIOD",), "milliseconds; 0 (default)", "Send the message again after each period."),
        HeaderDoc(("AMQ_SCHEDULED_REPEAT",), "a number; 0 (default), -1 is for ever", "Number of further sends."),
        HeaderDoc(
            ("AMQ_SCHEDULED_CRON",),
            "a cron expression of five fields. Default: none",
            "Send the message at these times, in UTC or the zone of ZONE. Any other header that begins with "
            "`AMQ_SCHEDULED_` is refused.",
        ),
        HeaderDoc(
            ("AMQ_SCHEDULED_ZONE",),
            "a name of the IANA database, such as `Europe/Oslo`. Default: UTC",
            "Time zone of CRON. A local time that is skipped or repeated counts once.",
        ),
        HeaderDoc(
            ("JMSXGroupID",),
            f"a name of at most {NAME_LENGTH_MAX} characters. Default: none",
            "Group of the message. All messages of a group go to one consumer, in order, as long as it is there.",
        ),
        HeaderDoc(
            ("JMSXGroupSeq",),
            "`-1`",
            "The group becomes free for another consumer with this message. Other values are yours.",
        ),
        HeaderDoc(
            ("reply-to",),
            "an address. Default: none",
            "Address for replies. A `/temp-queue/NAME` must have a subscription of this connection, a "
            "`/temp-topic/NAME` need not; the broker rewrites both so that other clients can send there.",
        ),
        HeaderDoc(
            ("correlation-id",),
            "a text. Default: none",
            "Text for the consumer. The answer to a control request repeats it.",
        ),
        _TRANSACTION,
    ),
    "SUBSCRIBE": (
        HeaderDoc(
            ("id",),
            f"a name of at most {NAME_LENGTH_MAX} characters. Required, except in STOMP 1.0",
            "Name of the subscription.",
        ),
        HeaderDoc(("destination",), "an address. Required", "Queue, topic or pattern to subscribe to."),
        HeaderDoc(
            ("ack",),
            "`auto` (default), `client`, `client-individual`",
            "Acknowledgement by the socket, of all messages up to one, or of each message.",
        ),
        HeaderDoc(
            ("activemq.prefetchSize", "prefetch-count", "consumer.prefetchSize"),
            f"1 to {WINDOW_MAX}; `prefetch-count:0` is the default",
            "Window: number of messages that the consumer may hold. By default it is automatic "
            f"(`client-individual`), or {WINDOW_DEFAULT} (`client`). 0 is refused without `truenext-pull`.",
        ),
        HeaderDoc(
            ("activemq.priority", "consumer.priority"),
            f"-{CONSUMER_PRIORITY_MAX} to {CONSUMER_PRIORITY_MAX}; 0 (default)",
            "Consumer priority. A message goes to the consumer with the highest priority among those that have credit.",
        ),
        HeaderDoc(
            ("activemq.exclusive", "consumer.exclusive", "exclusive"),
            "`true`, `false` (default)",
            "Exclusive consumer: it alone gets the queue's messages. When it ends, the next exclusive consumer does. "
            "`exclusive` is RabbitMQ's, and means this on a queue that is not temporary. In RabbitMQ it makes a queue "
            "of one connection. Here a second subscriber waits, and the queue stays; a queue of one connection is "
            "`/temp-queue/NAME`.",
        ),
        HeaderDoc(
            ("selector", "consumer.selector"),
            "a [JMS selector](../protocol.md#selectors). Default: none",
            "Selector: only messages that match it come, in order. Only these are copied from a topic.",
        ),
        HeaderDoc(
            ("truenext-express",),
            "`true`, `false` (default)",
            "Express dispatch: a more urgent message may come beyond a full window, at most 10. It needs "
            "`ack:client-individual`, and no pattern.",
        ),
        HeaderDoc(
            ("truenext-pull",),
            "`true`, `false` (default)",
            "The subscription pulls: it gets the messages that it requests by [`credit`](control.md#credit). It needs "
            "`ack:client` or `client-individual`, and no window but 0.",
        ),
        _DURABLE,
        _DURABLE_NAME,
        HeaderDoc(
            ("browser",),
            "`true`, `false` (default)",
            "Browser: it is shown the messages that wait, and consumes none. A MESSAGE with `browser:end` follows the "
            "last message.",
        ),
    ),
    "UNSUBSCRIBE": (
        HeaderDoc(("id",), "a name. Required", "Subscription that ends."),
        _DURABLE._replace(
            meaning="The durable subscription ends for good, with the messages that wait in it. No effect for a queue."
        ),
        _DURABLE_NAME._replace(meaning="The durable subscription of this name ends for good, as with `durable:true`."),
    ),
    "ACK": (
        *_ACK_ID,
        HeaderDoc(
            ("truenext-started",),
            "the `ack` of a MESSAGE. Default: none",
            "The program has this message now. Not together with `transaction`.",
        ),
    ),
    "NACK": (
        *_ACK_ID,
        HeaderDoc(
            ("truenext-delay",),
            f"milliseconds, 0 to {DELAY_MS_MAX}. Default: the queue's policy",
            "Try the message again after this delay.",
        ),
        HeaderDoc(("truenext-reject",), "`true`, `false` (default)", "Reject: the message is a dead letter now."),
        HeaderDoc(("requeue",), "`true` (default), `false`", "`requeue:false` is RabbitMQ's `truenext-reject:true`."),
        HeaderDoc(
            ("truenext-cause",),
            f"a text of at most {CAUSE_BYTES_MAX} bytes. Default: none",
            "Reason for the failure. Each later MESSAGE has the first and the last reason.",
        ),
    ),
    "BEGIN": (
        HeaderDoc(("transaction",), f"a name of at most {NAME_LENGTH_MAX} characters. Required", "New transaction."),
        HeaderDoc(
            ("truenext-count-attempts",),
            _COUNTED,
            "With `nacked` no end of the transaction counts an attempt for messages that it has only acknowledged: no "
            "ABORT, COMMIT or `release`, whatever these request, and no lost connection.",
        ),
    ),
    "COMMIT": (
        HeaderDoc(("transaction",), "a name. Required", "Transaction to commit."),
        _PRODUCER,
        _GAPLESS,
        HeaderDoc(
            ("truenext-count-attempts",),
            _COUNTED,
            "If the COMMIT is a repeat, it counts an attempt for all messages that the transaction has acknowledged or "
            "NACKed, or only for those that it has NACKed.",
        ),
    ),
    "ABORT": (
        HeaderDoc(("transaction",), "a name. Required", "Transaction to abort."),
        HeaderDoc(
            ("truenext-count-attempts",),
            _COUNTED,
            "Count an attempt for all messages that the transaction has acknowledged or NACKed, or only for those that "
            "it has NACKed.",
        ),
    ),
    "DISCONNECT": (
        HeaderDoc(
            ("truenext-forget",), "a JSON list of names. Default: none", "Producers that the broker need not remember."
        ),
    ),
}
"""Headers of a client's frames, by command. All other headers of a SEND are the user's; if one begins with `truenext-`,
the log warns of the first. On any other frame a header that is not listed has no effect, and is refused if it begins
with `truenext-`."""

BROKER_FRAME_HEADERS: dict[str, tuple[HeaderDoc, ...]] = {
    "CONNECTED": (
        HeaderDoc(("version",), "`1.0`, `1.1`, `1.2`", "Version of STOMP on this connection."),
        HeaderDoc(
            ("heart-beat",), "two numbers", "Agreed milliseconds between heart-beats of the broker, and of the client."
        ),
        HeaderDoc(("session",), "a text", "Id of the connection."),
        HeaderDoc(("server",), "a text", "Name of the broker, see the setting `server_name`."),
        HeaderDoc(
            ("truenext-login",), "`unchecked`", "CONNECT had a `login` or `passcode`, and the broker has no users."
        ),
        HeaderDoc(
            ("truenext-store",),
            "a text",
            "Name of the store, to a truenext client. Do not repeat a frame in doubt to another store.",
        ),
        HeaderDoc(("truenext-secret",), "32 hexadecimal digits", "Secret for the next CONNECT, to a truenext client."),
        HeaderDoc(
            ("truenext-taken-over",),
            "`true`, `false`",
            "Whether a connection was taken over, if CONNECT had a `truenext-secret`.",
        ),
    ),
    "MESSAGE": (
        HeaderDoc(("subscription",), "a name", "Id of the subscription."),
        HeaderDoc(("ack",), "a text", "Value for the `id` of ACK and NACK; STOMP 1.2, not in `auto` mode."),
        HeaderDoc(
            ("message-id",),
            "`truenext-STORE-SEQUENCE`",
            "Id of the message. With the sequence 0 the frame is no message.",
        ),
        HeaderDoc(("destination",), "an address", "Destination of the SEND; the queue, for a pattern of queues."),
        HeaderDoc(("priority",), f"0 to {PRIORITY_MAX}", "Priority in effect."),
        HeaderDoc(("expires",), "milliseconds since the epoch", "Time at which the message expires, if it does."),
        HeaderDoc(("timestamp",), "milliseconds since the epoch", "Time at which the broker accepted the message."),
        HeaderDoc(("truenext-sequence",), "a number", "Sequence: the position among messages of one priority."),
        HeaderDoc(("truenext-deliveries",), "a number", "Number of dispatches, this one included."),
        HeaderDoc(("truenext-attempts",), "a number", "Number of attempts so far that have failed."),
        HeaderDoc(("redelivered",), "`true`", "A program may have received the message before."),
        HeaderDoc(
            ("truenext-first-cause", "truenext-last-cause"),
            "a text",
            "Causes of the first and the last NACK that stated one.",
        ),
        HeaderDoc(("truenext-round",), "a number", "Release count at the dispatch, to a truenext client."),
        HeaderDoc(("truenext-lost",), "`true`", "The last attempt was a lost connection, to a truenext client."),
        HeaderDoc(("JMSXGroupFirstForConsumer",), "`true`", "The message is the first of its group for this consumer."),
        HeaderDoc(
            ("truenext-dead-letter-cause", "truenext-dead-letter-timestamp"),
            "a text; milliseconds since the epoch",
            "Reason and time of a dead letter.",
        ),
        HeaderDoc(
            ("truenext-original-first-cause", "truenext-original-last-cause"),
            "a text",
            "Causes of the message before it was a dead letter.",
        ),
        HeaderDoc(
            (
                *("truenext-original-destination", "truenext-original-priority", "truenext-original-persistent"),
                *("truenext-original-expires", "truenext-original-timestamp", "truenext-original-attempts"),
            ),
            "as on a SEND and a MESSAGE",
            "Headers of the message before it was a dead letter.",
        ),
        HeaderDoc(
            ("truenext-failure",),
            "`report`, `handled`",
            "The message is the report of a dead letter, or has failed and moved to a handler. Either has the headers "
            "of a dead letter.",
        ),
        HeaderDoc(
            ("truenext-due",),
            "milliseconds since the epoch",
            "Due time of a scheduled send. Each occurrence of a repeated send has its own due time.",
        ),
        HeaderDoc(("browser",), "`end`", "The frame is no message: the browser has been shown everything."),
        HeaderDoc(
            ("truenext-unused",),
            "a number",
            "The frame is no message: a pull request has ended, and this number of its messages has not come. It "
            "repeats the `correlation-id` of the last `credit`.",
        ),
    ),
    "RECEIPT": (
        HeaderDoc(("receipt-id",), "a text", "The `receipt` of the frame."),
        HeaderDoc(("truenext-repeat",), "`true`", "The frame was a repeat, and had no effect."),
        HeaderDoc(
            ("truenext-outcome",),
            "`unknown`",
            "The frame was a repeat, and its number may never have been used: the producer may have left it out.",
        ),
    ),
    "ERROR": (
        HeaderDoc(("message",), "a text", "Reason in short; the body has it in full."),
        HeaderDoc(("truenext-code",), "a [code](../protocol.md#error-codes)", "Reason, for programs."),
        HeaderDoc(("receipt-id",), "a text", "The `receipt` of the frame that was refused. It gets no RECEIPT."),
        HeaderDoc(
            ("truenext-frame",),
            "a number",
            "Number of the refused frame among all frames of the connection, CONNECT is 1; to a truenext client. "
            "Without this header the connection ends.",
        ),
        HeaderDoc(("version",), "`1.0,1.1,1.2`", "Versions of the broker, before the login."),
        HeaderDoc(("content-type",), "`text/plain`", "Type of the body."),
    ),
}
"""Headers of the broker's frames, by command. A MESSAGE also has the other headers of its SEND."""

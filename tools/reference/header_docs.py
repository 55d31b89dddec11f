"""Destinations and headers that the broker understands, frame by frame, with their values and meanings.

docs/reference/headers.md is made of these tables. SUBSCRIBE_RULES (wire/stomp/headers.py) has the headers of other
brokers that are only accepted or refused, with the reasons."""

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
        "Virtual topic: each queue `Consumer.ANY.VirtualTopic.NAME` gets a copy, too, whether it has consumers or "
        "not, from the time when a client first names that queue.",
        (DestinationKind.TOPIC,),
    ),
    DestinationDoc(
        ("/queue/a,/topic/b",),
        "SEND",
        f"Composite destination: each of its parts, at most {COMPOSITE_MAX}, gets the message.",
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
        "Temporary queue or topic of another connection, as the `reply-to` of a MESSAGE names it.",
        (DestinationKind.TEMPORARY, DestinationKind.TOPIC),
    ),
    DestinationDoc(
        ("/subscription/CLIENT,NAME",),
        "SUBSCRIBE with `browser:true`",
        "Durable subscription NAME of the client with the `client-id` CLIENT.",
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
    "Accept the frame once, however often it is repeated. The numbers of a producer rise; its SENDs and its "
    "COMMITs are numbered separately. Each header needs the other.",
)
_GAPLESS = HeaderDoc(
    ("truenext-gapless",),
    "`true`, `false` (default)",
    "The numbers of this producer have no gaps: a number higher than the last one plus 1 is refused. The broker "
    "can then report the outcome of each COMMIT. The header needs `truenext-producer`.",
)
_TRANSACTION = HeaderDoc(("transaction",), "a name. Default: none", "The frame is part of this open transaction.")
_ACK_ID = (
    HeaderDoc(("id",), "the `ack` of a MESSAGE. Required in STOMP 1.2", "Message that the frame is about."),
    HeaderDoc(
        ("message-id", "subscription"),
        "these headers of the MESSAGE. Both are required in STOMP 1.1, `message-id` also in STOMP 1.0",
        "Message that the frame is about.",
    ),
    _TRANSACTION,
)
_DURABLE = HeaderDoc(
    ("durable", "persistent"),
    "`true`, `false` (default)",
    "The subscription to a topic is durable: it collects messages while it has no consumer. Its name is the `id`, "
    "and it belongs to the client that the `client-id` of CONNECT names.",
)
_DURABLE_NAME = HeaderDoc(
    (
        *("activemq.subscriptionName", "activemq.subcriptionName"),
        *("durable-subscription-name", "durable-subscriber-name"),
    ),
    "a name. Default: none",
    "The subscription to a topic is durable, and has this name instead of the `id`.",
)

EVERY_FRAME = "Every frame of a client"
CLIENT_HEADERS: dict[str, tuple[HeaderDoc, ...]] = {
    EVERY_FRAME: (
        HeaderDoc(
            ("receipt",),
            f"a text of at most {NAME_LENGTH_MAX} characters. Default: none",
            "Answer with a RECEIPT, once all earlier frames of the connection are as durable as promised. The "
            "RECEIPT also confirms their persistent SENDs. CONNECT cannot have this header.",
        ),
    ),
    "CONNECT": (
        HeaderDoc(
            ("accept-version",),
            "`1.0`, `1.1`, `1.2`, joined by commas. Default: `1.0`",
            "Versions of STOMP that the client speaks.",
        ),
        HeaderDoc(
            ("heart-beat",),
            "two numbers, joined by a comma. Default: `0,0`",
            "Milliseconds between the heart-beats that the client can send, and between those that it wants; 0 "
            "means none. The smallest value is "
            f"{HEART_BEAT_MS_MIN}. A client that misses its heart-beats counts as lost after 2 to 2.5 times the agreed "
            "interval.",
        ),
        HeaderDoc(
            ("login", "passcode"),
            "a user's name and password. Default: none",
            "User of the connection. A broker without users does not check name and password.",
        ),
        HeaderDoc(
            ("client-id",), "a name. Default: none", "Name of the client, to which its durable subscriptions belong."
        ),
        HeaderDoc(
            ("truenext-client",),
            f"1 to {PRODUCER_NUMBER_MAX}. Default: none",
            "The client is a truenext client, which numbers its connections; this connection has this number. "
            "The header needs STOMP 1.2.",
        ),
        HeaderDoc(
            ("truenext-secret",),
            "32 hexadecimal digits, as in CONNECTED. Default: none",
            "Take over the client's former connection, which has this secret. The header needs a "
            "`truenext-client` with a higher number than that of the former connection.",
        ),
    ),
    "SEND": (
        HeaderDoc(("destination",), "an address. Required", "Destination of the message."),
        HeaderDoc(
            ("persistent",),
            "`true`, `false` (default)",
            "The message survives a crash of the broker. Without this header the message is transient, as in ActiveMQ.",
        ),
        HeaderDoc(
            ("priority",),
            f"0 to {PRIORITY_MAX}; {PRIORITY_DEFAULT} (default)",
            f"Priority of the message; {PRIORITY_MAX} is first. A number out of range counts as the nearest one.",
        ),
        HeaderDoc(
            ("expires",),
            "milliseconds since the epoch; 0 (default) and -1 mean never",
            "The message is not dispatched after this time, and is removed a second or so later.",
        ),
        HeaderDoc(
            ("truenext-ttl",),
            f"milliseconds, 1 to {TTL_MS_MAX}. Default: none",
            "Time from acceptance by the broker until the message expires. Not together with `expires`.",
        ),
        HeaderDoc(
            ("truenext-report-to", "truenext-report-id"),
            f"a queue or topic; a text of 1 to {REPORT_ID_LENGTH_MAX} characters. Default: none",
            "Send a report to this destination whenever the message becomes a dead letter: a message without a body, "
            "with the headers of the dead letter and the id as `correlation-id`. Each header needs the other, and "
            "the user needs the right to send to the destination. Only on a SEND to one queue.",
        ),
        HeaderDoc(
            ("truenext-on-failure",),
            f"1 to {HANDLERS_MAX} queues `/queue/NAME`, with one blank between two. Default: none",
            "A message that has failed moves to the first of these queues instead of becoming a dead letter; the "
            "others stay in the header. The user needs the right to send to each queue. Only on a SEND to one queue.",
        ),
        HeaderDoc(
            ("truenext-reject", "truenext-cause"),
            f"`true` or `false` (default); a text of up to {CAUSE_BYTES_MAX} bytes",
            "The message does not arrive in its queue: it becomes a dead letter, with this cause, as if a consumer had "
            "rejected it there. The user needs the right to take from the queue. Only on a SEND to one queue, in a "
            "transaction.",
        ),
        _PRODUCER,
        _GAPLESS,
        HeaderDoc(
            ("AMQ_SCHEDULED_DELAY",),
            "milliseconds; 0 (default)",
            "Send the message after this delay, or this long after each time of `AMQ_SCHEDULED_CRON`.",
        ),
        HeaderDoc(
            ("AMQ_SCHEDULED_TIME",),
            f"milliseconds since the epoch, at most {SCHEDULE_TIME_MAX}. Default: none",
            "Send the message at this time; if the time is past, send it at once. Not together with "
            "`AMQ_SCHEDULED_DELAY` or `AMQ_SCHEDULED_CRON`.",
        ),
        HeaderDoc(("AMQ_SCHEDULED_PERIOD",), "milliseconds; 0 (default)", "Send the message again after each period."),
        HeaderDoc(
            ("AMQ_SCHEDULED_REPEAT",),
            "a number; 0 (default), -1 means for ever",
            "Number of times that the message is sent again.",
        ),
        HeaderDoc(
            ("AMQ_SCHEDULED_CRON",),
            "a cron expression of five fields. Default: none",
            "Send the message at these times, in UTC or in the zone of `AMQ_SCHEDULED_ZONE`. Any other header "
            "that begins with "
            "`AMQ_SCHEDULED_` is refused.",
        ),
        HeaderDoc(
            ("AMQ_SCHEDULED_ZONE",),
            "a name of the IANA database, such as `Europe/Oslo`. Default: UTC",
            "Time zone of `AMQ_SCHEDULED_CRON`. A local time that the zone skips or repeats counts once.",
        ),
        HeaderDoc(
            ("JMSXGroupID",),
            f"a name of at most {NAME_LENGTH_MAX} characters. Default: none",
            "Group of the message. All messages of a group go to one consumer, in order, as long as this consumer "
            "exists.",
        ),
        HeaderDoc(
            ("JMSXGroupSeq",),
            "`-1`",
            "Once this message is dispatched, its group is free for another consumer. Other values have no effect "
            "in the broker.",
        ),
        HeaderDoc(
            ("reply-to",),
            "an address. Default: none",
            "Address for replies. A `/temp-queue/NAME` must have a subscription of this connection, but for a control "
            "request; a `/temp-topic/NAME` need not. The broker rewrites both so that other clients can send there.",
        ),
        HeaderDoc(
            ("correlation-id",),
            "a text. Default: none",
            "Text for the consumer. The broker's answer to a control request repeats this text.",
        ),
        HeaderDoc(
            ("amq-msg-type",),
            "`text`, `bytes`. Default: `bytes` if the SEND has `content-length` or the body is not UTF-8, else `text`",
            "Kind of message that a JMS client gets: a TextMessage, if the body is UTF-8, or a BytesMessage. "
            "`truenext send` sets `text` for a body that is UTF-8.",
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
            "`auto`: a message is acknowledged once the socket has taken it. `client`: an ACK acknowledges all "
            "messages up to one. `client-individual`: an ACK acknowledges one message.",
        ),
        HeaderDoc(
            ("activemq.prefetchSize", "prefetch-count", "consumer.prefetchSize"),
            f"1 to {WINDOW_MAX}; `prefetch-count:0` is the default",
            "Window: number of messages that the consumer may hold. By default the window is automatic "
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
            "Exclusive consumer: it alone gets the queue's messages. When this consumer ends, the next exclusive "
            "consumer gets them. In RabbitMQ the header `exclusive` makes a queue of one connection, which is "
            "`/temp-queue/NAME` here. On any other queue the header makes an exclusive consumer here: a second "
            "subscriber waits, and the queue stays.",
        ),
        HeaderDoc(
            ("selector", "consumer.selector"),
            "a [JMS selector](../protocol.md#selectors). Default: none",
            "Selector: the consumer gets only messages that match, in order. A subscription to a topic collects "
            "only these.",
        ),
        HeaderDoc(
            ("truenext-express",),
            "`true`, `false` (default)",
            "Express dispatch: at most 10 more urgent messages may come beyond a full window. The header needs "
            "`ack:client-individual`, and a destination that is no pattern.",
        ),
        HeaderDoc(
            ("truenext-pull",),
            "`true`, `false` (default)",
            "The subscription pulls: it gets the messages that it requests by [`credit`](control.md#credit). The "
            "header needs `ack:client` or `ack:client-individual`, and no window other than 0.",
        ),
        _DURABLE,
        _DURABLE_NAME,
        HeaderDoc(
            ("browser",),
            "`true`, `false` (default)",
            "Browser: the subscription is shown the messages that wait, and consumes none. A MESSAGE with "
            "`browser:end` follows the "
            "last message.",
        ),
        HeaderDoc(
            ("truenext-after",),
            "PRIORITY,SEQUENCE. Default: from the first message",
            "Only with `browser:true`: the browser is shown the messages that come after this position in the order of "
            "the queue, whether or not a message is there.",
        ),
        HeaderDoc(
            ("truenext-count",),
            "a number, 1 or more. Default: all",
            "Only with `browser:true`: number of messages after which the browser has been shown everything.",
        ),
    ),
    "UNSUBSCRIBE": (
        HeaderDoc(("id",), "a name. Required", "Id of the subscription that ends."),
        _DURABLE._replace(
            meaning="The durable subscription ends for good, with the messages that wait in it. The header has no "
            "effect for a queue."
        ),
        _DURABLE_NAME._replace(meaning="The durable subscription of this name ends for good, as with `durable:true`."),
    ),
    "ACK": (
        *_ACK_ID,
        HeaderDoc(
            ("truenext-started",),
            "the `ack` of a MESSAGE. Default: none",
            "The client's program has started to handle this message. Not together with `transaction`.",
        ),
    ),
    "NACK": (
        *_ACK_ID,
        HeaderDoc(
            ("truenext-delay",),
            f"milliseconds, 0 to {DELAY_MS_MAX}. Default: the queue's policy",
            "Try the message again after this delay.",
        ),
        HeaderDoc(
            ("truenext-reject",), "`true`, `false` (default)", "Reject the message: it becomes a dead letter at once."
        ),
        HeaderDoc(
            ("requeue",), "`true` (default), `false`", "`requeue:false`, as in RabbitMQ, means `truenext-reject:true`."
        ),
        HeaderDoc(
            ("truenext-cause",),
            f"a text of at most {CAUSE_BYTES_MAX} bytes. Default: none",
            "Reason for the failure. Each later MESSAGE with this message has the first and the last such reason.",
        ),
    ),
    "BEGIN": (
        HeaderDoc(
            ("transaction",),
            f"a name of at most {NAME_LENGTH_MAX} characters. Required",
            "Name of the new transaction.",
        ),
        HeaderDoc(
            ("truenext-count-attempts",),
            _COUNTED,
            "With `nacked`, messages that the transaction has acknowledged but not NACKed get no attempt when it "
            "ends: by an ABORT, COMMIT or `release`, whatever these request, or by a lost connection.",
        ),
    ),
    "COMMIT": (
        HeaderDoc(("transaction",), "a name. Required", "Transaction to commit."),
        _PRODUCER,
        _GAPLESS,
        HeaderDoc(
            ("truenext-count-attempts",),
            _COUNTED,
            "If the COMMIT is a repeat: messages for which it counts an attempt. `all`: those that the "
            "transaction has acknowledged or NACKed; `nacked`: only those that it has NACKed.",
        ),
    ),
    "ABORT": (
        HeaderDoc(("transaction",), "a name. Required", "Transaction to abort."),
        HeaderDoc(
            ("truenext-count-attempts",),
            _COUNTED,
            "Messages for which the ABORT counts an attempt. `all`: those that the transaction has acknowledged "
            "or NACKed; `nacked`: only those that it has NACKed.",
        ),
    ),
    "DISCONNECT": (
        HeaderDoc(
            ("truenext-forget",),
            "a JSON list of names. Default: none",
            "Names of producers whose numbers the broker need not remember any longer.",
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
            ("heart-beat",),
            "two numbers",
            "Agreed milliseconds between heart-beats: first those of the broker, then those of the client.",
        ),
        HeaderDoc(("session",), "a text", "Id of the connection."),
        HeaderDoc(("server",), "a text", "Name of the broker, see the setting `server_name`."),
        HeaderDoc(
            ("truenext-login",), "`unchecked`", "CONNECT had a `login` or `passcode`, and the broker has no users."
        ),
        HeaderDoc(
            ("truenext-store",),
            "a text",
            "Name of the broker's store, only for a truenext client. The client must not repeat a frame in doubt "
            "to a broker with another store.",
        ),
        HeaderDoc(
            ("truenext-secret",),
            "32 hexadecimal digits",
            "Secret for the next CONNECT of the client, only for a truenext client.",
        ),
        HeaderDoc(
            ("truenext-taken-over",),
            "`true`, `false`",
            "Whether a connection was taken over, if CONNECT had a `truenext-secret`.",
        ),
        HeaderDoc(
            ("truenext-control-only",),
            "`limit`, `draining`",
            "The connection may only send control requests; other frames are refused with this code.",
        ),
    ),
    "MESSAGE": (
        HeaderDoc(("subscription",), "a name", "Id of the subscription."),
        HeaderDoc(
            ("ack",),
            "a text",
            "Value for the `id` of an ACK or NACK of this message; only in STOMP 1.2, and not in `auto` mode.",
        ),
        HeaderDoc(
            ("message-id",),
            "`truenext-STORE-SEQUENCE`",
            "Id of the message. If SEQUENCE is 0, the frame is no message.",
        ),
        HeaderDoc(
            ("destination",),
            "an address",
            "Destination of the SEND; if the subscription is to a pattern of queues, the message's queue.",
        ),
        HeaderDoc(("priority",), f"0 to {PRIORITY_MAX}", "Priority by which the broker orders the message."),
        HeaderDoc(
            ("expires",), "milliseconds since the epoch", "Time at which the message expires; missing if it never does."
        ),
        HeaderDoc(("timestamp",), "milliseconds since the epoch", "Time at which the broker accepted the message."),
        HeaderDoc(
            ("truenext-sequence",), "a number", "Sequence: position of the message among the messages of its priority."
        ),
        HeaderDoc(("truenext-deliveries",), "a number", "Number of dispatches of the message, this one included."),
        HeaderDoc(("truenext-attempts",), "a number", "Number of failed attempts so far."),
        HeaderDoc(("redelivered",), "`true`", "A program may have received the message before."),
        HeaderDoc(
            ("truenext-first-cause", "truenext-last-cause"),
            "a text",
            "Causes of the first and the last NACK of the message that stated a cause.",
        ),
        HeaderDoc(
            ("truenext-round",),
            "a number",
            "Release count of the connection at the dispatch, only for a truenext client.",
        ),
        HeaderDoc(
            ("truenext-lost",),
            "`true`",
            "The last attempt of the message was a lost connection; only for a truenext client.",
        ),
        HeaderDoc(
            ("JMSXGroupFirstForConsumer",), "`true`", "The message is the first of its group that this consumer gets."
        ),
        HeaderDoc(
            ("truenext-dead-letter-cause", "truenext-dead-letter-timestamp"),
            "a text; milliseconds since the epoch",
            "Reason for which the message became a dead letter, and time at which it did.",
        ),
        HeaderDoc(
            ("truenext-original-first-cause", "truenext-original-last-cause"),
            "a text",
            "Causes (`truenext-first-cause`, `truenext-last-cause`) of the message before it became a dead letter.",
        ),
        HeaderDoc(
            (
                *("truenext-original-destination", "truenext-original-priority", "truenext-original-persistent"),
                *("truenext-original-expires", "truenext-original-timestamp", "truenext-original-attempts"),
            ),
            "as on a SEND and a MESSAGE",
            "These headers of the message before it became a dead letter.",
        ),
        HeaderDoc(
            ("truenext-failure",),
            "`report`, `handled`",
            "`report`: the message is the report of a dead letter. `handled`: the message has failed and moved to "
            "a handler. Both have the headers of a dead letter.",
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
            "The frame is no message: a pull request has ended, and this number of the messages that it requested "
            "has not come. The frame repeats the `correlation-id` of the last `credit`.",
        ),
    ),
    "RECEIPT": (
        HeaderDoc(("receipt-id",), "a text", "Value of the header `receipt` of the confirmed frame."),
        HeaderDoc(("truenext-repeat",), "`true`", "The confirmed frame was a repeat, and had no effect."),
        HeaderDoc(
            ("truenext-outcome",),
            "`unknown`",
            "The confirmed frame was a repeat, but its number may never have been used: the producer may have "
            "left the number out.",
        ),
    ),
    "ERROR": (
        HeaderDoc(("message",), "a text", "Reason in short; the body has the whole text."),
        HeaderDoc(("truenext-code",), "a [code](../protocol.md#error-codes)", "Reason, for programs."),
        HeaderDoc(
            ("receipt-id",), "a text", "Value of the header `receipt` of the refused frame, which gets no RECEIPT."
        ),
        HeaderDoc(
            ("truenext-frame",),
            "a number",
            "Number of the refused frame among all frames of the connection; CONNECT is 1. Only for a truenext "
            "client. After an ERROR without this header the connection ends.",
        ),
        HeaderDoc(("version",), "`1.0,1.1,1.2`", "Versions of STOMP that the broker speaks; only before the login."),
        HeaderDoc(("content-type",), "`text/plain`", "Type of the body."),
    ),
}
"""Headers of the broker's frames, by command. A MESSAGE also has the other headers of its SEND."""

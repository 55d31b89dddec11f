"""Limits of what clients can make the broker hold, and below them the constants that only tune the broker.

Every limit is checked before memory is allocated for what it limits. Sizes are in bytes unless the name says
otherwise. Queues may hold as many messages as fit on the disk; policy.py and the command line limit how many are in
memory.

docs/reference/limits.md is made of the text below each limit: what it limits, and in a paragraph of its own

    Setting: the setting that changes the limit; the constant is its default, or its lowest or highest value. A limit
             without this line is fixed.
    Exceeded: `text of the error`, in which {NAME} is the value and … stands for the individual case; or what happens

Source: docs/contract.md, "Memory and disk"
"""

# ---- Connections and logins ----

CONNECTIONS_MAX = 1000
"""Connections of one listener; fewer if the system lets the broker open fewer files (`ulimit -n`).

Exceeded: `the listener has … connections, the most that it accepts`
"""

CONNECTIONS_BEFORE_LOGIN_MAX = 200
"""Connections of one listener that have not logged in; fewer if the system lets the broker open fewer files. A further
connection ends the oldest of these.

Exceeded: `no CONNECT yet, and … newer connections wait to log in: send CONNECT at once`, `no ConnectionInfo yet, and … newer connections wait to log in: start the connection at once`
"""  # noqa: E501

CONTROL_ONLY_CONNECTIONS_MAX = 10
"""Connections beyond CONNECTIONS_MAX that may only send control requests, so that an operator can still connect.

Exceeded: `and {CONTROL_ONLY_CONNECTIONS_MAX} more for control requests alone: try again later`
"""

CONTROL_ONLY_IDLE_S = 5.0
"""Seconds that a control-only connection may stay open without a control request.

Exceeded: `this connection may only send control requests, and has sent none for {CONTROL_ONLY_IDLE_S} seconds`
"""

LOGIN_BYTES_MAX = 8 * 1024
"""Bytes that a client may send before its CONNECT is complete, line ends before the CONNECT included: an unknown client
gets only the memory and time that a login needs. The same holds for the ConnectionInfo of a JMS client, but keep-alives
do not count.

Exceeded: `more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete`, `more than {LOGIN_BYTES_MAX} bytes before ConnectionInfo is complete`
"""  # noqa: E501

LOGIN_SECONDS_MAX = 5.0
"""Seconds from the accept of a connection to its complete CONNECT: an idle client must not take one of the permitted
connections.

Exceeded: `no CONNECT within {LOGIN_SECONDS_MAX} seconds`, `the login was not checked within {LOGIN_SECONDS_MAX} seconds`
"""  # noqa: E501

OPENING_SECONDS_MAX = 15.0
"""Seconds from the accept of a JMS client's connection to its complete WireFormatInfo: such a client loads its classes
meanwhile, those of TLS too. Its ConnectionInfo may come at any time, as pools open connections before they need them.

Exceeded: `no WireFormatInfo within {OPENING_SECONDS_MAX} seconds`
"""

LOGINS_WAITING_MAX = 100
"""Logins that wait until their passwords are checked, in about 30 ms each. From one address half as many may wait.

Exceeded: `{LOGINS_WAITING_MAX} logins, or half as many from this address, wait to be checked: try again later`
"""

FAILED_LOGINS_PER_USER = 10
"""Failed logins of one user from one address in a minute. After that, further logins are refused unchecked.

Exceeded: `{FAILED_LOGINS_PER_USER} logins of this user, or … logins, have failed from this address within a minute`
"""

FAILED_LOGINS_PER_ADDRESS = 100
"""Failed logins from one address in a minute. After that, further logins are refused unchecked.

Exceeded: `… logins of this user, or {FAILED_LOGINS_PER_ADDRESS} logins, have failed from this address within a minute`
"""

SECRETS_MAX = 1000
"""Ended connections whose secret and number the broker remembers.

Exceeded: No error. The broker forgets the oldest, and does not notice that a CONNECT with its secret came late.
"""

LOST_IDS_MAX = 1000
"""Ids of lost connections of JMS clients that the broker keeps for each user: no other user may log in with them.

Exceeded: No error. The id that was lost longest ago is free for all users.
"""

HEART_BEAT_MS_MIN = 250
"""Shortest heart-beat interval in milliseconds: the timers of all connections must not become a load.

Exceeded: No error. CONNECTED offers this interval instead.
"""

# ---- Frames ----

HEADERS_MAX = 128
"""Headers of one frame: each costs a dictionary entry, whatever its length. truenext's client takes 112 from its
program, and adds up to 16.

Exceeded: `more than {HEADERS_MAX} headers in one frame`
"""

HEADER_BYTES_MAX = 64 * 1024
"""Bytes of all header lines of one frame, the command included. No more may arrive without the blank line that ends
them.

Exceeded: `more than {HEADER_BYTES_MAX} bytes of headers in one frame`
"""

MESSAGE_HEADERS_MAX = 2 * HEADERS_MAX
"""Headers of one frame that truenext's client takes from its broker.

Exceeded: `more than {MESSAGE_HEADERS_MAX} headers in one frame`
"""

MESSAGE_HEADER_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""Bytes of all header lines of one frame that truenext's client takes from its broker. This is more than a SEND may
have, as the broker adds headers: a dead letter may have four causes, and escapes make a cause up to twice as long.

Exceeded: `more than {MESSAGE_HEADER_BYTES_MAX} bytes of headers in one frame`
"""

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of one message's body: the largest block that one frame may make the broker allocate.

Exceeded: `body of more than {BODY_BYTES_MAX} bytes`
"""

OPENWIRE_FRAME_BYTES_MAX = BODY_BYTES_MAX + 512 * 1024
"""Bytes of one OpenWire frame. The broker announces this number, and clients do not read larger ones. So it leaves
space for what the broker adds to a message. Of a larger frame from a client, a message is refused alone; any other
command ends the connection.

Exceeded: `OpenWire frame of … bytes; at most {OPENWIRE_FRAME_BYTES_MAX}`
"""

OPENWIRE_MESSAGE_BYTES_MAX = BODY_BYTES_MAX + HEADER_BYTES_MAX
"""Bytes of one OpenWire message as the broker stores it: content, properties, ids and other headers.

Exceeded: `message of … bytes with its headers; at most {OPENWIRE_MESSAGE_BYTES_MAX}: send its content in parts`
"""

MAP_VALUES_MAX = 64 * 1024
"""Values in all maps and lists of one OpenWire frame that the broker reads.

Exceeded: `more than {MAP_VALUES_MAX} values in the maps and lists of one frame`
"""

ARRAY_VALUES_MAX = 1000
"""Elements of all arrays of one OpenWire frame. Clients send none but paths of brokers, which are empty.

Exceeded: `more than {ARRAY_VALUES_MAX} elements in the arrays of one frame`
"""

DECOMPRESSED_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of a JMS client's compressed text or bytes that STOMP clients get decompressed: that takes some 10 ms, at each
dispatch.

Exceeded: No error. STOMP clients get the content compressed, with the header `content-encoding:deflate`.
"""

PROPERTY_VALUES_MAX = 1024
"""Properties of one OpenWire message, with the values of their maps and lists, if they take more than three times as
many bytes: selectors and STOMP clients' messages need them one by one. The message is refused, and nothing else.

Exceeded: `message with more than {PROPERTY_VALUES_MAX} properties, and values in these`
"""

MAP_DEPTH_MAX = 32
"""Maps and lists inside one another in one OpenWire frame that the broker reads.

Exceeded: `more than {MAP_DEPTH_MAX} maps and lists inside one another`
"""

NESTED_DEPTH_MAX = 8
"""Structures inside one another in one OpenWire frame. Frames of clients nest at most three: message, message id,
producer id.

Exceeded: `more than {NESTED_DEPTH_MAX} structures inside one another`
"""

ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of a body that the `truenext` command takes from a broker: one answer may describe all queues of the broker, in
120 bytes each.

Exceeded: `content-length … is more than {ANSWER_BYTES_MAX} bytes`
"""

INCOMPLETE_FRAME_BYTES = 16 * 1024
"""Bytes from which on an incomplete frame counts towards the memory for such frames, a sixteenth of `--memory-limit`.
Most messages are smaller, and smaller frames take at most 16 MiB on CONNECTIONS_MAX connections. When the memory is
used up, only the frame that has counted for longest is read on.

Exceeded: No error. The other frames wait for their turn.
"""

INCOMPLETE_FRAME_PROGRESS_BYTES = 1024 * 1024
"""Bytes of a large frame that a client must send in INCOMPLETE_FRAME_SECONDS while other clients wait. So the largest
frame takes three minutes at most.

Exceeded: `the client has sent less than {INCOMPLETE_FRAME_PROGRESS_BYTES} bytes of a large frame in … seconds, and other connections wait for its memory`
"""  # noqa: E501

INCOMPLETE_FRAME_SECONDS = 10
"""Seconds in which a client must have sent INCOMPLETE_FRAME_PROGRESS_BYTES: networks are normally not silent for so
long, and the client can still try again.

Exceeded: `bytes of a large frame in {INCOMPLETE_FRAME_SECONDS} seconds, and other connections wait for its memory`
"""

UNSENT_BYTES_MAX = 1024 * 1024
"""Bytes of messages dispatched to a connection that its socket has not taken yet. Compressed text and bytes of a JMS
client count as what they become for STOMP clients.

Exceeded: No error. The next message follows when the socket has taken some.
"""

UNSENT_ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of answers, such as receipts, that a client has not read.

Exceeded: The connection is closed, and the log says `the client has … bytes of unread answers, at most {UNSENT_ANSWER_BYTES_MAX}`
"""  # noqa: E501

UNREAD_ANSWER_BYTES = 64 * 1024
"""Bytes of unread answers that each connection may always have. If all connections together have more than a sixteenth
of `--memory-limit`, the connection with the most bytes ends, as its client does not read.

Exceeded: The connection is closed, and the log says `bytes of unread answers, the most of all, and those of all clients take more than … bytes (--memory-limit)`
"""  # noqa: E501

# ---- Names and destinations ----

NAME_LENGTH_MAX = 255
"""Characters of the name of a subscription, transaction, receipt, producer or group: the broker keeps such names.

Exceeded: `… of … characters; at most {NAME_LENGTH_MAX}`
"""

DESTINATION_LENGTH_MAX = 255
"""Characters of a destination's name; 4 fewer if it does not begin with `DLQ.`. Names are kept in memory and in the
store for good.

Exceeded: `destination name of … characters; at most …`
"""

DURABLE_LENGTH_MAX = DESTINATION_LENGTH_MAX - len("DLQ.subscription..")
"""Characters of a client-id and the name of its durable subscription together: both are part of the name of its
dead-letter queue, `DLQ.subscription.CLIENT.NAME`.

Exceeded: `client-id and name of a durable subscription of … characters together; at most {DURABLE_LENGTH_MAX}`
"""

COMPOSITE_MAX = 100
"""Destinations of one message.

Exceeded: `a composite destination of … parts; at most {COMPOSITE_MAX}`
"""

# ---- Subscriptions ----

ADVISORY_CONSUMERS_MAX = 10
"""Consumers of advisories on one JMS client's connection. The client of ActiveMQ has one.

Exceeded: `this connection has {ADVISORY_CONSUMERS_MAX} consumers of advisories, the most allowed: close some`
"""

JMS_PRODUCERS_MAX = 10_000
"""Producers of one JMS client's connection. The broker keeps their windows.

Exceeded: `this connection has {JMS_PRODUCERS_MAX} producers, the most allowed: close some`
"""

SUBSCRIPTIONS_MAX = 1000
"""Subscriptions of one connection, and temporary queues that it owns. A JMS client's temporary topics count with its
temporary queues.

Exceeded: `this connection has {SUBSCRIPTIONS_MAX} subscriptions, the most allowed: end some, or open another connection`
"""  # noqa: E501

REPLY_DESTINATIONS_MAX = 1000
"""Temporary topics of one connection, and temporary queues that did not exist when they were named, to which other
users have the right to reply. Queues that existed have no such limit.

Exceeded: No error. The queue or topic that was named longest ago is forgotten: replies to it are refused until it is
named again.
"""

WINDOW_DEFAULT = 1000
"""Messages in the window of a consumer that names no window and acknowledges cumulatively, and in the largest automatic
window. The number is ActiveMQ's default.

Setting: `activemq.prefetchSize` of the SUBSCRIBE
Exceeded: No error. The next message follows when one is acknowledged.
"""

WINDOW_MAX = 32_767
"""Messages in the largest window that a consumer may request. One cumulative NACK can requeue a whole window, in one
step, which must not take long.

Exceeded: `… is more than {WINDOW_MAX} messages, the largest window`
"""

HELD_MAX = 25_000
"""Messages that one connection may hold in all its subscriptions and open transactions: when the connection ends, all
of these are requeued in one step. Those that subscriptions to patterns of queues hold count twice. The limit is checked
once in each turn, so a connection may hold up to DISPATCHES_PER_TURN messages more.

Exceeded: No error. The next message follows when the connection holds fewer.
"""

KEPT_MAX = 32_767
"""Messages that one `release` may exclude: as many as fit into the largest window.

Exceeded: `or with more than {KEPT_MAX} messages to keep`
"""

TOPIC_SUBSCRIPTIONS_MAX = 10_000
"""Subscriptions to one topic, durable ones and queues `Consumer.*` of a virtual topic included. All patterns of topics
together may have as many. A message is copied to all of them in one step, in 4 us each.

Exceeded: `{TOPIC_SUBSCRIPTIONS_MAX} subscriptions …, the most allowed: end some, or use more topics`
"""

COPIES_MAX = 20_000
"""Copies that one SEND or COMMIT may make of messages to topics and composite destinations. The limit is
`transaction_messages_max` if that is more. All copies are accepted in one step, in 4 us each. Copies with a group or an
expiry count twice.

Exceeded: `… copies, more than the … that one SEND or COMMIT may make, where copies with a group or an expiry count twice: commit more often, or send to fewer topics and queues at once`
"""  # noqa: E501

CONSUMER_PRIORITY_MAX = 127
"""Highest consumer priority; the lowest is the same number with a minus. ActiveMQ has the same limits.

Exceeded: `is not a number from -{CONSUMER_PRIORITY_MAX} to {CONSUMER_PRIORITY_MAX}`
"""

BROWSERS_MAX = 100
"""Browsers of one broker that still have messages to show; one user may have half as many. Each turn searches all of
them for one with credit.

Exceeded: `more than {BROWSERS_MAX} browsers at once; try again when some of them have ended`, `has half of the {BROWSERS_MAX} browsers that there may be at once; try again when some of them have ended`
"""  # noqa: E501

SELECTOR_LENGTH_MAX = 4096
"""Characters of a selector: it is kept with its subscription, and tested against all waiting messages.

Exceeded: `selector of … characters; at most {SELECTOR_LENGTH_MAX}`
"""

SELECTOR_PARTS_MAX = 800
"""Names, values, keywords and signs of a selector; each % counts, too. A selector is compiled in one step, in up to 20
us for each of these, and each piece between two % may be searched in a long text. An IN with a list of 398 texts
reaches the limit.

Exceeded: `selector of … names, values, signs and %; at most {SELECTOR_PARTS_MAX}`
"""

SELECTOR_DEPTH_MAX = 32
"""Nested parentheses of a selector: each level makes several nested calls when a message is tested.

Exceeded: `more than {SELECTOR_DEPTH_MAX} nested parentheses`
"""

SELECTOR_SCAN_MAX = 256
"""Characters of a selector in those pieces of its LIKE patterns that have a _ and are between two %: the search for
such pieces takes longest.

Exceeded: `has more than {SELECTOR_SCAN_MAX} characters of LIKE in parts with _ between two %`
"""

GROUPS_MAX = 10_000
"""Groups of one queue whose owner is remembered while no message of the group is held: some 300 bytes each. A
queue may have a quarter more; then it forgets the longest unused groups, until this number is left.

Exceeded: No error. The longest unused groups are forgotten.
"""

GROUPS_MIN = 100
"""Limit in place of GROUPS_MAX when queues, with their groups, have taken all memory that `--memory-limit` leaves for
them.

Exceeded: No error. The longest unused groups are forgotten.
"""

# ---- Transactions ----

TRANSACTIONS_MAX = 1000
"""Open transactions of one connection: a session normally has one, a pool of workers a few. All sessions of a JMS
client may share one connection.

Setting: `transactions_max`
Exceeded: `more than … open transactions on one connection (transactions_max)`
"""

TRANSACTIONS_CEILING = 10_000
"""Highest value that may be set in place of TRANSACTIONS_MAX: each transaction takes some 500 bytes, which no other
limit counts.

Setting: `transactions_max`
Exceeded: The setting is refused, with its range.
"""

TRANSACTION_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of sends and causes that one connection may have in open transactions; a single larger message is allowed. Each
transaction becomes one batch of the store.

Setting: `transaction_bytes_max`
Exceeded: `more than … bytes in open transactions of one connection (transaction_bytes_max); commit more often`
"""

TRANSACTION_BYTES_CEILING = 64 * 1024 * 1024
"""Highest value that may be set in place of TRANSACTION_BYTES_MAX: a batch is written in one piece, for most of a
second, while other batches wait.

Setting: `transaction_bytes_max`
Exceeded: The setting is refused, with its range.
"""

TRANSACTION_MESSAGES_MAX = 20_000
"""Sends and acknowledgements in one connection's open transactions: a COMMIT or ABORT is one step, in which no other
client is served. A send with a group, an expiry or a schedule counts twice, and a NACK once more for a cause and for a
delay. A queue to which a transaction sends counts TRANSACTION_QUEUE_COUNT, except the first
TRANSACTION_QUEUES_UNCOUNTED of each transaction.

Setting: `transaction_messages_max`
Exceeded: `more than … sends and acknowledgements in open transactions of one connection (transaction_messages_max), where sends with a group, an expiry or a schedule count twice, NACKs once more for a cause and for a delay, and each queue beyond the first … of a transaction counts …; commit more often`
"""  # noqa: E501

TRANSACTION_QUEUES_UNCOUNTED = 100
"""Queues to which one transaction may send before further queues count towards TRANSACTION_MESSAGES_MAX.

Exceeded: No error. Fewer messages fit into the transaction.
"""

TRANSACTION_QUEUE_COUNT = 10
"""Number of sends that each further queue of a transaction counts: COMMIT may have to create the queue and its lanes.

Exceeded: No error. It is a weight.
"""

TRANSACTION_CRON_SENDS_MAX = 100
"""Sends with a cron expression in one transaction: its COMMIT computes the next time of each in one step, in up to
0.2 ms.

Exceeded: `more than {TRANSACTION_CRON_SENDS_MAX} sends with AMQ_SCHEDULED_CRON in one transaction: commit more often, or send them outside of a transaction`
"""  # noqa: E501

TRANSACTION_MESSAGES_CEILING = 200_000
"""Highest value that may be set in place of TRANSACTION_MESSAGES_MAX: a COMMIT of as many messages is one step of about
a second, in which no other client is served.

Setting: `transaction_messages_max`
Exceeded: The setting is refused, with its range.
"""

SPARK_SURPLUS_BYTES_MAX = 16 * 1024
"""Bytes by which one transaction's sends to queues `Spark.` + anything may exceed what the transaction frees, while the
disk has no space: the last bundle of a batch may be empty, and then frees nothing.

Exceeded: `use a transaction that first acknowledges messages, of at least as many bytes as it sends (except {SPARK_SURPLUS_BYTES_MAX} bytes to queues Spark.*)`
"""  # noqa: E501

# ---- Producers with numbers ----

PRODUCERS_MAX = 100_000
"""Producers whose numbers are remembered; each is kept for PRODUCER_RETENTION_MS after its last use. As many producers
of JMS clients are remembered beside these; for one more, the longest unused of them is forgotten without an error.

Exceeded: `there are {PRODUCERS_MAX} producers with numbers, the most allowed`
"""

PRODUCER_RETENTION_MS = 7 * 24 * 3600 * 1000
"""Milliseconds for which a producer's numbers are remembered after its last use.

Exceeded: No error. A repeat after that is accepted as new.
"""

PRODUCER_RETENTION_MS_MIN = 3600 * 1000
"""Milliseconds in place of PRODUCER_RETENTION_MS for a producer with a single SEND, when there are PRODUCERS_MAX
producers.

Exceeded: No error. A repeat after that is accepted as new.
"""

PRODUCER_NUMBER_MAX = 2**63 - 1
"""Highest number of a SEND or COMMIT: it is stored in eight bytes.

Exceeded: `truenext-number … is more than {PRODUCER_NUMBER_MAX}`
"""

RESOLVED_MAX = 100
"""COMMITs of one producer that are remembered as resolved (rolled back). Those with the highest numbers are kept.

Exceeded: No error. The outcome of those with lower numbers is `unknown`.
"""

RESOLVED_TOTAL_MAX = 500_000
"""COMMITs of all producers that are remembered as resolved; they take about 25 MiB.

Exceeded: No error. No further COMMIT is resolved, and the answer says so.
"""

# ---- Causes, reports, delays and schedules ----

CAUSE_BYTES_MAX = 4096
"""Bytes of UTF-8 in the cause of a NACK: even if all characters are escaped, most clients can read such a header line,
as they take lines of 10 KiB.

Exceeded: `truenext-cause of … bytes; at most {CAUSE_BYTES_MAX}`
"""

REPORT_ID_LENGTH_MAX = 64
"""Characters in the `truenext-report-id` of a SEND.

Exceeded: `… of … characters; it must have 1 to {REPORT_ID_LENGTH_MAX}`
"""

TOPIC_REPORTS_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of reports to topics that wait to be sent. Further reports are lost.

Exceeded: the report is lost
"""

HANDLERS_MAX = 8
"""Queues in the `truenext-on-failure` of a SEND. Each failure writes the message once more, for the next of these
queues.

Exceeded: `… names … queues; at most {HANDLERS_MAX}`
"""

ATTEMPTS_MAX = 1_000_000
"""Highest number of attempts before a message becomes a dead letter: the store has four bytes for attempts.

Setting: `attempts_max`
Exceeded: The setting is refused, with its range.
"""

DELAY_MS_MAX = 7 * 24 * 3600 * 1000
"""Longest delay in milliseconds that a NACK may request: messages that wait longer belong into a queue of their own.

Exceeded: `truenext-delay … is more than {DELAY_MS_MAX} milliseconds (7 days)`
"""

SCHEDULE_MS_MAX = 100 * 365 * 24 * 3600 * 1000
"""Longest delay or period of a scheduled send, in milliseconds.

Exceeded: `scheduled more than {SCHEDULE_MS_MAX} milliseconds (100 years) from now`
"""

SCHEDULE_TIME_MAX = 2 * SCHEDULE_MS_MAX
"""Latest time that a scheduled send may name, in milliseconds since 1970.

Exceeded: `AMQ_SCHEDULED_TIME … is more than {SCHEDULE_TIME_MAX} milliseconds since 1970 (the year 2169)`
"""

TTL_MS_MAX = SCHEDULE_MS_MAX
"""Longest time to live that a SEND may give its message, in milliseconds.

Exceeded: `truenext-ttl … is more than {TTL_MS_MAX} milliseconds (100 years)`
"""

CRON_LENGTH_MAX = 100
"""Characters of a cron expression.

Exceeded: `AMQ_SCHEDULED_CRON … is not five fields of {CRON_LENGTH_MAX} characters in all`
"""

# ---- Control requests ----

CONTROL_REQUEST_BYTES_MAX = 64 * 1024
"""Bytes of the body of a control request.

Exceeded: `the body of the control request has more than {CONTROL_REQUEST_BYTES_MAX} bytes`
"""

CONTROL_REQUEST_SEQUENCES_MAX = 1000
"""Messages that one control request may name.

Exceeded: `of length <= {CONTROL_REQUEST_SEQUENCES_MAX}`
"""

QUEUE_NAMES_MAX = 100
"""Queues that one request `queues` may name.

Exceeded: `of length <= {QUEUE_NAMES_MAX}`
"""

PIECES_MAX = 100
"""Answers that one connection may wait for, each to a control request or a piece of bulk work.

Exceeded: `{PIECES_MAX} control requests of this connection have no answer yet, the most allowed`
"""

ANSWER_STALL_SECONDS = 10
"""Seconds for which a client may take almost nothing of a large answer, if other answers wait.

Exceeded: `the client has read almost nothing of the answer to its control request for {ANSWER_STALL_SECONDS} seconds`
"""

ANSWER_SECONDS_MAX = 60
"""Seconds in which a client must have taken all of a large answer, if other answers wait.

Exceeded: `or not all of it for {ANSWER_SECONDS_MAX} seconds, and other requests wait`
"""

DEAD_LETTER_GROUPS_MAX = 1000
"""Groups of dead letters that `truenext dead-letters` and the console tell apart.

Exceeded: No error. The messages of all further groups count as others.
"""

CAUSE_LINE_LENGTH_MAX = 255
"""Characters of a cause's first line by which dead letters are grouped.

Exceeded: No error. The rest is left out.
"""

SECURITY_EVENTS_MAX = 100
"""Different events of each of three kinds that the broker remembers for the control request `security`: refused
requests, failed logins, and control requests. An event that repeats counts once.

Exceeded: No error. The event that happened longest ago is forgotten.
"""

SHOWN_BODY_BYTES = 1000
"""Bytes of a scheduled send's body that a list shows.

Exceeded: No error. The rest is left out.
"""

# ---- Memory and disk ----

MEMORY_LIMIT = 256 * 1024 * 1024
"""Bytes of the broker's private memory: 48 MiB for the broker itself, a quarter for messages, the rest for queues,
subscriptions and their selectors. Open transactions of all connections may have a sixteenth of the limit, unread
answers of all clients a sixteenth, and incomplete frames a sixteenth and one frame of the largest size.

A queue takes 1.3 KiB of the part for queues, 3 to 5 KiB with groups, and 4 bytes more for each byte of its name beyond
64. A subscription takes 1 KiB, or 4 KiB to a pattern of queues, and its selector 0.1 to 0.8 KiB for each number, text
or name in it. A queue takes 0.3 KiB more for each wildcard consumer after its first, and 1 to 2 KiB for each
different selector of its consumers, and 0.35 KiB for each text that such a selector requires of a property. Dead-letter queues, the first temporary queue of each connection,
and 2 MiB for subscriptions come in addition.

Setting: `memory_limit` of `[broker]`
Exceeded: `open transactions of all connections have … of at most … bytes (--memory-limit)`, `no memory for another queue: … queues and their consumers take all of the … MiB that --memory-limit leaves for them`, `no memory for this subscription: it needs … KiB with its selector and in all its queues, and queues and their consumers take … of the … MiB that --memory-limit leaves for them`
"""  # noqa: E501

METRICS_QUEUES_MAX = 1000
"""Queues that have metrics of their own at /metrics, of those that `metrics_queues` matches: the first by name.

Exceeded: The others have none, and a warning is logged.
"""

MEMORY_LIMIT_MIN = 128 * 1024 * 1024
"""Lowest memory limit: the broker itself takes about half of it.

Setting: `memory_limit` of `[broker]`
Exceeded: The setting is refused, with its range.
"""

DISK_LIMIT_MIN = 1024 * 1024 * 1024
"""Lowest disk limit: the journal alone may take half of the limit, before its first segment is copied into the
checkpoint. Without the setting, the limit is the size of the disk.

Setting: `disk_limit`
Exceeded: The setting is refused, with its range. When the disk limit is reached: `the broker's disk is as full as it may be (its reserve of free space, --disk-limit or --database-limit is reached; with --memory: --memory-limit)`
"""  # noqa: E501

DATABASE_LIMIT_MIN = 1024 * 1024 * 1024
"""Lowest database limit: the newest rows of the log alone may take half of the limit, before they are compacted.

Setting: `database_limit`
Exceeded: The setting is refused, with its range. When the database limit is reached: `the broker's disk is as full as it may be (its reserve of free space, --disk-limit or --database-limit is reached; with --memory: --memory-limit)`
"""  # noqa: E501

DATABASE_PATIENCE_MS = 30_000
"""Milliseconds for which a broker tries to reach its database.

Setting: `database_patience_ms`
Exceeded: The broker stops with exit status 1. Nothing is confirmed meanwhile, and clients stay connected.
"""

DATABASE_PATIENCE_MS_MIN = 5_000
"""Lowest time for which a broker tries to reach its database, in milliseconds. A connection counts as lost after 2
seconds of silence, and the broker then needs time for another one.

Setting: `database_patience_ms`
Exceeded: The setting is refused, with its range.
"""

DATABASE_PATIENCE_MS_MAX = 3_600_000
"""Highest time for which a broker tries to reach its database, in milliseconds: an hour. Clients wait meanwhile.

Setting: `database_patience_ms`
Exceeded: The setting is refused, with its range.
"""

FAILOVER_AFTER_MS = 5_000
"""Milliseconds without a new row in the log of PostgreSQL after which a broker that stands by takes over.

Setting: `failover_after_ms`
Exceeded: The active broker is fenced, and exits with status 3. It is silent after 0.8 of this time.
"""

FAILOVER_AFTER_MS_MIN = 2_000
"""Lowest time without a new row after which a broker that stands by takes over, in milliseconds. The active broker
appends a row each half second, if PostgreSQL confirms the rows so soon.

Setting: `failover_after_ms`
Exceeded: The setting is refused, with its range.
"""

PAGE_SIZE = 1000
"""Messages read from the store at a time.

Setting: `page_size`
Exceeded: No error. The next page follows.
"""

PAGE_SIZE_MAX = 100_000
"""Highest page size: all messages of a page come into memory in one step, which must not take long.

Setting: `page_size`
Exceeded: The setting is refused, with its range.
"""

CONFIGURATION_BYTES_MAX = 1024 * 1024
"""Bytes of a configuration file: about ten thousand settings. A running broker reads it in one step.

Exceeded: `a configuration file has at most {CONFIGURATION_BYTES_MAX} bytes`
"""

# ---- History ----

HISTORY_BYTES_MAX = 8 * 1024 * 1024 * 1024
"""Bytes of history that are kept.

Setting: `history_bytes_max`
Exceeded: No error. The oldest files are deleted first.
"""

HISTORY_DAYS_MAX = 30
"""Days for which history is kept.

Setting: `history_days_max`
Exceeded: No error. The oldest files are deleted first.
"""

# ---- Tuning: no client is refused because of these ----

SELECTOR_CACHE_BYTES = 2 * 1024 * 1024
"""Bytes of recently compiled selectors that are kept for reuse, even if no subscription has them."""

CONTENT_BYTES_MIN = 1024
"""Bytes of header and body from which on a message in several queues is stored once. For a smaller one, counting
references would take more time than writing the bytes."""

READ_BYTES = 128 * 1024
"""Bytes taken from a socket in one read: large enough for many frames in one pass of the event loop, and small enough
to be fair to other connections."""

GATHERING_BYTES_MAX = 4 * 1024 * 1024
"""Approximate bytes of the gathering batch, and of the answers that wait for it. At this size a batch is full:
clients may only add small shares to it (capacity.py)."""

PENDING_ANSWER_BYTES = 500
"""Bytes that an answer waiting for the disk counts towards GATHERING_BYTES_MAX."""

LAZY_COMMIT_SECONDS = 0.025
"""Longest time that a batch gathers before it is written, if no client waits for it."""

HISTORY_FLUSH_SECONDS = 0.05
"""Longest time from the commit of a batch until its events are in the history's file."""

INLINE_WRITE_SECONDS_MAX = 0.002
"""Longest expected time of a write that the event loop makes itself. After a slower write, the store's thread writes
all batches, until a write was quick again."""

SMALL_BATCH_BYTES = 64 * 1024
"""Size up to which a batch is small: the time of its write does not depend on its size."""

INLINE_SMALL_WRITE_SECONDS_MAX = 0.0005
"""Longest average time of small writes with which the event loop writes any batch itself. On a slower disk the store's
thread writes all batches."""

EXECUTE_SLICE_US = 5_000
"""Microseconds after which the remaining commands of one read wait for the next turn."""

READ_NS_PER_PASS = 5_000_000
"""Nanoseconds after which one pass of the event loop begins no further read. Connections that have waited for a turn
have the same amount of time in addition, so that they and the other connections do not delay each other."""

LONG_READ_NS = 20_000_000
"""Nanoseconds of work from which on the commands of one read, or the end of a connection, set back the connection's
user for SET_BACK_NS."""

SET_BACK_NS = 1_000_000_000
"""Nanoseconds for which a user is set back. During this time other users are read, and answered by a turn, before this
user."""

ENDS_NS_PER_TURN = 5_000_000
"""Nanoseconds in one turn for ending connections that exceed a time limit, or that lack of memory ends. Further
connections end in the next turns."""

REFUSALS_PER_PASS_MAX = 200
"""Frames of one connection that are refused in one pass. Later frames wait for the next turn."""

CAPACITY_CHECK_INTERVAL_S = 0.1
"""Seconds between two checks whether connections that wait for disk space may be read again."""

SEQUENCE_BLOCK = 1 << 20
"""Sequences that are reserved at a time. The reservation is durable before any of them is used."""

SEQUENCE_RESERVE = 1 << 18
"""Reserved sequences that must be unused for connections to be read. If one read needs more, the messages without a
sequence wait for the next reservation."""

HEART_BEAT_GRACE_FACTOR = 2.25
"""Number of heart-beat intervals without a byte after which the connection ends. The documentation says 2 to 2.5, as
the timers of both sides are not exact."""

STORE_TRANSACTION_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of one batch at a clean stop: the pages that a write transaction of the store has changed stay in private
memory."""

ANSWERS_IN_FLIGHT_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of large answers to control requests that are on their way to clients at once; or a single larger answer."""

REPLIES_EXCESS_BYTES_MAX = 24 * 1024 * 1024
"""Bytes by which messages may exceed their part of the memory before the connection with the largest reply queue is
ended; three quarters of that part, if this is less. An answer counts twice while it is on its way."""

ROUTING_STEP_NS = 2_000_000
"""Approximate nanoseconds of comparisons with patterns of topics and selectors of topic subscriptions. A command that
needs more waits while its comparisons are made between turns."""

ROUTING_SLICE_NS = 1_000_000
"""Nanoseconds between two turns for the comparisons of commands that wait, of all connections together. A single
comparison may take longer."""

BROWSE_MESSAGES_PER_TURN = 250
BROWSE_BYTES_PER_TURN = 256 * 1024
"""Messages that a browser checks in one turn, and their bytes: no other client is served meanwhile. For a message from
the store, the bytes of its record count; for a message in memory, those of its header lines, as selectors read them."""

COMPARISONS_NS_PER_PASS = 8_000_000
"""Approximate nanoseconds in one pass for comparing messages that arrive or are requeued with selectors of consumers.
Costly comparisons may use half of this time. The remaining messages are compared in the background."""

COSTLY_COMPARISON_NS = 20_000
"""Approximate nanoseconds from which on a comparison is costly."""

REQUEUE_IN_GROUPS_NS = 2_000
"""Approximate nanoseconds to find the position of a requeued message in its group, which count like a comparison."""

SCAN_NS_PER_TURN = 8_000_000
"""Approximate nanoseconds in one turn for comparisons in the background, with selectors of consumers, browsers or
control requests. Costly comparisons may use half of this time. No other client is served meanwhile."""

RETRIES_PER_TURN = 2000
"""Failed messages that return to their lanes in one turn when they are due. Nothing is dispatched until all messages
that are due have returned."""

PULL_ENDS_PER_TURN = 1000
"""Pull requests that are withdrawn in one turn because their time is over: no other client is served meanwhile. The
next turn continues."""

DISPATCHES_PER_TURN = 2000
"""Messages dispatched, and queues searched, in one turn: no other client is served meanwhile. The next turn
continues."""

GROWTH_BYTES_PER_DISPATCH = 4096
"""Bytes by which messages grow for their consumers that count as one dispatch more: to decompress them takes some 10
us."""

EXPIRED_PER_TURN = 1000
"""Expired messages that dispatch finds and removes in one turn, of a queue with selectors, groups or wildcard
consumers."""

SCAN_MESSAGES_PER_TURN = 60
"""Messages of one queue compared with selectors in one turn: no other client is served meanwhile."""

SCAN_PAGE_SIZE = 120
"""Messages read at a time for comparisons. This is twice SCAN_MESSAGES_PER_TURN, as another thread reads and decodes
them."""

SCAN_BYTES = 1024 * 1024
"""Bytes of records read at a time for comparisons."""

SCAN_FOUND_MAX = 1000
"""Matching messages of one lane that were found for a selector and are not dispatched yet. At this number the search
waits."""

GROUP_FOUND_MIN = 10
"""Messages of one group that may always be found in one lane and not dispatched yet, however many groups there are. If
there are few groups, each may have an equal share of SCAN_FOUND_MAX."""

BROKER_BYTES = 48 * 1024 * 1024
"""Bytes of MEMORY_LIMIT that are neither for messages nor for queues: for the interpreter, the journal's index, batches
that are being written, and pages. When queues have taken all the rest, a queue is created only for messages that have
failed, are moved, or were sent in a transaction: such messages cannot be refused."""

UNUSED_QUEUE_SECONDS = 60.0
"""Seconds after which an empty and unused queue is removed."""

UNUSED_QUEUE_SECONDS_SHORT = 1.0
"""Seconds in place of UNUSED_QUEUE_SECONDS when there is no memory for another queue."""

JOIN_QUEUES_PER_TURN = 200
"""Queues that a new wildcard consumer checks and joins in one turn."""

EVICTED_BYTES_PER_TURN = 1024 * 1024
"""Bytes of messages that leave memory in one turn, or half of the bytes above the limit if that is more. Other clients
are served between the turns."""

EVICTION_QUEUES_PER_TURN = 300
EVICTION_QUEUES_SORTED_PER_TURN = 5000
"""Queues whose messages leave memory in one turn, and queues that are searched for the largest ones."""

LEAVE_QUEUES_PER_TURN = 500
"""Queues that ended wildcard consumers leave in one turn, beside those in which they own groups. They get nothing from
the first of these turns on, and hold nothing back."""

UNUSED_QUEUES_CHECKED_MAX = 5000
"""Queues of which one step checks whether they are unused, in some 0.3 us each."""

UNUSED_QUEUES_REMOVED_MAX = 500
"""Queues removed in one step. Other clients are served between the steps."""

DUE_SENDS_PER_READ = 500
"""Scheduled sends that are read at a time, and become messages in one step."""

DUE_COPIES_PER_STEP = 1000
"""Copies of scheduled sends to topics and composite destinations after which a step ends. The computation of a cron
expression's next time counts as 50 copies."""

DEAD_LETTERS_PER_TURN = 100
"""Messages that have failed too often and become dead letters in one turn. Further ones wait for the next turns."""

SHOWN_SENDS_PER_PIECE = 100
"""Scheduled sends in one piece of a list of scheduled sends."""

DEAD_LETTERS_PER_PIECE = 125
"""Dead letters in one piece of an answer to `dead-letters`, which is made in one step of 2 ms at most."""

DEAD_LETTERS_COST_PER_PIECE = 2000
"""Words with digits in the causes of these dead letters, and 256 bytes of their headers for one more, about. With more
the piece has fewer messages."""

GROUP_SEQUENCES_MAX = 10
"""Sequences that a group of dead letters names."""

SEQUENCE_MAX = 2**63 - 1
"""Highest sequence that the broker gives."""

BULK_MESSAGES_PER_PIECE = 500
"""Messages moved or removed in one piece of bulk work. Other clients are served between the pieces."""

QUEUE_REMOVAL_BYTES = 20
"""Approximate size in a batch of the removal of a queue."""

PAUSE_BYTES = 20
"""Approximate size in a batch of the change that pauses or resumes a queue."""

PAGE_BYTES = 1024 * 1024
"""Bytes of records that a page has at most; or a single larger message."""

PAGE_SIZE_SHORT = 16
PAGE_BYTES_SHORT = 64 * 1024
"""Messages and bytes of a page while memory is short: messages that are not dispatched at once are evicted again."""

HISTORY_FILE_BYTES = 16 * 1024 * 1024
"""Bytes of history after which a new file begins. A file then has about a million events; the export to Parquet has all
events of a file in memory."""

BACKUP_RATE = 50 * 1024 * 1024
"""Bytes a second that a backup copies at most, if its request names no other number."""

BACKUP_RATE_MIN = 1024 * 1024
"""Lowest rate of a backup. With a lower one a backup would hold its state for very long."""

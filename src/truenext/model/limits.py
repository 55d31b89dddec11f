"""Limits: how much one peer may make the broker hold.

Every limit is checked before memory is allocated for what it limits. Sizes are in bytes unless the name says
otherwise. Queues may hold as many messages as fit on the disk; policy.py and the command line limit how many are in
memory.
"""

LOGIN_BYTES_MAX = 8 * 1024
"""Bytes that a peer may send before its CONNECT is complete: a stranger gets no more memory than a login needs."""

LOGIN_SECONDS_MAX = 5.0
"""Seconds from accept to a complete CONNECT: an idle stranger must not hold a connection."""

LOGINS_WAITING_MAX = 100
"""Logins that wait until their passwords are checked, each about 30 ms; from one address half as many."""

FAILED_LOGINS_PER_USER = 10
"""Failed logins of one user from one address in a minute, after which further ones are refused unchecked."""

FAILED_LOGINS_PER_ADDRESS = 100
"""Failed logins from one address in a minute, after which further ones are refused unchecked."""

HEADERS_MAX = 128
"""Headers of one frame: each costs a dictionary entry, whatever its length."""

HEADER_BYTES_MAX = 64 * 1024
"""Bytes of all header lines of one frame, the command included; also all that may arrive without a blank line."""

MESSAGE_HEADERS_MAX = 2 * HEADERS_MAX
MESSAGE_HEADER_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""Like HEADER_BYTES_MAX, for frames from the broker, which adds headers: to a dead letter that has failed four
causes, each up to twice as long when escaped."""

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of one message's body: the largest block that one frame may make the broker allocate."""

ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""Like BODY_BYTES_MAX, for frames from the broker: one answer may describe all of its queues, in 120 bytes each."""

CONNECTIONS_MAX = 1000
"""Concurrent connections of one listener; fewer if the system lets the broker open fewer files (cli/files.py)."""

CONNECTIONS_BEFORE_LOGIN_MAX = 200
"""Connections of one listener that have not logged in yet: beyond that the oldest is ended for the next."""

CONTROL_ONLY_CONNECTIONS_MAX = 10
"""Connections beyond CONNECTIONS_MAX that may only send control requests, so that an operator still can."""

CONTROL_ONLY_IDLE_S = 5.0
"""Seconds that a control-only connection may stay open without a control request."""

SUBSCRIPTIONS_MAX = 1000
"""Subscriptions of one connection, and temporary queues that it owns."""

NAME_LENGTH_MAX = 255
"""Characters of a client's names for subscriptions, transactions, receipts and producers: the broker keeps them."""

DESTINATION_LENGTH_MAX = 255
"""Characters of a destination's name: names are kept in memory and in the store for good."""

DURABLE_LENGTH_MAX = DESTINATION_LENGTH_MAX - len("DLQ.subscription..")
"""Characters of a client-id and the name of its durable subscription together: both are part of the name of its
dead-letter queue."""

SELECTOR_LENGTH_MAX = 4096
"""Characters of a selector: it is compiled at once, in about 5 us each, and tested against all waiting messages."""

SELECTOR_DEPTH_MAX = 32
"""Nested parentheses of a selector: each level is several nested calls when it is tested."""

SELECTOR_SCAN_MAX = 256
"""Characters of a selector in those pieces of its LIKE patterns that hold a _ and are between two %: only there a
test takes time in proportion to value times pattern."""

SELECTOR_CACHE_BYTES = 2 * 1024 * 1024
"""Bytes of recently compiled selectors that are kept for reuse, even if no subscription has them."""

COMPOSITE_MAX = 100
"""Destinations of one message."""

CONTENT_BYTES_MIN = 1024
"""Bytes of header and body from which on several queues share what is stored. Below this, counting references costs
more time than writing the bytes."""

SPARK_SURPLUS_BYTES_MAX = 16 * 1024
"""Bytes by which one transaction's sends to queues of Spark may exceed what it frees while the disk has no space:
the last bundle of a batch may be empty, and frees nothing."""

TRANSACTIONS_MAX = 64
"""Default for the open transactions of one connection: a session normally has one, a pool of workers a few."""

TRANSACTIONS_CEILING = 10_000
"""Highest valid setting in place of TRANSACTIONS_MAX: each takes some 500 bytes, which no other limit counts."""

TRANSACTION_BYTES_MAX = 16 * 1024 * 1024
"""Default for the bytes that one connection may hold in open transactions, unless it is one larger message: each
transaction becomes one batch of the store."""

TRANSACTION_BYTES_CEILING = 64 * 1024 * 1024
"""Highest valid setting in place of TRANSACTION_BYTES_MAX: a batch is written in one piece, for most of a second, while
other batches wait."""

TRANSACTION_MESSAGES_MAX = 50_000
"""Default for sends and acknowledgements in one connection's open transactions: a limit for small messages."""

TRANSACTION_MESSAGES_CEILING = 200_000
"""Highest valid setting in place of TRANSACTION_MESSAGES_MAX: a COMMIT is one step of about a second, in which no other
client is served."""

PRODUCERS_MAX = 100_000
"""Producers whose numbers are remembered; each is kept for PRODUCER_RETENTION_MS after its last use."""

PRODUCER_RETENTION_MS_MIN = 3600 * 1000
"""Milliseconds in place of PRODUCER_RETENTION_MS for a producer with a single SEND, when there are PRODUCERS_MAX."""

PRODUCER_RETENTION_MS = 7 * 24 * 3600 * 1000
"""Milliseconds for which a producer's numbers are remembered after its last use (guarantee L5)."""

DELAY_MS_MAX = 7 * 24 * 3600 * 1000
"""Longest delay in milliseconds that a NACK may request: messages that wait longer belong into a queue of their own."""

CAUSE_BYTES_MAX = 4096
"""Bytes of UTF-8 of the cause that a NACK states: even escaped, most clients take as much in one header line (10
KiB)."""

RESOLVED_MAX = 100
"""COMMITs of one producer remembered as resolved (rolled back): the highest ones."""

RESOLVED_TOTAL_MAX = 500_000
"""COMMITs of all producers remembered as resolved, about 25 MiB: beyond this none is resolved any more."""

PRODUCER_NUMBER_MAX = 2**63 - 1
"""Highest number of a SEND or COMMIT: it is stored in eight bytes."""

WINDOW_DEFAULT = 1000
"""Window, in messages, of a consumer that names none and acknowledges cumulatively, and the largest automatic
window: ActiveMQ's default."""

CONSUMER_PRIORITY_MAX = 127
"""Highest consumer priority, and the lowest with a minus: ActiveMQ's."""

WINDOW_MAX = 32_767
"""Largest window that a consumer may request, in messages; more is refused. One cumulative NACK can requeue a whole
window in one step, which must not take long."""

UNSENT_BYTES_MAX = 1024 * 1024
"""Bytes of messages dispatched to a connection that its socket has not taken yet; beyond it no more are dispatched."""

UNSENT_ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of answers (receipts, for example) that a peer has not read; beyond it the connection is cut."""

READ_BYTES = 128 * 1024
"""Bytes taken from a socket in one read: large enough to share a pass among many frames, small enough to be fair."""

INCOMPLETE_FRAME_BYTES = 16 * 1024
"""Bytes from which on an incomplete frame counts towards the memory for such frames: smaller ones take at most 16
MiB on CONNECTIONS_MAX connections, and most messages are smaller."""

INCOMPLETE_FRAME_SECONDS = 10
"""Seconds in which a client must make progress with an incomplete frame that counts, or be disconnected, while
others wait for that memory: longer than a network is normally silent, and short enough to retry afterwards."""

INCOMPLETE_FRAME_PROGRESS_BYTES = 1024 * 1024
"""Bytes in INCOMPLETE_FRAME_SECONDS that are enough progress: the largest frame may then take three minutes at most."""

GATHERING_BYTES_MAX = 4 * 1024 * 1024
"""Approximate bytes of the batch that gathers while another is made durable, and of the answers that wait for it;
beyond it no connection is read."""

PENDING_ANSWER_BYTES = 500
"""Bytes that an answer waiting for the disk counts towards GATHERING_BYTES_MAX."""

LAZY_COMMIT_SECONDS = 0.025
"""Longest time that a batch gathers before it is written, if no client waits for it."""

HISTORY_FLUSH_SECONDS = 0.05
"""Longest time until history of durable changes is in its file."""

INLINE_WRITE_SECONDS_MAX = 0.002
"""Longest expected time of a batch that the event loop writes itself. After a write that took longer, the store's
thread writes all batches until one was quicker."""

SMALL_BATCH_BYTES = 64 * 1024
"""Size up to which the time of a batch's write does not depend on its bytes."""

INLINE_SMALL_WRITE_SECONDS_MAX = 0.0005
"""Average time of small writes up to which the event loop itself writes at all: it never waits for a slow disk."""

REFUSALS_PER_PASS_MAX = 200
"""Frames of one connection that are refused in one pass; the frames after them are executed a moment later."""

CAPACITY_CHECK_INTERVAL_S = 0.1
"""Seconds between two checks whether connections that wait for disk space may be read again."""

SEQUENCE_BLOCK = 1 << 20
"""Sequence numbers reserved at a time, durably."""

SEQUENCE_RESERVE = 1 << 18
"""Reserved sequence numbers that must be left for connections to be read. If one read uses more, messages beyond the
reservation wait for the next one."""

HEART_BEAT_MS_MIN = 250
"""Shortest heart-beat interval offered, in milliseconds: the timers of all connections must not become a load."""

HEART_BEAT_GRACE_FACTOR = 2.25
"""Number of its heart-beat intervals without a byte after which a peer counts as lost. Documented are 2 to 2.5: the
timers of neither side are exact."""

STORE_TRANSACTION_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of one batch of a clean stop: the dirty pages of a write transaction stay in private memory."""

ANSWERS_IN_FLIGHT_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of large answers to control requests on their way to clients at once, or one larger answer."""

ANSWER_STALL_SECONDS = 10
"""Seconds without notable progress after which a client that reads an answer is disconnected, if other answers wait."""

ANSWER_SECONDS_MAX = 60
"""Seconds after which a client that still reads an answer is disconnected in any case, if other answers wait."""

REPLIES_EXCESS_BYTES_MAX = 24 * 1024 * 1024
"""Bytes by which messages may exceed their part of the memory, or three quarters of that if it is less, before the
connection with the largest reply queue is disconnected: an answer counts twice while it is on its way."""

BROWSE_MESSAGES_PER_TURN = 250
BROWSE_BYTES_PER_TURN = 256 * 1024
"""Messages that a browser checks in one turn, and bytes: no other client is served meanwhile. For messages from the
store these are bytes of records; in memory, of header lines, which selectors check."""

SCAN_MESSAGES_PER_TURN = 60
"""Messages of one queue compared with selectors in one turn: no other client is served meanwhile."""

SCAN_PAGE_SIZE = 120
"""Messages read at a time to be compared: twice as many, as another thread does half of the work."""

SCAN_BYTES = 1024 * 1024
"""Bytes of records read at a time to be compared."""

SCAN_FOUND_MAX = 1000
"""Messages found in one lane for a selector and not dispatched yet; the scan then waits until some are."""

GROUP_FOUND_MIN = 10
"""Messages of one group found in one lane for a selector and not dispatched yet, however many groups there are. With
few groups each may have an equal share of SCAN_FOUND_MAX."""

GROUPS_MAX = 10_000
"""Groups of one queue whose owner is remembered while no message of the group is held: some 300 bytes each."""

GROUPS_MIN = 100
"""Like GROUPS_MAX, when queues have taken all memory that they may."""

KEPT_MAX = 32_767
"""Messages that one release may exclude: a window's worth."""

SECRETS_MAX = 1000
"""Ended connections whose secret and number the broker remembers."""

BROWSERS_MAX = 100
"""Browsers of one broker that have not been shown everything: each turn searches for the next one with credit."""

CONFIGURATION_BYTES_MAX = 1024 * 1024
"""Bytes of a configuration file: about ten thousand settings. A running broker reads it in one step."""

MEMORY_LIMIT = 256 * 1024 * 1024
"""Default for the broker's private memory in bytes: for itself, a quarter for messages, the rest for queues."""

MEMORY_LIMIT_MIN = 128 * 1024 * 1024
"""Lowest memory limit: the broker itself takes about half of it."""

BROKER_BYTES = 48 * 1024 * 1024
"""Bytes of MEMORY_LIMIT that are neither for messages nor for queues: the interpreter, the journal's index, batches
on their way, pages. When queues have taken all the rest no queue is created any more, except for messages that have
failed, are moved, or were sent in a transaction: these must be put somewhere."""

UNUSED_QUEUE_SECONDS = 60.0
"""Seconds after which an empty and unused queue is removed."""

UNUSED_QUEUE_SECONDS_SHORT = 1.0
"""Seconds in place of UNUSED_QUEUE_SECONDS when there is no memory for another queue."""

JOIN_QUEUES_PER_TURN = 200
"""Queues checked in one turn for a wildcard consumer that is to join them."""

UNUSED_QUEUES_CHECKED_MAX = 5000
"""Queues checked in one step for being unused; some 0.3 us each."""

UNUSED_QUEUES_REMOVED_MAX = 500
"""Queues removed in one step: other clients are served in between."""

DISK_LIMIT_MIN = 1024 * 1024 * 1024
"""Lowest disk limit: up to half of it is the journal, before a segment is copied into the checkpoint."""

PAGE_SIZE = 1000
"""Messages read from the store at a time."""

PAGE_SIZE_MAX = 100_000
"""Highest page size: a page is taken over in one step, which must not take long."""

ATTEMPTS_MAX = 1_000_000
"""Highest value of the setting attempts_max: the store has four bytes for attempts."""

PAGE_BYTES_SHORT = 64 * 1024
SCHEDULE_MS_MAX = 100 * 365 * 24 * 3600 * 1000
"""Longest delay or period of a scheduled send, in milliseconds."""

SCHEDULE_TIME_MAX = 2 * SCHEDULE_MS_MAX
"""Latest time that a scheduled send may name, in milliseconds since 1970."""

TTL_MS_MAX = SCHEDULE_MS_MAX
"""Longest time to live that a SEND may give its message, in milliseconds."""

CRON_LENGTH_MAX = 100
"""Characters of a cron expression."""

DUE_SENDS_PER_READ = 500
"""Scheduled sends that are read at a time and become messages in one step."""

SHOWN_BODY_BYTES = 1000
"""Bytes of a scheduled send's body that a list shows."""

SHOWN_SENDS_PER_PIECE = 100
"""Scheduled sends that are listed in one step."""

SEQUENCE_MAX = 2**63 - 1
"""Highest sequence number that is allocated."""

CONTROL_REQUEST_BYTES_MAX = 64 * 1024
"""Bytes of the body of a control request."""

CONTROL_REQUEST_SEQUENCES_MAX = 1000
"""Messages that one control request may name."""

PIECES_MAX = 100
"""Answers that one connection may wait for, each to a control request or a piece of bulk work."""

BULK_MESSAGES_PER_PIECE = 500
"""Messages moved or removed in one piece of bulk work: other clients are served in between."""

QUEUE_REMOVAL_BYTES = 20
"""Approximate bytes that the removal of a queue counts in a batch."""

PAUSE_BYTES = 20
"""Approximate bytes that a paused or resumed queue counts in a batch."""

PAGE_SIZE_SHORT = 16
"""Messages read at a time while memory is short: those that are not dispatched at once are evicted again."""

PAGE_BYTES = 1024 * 1024
"""Bytes of records read from the store at a time, or one message."""

HISTORY_FILE_BYTES = 16 * 1024 * 1024
"""Bytes of history after which a new file begins: about a million events, which an export to Parquet holds in
memory."""

HISTORY_BYTES_MAX = 8 * 1024 * 1024 * 1024
"""Bytes of history that are kept; the oldest files are deleted first."""

HISTORY_DAYS_MAX = 30
"""Days for which history is kept."""
